from __future__ import annotations

from pathlib import Path

import pytest

from orbitkv.protocol.messages import GroupHashes, Instance, Loading, Nothing, Query, Ready
from orbitkv.protocol.records import RecordState
from orbitkv_agent.tests.harness import HASH_BYTES, Engine, World, hashes

ENGINES = 8
PAGES = 4
RESTORES_A_ROUND = 8  # of each engine
ROUND_S = 0.05


class Load:
    """One engine with many queries at once; it restores what is ready, some each round, as fast as all others."""

    def __init__(self, engine: Engine, queries: int) -> None:
        self.engine = engine
        self.restored = 0
        self.nothing = 0
        self.slowest = 0.0
        self.began = engine.world.clock.now
        self.ready: list[Ready] = []
        self.loading: dict[int, Loading] = {}
        control = engine.control
        for number in range(queries):
            query = Query(engine.instance, number, 1, [GroupHashes(0, HASH_BYTES, hashes(*range(PAGES)))])
            reply = control.ask(query)
            assert isinstance(reply, Ready | Loading | Nothing)
            self._take(number, reply)

    @property
    def open(self) -> bool:
        return bool(self.ready or self.loading)

    def round(self) -> None:
        records = self.engine.control.records
        assert records is not None
        for number, loading in list(self.loading.items()):
            assert loading.record is not None
            if records.state(loading.record) is not RecordState.PENDING:
                del self.loading[number]
                reply = self.engine.control.poll(number)
                assert isinstance(reply, Ready | Loading | Nothing)
                self._take(number, reply)
        for _ in range(RESTORES_A_ROUND):
            if self.ready:
                self.engine.worker.done(self.engine.start(self.ready.pop(0)))
                self.restored += 1

    def _take(self, number: int, reply: Ready | Loading | Nothing) -> None:
        if isinstance(reply, Loading):
            self.loading[number] = reply
            return
        self.slowest = max(self.slowest, self.engine.world.clock.now - self.began)
        if isinstance(reply, Ready):
            self.ready.append(reply)
        else:
            assert reply.reason == "budget"
            self.nothing += 1


@pytest.mark.parametrize("queries", [120, 200])
def test_no_engine_is_starved_and_every_query_is_resolved(tmp_path: Path, queries: int) -> None:
    # The budget takes 192 of these queries at once: fewer than there are.
    with World(tmp_path) as world:
        engines = [world.engine(instance=Instance(f"engine{number}", "1")) for number in range(ENGINES)]
        engines[0].save(hashes(*range(PAGES)))
        loads = [Load(engine, queries) for engine in engines]
        while any(load.open for load in loads):
            for load in loads:
                load.round()
            budget = world.agent.queries.budget
            assert budget.reserved <= budget.limit
            world.advance(ROUND_S)
        assert all(load.restored + load.nothing == queries for load in loads)
        assert max(load.slowest for load in loads) <= 5
        mean = sum(load.restored for load in loads) / ENGINES
        assert mean > 100, "most are answered with pages"
        assert min(load.restored for load in loads) >= mean / 2
