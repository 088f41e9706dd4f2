"""An apiserver for the tests of what tests share."""

from collections.abc import Iterator

import pytest

from e2e.cluster import programs
from e2e.cluster.control_plane import ControlPlane, standalone
from e2e.support.kubectl import Kubectl


@pytest.fixture(scope="session")
def apiserver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    built = programs.ensure(programs.CLUSTER[:1])
    with standalone(built["kube-apiserver"], tmp_path_factory.mktemp("apiserver")) as plane:
        yield plane


@pytest.fixture(scope="session")
def direct(apiserver: ControlPlane) -> Kubectl:
    return Kubectl(programs.Programs(programs.CLUSTER[:1])["kubectl"], apiserver.kubeconfig)
