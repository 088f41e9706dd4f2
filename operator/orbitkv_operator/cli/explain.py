"""`orbitkv explain pod`: from the annotation to the hits, what was decided for one pod, what is missing, what to do."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, Final

from orbitkv_crds import names
from orbitkv_crds.stamps import (
    ANNOTATION_INJECT,
    INFORMATION,
    SKIP_REASONS,
    STAMPS,
    asked,
    read_injected,
    read_skip,
)
from orbitkv_operator.admission.asks import LMCACHE_LABEL, from_lmcache
from orbitkv_operator.cli.cluster import Cluster, condition, full_name, is_ready, pool_of
from orbitkv_operator.cli.findings import Finding, info, ok, problem, sentence, warning
from orbitkv_operator.cluster.api import CACHES, EVENTS, NAMESPACES, PODS, POOLS, ApiError, Manifest
from orbitkv_operator.engines.pods import EnginePod

CONTROLLER: Final = "orbitkv.io/operator"
_ATTACHED: Final = ("CacheAttached", "CacheNotAttached", "CacheDetached")
_KEPT: Final = ("namespace", "labels", "annotations")


class NoSuchPodError(Exception):
    """There is no such pod; the message says so."""


def explain(cluster: Cluster, namespace: str, name: str) -> list[Finding]:
    """Follow one pod from its annotation to its hits; the last finding says whether it uses the cache.

    Raises:
        NoSuchPodError: there is none of that name.
        ApiError: the API cannot be asked.
    """
    manifest = cluster.get(PODS, namespace, name)
    if manifest is None:
        raise NoSuchPodError(
            f"there is no pod {name} in namespace {namespace} (`kubectl -n {namespace} get pods` lists them)"
        )
    pod = EnginePod.of(manifest)
    found = [_pod(manifest, pod), *_decided(cluster, manifest, pod)]
    if pod.injected is None:
        return found
    cache, readable = cluster.get_or_unknown(CACHES, *_place(pod.cache))
    if readable:
        found += _cache(cluster, pod, cache)
    else:
        found.append(info(f"CacheNamespace {pod.cache}", "Your rights do not reach to it.", "Ask those who own it."))
    if cache is not None:
        found += _agent(cluster, pod, cache)
    found += _containers(manifest, pod)
    return [*found, _use(cluster, pod, cache)]


def uses_the_cache(findings: list[Finding]) -> bool:
    """Return whether `explain` found that a pod uses its cache."""
    return bool(findings) and findings[-1].about == "Engine" and findings[-1].level.value == "ok"


def _pod(manifest: Manifest, pod: EnginePod) -> Finding:
    phase = str((manifest.get("status") or {}).get("phase") or "Unknown")
    where = f"on node {pod.node}" if pod.node else "not scheduled"
    state = "ready" if is_ready(manifest) else "not ready"
    words = f"{phase}, {where}, {state}."
    if not pod.node:
        return warning(f"Pod {pod.full_name}", words, _describe(pod))
    return ok(f"Pod {pod.full_name}", words)


# ------------------------------------------------------------------------------------------------------------ decided


def _decided(cluster: Cluster, manifest: Manifest, pod: EnginePod) -> Iterator[Finding]:
    annotations: Mapping[str, Any] = manifest["metadata"].get("annotations") or {}
    if pod.injected is not None:
        it = pod.injected
        engine = it.engine or "an engine that is not recognised"
        payload = "an image volume" if it.payload == "imageVolume" else "an init container"
        yield ok(
            "Injection",
            f"Container {it.container} ({engine}) was given what it needs for CacheNamespace {it.namespace}; the "
            f"plugin comes by {payload}, of OrbitKV {it.version}.",
        )
        for note in it.info:
            yield info("Injection", f"{note.reason}: {sentence(note.message)} (At the time when the pod was made.)")
    elif pod.skipped is not None:
        meaning = SKIP_REASONS.get(pod.skipped.reason, "")
        yield problem(
            "Injection",
            f"The webhook left the pod as it is: {pod.skipped.reason}: {sentence(pod.skipped.message)}",
            f"{sentence(meaning[:1].upper() + meaning[1:])} Then let the pod be made anew.",
        )
    elif annotations.get(ANNOTATION_INJECT) == "false":
        yield info("Injection", f'The pod has opted out: {ANNOTATION_INJECT} is "false".')
    elif asked(annotations):
        yield from _missed(cluster, manifest, pod)
    elif asked(from_lmcache(manifest["metadata"].get("labels") or {}, annotations)[0]):
        yield problem(
            "Injection",
            f"The pod is labelled {LMCACHE_LABEL}, for LMCache's operator, and has no annotation of OrbitKV.",
            "Such pods are served where the chart's compat.lmcache is true and the pod was made after that.",
        )
        yield _made_anew(cluster, manifest)
    else:
        yield from _never_asked(cluster, pod)


def _missed(cluster: Cluster, manifest: Manifest, pod: EnginePod) -> Iterator[Finding]:
    if pod.namespace in ("kube-system", _system(cluster)):
        yield problem(
            "Injection",
            f"The pod asks for a cache, and the webhook leaves out namespace {pod.namespace}.",
            "Run the engine in another namespace.",
        )
        return
    yield problem(
        "Injection",
        "webhook-missed: the pod asks for a cache, and the webhook did not see it when it was made.",
        "Delete the pod, so that it is made anew.",
    )
    yield _made_anew(cluster, manifest)


def _system(cluster: Cluster) -> str:
    """Return the namespace of the installation; "" also where one's rights do not reach to it."""
    try:
        return cluster.system()
    except ApiError as error:
        if error.status != 403:
            raise
        return ""


