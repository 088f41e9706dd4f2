"""The cluster that tests run on: the project's own, or the one that KUBECONFIG names."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster import programs
from e2e.cluster.cluster import Cluster, state_folder
from e2e.support.helm import Helm
from e2e.support.kubectl import Kubectl
from tools.cache import cache_folder, locked


@dataclass(frozen=True)
class Target:
    """A cluster and the programs to talk to it. `own` is None on a cluster that is not the project's.

    `helm` has both versions, by their number; one that is not there is left out. `registry` is where the nodes find
    OrbitKV's images.
    """

    kubectl: Kubectl
    helm: dict[int, Helm]
    own: Cluster | None
    registry: str

    @property
    def kubeconfig(self) -> Path:
        """The way in that the tests use."""
        return self.kubectl.kubeconfig


@contextmanager
def connect() -> Iterator[Target]:
    """Finds or starts the cluster and keeps other test runs off the project's own one meanwhile.

    Raises SetUpError and ClusterError.
    """
    named = foreign_kubeconfig()
    if named is not None:
        yield foreign(named)
        return
    with turn():
        cluster = Cluster.up()
        helm = {version: Helm(cluster.programs[f"helm{version}"], cluster.kubeconfig) for version in (3, 4)}
        kubectl = Kubectl(cluster.programs["kubectl"], cluster.kubeconfig)
        yield Target(kubectl, helm, cluster, "localhost")


def foreign_kubeconfig() -> Path | None:
    """The way into a cluster that is not the project's own, if KUBECONFIG names one."""
    named = os.environ.get("KUBECONFIG", "")
    return Path(named) if named and not Path(named).is_relative_to(state_folder()) else None


@contextmanager
def turn() -> Iterator[None]:
    """Waits until no other test run uses the project's own cluster, and keeps others off it."""
    cache_folder().mkdir(parents=True, exist_ok=True)
    with locked(cache_folder() / ".cluster-tests.lock", "the cluster, as a test run"):
        yield


def foreign(kubeconfig: Path) -> Target:
    """A cluster that is not the project's, with the programs on PATH, or the built ones.

    ORBITKV_TEST_REGISTRY is the registry from which its nodes pull OrbitKV's images.
    """
    built = programs.Programs(programs.CLUSTER)

    def program(name: str) -> str:
        return shutil.which(name) or built[name]

    helm = {
        version: Helm(built[f"helm{version}"], kubeconfig)
        for version in (3, 4)
        if Path(built[f"helm{version}"]).exists()
    }
    registry = os.environ.get("ORBITKV_TEST_REGISTRY", "localhost")
    return Target(Kubectl(program("kubectl"), kubeconfig), helm, None, registry)
