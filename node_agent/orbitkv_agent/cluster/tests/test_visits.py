"""What an agent remembers of the pods that came to it."""

from __future__ import annotations

from orbitkv_agent.cluster import visits
from orbitkv_agent.cluster.tests.fake_apiserver import FakeApiserver
from orbitkv_agent.cluster.tests.world import ClusterWorld
from orbitkv_agent.cluster.visits import Seen, State
from orbitkv_agent.tests.harness import TOKENS, hashes

NAME = "team-a/qwen"


def seen(world: ClusterWorld) -> dict[str, Seen]:
    """What a report would say now, by the pods' names."""
    found = world.cluster.admission.visits.seen(world.agent.instances, world.agent.loop.now())
    return {each.visit.pod.name: each for each in found}


def test_a_pod_counts_as_attached_once_its_engine_has_registered(world: ClusterWorld) -> None:
    world.client(NAME)
    (only,) = seen(world).values()
    assert (only.word.state, only.word.reason, only.engines) == (State.CONNECTED, "not-registered", 0)
    engine = world.engine(namespace=NAME)
    engine.save(hashes(1, 2))
    engine.restore(hashes(1, 2, 3))
    (only,) = seen(world).values()
    assert (only.word.state, only.engines, only.visit.cache_namespace) == (State.ATTACHED, 1, NAME)
    assert (only.asked, only.found) == (3 * TOKENS, 2 * TOKENS)


def test_what_engines_ask_for_counts_for_each_and_for_their_cache(world: ClusterWorld, api: FakeApiserver) -> None:
    engine = world.engine(namespace=NAME)
    engine.save(hashes(1))
    engine.restore(hashes(1))
    demand = next(iter(world.agent.counters.demand.values()))
    assert (demand.asked, demand.found) == (TOKENS, TOKENS)
    engine.close()
    assert (demand.asked, demand.found) == (TOKENS, TOKENS)


def test_a_pod_that_may_not_attach_is_remembered_with_the_reason(world: ClusterWorld, api: FakeApiserver) -> None:
    other = api.token("stranger", pod="engine-9", namespace="team-b")
    world.refused(NAME, token=other)
    stranger = seen(world)["engine-9"]
    assert (stranger.word.state, stranger.visit.cache_namespace) == (State.REFUSED, NAME)
    assert stranger.word.reason and "access.namespaces is Same" in stranger.word.message


def test_who_cannot_prove_who_it_is_has_no_place(world: ClusterWorld) -> None:
    world.refused(NAME, token=b"forged")
    assert not seen(world)


def test_an_engine_that_stays_off_is_remembered_after_it_has_gone(world: ClusterWorld) -> None:
    client = world.client(NAME)
    world.cluster.admission.reported(client.session, "vllm 0.30.0", "engine-version-unsupported", "use vLLM 0.33")
    assert seen(world)["engine-0"].word.state is State.OFF
    client.goodbye()
    world.until(lambda: not seen(world)["engine-0"].visit.sessions)
    word = seen(world)["engine-0"].word
    assert (word.state, word.reason, word.message) == (State.OFF, "engine-version-unsupported", "use vLLM 0.33")
    assert seen(world)["engine-0"].visit.engine == "vllm 0.30.0"


def test_a_restarted_engine_that_uses_the_cache_after_all_is_attached(world: ClusterWorld) -> None:
    client = world.client(NAME)
    world.cluster.admission.reported(client.session, "vllm 0.30.0", "engine-version-unsupported", "use vLLM 0.33")
    client.goodbye()
    world.until(lambda: not seen(world)["engine-0"].visit.sessions)
    world.engine(namespace=NAME)
    assert seen(world)["engine-0"].word.state is State.ATTACHED


def test_a_session_that_ends_leaves_word_why(world: ClusterWorld, api: FakeApiserver) -> None:
    engine = world.engine(namespace=NAME)
    assert seen(world)["engine-0"].word.state is State.ATTACHED
    api.put(NAME, "one", access={"namespaces": "Same", "serviceAccounts": ["nobody"]})
    world.until(lambda: not seen(world)["engine-0"].visit.sessions)
    word = seen(world)["engine-0"].word
    assert word.state is State.LEFT and "access.serviceAccounts" in word.message
    engine.control.drop_after_end()


def test_the_age_of_a_state_begins_with_it(world: ClusterWorld) -> None:
    client = world.client(NAME)
    assert seen(world)["engine-0"].age < 1
    world.advance(20)
    assert 19 < seen(world)["engine-0"].age < 30
    client.goodbye()
    world.until(lambda: not seen(world)["engine-0"].visit.sessions)
    assert (seen(world)["engine-0"].word.state, seen(world)["engine-0"].age < 5) == (State.LEFT, True)


def test_a_pod_that_left_is_forgotten_after_an_hour(world: ClusterWorld) -> None:
    world.client(NAME).goodbye()
    world.until(lambda: not seen(world)["engine-0"].visit.sessions)
    world.advance(visits.KEPT_S - 60)
    assert seen(world)
    world.advance(120)
    assert not seen(world)


def test_a_crowd_of_refused_pods_takes_bounded_memory_and_no_attached_pods_place(
    world: ClusterWorld, api: FakeApiserver
) -> None:
    world.engine(namespace=NAME)
    book = world.cluster.admission.visits
    pod = next(iter(seen(world).values())).visit.pod
    for number in range(2 * visits.MOST):
        stranger = type(pod)("team-b", "default", f"pod-{number}", f"uid-{number}", "node-a")
        book.refused(stranger, NAME, "access-denied", "x" * 5000, float(number))
    assert len(book) == visits.MOST
    assert seen(world)["engine-0"].word.state is State.ATTACHED
    assert all(len(each.word.message) <= 500 for each in seen(world).values())
