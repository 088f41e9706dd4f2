"""Checks of pools, CacheNamespaces and the namespaces of tenants."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from pydantic import ValidationError

from orbitkv_crds import names
from orbitkv_crds.managerpool import ManagerPool
from orbitkv_crds.model import describe_errors
from orbitkv_crds.stamps import is_stamped, read_injected, read_skip
from orbitkv_operator.builders.agents import placement_for
from orbitkv_operator.cli.cluster import Cluster, condition, full_name, pool_of
from orbitkv_operator.cli.findings import Finding, info, ok, problem, sentence, warning
from orbitkv_operator.cluster.api import (
    CLAIM_TEMPLATES,
    DEPLOYMENTS,
    NAMESPACES,
    NODES,
    PODS,
    RUNTIME_CLASSES,
    SECRETS,
    ApiError,
    Manifest,
)
from orbitkv_operator.dra import Dra, Obstacle, look
from orbitkv_operator.engines.probe import probe_pod
from orbitkv_operator.gpu import AWAY, find_route, runtime_class_name
from orbitkv_operator.placement import matching

MOST: Final = 50
"""Objects of one kind that are named; of more there is a count."""
GPU_LABEL: Final = "nvidia.com/gpu.present"
_ELSEWHERE: Final = ("Complete", "Blocked", "NoAgents")
"""Reasons of conditions that are no fault, or of which another condition has the cause."""
_PULL_SECRETS: Final = "ORBITKV_WEBHOOK_PAYLOAD_PULL_SECRETS"


def pools(cluster: Cluster) -> Iterator[Finding]:
    """Is every pool ready, and does it have nodes?"""
    found = cluster.pools()
    if not found:
        yield warning(
            "ManagerPools",
            "There is none, so no node has a cache.",
            "`kubectl apply -f examples/kubernetes/managerpool.yaml` makes a first one.",
        )
    for pool in found:
        yield from _pool(pool)


def _pool(pool: Manifest) -> Iterator[Finding]:
    name, status = pool["metadata"]["name"], pool.get("status") or {}
    about, describe = f"ManagerPool {name}", f"`kubectl describe mpool {name}` has all conditions."
    if status.get("observedGeneration", 0) < pool["metadata"].get("generation", 0):
        yield warning(
            about, "The operator has not acted on its newest version yet.", "If it stays so, see the operator."
        )
    wrong = [
        it
        for kind in ("ConfigValid", "GPUAccess", "Available", "Progressing", "Ready")
        if (it := condition(pool, kind)).get("status") == "False" and it.get("reason") not in _ELSEWHERE
    ]
    if condition(pool, "Ready").get("status") == "True" and not status.get("unhealthyNodes"):
        nodes = (status.get("nodes") or {}).get("desired", 0)
        yield ok(about, f"It is ready on {nodes} {'node' if nodes == 1 else 'nodes'}.")
        return
    said = set()
    for it in wrong:
        if it.get("reason") not in said:
            said.add(it.get("reason"))
            level = warning if condition(pool, "Ready").get("status") == "True" else problem
            yield level(about, f"{it['type']}: {it['reason']}: {sentence(it.get('message', ''))}", describe)
    if not wrong and condition(pool, "Ready").get("status") != "True":
        yield problem(about, "It is not ready, and has no condition that says why.", "See the operator.")
    for node in status.get("unhealthyNodes") or ():
        yield problem(
            f"{about}, node {node['name']}",
            f"{node['reason']}: {sentence(node.get('message', ''))}",
            f"`kubectl describe node {node['name']}`; the page on Kubernetes has a table of these reasons.",
        )


def gpus(cluster: Cluster) -> Iterator[Finding]:
    """Is there what pools for GPUs need?"""
    wanting = [pool for pool in cluster.pools() if (pool["spec"].get("gpu") or {}).get("access", "auto") != "none"]
    if not wanting:
        return
    nodes = cluster.all(NODES)
    labelled = [node for node in nodes if (node["metadata"].get("labels") or {}).get(GPU_LABEL) == "true"]
    if labelled:
        yield ok("GPUs", f"{len(labelled)} of {len(nodes)} nodes are labelled {GPU_LABEL}: true.")
    elif not all(pool["spec"].get("nodeSelector") for pool in wanting):
        yield problem(
            "GPUs",
            f"No node has the label {GPU_LABEL}: true, by which pools find nodes with GPUs.",
            "Install NVIDIA's GPU operator or its feature discovery, or give the pools a nodeSelector of your own.",
        )
    for node in nodes:
        labels = node["metadata"].get("labels") or {}
        for label, values in AWAY:
            if labels.get(label) in values:
                yield info(f"Node {node['metadata']['name']}", f"{label} is {labels[label]}: no agent runs meanwhile.")
    for manifest in wanting:
        about = f"ManagerPool {manifest['metadata']['name']}"
        try:
            pool = ManagerPool.model_validate(manifest)
        except ValidationError as error:
            yield problem(about, f"It cannot be read: {describe_errors(error)}", "Correct it, or upgrade the chart.")
            continue
        runtime_class = cluster.get(RUNTIME_CLASSES, None, runtime_class_name(pool))
        meant = set(matching(nodes, placement_for(pool)))
        own = [node for node in nodes if node["metadata"]["name"] in meant]
        found = find_route(pool, runtime_class, own, _dra(cluster, pool), cluster.system())
        if isinstance(found, Obstacle) and condition(manifest, "GPUAccess").get("reason") == found.reason:
            continue  # the pool has said it
        if isinstance(found, Obstacle):
            yield problem(
                about, f"{found.reason}: {found.message}", "See the page on Kubernetes, the ways to the GPUs."
            )
        else:
            by = f" (RuntimeClass {found.runtime_class})" if found.runtime_class else ""
            yield ok(about, f"Its agents get at GPUs by {found.name}{by}.")


def _dra(cluster: Cluster, pool: ManagerPool) -> Dra | None:
    """Look up what a pool needs that claims its GPUs; None: it does not, or there is no namespace to look at."""
    system = cluster.system()
    if pool.spec.gpu.access != "dra" or not system:
        return None
    namespace = cluster.get(NAMESPACES, None, system) or {"metadata": {}}
    live = None
    if cluster.api.serves(CLAIM_TEMPLATES):
        live = cluster.get(CLAIM_TEMPLATES, system, names.pool_object_name(pool.name))
    return look(cluster.api, system, namespace["metadata"].get("labels") or {}, live)


def caches(cluster: Cluster) -> Iterator[Finding]:
    """Is every CacheNamespace ready, and do pods that ask for it have it?"""
    ready = 0
    wrong: list[Finding] = []
    pools_there = {pool["metadata"]["name"] for pool in cluster.pools()}
    for cache in cluster.caches():
        about = f"CacheNamespace {full_name(cache)}"
        namespace, name = cache["metadata"]["namespace"], cache["metadata"]["name"]
        describe = f"`kubectl -n {namespace} describe cns {name}` has all conditions."
        is_ready = condition(cache, "Ready")
        if pool_of(cache) not in pools_there:
            wrong.append(
                problem(
                    about,
                    f"It refers to ManagerPool {pool_of(cache)}, which does not exist.",
                    "Make the pool, or the CacheNamespace anew for another one.",
                )
            )
        elif is_ready.get("status") != "True":
            reason = f"{is_ready.get('reason', 'NoStatusYet')}: {sentence(is_ready.get('message', ''))}"
            wrong.append(problem(about, f"It is not ready: {reason}", describe))
        else:
            ready += 1
        if ((cache.get("status") or {}).get("attached") or {}).get("without"):
            words = sentence(condition(cache, "InUse").get("message", ""))
            wrong.append(warning(about, words, "`orbitkv explain pod NAMESPACE/NAME` says more of each pod."))
    if ready:
        yield ok("CacheNamespaces", f"{ready} are ready." if ready > 1 else "1 is ready.")
    yield from wrong[:MOST]
    if len(wrong) > MOST:
        yield warning("CacheNamespaces", f"{len(wrong) - MOST} more have something wrong.", "Correct the first ones.")


def tenants(cluster: Cluster) -> Iterator[Finding]:
    """Could a pod get the cache in each namespace that has a CacheNamespace? Tried in dry runs."""
    system = cluster.system()
    webhook = cluster.get(DEPLOYMENTS, system, names.WEBHOOK) if system else None
    by_namespace: dict[str, str] = {}
    for cache in cluster.caches():
        by_namespace.setdefault(cache["metadata"]["namespace"], cache["metadata"]["name"])
    for namespace, cache_name in sorted(by_namespace.items())[:MOST]:
        about = f"Namespace {namespace}"
        if webhook is None:
            yield from _try_volumes(cluster, namespace, about)
        else:
            yield from _try_injection(cluster, namespace, cache_name, about)
            yield from _payload_secrets(cluster, webhook, namespace, about)
    if len(by_namespace) > MOST:
        yield info("Namespaces", f"{MOST} of {len(by_namespace)} were tried.")


def _try_injection(cluster: Cluster, namespace: str, cache: str, about: str) -> Iterator[Finding]:
    pod = probe_pod("localhost/vllm", namespace)
    pod["metadata"] |= {"labels": {}, "annotations": {names.ANNOTATION_CACHE_NAMESPACE: cache}}
    made = _dry_run(cluster, namespace, pod, about)
    if isinstance(made, Finding):
        yield made
        return
    annotations = made["metadata"].get("annotations") or {}
    skipped = read_skip(annotations)
    if skipped is not None:
        yield problem(
            about,
            f"A pod that asks for a cache would run without: {skipped.reason}: {sentence(skipped.message)}",
            "Correct that, or give the namespace another way to the agent's socket.",
        )
    elif is_stamped(made["metadata"].get("labels") or {}) and read_injected(annotations) is not None:
        yield ok(about, f"A pod that asks for CacheNamespace {cache} would get it.")
    else:
        yield problem(
            about, "The webhook would not see a pod that asks for a cache.", "See what is said of the webhook above."
        )


def _try_volumes(cluster: Cluster, namespace: str, about: str) -> Iterator[Finding]:
    pod = probe_pod("localhost/vllm", namespace)
    pod["metadata"] |= {"labels": {}, "annotations": {}}
    pod["spec"]["volumes"] = [
        {"name": "orbitkv", "hostPath": {"path": names.SOCKET_DIRECTORY, "type": "DirectoryOrCreate"}}
    ]
    made = _dry_run(cluster, namespace, pod, about)
    yield made if isinstance(made, Finding) else ok(about, "Pods may use the agent's folder.")


def _dry_run(cluster: Cluster, namespace: str, pod: Manifest, about: str) -> Manifest | Finding:
    try:
        return cluster.api.create(PODS, namespace, pod, dry_run=True)
    except ApiError as error:
        if error.status in (0, 401):
            raise
        if "PodSecurity" in str(error):
            return problem(
                about,
                f"Pod Security forbids the folder of the agent's socket: {sentence(str(error))}",
                f"`kubectl label namespace {namespace} pod-security.kubernetes.io/enforce=privileged --overwrite`.",
            )
        return info(about, f"A pod could not be tried: {sentence(str(error))}")


def _payload_secrets(cluster: Cluster, webhook: Manifest, namespace: str, about: str) -> Iterator[Finding]:
    """The secrets with which pods pull the payload have to be in the pods' own namespaces."""
    environment = webhook["spec"]["template"]["spec"]["containers"][0].get("env") or ()
    wanted = next((str(it.get("value") or "") for it in environment if it["name"] == _PULL_SECRETS), "")
    for name in filter(None, (part.strip() for part in wanted.split(","))):
        if cluster.get(SECRETS, namespace, name) is None:
            yield problem(
                about,
                f"Injected pods pull the plugin's image with Secret {name}, which is not in this namespace.",
                f"Make it there (`kubectl -n {namespace} create secret docker-registry {name} ...`).",
            )