def _made_anew(cluster: Cluster, manifest: Manifest) -> Finding:
    """Try what would become of the pod if it were made now; nothing is made."""
    about = "If made anew now"
    try:
        made = cluster.api.create(PODS, manifest["metadata"]["namespace"], anew(manifest), dry_run=True)
    except ApiError as error:
        return info(about, f"It could not be tried: {error}", "`orbitkv doctor` looks at the webhook itself.")
    annotations = made["metadata"].get("annotations") or {}
    injected, skipped = read_injected(annotations), read_skip(annotations)
    if injected is not None:
        return ok(about, f"The webhook would inject container {injected.container}.")
    if skipped is not None:
        return warning(
            about,
            f"The webhook would leave it as it is: {skipped.reason}: {sentence(skipped.message)}",
            "Correct that first.",
        )
    return problem(about, "The webhook would miss it again.", "`orbitkv doctor` says what is wrong with the webhook.")


def anew(manifest: Manifest) -> Manifest:
    """Return a pod as it could have been sent to be made: without what the cluster has added since."""
    metadata = {key: copy.deepcopy(value) for key, value in manifest["metadata"].items() if key in _KEPT}
    metadata["name"] = f"{manifest['metadata']['name'][:240]}-anew"
    metadata["annotations"] = {k: v for k, v in (metadata.get("annotations") or {}).items() if k not in STAMPS}
    metadata["labels"] = {k: v for k, v in (metadata.get("labels") or {}).items() if k != names.LABEL_CACHE}
    spec = {key: value for key, value in manifest["spec"].items() if key not in ("nodeName", "ephemeralContainers")}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _never_asked(cluster: Cluster, pod: EnginePod) -> Iterator[Finding]:
    namespace, _ = cluster.get_or_unknown(NAMESPACES, None, pod.namespace)
    metadata = (namespace or {"metadata": {}})["metadata"]
    labelled = (metadata.get("labels") or {}).get(ANNOTATION_INJECT) == "true"
    default = (metadata.get("annotations") or {}).get(names.ANNOTATION_CACHE_NAMESPACE)
    how = (
        f"Annotate the pod's template, or its Deployment, StatefulSet or LeaderWorkerSet: "
        f"{names.ANNOTATION_CACHE_NAMESPACE}: NAME of a CacheNamespace."
    )
    if labelled and default:
        yield problem(
            "Injection",
            f"Namespace {pod.namespace} gives its engines CacheNamespace {default}, and this pod has nothing of it: no "
            "container of it mentions an engine in image, command or arguments, or it was made before the namespace "
            "was labelled, or the webhook did not see it.",
            f"{how} Or delete the pod, so that it is made anew.",
        )
    else:
        yield problem("Injection", "The pod does not ask for a cache.", how)


# ------------------------------------------------------------------------------------------------- what it attaches to


def _cache(cluster: Cluster, pod: EnginePod, cache: Manifest | None) -> Iterator[Finding]:
    namespace, _, name = pod.cache.partition("/")
    about = f"CacheNamespace {pod.cache}"
    if cache is None:
        yield problem(
            about,
            "It does not exist.",
            f"Make it (the engine attaches by itself then), or correct {names.ANNOTATION_CACHE_NAMESPACE}. "
            f"`kubectl -n {namespace} get cns` lists what there is.",
        )
        return
    ready = condition(cache, "Ready")
    if ready.get("status") == "True":
        yield ok(about, f"It is ready, in ManagerPool {pool_of(cache)}.")
    elif cluster.get_or_unknown(POOLS, None, pool_of(cache)) == (None, True):
        yield problem(about, f"It refers to ManagerPool {pool_of(cache)}, which does not exist.", "Make the pool.")
    else:
        yield problem(
            about,
            f"It is not ready: {ready.get('reason', 'NoStatusYet')}: {sentence(str(ready.get('message', '')))}",
            f"`kubectl -n {namespace} describe cns {name}` has all conditions.",
        )


