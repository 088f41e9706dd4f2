"""What claims with admin access need, as real apiservers have it: the word kept, dropped, refused, and not known."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.cluster import programs
from e2e.cluster.control_plane import ControlPlane, standalone
from e2e.support.installation import namespace_object
from e2e.support.kubectl import Kubectl
from orbitkv_operator import dra
from orbitkv_operator.cluster.api import CLAIM_TEMPLATES, KubernetesApi, load_client

NAMESPACE = "orbitkv-system"
ALLOWED = {dra.ADMIN_LABEL: "true"}


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[ControlPlane]:
    """An apiserver with NVIDIA's DeviceClass, and a namespace without labels."""
    built = programs.ensure(programs.CLUSTER[:1])
    with standalone(built["kube-apiserver"], tmp_path) as plane:
        spec = {"selectors": [{"cel": {"expression": f'device.driver == "{dra.DRIVER}"'}}]}
        Kubectl(built["kubectl"], plane.kubeconfig).apply(
            namespace_object(NAMESPACE),
            {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": dra.DRIVER}, "spec": spec},
        )
        yield plane


def start_again(plane: ControlPlane, *arguments: str, features: str = ControlPlane.features) -> None:
    """Starts the apiserver anew, with other arguments."""
    plane.processes.stop("apiserver")
    plane.features = features
    plane.extra += arguments
    plane.start_apiserver()
    plane.wait_apiserver()


def test_each_apiserver_that_would_not_keep_admin_access_is_told_from_the_others(plane: ControlPlane) -> None:
    built = programs.Programs(programs.CLUSTER[:1])
    kubectl = Kubectl(built["kubectl"], plane.kubeconfig)

    def look(**labels: str) -> dra.Dra:
        return dra.look(KubernetesApi(load_client(str(plane.kubeconfig))), NAMESPACE, labels, None)

    def missing(found: dra.Dra) -> dict[str, str]:
        return {it.reason: it.message for it in found.missing((), NAMESPACE)}

    assert list(missing(look())) == ["AdminAccessNotAllowed"]
    # somebody has taken the label away since it was read
    refused = missing(look(**ALLOWED))
    assert list(refused) == ["ClaimRefused"] and dra.ADMIN_LABEL in refused["ClaimRefused"]
    kubectl.run("label", "namespace", NAMESPACE, f"{dra.ADMIN_LABEL}=true")
    assert missing(look(**ALLOWED)) == {}
    assert kubectl.list_all(f"{CLAIM_TEMPLATES.plural}.{CLAIM_TEMPLATES.group}") == []  # a trial leaves nothing

    start_again(plane, features=f"DRAAdminAccess=false,{ControlPlane.features}")
    assert list(missing(look(**ALLOWED))) == ["AdminAccessDropped"]

    # as before 1.34 (with the feature on, it would wait for its own objects of the group for ever)
    served = f"--runtime-config={CLAIM_TEMPLATES.api_version}=false"
    start_again(plane, served, features=f"DynamicResourceAllocation=false,{ControlPlane.features}")
    assert list(missing(look(**ALLOWED))) == ["DRANotServed"]
