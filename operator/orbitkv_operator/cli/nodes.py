"""Checks of the nodes' memory: whether a pool fits, and what of it is set aside or cannot be pinned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from pydantic import ValidationError

from orbitkv_crds.managerpool import ManagerPool
from orbitkv_crds.quantity import parse_quantity, rounded_size_text
from orbitkv_operator.builders import agents
from orbitkv_operator.cli.cluster import Cluster
from orbitkv_operator.cli.findings import Finding, info, ok, problem
from orbitkv_operator.cluster.api import NODES, Manifest
from orbitkv_operator.placement import matching

FIRST: Final = 10
"""Nodes that are named."""
_HUGE: Final = "hugepages-"


def memory(cluster: Cluster) -> Iterator[Finding]:
    """Has every node of a pool the memory that an agent asks for, and does hugepages' memory lie idle there?"""
    for manifest in cluster.pools():
        try:
            pool = ManagerPool.model_validate(manifest)
        except ValidationError:
            continue  # the check of GPUs, or of pools, says so
        by_name = {node["metadata"]["name"]: node for node in cluster.all(NODES)}
        meant = [by_name[name] for name in matching(by_name.values(), agents.placement_for(pool))]
        yield from _fits(pool, meant)
        yield from _set_aside(pool, meant)


def _fits(pool: ManagerPool, nodes: list[Manifest]) -> Iterator[Finding]:
    about, wanted = f"ManagerPool {pool.name}", agents.resources(pool)["requests"]["memory"]
    small = []
    for node in nodes:
        there = _amount(node, "memory")
        if there is not None and there < parse_quantity(wanted):
            small.append(f"{node['metadata']['name']} ({rounded_size_text(int(there))})")
    if small:
        yield problem(
            about,
            f"An agent asks for {wanted}, which is more than these nodes have for pods at all: {_listed(small)}.",
            "Lower memory.pool, or leave these nodes out by nodeSelector.",
        )
    elif nodes:
        yield ok(about, f"An agent asks for {wanted}, which each of its nodes has for pods, if others leave it.")


def _set_aside(pool: ManagerPool, nodes: list[Manifest]) -> Iterator[Finding]:
    idle = []
    for node in nodes:
        allocatable = (node.get("status") or {}).get("allocatable") or {}
        total = sum(_amount(node, name) or 0 for name in allocatable if name.startswith(_HUGE))
        if total:
            idle.append(f"{node['metadata']['name']} ({rounded_size_text(int(total))})")
    if idle:
        yield info(
            f"ManagerPool {pool.name}",
            f"Nodes set memory aside as hugepages: {_listed(idle)}. Agents use ordinary pages, so this memory is not "
            "theirs, and is missing from what pods can have.",
            "Nothing, if something else on these nodes uses them; else set fewer aside (vm.nr_hugepages).",
        )


def _amount(node: Manifest, resource: str) -> float | None:
    """Return how much of a resource a node has for pods, in bytes; None: it does not say."""
    value = ((node.get("status") or {}).get("allocatable") or {}).get(resource)
    try:
        return None if value is None else float(parse_quantity(value))
    except ValueError:
        return None


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - FIRST} more" if len(names) > FIRST else ""
    return f"{', '.join(names[:FIRST])}{more}"
