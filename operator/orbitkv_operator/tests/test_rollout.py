"""Which agents are replaced, and when not."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orbitkv_operator.rollout import Agent, Health, Rollout, plan

OLD, NEW = "old", "new"


def agent(node: str, template: str = OLD, health: Health = Health.READY) -> Agent:
    return Agent(f"pod-{node}-{template}", f"uid-{node}-{template}", node, template, health)


def decide(agents: list[Agent], *, most: int = 1, paused: bool = False, down: tuple[str, ...] = ()) -> Rollout:
    nodes = sorted({it.node for it in agents} | {"a", "b", "c"})
    return plan(agents, nodes, down, NEW, max_unavailable=most, paused=paused)


def replaced(rollout: Rollout) -> list[str]:
    return [it.node for it in rollout.replace]


def test_one_at_a_time() -> None:
    assert replaced(decide([agent("a"), agent("b"), agent("c")])) == ["a"]


def test_next_one_waits_until_the_new_agent_is_ready() -> None:
    starting = [agent("a", NEW, Health.NOT_READY), agent("b"), agent("c")]
    assert replaced(decide(starting)) == []
    assert replaced(decide([agent("a", NEW), agent("b"), agent("c")])) == ["b"]


def test_next_one_waits_until_the_old_agent_is_gone() -> None:
    assert replaced(decide([agent("a", OLD, Health.GOING), agent("b"), agent("c")])) == []


def test_as_many_as_are_allowed() -> None:
    assert replaced(decide([agent("a"), agent("b"), agent("c")], most=2)) == ["a", "b"]


def test_old_agents_that_do_not_serve_are_replaced_at_once() -> None:
    broken = [agent("a", OLD, Health.NOT_READY), agent("b", OLD, Health.NOT_READY), agent("c")]
    assert replaced(decide(broken)) == ["a", "b"]


def test_failing_rollout_stops() -> None:
    assert replaced(decide([agent("a", NEW, Health.NOT_READY), agent("b"), agent("c")])) == []


def test_paused_rollout_replaces_nothing_and_counts() -> None:
    found = decide([agent("a", NEW), agent("b"), agent("c", OLD, Health.NOT_READY)], paused=True)
    assert (found.ready, found.updated, found.outdated, found.replace) == (2, 1, ("b", "c"), ())


def test_node_that_is_down_neither_blocks_the_rollout_nor_is_part_of_it() -> None:
    agents = [agent("a", OLD, Health.NOT_READY), agent("b"), agent("c")]
    assert replaced(decide(agents, down=("a",))) == ["b"]


def test_agent_that_goes_does_not_hide_the_one_that_comes() -> None:
    agents = [agent("a", OLD, Health.GOING), agent("a", NEW), agent("b", NEW), agent("c", NEW)]
    assert decide(agents).outdated == ()


def test_agents_on_other_nodes_do_not_count() -> None:
    found = plan([agent("gone"), agent("a", NEW)], ["a"], (), NEW, max_unavailable=1, paused=False)
    assert (found.ready, found.updated, found.replace) == (1, 1, ())


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.sampled_from((OLD, NEW)), st.sampled_from(Health)), min_size=1, max_size=12),
    st.integers(1, 4),
)
def test_serving_agents_are_never_taken_beyond_the_budget(states: list[tuple[str, Health]], most: int) -> None:
    agents = [agent(f"n{number}", *state) for number, state in enumerate(states)]
    found = plan(agents, [it.node for it in agents], (), NEW, max_unavailable=most, paused=False)
    ready = sum(it.health is Health.READY for it in agents)
    taken = sum(it.health is Health.READY for it in found.replace)
    if taken:
        assert len(agents) - ready + taken <= most
    assert all(it.template == OLD for it in found.replace)
