"""Random interleavings of engines that save, ask, restore, cancel, disappear, while time passes.

The model knows what every engine was granted, and what of it may still be touched by a copy. After each step the
agent's accounts must agree with each other, and no place that is granted anew may be one that somebody may still touch.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import Phase as HypothesisPhase
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from orbitkv.protocol.messages import (
    CommitSave,
    Done,
    Instance,
    Loading,
    Nothing,
    PagePlaces,
    Ready,
    Refusal,
    RestoreDone,
    RestorePlan,
    SavePlan,
    SavesAccepted,
    SubmitSaves,
    Unregister,
)
from orbitkv_agent.queries.budget import Phase
from orbitkv_agent.tests.harness import PAGE, Engine, Way, World, hashes, save_request, start_message

PREFIXES = [[100 * chain + page for page in range(12)] for chain in range(4)]
Places = frozenset[tuple[int, int]]


@dataclass
class Player:
    """An engine and what it was granted."""

    engine: Engine
    saves: dict[int, tuple[SavePlan, Places]] = field(default_factory=dict)
    restores: dict[int, tuple[RestorePlan, Places]] = field(default_factory=dict)
    loading: dict[int, int] = field(default_factory=dict)
    leases: dict[int, Ready] = field(default_factory=dict)
    sessions: list[object] = field(default_factory=list)
    operation: int = 0


class AgentMachine(RuleBasedStateMachine):
    """The agent with a pool of 64 pages, a budget of 32, 20 an instance; engines are of these cache namespaces."""

    namespaces: tuple[str, ...] = ("",)
    pool = "1MiB"
    percent = 12  # 30 pages

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.world = World(
            Path(self.folder.name),
            pool=self.pool,
            arena="1MiB",
            query_budget_percent=self.percent,
            instance_budget=20 * PAGE,
            max_session_queries=3,
            max_queries=5,
            max_restores_per_device=2,
            cache_namespaces={name: {} for name in self.namespaces},
        )
        self.players: list[Player] = []
        self.ghosts: list[tuple[object, list[Places]]] = []
        self.names = 0

    @initialize()
    def start(self) -> None:
        for _ in range(2):
            self.join()
        for chain in range(3):
            self.save_all(0, chain)

    @precondition(lambda self: len(self.players) < 4)
    @rule()
    def join(self) -> None:
        self.names += 1
        namespace = self.namespaces[self.names % len(self.namespaces)]
        instance = Instance(f"engine{self.names}", "1")
        self.players.append(Player(self.world.engine(namespace=namespace, instance=instance)))

    @precondition(lambda self: self.players)
    @rule(number=st.integers(0, 3), way=st.sampled_from(Way))
    def ask_another_way(self, number: int, way: Way) -> None:
        engine = self._player(number).engine
        engine.control.way = engine.worker.way = way

    def _player(self, number: int) -> Player:
        return self.players[number % len(self.players)]

    @precondition(lambda self: self.players)
    @rule(
        number=st.integers(0, 3),
        chain=st.integers(0, 3),
        first=st.sampled_from([0, 0, 4, 11]),
        count=st.sampled_from([12, 12, 5, 1]),
    )
    def submit(self, number: int, chain: int, first: int, count: int) -> None:
        player = self._player(number)
        wanted = hashes(*PREFIXES[chain][first : first + count])
        worker, registration = player.engine.worker, player.engine.registration
        reply = worker.call(SubmitSaves([save_request(registration, wanted)]), SavesAccepted)
        plan = reply.plans[0]
        places = _places(plan.pages)
        assert not places & self._touched(), "a place under a copy was granted again"
        player.saves[plan.save] = (plan, places)

    @precondition(lambda self: any(player.saves for player in self.players))
    @rule(number=st.integers(0, 3), pick=st.integers(0, 9), copied=st.sampled_from([True, True, False]))
    def commit(self, number: int, pick: int, copied: bool) -> None:
        player = self._player(number)
        if player.saves:
            save = sorted(player.saves)[pick % len(player.saves)]
            del player.saves[save]
            player.engine.worker.call(CommitSave(save, copied), Done)

    @precondition(lambda self: self.players)
    @rule(
        number=st.integers(0, 3),
        chain=st.integers(0, 3),
        count=st.sampled_from([12, 12, 7, 2]),
        wait=st.sampled_from([2000, 2000, 0]),
    )
    def query(self, number: int, chain: int, count: int, wait: int) -> None:
        player = self._player(number)
        player.operation += 1
        reply = player.engine.query(hashes(*PREFIXES[chain][:count]), operation=player.operation, max_wait_ms=wait)
        self._answered(player, player.operation, reply)

    @precondition(lambda self: any(player.loading for player in self.players))
    @rule(number=st.integers(0, 3), pick=st.integers(0, 9))
    def poll(self, number: int, pick: int) -> None:
        player = self._player(number)
        if player.loading:
            operation = sorted(player.loading)[pick % len(player.loading)]
            del player.loading[operation]
            reply = player.engine.control.poll(operation)
            assert isinstance(reply, Ready | Loading | Nothing), reply
            self._answered(player, operation, reply)

    def _answered(self, player: Player, operation: int, reply: Ready | Loading | Nothing) -> None:
        if isinstance(reply, Ready):
            assert reply.bytes == reply.pages[0].count * PAGE
            player.leases[operation] = reply
        elif isinstance(reply, Loading):
            player.loading[operation] = 1

    @precondition(lambda self: any(player.leases for player in self.players))
    @rule(number=st.integers(0, 3), pick=st.integers(0, 9), skip=st.booleans())
    def restore(self, number: int, pick: int, skip: bool) -> None:
        player = self._player(number)
        if not player.leases:
            return
        operation = sorted(player.leases)[pick % len(player.leases)]
        ready = player.leases.pop(operation)
        worker, registration = player.engine.worker, player.engine.registration
        blocks = [-1 if skip and block == 0 else block for block in range(ready.pages[0].count)]
        sequence = worker.post(start_message(registration, ready.leases[0], blocks))
        reply = worker.reply(sequence)
        if isinstance(reply, RestorePlan):
            player.restores[reply.restore] = (reply, _places(reply.pages))
        elif isinstance(reply, Refusal):
            assert reply.kind == "stale", reply
        else:
            assert self.world.agent.restores.waiting

    @precondition(lambda self: any(player.restores for player in self.players))
    @rule(number=st.integers(0, 3), pick=st.integers(0, 9), copied=st.booleans())
    def finish(self, number: int, pick: int, copied: bool) -> None:
        player = self._player(number)
        if player.restores:
            restore = sorted(player.restores)[pick % len(player.restores)]
            del player.restores[restore]
            player.engine.worker.call(RestoreDone(restore, copied), Done)
            self._collect_plans(player)

    def _collect_plans(self, player: Player) -> None:
        """Take the plans of restores that had waited for a place."""
        worker = player.engine.worker
        worker.read()
        for sequence, reply in list(worker.replies.items()):
            if isinstance(reply, RestorePlan):
                del worker.replies[sequence]
                player.restores[reply.restore] = (reply, _places(reply.pages))

    @precondition(lambda self: any(player.leases or player.loading for player in self.players))
    @rule(number=st.integers(0, 3), pick=st.integers(0, 9))
    def cancel(self, number: int, pick: int) -> None:
        player = self._player(number)
        known = sorted({*player.leases, *player.loading})
        if known:
            operation = known[pick % len(known)]
            player.leases.pop(operation, None)
            player.loading.pop(operation, None)
            player.engine.control.cancel(operation)

    @precondition(lambda self: any(player.leases for player in self.players))
    @rule(number=st.integers(0, 3), pick=st.integers(0, 9))
    def release(self, number: int, pick: int) -> None:
        player = self._player(number)
        if player.leases:
            operation = sorted(player.leases)[pick % len(player.leases)]
            player.engine.control.release(*player.leases.pop(operation).leases)

    @precondition(lambda self: self.players)
    @rule(seconds=st.sampled_from([0.5, 2.5, 61.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.advance(seconds)

    @precondition(lambda self: self.players)
    @rule(number=st.integers(0, 3))
    def disconnect(self, number: int) -> None:
        """The streams end; the process lives on and may still copy."""
        player = self._player(number)
        self.players.remove(player)
        session = player.engine.worker.session
        self._collect_plans(player)
        player.engine.control.drop()
        player.engine.worker.drop()
        self.ghosts.append((session, [places for _, places in (*player.saves.values(), *player.restores.values())]))

    @precondition(lambda self: self.ghosts)
    @rule(pick=st.integers(0, 9))
    def exit(self, pick: int) -> None:
        """The process of streams that ended is gone, too."""
        session, _ = self.ghosts.pop(pick % len(self.ghosts))
        session.close()  # type: ignore[attr-defined]

    @precondition(lambda self: self.players)
    @rule(number=st.integers(0, 3), chain=st.integers(0, 3))
    def save_all(self, number: int, chain: int) -> None:
        """A whole prefix, from plan to commit: so that queries have something to find."""
        player = self._player(number)
        player.engine.worker.save(player.engine.registration, hashes(*PREFIXES[chain]))

    @precondition(lambda self: self.players)
    @rule(number=st.integers(0, 3))
    def goodbye(self, number: int) -> None:
        player = self._player(number)
        self.players.remove(player)
        player.engine.close()

    @precondition(lambda self: self.players)
    @rule(number=st.integers(0, 3))
    def register_again(self, number: int) -> None:
        """The worker's registration is lost and made again; what was promised before is void."""
        player = self._player(number)
        worker = player.engine.worker
        worker.post(Unregister(player.engine.registration))
        self.world.pump()
        registered = worker.register(player.engine.instance)
        assert not registered.proof_required
        player.engine.registration = registered.registration
        for ready in player.leases.values():
            refusal = worker.ask(start_message(registered.registration, ready.leases[0], range(ready.pages[0].count)))
            assert isinstance(refusal, Refusal), "a revoked lease was restored"
        player.leases.clear()

    def _touched(self) -> Places:
        found: set[tuple[int, int]] = set()
        for player in self.players:
            for _, places in (*player.saves.values(), *player.restores.values()):
                found |= places
        for _, held in self.ghosts:
            for places in held:
                found |= places
        return frozenset(found)

    @invariant()
    def accounts_agree(self) -> None:
        agent = self.world.agent
        budget, leases = agent.queries.budget, agent.queries.leases
        assert 0 <= budget.reserved <= budget.limit
        assert budget.reserved == sum(budget.by_phase) == leases.pinned_bytes == leases.pinned_pages * PAGE
        assert budget.owner_peak <= budget.owner_limit
        assert budget.by_phase[Phase.PREPARING] == 0
        assert agent.queries.outstanding - agent.queries.unadmitted <= 5
        assert leases.live + len(agent.restores) + agent.restores.waiting == len(leases)
        instances = list(agent.instances)
        assert sum(len(operation.leases) for each in instances for operation in each.operations) == len(leases)
        for player in self.players:
            session = player.engine.control.session
            admitted = [operation for operation in session.operations.values() if operation.admitted]
            assert len(admitted) <= 3
        assert agent.saves.inflight_bytes == sum(save.held_bytes for save in agent.saves)

    @invariant()
    def copies_keep_their_pages(self) -> None:
        agent = self.world.agent
        touched = self._touched()
        held: set[tuple[int, int]] = set()
        for save in agent.saves:
            for reservation in save.reservations:
                held |= set(zip(reservation.arena_ids.tolist(), reservation.offsets.tolist(), strict=True))
        for restore in agent.restores:
            for _, arenas, offsets in restore.lease.pages.places(0):
                held |= set(zip(arenas.tolist(), offsets.tolist(), strict=True))
        assert touched <= held

    @invariant()
    def nobody_waits_who_could_be_served(self) -> None:
        agent = self.world.agent
        if agent.queries.budget.reserved == 0:
            assert agent.queries.waiting_for_bytes == 0
        if agent.queries.outstanding - agent.queries.unadmitted == 0:
            assert agent.queries.unadmitted == 0

    def teardown(self) -> None:
        try:
            self.world.__exit__(None, None, None)  # checks the drain oracle
        finally:
            self.folder.cleanup()


