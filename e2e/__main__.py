"""`make cluster`: a Kubernetes on this machine with OrbitKV installed, and how to use it."""

import sys
import time

from e2e.cluster.cluster import Cluster
from e2e.cluster.processes import ClusterError
from e2e.support.helm import Helm, HelmError
from e2e.support.installation import OWN_NAMESPACE, PRIVILEGED, RELEASE, namespace_object
from e2e.support.kubectl import Kubectl, KubectlError
from e2e.support.target import turn
from images import build
from tools.cache import SetUpError, say

USE = """
Two nodes, {nodes}, with OrbitKV in the namespace {namespace}:

  export KUBECONFIG={kubeconfig}
  export PATH={path}:$PATH
  kubectl apply -f examples/kubernetes
  kubectl get mpool,cns -A

make test ONLY=e2e tests it; make cluster-down removes it."""


def main() -> None:
    """Starts what is not there yet. Raises SetUpError, ClusterError, KubectlError and HelmError."""
    started = time.monotonic()
    cluster = Cluster.up()
    say(f"the cluster runs after {time.monotonic() - started:.0f} s: {', '.join(cluster.nodes)}")
    build.build()
    build.load(cluster)
    say("installing OrbitKV")
    kubectl = Kubectl(cluster.programs["kubectl"], cluster.kubeconfig)
    kubectl.apply(namespace_object(OWN_NAMESPACE, PRIVILEGED))
    # the tag stays the same from build to build: what changes replaces the pods
    values = {"operator": {"podAnnotations": {"orbitkv-test/build": build.present()}}}
    Helm(cluster.programs["helm3"], cluster.kubeconfig).install(RELEASE, OWN_NAMESPACE, values)
    say(f"ready after {time.monotonic() - started:.0f} s")
    # the folders of kubectl and of Helm 3; the cluster's other programs need no one's PATH
    path = ":".join(cluster.programs.folder(name) for name in ("kubectl", "helm3"))
    nodes = " and ".join(cluster.nodes)
    print(USE.format(nodes=nodes, namespace=OWN_NAMESPACE, kubeconfig=cluster.kubeconfig, path=path))


if __name__ == "__main__":
    try:
        with turn():
            main()
    except (SetUpError, ClusterError, KubectlError, HelmError) as error:
        sys.exit(f"cluster: {error}")
