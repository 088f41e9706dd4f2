"""Whether a pod uses its cache, and if not, why: a pure function of what was seen.

The reasons are words for people and programs alike; `docs/kubernetes.md` lists them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from orbitkv_crds.agent_api import reports_pb2 as pb
from orbitkv_crds.meta import find_condition
from orbitkv_operator.engines.pods import EnginePod
from orbitkv_operator.view import Cache

CAUSES: Final[Mapping[str, str]] = {
    "cache-namespace-not-found": "there is no such CacheNamespace: make it, or correct the annotation",
    "cache-namespace-not-accepted": "the pool does not take the CacheNamespace; its condition `Accepted` says why",
    "pool-not-found": "the pool that the CacheNamespace refers to does not exist",
    "agent-absent": "no agent of the pool reports from the pod's node",
    "other-pool": "the node's agent belongs to another pool than the CacheNamespace",
    "not-registered": "the engine is connected and has not registered its memory yet",
    "disconnected": "the engine was attached, and its connection ended",
    "never-came": "the engine has never come to its node's agent: it has not loaded the plugin",
    "webhook-missed": "the webhook did not see the pod when it was made",
}
"""Why a pod that was injected does not use its cache, where neither the agent nor the plugin gave a reason."""


@dataclass(frozen=True)
class Verdict:
    """What is known of a pod's use of its cache.

    Attributes:
        attached: its engine is registered with the agent of its node.
        certain: agent or plugin said so themselves; otherwise it follows from what was not seen, and may yet come.
        reason: one word; "" when attached.
        message: for people, one or more sentences: what is in the way, and what to do.
    """

    attached: bool
    certain: bool
    reason: str
    message: str


def verdict(
    pod: EnginePod,
    visit: tuple[str, pb.PodVisit] | None,
    on_node: Sequence[pb.Report],
    cache: Cache | None,
    pool_exists: bool,
) -> Verdict:
    """Judge an injected pod.

    Args:
        visit: what an agent says of it, and on which node.
        on_node: fresh reports of agents on its node.
        cache: its CacheNamespace; None: there is none.
        pool_exists: whether the CacheNamespace's pool is there.
    """
    if visit is not None:
        node, said = visit
        if said.state == pb.VISIT_STATE_ATTACHED:
            engine = said.engine or (pod.injected.engine if pod.injected else "") or "The engine"
            return Verdict(
                True, True, "", f"{engine} uses CacheNamespace {said.cache_namespace} through the agent on node {node}."
            )
        if said.state in (pb.VISIT_STATE_OFF, pb.VISIT_STATE_REFUSED):
            return Verdict(False, True, said.reason or "refused", _said(said))
    absent = _nothing_there(pod, cache, pool_exists, on_node)
    if absent is not None:
        return absent
    node = pod.node
    if visit is not None and visit[1].state == pb.VISIT_STATE_CONNECTED:
        return Verdict(
            False,
            False,
            "not-registered",
            f"The engine is connected to the agent on node {node} and not registered: {_said(visit[1])} "
            "If it stays so, the engine's log says why.",
        )
    if visit is not None and visit[1].state == pb.VISIT_STATE_LEFT:
        why = f": {_said(visit[1])}" if visit[1].message else "."
        return Verdict(
            False,
            False,
            visit[1].reason or "disconnected",
            f"The engine's connection to the agent on node {node} has ended{why} It computes meanwhile, and attaches "
            "again by itself when it can.",
        )
    container = pod.injected.container if pod.injected else ""
    return Verdict(
        False,
        False,
        "never-came",
        f"The engine has not come to the agent on node {node}. Look for lines with orbitkv in its log (`kubectl -n "
        f"{pod.namespace} logs {pod.name} -c {container}`). If there are none, the plugin was not loaded: the "
        "container runs no vLLM or SGLang, it clears PYTHONPATH, or it runs Python with -I or -E.",
    )


def _nothing_there(
    pod: EnginePod, cache: Cache | None, pool_exists: bool, on_node: Sequence[pb.Report]
) -> Verdict | None:
    """Return what the engine could not attach to however well it runs, or None if all is there."""
    if cache is None:
        namespace, _, name = pod.cache.partition("/")
        return Verdict(
            False,
            False,
            "cache-namespace-not-found",
            f"There is no CacheNamespace {name} in namespace {namespace}: make it, or correct the annotation "
            "orbitkv.io/cache-namespace and let the pod be made anew.",
        )
    if not pool_exists:
        return Verdict(
            False,
            False,
            "pool-not-found",
            f"CacheNamespace {pod.cache} refers to ManagerPool {cache.pool}, which does not exist: make it.",
        )
    accepted = find_condition(cache.model.status.conditions or (), "Accepted") if cache.model is not None else None
    if accepted is not None and accepted.status == "False" and accepted.reason != "GuaranteeExceedsPool":
        return Verdict(
            False,
            False,
            "cache-namespace-not-accepted",
            f"ManagerPool {cache.pool} does not take CacheNamespace {pod.cache} ({accepted.reason}): "
            f"{_sentence(accepted.message)}",
        )
    own = [report for report in on_node if report.pool == cache.pool]
    if not own and on_node:
        return Verdict(
            False,
            False,
            "other-pool",
            f"The agent on node {pod.node} belongs to ManagerPool {on_node[0].pool}, and CacheNamespace {pod.cache} to "
            f"{cache.pool}: let the pod run on nodes of {cache.pool}, or use a CacheNamespace of the node's pool.",
        )
    if not own:
        return Verdict(
            False,
            False,
            "agent-absent",
            f"No agent of ManagerPool {cache.pool} reports from node {pod.node}: `kubectl describe mpool {cache.pool}` "
            "says which nodes it is to have and what is wrong with them. The engine attaches by itself when an agent "
            "comes.",
        )
    return None


def _said(visit: pb.PodVisit) -> str:
    """Return what an agent says, without the reason that its words may begin with."""
    return _sentence(visit.message.removeprefix(f"{visit.reason}: "))


def _sentence(words: str) -> str:
    line = " ".join(words.split())
    return line if not line or line.endswith((".", "!", "?")) else f"{line}."