def _places(pages: list[PagePlaces]) -> Places:
    found: set[tuple[int, int]] = set()
    for part in pages:
        arenas, offsets = np.frombuffer(part.arenas, "<u4").tolist(), np.frombuffer(part.offsets, "<u8").tolist()
        found |= set(zip(arenas, offsets, strict=True))
    return frozenset(found)


class TenantsMachine(AgentMachine):
    """The same with two tenants, one of which has two cache namespaces; each of the three has memory of its own."""

    namespaces = ("a/one", "b/one", "a/two")
    pool = "4MiB"
    percent = 3

    @invariant()
    def shares_agree(self) -> None:
        queries = self.world.agent.queries
        of_bytes, of_places = queries.budget._shares._of, queries._turns._places._shares._of
        assert sum(of_bytes.values()) == queries.budget.reserved
        assert sum(of_places.values()) == queries.outstanding - queries.unadmitted
        assert {*of_bytes, *of_places} <= {"a", "b"}
        there = {each.tenant for each in self.world.agent.instances}
        assert self.world.agent.instances.of_several_tenants() == (len(there) > 1)


TestAgentMachine = AgentMachine.TestCase
TestTenantsMachine = TenantsMachine.TestCase
TestAgentMachine.settings = TestTenantsMachine.settings = settings(
    max_examples=40,
    stateful_step_count=50,
    deadline=None,
    phases=[HypothesisPhase.explicit, HypothesisPhase.reuse, HypothesisPhase.generate],  # shrinking takes minutes
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
