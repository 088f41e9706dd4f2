"""Which agents to replace now: a pure function of what runs.

DaemonSets are `OnDelete`: an agent is replaced by deleting its pod, and only the operator does that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum


class Health(Enum):
    """What an agent's pod is worth to its node."""

    READY = "ready"
    NOT_READY = "not ready"
    GOING = "going"


@dataclass(frozen=True)
class Agent:
    """A pod of the pool on a node."""

    name: str
    uid: str
    node: str
    template: str
    """Hash of the template that it was made from."""
    health: Health


@dataclass(frozen=True)
class Rollout:
    """How far a pool is, and what to do next."""

    serving: frozenset[str]
    """Wanted nodes with a ready agent."""
    updated: int
    """Wanted nodes whose agent is of the present template."""
    outdated: tuple[str, ...]
    """Wanted nodes whose agent is not, sorted."""
    replace: tuple[Agent, ...]
    """Agents to delete now."""

    @property
    def ready(self) -> int:
        """How many nodes have a ready agent."""
        return len(self.serving)


def plan(
    agents: Collection[Agent],
    wanted: Collection[str],
    down: Collection[str],
    template: str,
    *,
    max_unavailable: int,
    paused: bool,
) -> Rollout:
    """Decide which agents are replaced now.

    An old agent that serves is replaced while fewer than `max_unavailable` wanted nodes lack a ready agent. An old one
    that does not serve is replaced at once: nobody loses anything, and its new template may be what it needs.

    Args:
        wanted: nodes that should have an agent.
        down: nodes that are not ready themselves: no rollout can help them, nor should it wait for them.
    """
    by_node = _by_node(agents)
    serving = frozenset(node for node in wanted if node in by_node and by_node[node].health is Health.READY)
    outdated = sorted(node for node in wanted if node in by_node and by_node[node].template != template)
    updated = sum(node in by_node and by_node[node].template == template for node in wanted)
    if paused:
        return Rollout(serving, updated, tuple(outdated), ())
    lost = [by_node[node] for node in outdated if by_node[node].health is Health.NOT_READY and node not in down]
    unavailable = sum(node not in serving and node not in down for node in wanted)
    budget = max(0, max_unavailable - unavailable)
    useful = [by_node[node] for node in outdated if node in serving and node not in down]
    return Rollout(serving, updated, tuple(outdated), (*lost, *useful[:budget]))


def _by_node(agents: Collection[Agent]) -> Mapping[str, Agent]:
    """Return the agent of each node: of several (one going, one coming) the one that counts."""
    order = (Health.GOING, Health.NOT_READY, Health.READY)
    found: dict[str, Agent] = {}
    for agent in sorted(agents, key=lambda agent: (order.index(agent.health), agent.name)):
        found[agent.node] = agent
    return found