def _agent(cluster: Cluster, pod: EnginePod, cache: Manifest) -> Iterator[Finding]:
    if not pod.node:
        return
    pool = pool_of(cache)
    try:
        here = [it for it in cluster.agents() if (it.get("spec") or {}).get("nodeName") == pod.node]
    except ApiError as error:
        if error.status != 403:
            raise
        yield info("Agent", "Your rights do not reach to the agents' pods.", "Ask those who run the cluster.")
        return
    own = next((it for it in here if pool_of(it) == pool), None)
    if own is not None and is_ready(own):
        yield ok("Agent", f"{full_name(own)} is ready on node {pod.node}.")
    elif own is not None:
        yield problem(
            "Agent",
            f"{full_name(own)} on node {pod.node} is not ready.",
            f"`kubectl describe mpool {pool}` says what is wrong on the node.",
        )
    elif here:
        yield problem(
            "Agent",
            f"The agent on node {pod.node} belongs to ManagerPool {pool_of(here[0])}, the CacheNamespace to {pool}.",
            f"Let the pod run on nodes of {pool}, or use a CacheNamespace of {pool_of(here[0])}.",
        )
    else:
        yield problem(
            "Agent",
            f"ManagerPool {pool} has no agent on node {pod.node}.",
            f"Let nodeSelector and tolerations of the pool cover the node (`kubectl describe mpool {pool}`), or let "
            "the pod run where the pool is.",
        )


def _containers(manifest: Manifest, pod: EnginePod) -> Iterator[Finding]:
    status = manifest.get("status") or {}
    waiting = [
        (it["name"], (it.get("state") or {})["waiting"])
        for it in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ()))
        if (it.get("state") or {}).get("waiting")
    ]
    for name, state in waiting:
        reason = state.get("reason", "")
        if reason in ("PodInitializing", "ContainerCreating", ""):
            continue
        yield problem(
            f"Container {name}", f"It waits: {reason}: {sentence(str(state.get('message', '')))}", _describe(pod)
        )


# ---------------------------------------------------------------------------------------------------------------- use


def _use(cluster: Cluster, pod: EnginePod, cache: Manifest | None) -> Finding:
    attached = ((cache or {}).get("status") or {}).get("attached") or {}
    entry = next(
        (it for it in attached.get("first") or () if (it["namespace"], it["name"]) == (pod.namespace, pod.name)), None
    )
    latest = _latest_event(cluster, pod)
    if latest is None and entry is not None:  # events are forgotten after an hour
        return ok("Engine", f"It is attached and uses the cache. {_tokens(entry)}")
    if latest is None:
        return info(
            "Engine",
            "Nothing was heard of it yet.",
            "An engine attaches when it has loaded its model. If the pod has been ready for five minutes, the operator "
            "says in an event on it what the likely cause is.",
        )
    reason, note = str(latest.get("reason")), sentence(str(latest.get("note")))
    if reason == "CacheAttached":
        return ok("Engine", f"{note} {_tokens(entry)}" if entry is not None else note)
    cause = note.partition(":")[0]
    meaning = INFORMATION.get(cause, "")
    return problem("Engine", note, sentence(meaning) or f"What the engine itself says: {_log(pod)}")


def _tokens(entry: Mapping[str, Any]) -> str:
    requested, hit = entry.get("requestedTokens") or 0, entry.get("hitTokens") or 0
    if not requested:
        return "It has asked for nothing yet."
    return f"Of {requested} tokens that it asked for, {hit} came from the cache ({100 * hit / requested:.0f} %)."


def _latest_event(cluster: Cluster, pod: EnginePod) -> Manifest | None:
    try:
        everything = cluster.all(EVENTS, pod.namespace)
    except ApiError as error:
        if error.status != 403:
            raise
        return None
    events = [
        event
        for event in everything
        if event.get("reportingController") == CONTROLLER
        and (event.get("regarding") or {}).get("uid") == pod.uid
        and event.get("reason") in _ATTACHED
    ]
    return max(events, key=lambda event: str(event.get("eventTime") or ""), default=None)


def _log(pod: EnginePod) -> str:
    container = f" -c {pod.injected.container}" if pod.injected else ""
    return f"`kubectl -n {pod.namespace} logs {pod.name}{container} | grep -i orbitkv`."


def _describe(pod: EnginePod) -> str:
    return f"`kubectl -n {pod.namespace} describe pod {pod.name}` says why."


def _place(full: str) -> tuple[str, str]:
    namespace, _, name = full.partition("/")
    return namespace, name
