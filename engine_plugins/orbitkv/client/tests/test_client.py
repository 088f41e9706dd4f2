"""The client against a real agent in a process of its own."""

from __future__ import annotations

import ctypes
import gc
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orbitkv.client import (
    CacheManagerClient,
    ErrorKind,
    OrbitKVError,
    QueryReady,
    RestoreStatus,
    SaveNotSubmittedError,
    SaveStatus,
)
from orbitkv.client import connection as connection_module
from orbitkv.client.connection import Connection
from orbitkv.client.copies import CopyPlan
from orbitkv.protocol.framing import MAX_FRAME_BYTES
from orbitkv.protocol.messages import SyncArenas
from orbitkv.scheduling import LONG_SLICE_S, slice_s
from tools.harness.agent import AgentProcess
from tools.harness.process import wait_until

from .conftest import BLOCKS, Engine, hashes

REPOSITORY = Path(__file__).parents[4]


def refused(kind: ErrorKind, match: str | None = None) -> pytest.RaisesExc[OrbitKVError]:
    return pytest.raises(OrbitKVError, match=match, check=lambda error: error.kind is kind)


def reserved_bytes(agent: AgentProcess) -> int:
    return sum(agent.status()["query"]["reserved_bytes_by_phase"].values())


# ---------------------------------------------------------------------------------------------------- save and restore


def test_restored_pages_are_equal_to_saved_ones(engine: Engine) -> None:
    engine.save(hashes(1, 2, 3))
    before = engine.kv.copy()
    ready = engine.query("r", hashes(1, 2, 3, 4))
    assert (ready.pages, ready.boundaries, len(ready.leases)) == (3, ((1, 3, 1),), 1)
    restore = engine.client.start_restore(engine.registration, ready.leases[0], [np.array([20, 31, 10])])
    assert engine.client.wait_restore(restore, 10) is RestoreStatus.DONE
    assert np.array_equal(engine.kv[:, [20, 31, 10]], before[:, [0, 1, 2]])
    others = np.setdiff1d(np.arange(BLOCKS), [20, 31, 10])
    assert np.array_equal(engine.kv[:, others], before[:, others]), "a restore writes only where it was told to"


def test_a_skipped_page_leaves_its_block_alone(engine: Engine) -> None:
    engine.save(hashes(1, 2))
    before = engine.kv.copy()
    ready = engine.query("r", hashes(1, 2))
    restore = engine.client.start_restore(engine.registration, ready.leases[0], [np.array([-1, 9])])
    assert engine.client.wait_restore(restore, 10) is RestoreStatus.DONE
    assert np.array_equal(engine.kv[:, 9], before[:, 1])
    untouched = np.setdiff1d(np.arange(BLOCKS), [9])
    assert np.array_equal(engine.kv[:, untouched], before[:, untouched])


@pytest.mark.parametrize("layer_order", [False, True])
def test_a_restore_that_this_process_copies_layer_by_layer_ends_by_itself(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, layer_order: bool
) -> None:
    engine.save(hashes(1))
    chunks, goes_on = CopyPlan.chunks, threading.Event()

    def stand_still(plan: CopyPlan) -> Iterator[int]:
        assert goes_on.wait(10)
        return chunks(plan)

    monkeypatch.setattr(CopyPlan, "chunks", stand_still)
    lease = engine.query("r", hashes(1)).leases[0]
    restore = engine.client.start_restore(engine.registration, lease, [np.array([8])], layer_order=layer_order)
    assert engine.client.wait_restore_enqueued(restore, 10)
    assert restore.handed_over is layer_order
    goes_on.set()
    assert engine.client.wait_restore(restore, 10) is RestoreStatus.DONE
    assert not restore.handed_over


def test_layers_become_ready_in_order(engine: Engine) -> None:
    engine.save(hashes(1, 2))
    ready = engine.query("r", hashes(1, 2))
    restore = engine.client.start_restore(engine.registration, ready.leases[0], [np.array([8, 9])], layer_order=True)
    assert engine.client.wait_restore_enqueued(restore, 10)
    assert engine.client.wait_layer(restore, 2, 10)
    assert engine.client.wait_restore(restore, 10) is RestoreStatus.DONE
    assert engine.client.layers_ready(restore) == 3


def test_pages_that_are_there_are_not_copied_again(engine: Engine) -> None:
    engine.save(hashes(1, 2))
    handle = engine.client.start_save(engine.registration, [hashes(1, 2, 3)], [np.arange(3)])
    assert engine.client.wait_save(handle, 10) is SaveStatus.COMMITTED
    assert (handle.present, handle.positions[0].tolist(), handle.dropped) == (2, [2], {})


def test_another_engine_with_the_same_identity_finds_the_pages(agent: AgentProcess, engine: Engine) -> None:
    engine.save(hashes(1))
    other = Engine(agent, engine.identity)
    assert other.query("r", hashes(1)).pages == 1
    other.close()


def test_another_model_does_not(agent: AgentProcess, engine: Engine) -> None:
    engine.save(hashes(1))
    other = Engine(agent, identity="another model")
    assert other.query("r", hashes(1)) == QueryReady(reason="miss")
    other.close()


def test_another_cache_namespace_does_not(agent: AgentProcess, engine: Engine) -> None:
    engine.save(hashes(1))
    other = Engine(agent, engine.identity, cache_namespace="team-b")
    assert other.query("r", hashes(1)).pages == 0
    other.close()


def test_the_example_of_the_documentation(agent: AgentProcess) -> None:
    example = [sys.executable, str(REPOSITORY / "examples/store_and_restore.py"), "--socket", str(agent.socket_path)]
    first = subprocess.run(example, capture_output=True, text=True, timeout=60, check=False)
    assert first.returncode == 0, first.stdout + first.stderr
    assert first.stdout.splitlines()[0] == "before: 0 of 8 pages are cached"
    printed = first.stdout.rstrip()
    assert printed in (REPOSITORY / "docs/client.md").read_text(), "the page shows what the example prints"
    second = subprocess.run(example, capture_output=True, text=True, timeout=60, check=False)
    assert second.stdout.splitlines()[0] == "before: 8 of 8 pages are cached"


# --------------------------------------------------------------------------------------------------- leases, revisions


def test_a_lease_is_used_once(engine: Engine) -> None:
    engine.save(hashes(1))
    lease = engine.query("r", hashes(1)).leases[0]
    first = engine.client.start_restore(engine.registration, lease, [np.array([9])])
    assert engine.client.wait_restore(first, 10) is RestoreStatus.DONE
    before = engine.kv.copy()
    second = engine.client.start_restore(engine.registration, lease, [np.array([10])])
    assert engine.client.wait_restore(second, 10) is RestoreStatus.FAILED
    assert second.error is not None
    assert second.error.kind is ErrorKind.STALE
    assert np.array_equal(engine.kv, before)


def test_the_same_question_keeps_its_lease_and_other_hashes_retire_it(engine: Engine) -> None:
    engine.save(hashes(1, 2))
    first = engine.query("r", hashes(1, 2))
    assert engine.query("r", hashes(1, 2)) is first
    second = engine.query("r", hashes(1))
    restore = engine.client.start_restore(engine.registration, first.leases[0], [np.array([9, 10])])
    assert engine.client.wait_restore(restore, 10) is RestoreStatus.FAILED
    restore = engine.client.start_restore(engine.registration, second.leases[0], [np.array([9])])
    assert engine.client.wait_restore(restore, 10) is RestoreStatus.DONE


@pytest.mark.parametrize("how", ["cancel", "release"])
def test_leases_given_back_leave_nothing_reserved(agent: AgentProcess, engine: Engine, how: str) -> None:
    engine.save(hashes(1))
    ready = engine.query("r", hashes(1))
    assert reserved_bytes(agent) > 0
    if how == "cancel":
        engine.client.cancel_query("r")
    else:
        engine.client.release(ready)
    engine.client.health()  # comes after it on the same connection
    assert reserved_bytes(agent) == 0


def test_a_plan_with_a_block_named_twice_is_refused_before_anything_is_sent(engine: Engine) -> None:
    engine.save(hashes(1, 2))
    lease = engine.query("r", hashes(1, 2)).leases[0]
    with refused(ErrorKind.INVALID, "named twice"):
        engine.client.start_restore(engine.registration, lease, [np.array([9, 9])])
    with refused(ErrorKind.INVALID, "blocks 0 to 31"):
        engine.client.start_restore(engine.registration, lease, [np.array([9, 32])])


def test_a_plan_of_the_wrong_length_is_refused_by_the_agent(engine: Engine) -> None:
    engine.save(hashes(1, 2))
    lease = engine.query("r", hashes(1, 2)).leases[0]
    restore = engine.client.start_restore(engine.registration, lease, [np.array([9])])
    assert engine.client.wait_restore(restore, 10) is RestoreStatus.FAILED
    assert restore.error is not None
    assert restore.error.kind is ErrorKind.INVALID


# ------------------------------------------------------------------------------------------------- registration, saves


def test_a_retired_registration_accepts_nothing_new(engine: Engine) -> None:
    engine.save(hashes(1))
    lease = engine.query("r", hashes(1)).leases[0]
    engine.client.unregister_context(engine.registration)
    with refused(ErrorKind.STALE, "retired"):
        engine.client.start_restore(engine.registration, lease, [np.array([9])])
    with pytest.raises(SaveNotSubmittedError, match="retired"):
        engine.client.prepare_save(engine.registration, [hashes(2)], [np.array([1])])


def test_a_registration_belongs_to_its_client(agent: AgentProcess, engine: Engine) -> None:
    other = Engine(agent)
    with pytest.raises(SaveNotSubmittedError, match="another client"):
        other.client.start_save(engine.registration, [hashes(2)], [np.array([1])])
    other.close()


def test_a_prepared_save_can_be_cancelled_and_is_not_submitted_afterwards(engine: Engine) -> None:
    handle = engine.client.prepare_save(engine.registration, [hashes(1)], [np.array([0])])
    assert engine.client.cancel_save(handle)
    with pytest.raises(SaveNotSubmittedError):
        engine.client.submit_saves([handle])
    assert engine.query("r", hashes(1)).pages == 0


def test_a_batch_with_one_bad_save_submits_none(engine: Engine) -> None:
    good = engine.client.prepare_save(engine.registration, [hashes(1)], [np.array([0])])
    cancelled = engine.client.prepare_save(engine.registration, [hashes(2)], [np.array([1])])
    engine.client.cancel_save(cancelled)
    with pytest.raises(SaveNotSubmittedError):
        engine.client.submit_saves([good, cancelled])
    assert engine.client.poll_save(good) is SaveStatus.PREPARED
    engine.client.submit_saves([good])
    assert engine.client.wait_save(good, 10) is SaveStatus.COMMITTED


def test_a_voided_save_never_becomes_visible(agent: AgentProcess, engine: Engine) -> None:
    agent.pause()  # the save waits for the agent's plan
    handle = engine.client.start_save(engine.registration, [hashes(1)], [np.array([0])])
    assert engine.client.void_save(handle)
    agent.resume()
    assert engine.client.wait_save(handle, 10) is SaveStatus.FAILED
    assert engine.query("r", hashes(1)).pages == 0


def test_a_request_that_is_too_large_is_refused_and_the_client_lives_on(engine: Engine) -> None:
    pages = hashes(*range(MAX_FRAME_BYTES // 32))
    with refused(ErrorKind.INVALID, "fewer pages"):
        engine.client.query_prefetch("r", [pages], instance=engine.instance)
    assert engine.client.health()[0]
    engine.client.cancel_query("r")


def test_mismatched_hashes_and_blocks_start_nothing(engine: Engine) -> None:
    with pytest.raises(SaveNotSubmittedError, match="same number"):
        engine.client.start_save(engine.registration, [hashes(1, 2)], [np.array([0])])


# ----------------------------------------------------------------------------------------------------------- the agent


def test_no_agent_is_said_with_the_path(tmp_path: Path) -> None:
    path = str(tmp_path / "nobody.sock")
    with refused(ErrorKind.UNAVAILABLE, path):
        CacheManagerClient(path)


def test_a_socket_of_another_user_is_sent_nothing(agent: AgentProcess) -> None:
    with refused(ErrorKind.DENIED, f"runs as user {os.geteuid()}, not 54321"):
        CacheManagerClient(str(agent.socket_path), server_uid=54321)


def test_health_and_liveness(agent: AgentProcess, engine: Engine) -> None:
    assert engine.client.health()[0]
    assert engine.client.peer_alive()
    agent.pause()
    assert engine.client.peer_alive(), "a stalled agent is alive"
    with refused(ErrorKind.TIMEOUT):
        engine.client.health(timeout_ms=50)
    agent.resume()
    assert engine.client.health()[0]


def test_when_the_agent_dies_every_handle_ends_and_calls_say_so(own_agent: AgentProcess) -> None:
    agent, engine = own_agent, Engine(own_agent)
    engine.save(hashes(1))
    lease = engine.query("r", hashes(1)).leases[0]
    agent.pause()
    restore = engine.client.start_restore(engine.registration, lease, [np.array([9])])
    save = engine.client.start_save(engine.registration, [hashes(2)], [np.array([1])])
    agent.kill9()
    assert engine.client.wait_restore(restore, 10) is RestoreStatus.FAILED
    assert engine.client.wait_save(save, 10) is SaveStatus.NOT_SUBMITTED
    assert not engine.client.peer_alive()
    with refused(ErrorKind.UNAVAILABLE):
        engine.client.query_prefetch("r2", [hashes(1)], instance=engine.instance)
    with refused(ErrorKind.UNAVAILABLE):
        engine.client.start_restore(engine.registration, lease, [np.array([9])])
    assert engine.client.lost is not None
    engine.client.close()


def test_what_is_registered_with_an_agent_that_restarted_meanwhile_is_refused(
    own_agent: AgentProcess, tmp_path: Path
) -> None:
    engine = Engine(own_agent, registered=False)
    own_agent.kill9()
    with AgentProcess(tmp_path), refused(ErrorKind.STALE, "^agent-changed: "):
        engine.register()
    engine.client.close()


def test_what_is_registered_after_the_clients_own_session_ended_is_refused(agent: AgentProcess) -> None:
    engine = Engine(agent, registered=False)
    engine.client._session.connection._socket.shutdown(socket.SHUT_RDWR)
    with refused(ErrorKind.STALE, "^stale-session: "):
        engine.register()
    engine.client.close()


def test_when_the_agent_dies_between_two_saves_of_a_batch_both_end(
    own_agent: AgentProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(own_agent)
    transfers = engine.client._transfers
    assert transfers is not None
    mapping = transfers._arenas.addresses

    def addresses_of_a_dead_agent(*arguments: Any) -> Any:
        own_agent.kill9()  # the plans are here, the arena is not mapped yet
        return mapping(*arguments)

    monkeypatch.setattr(transfers._arenas, "addresses", addresses_of_a_dead_agent)
    saves = [engine.client.prepare_save(engine.registration, [hashes(i)], [np.array([i])]) for i in range(3)]
    engine.client.submit_saves(saves)
    assert [engine.client.wait_save(save, 10) for save in saves] == [SaveStatus.FAILED] * 3
    engine.close()


def test_what_is_handed_to_a_thread_that_has_just_ended_ends_too(
    own_agent: AgentProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(own_agent)
    transfers = engine.client._transfers
    assert transfers is not None
    own_agent.kill9()
    transfers._thread.join(10)
    monkeypatch.setattr(transfers, "_check", lambda: None)  # the thread ended after the caller had looked
    restore = engine.client.start_restore(engine.registration, 1, [np.array([9])])
    assert engine.client.wait_restore(restore, 10) is RestoreStatus.FAILED
    save = engine.client.start_save(engine.registration, [hashes(1)], [np.array([1])])
    assert engine.client.wait_save(save, 10) is SaveStatus.NOT_SUBMITTED
    with refused(ErrorKind.UNAVAILABLE):
        transfers.call(lambda: None, 5000)
    engine.close()


@pytest.mark.parametrize("defect", [IndexError, OSError, MemoryError])
def test_a_copy_that_cannot_be_made_ends_its_handle_and_nothing_else(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, defect: type[Exception]
) -> None:
    engine.save(hashes(1))
    lease = engine.query("r", hashes(1)).leases[0]
    with monkeypatch.context() as patched:

        def fail(*_: object, **__: object) -> None:
            raise defect("no copy")

        patched.setattr("orbitkv.client.transfers.plan_pages", fail)
        restore = engine.client.start_restore(engine.registration, lease, [np.array([9])])
        save = engine.client.start_save(engine.registration, [hashes(2)], [np.array([1])])
        assert engine.client.wait_restore(restore, 10) is RestoreStatus.FAILED
        assert engine.client.wait_save(save, 10) is SaveStatus.FAILED
        assert "no copy" in str(restore.error)
    engine.save(hashes(3))
    assert engine.query("again", hashes(3)).pages == 1


def test_what_a_stalled_agent_did_not_take_is_sent_when_it_is_back(agent: AgentProcess, engine: Engine) -> None:
    transfers = engine.client._transfers
    assert transfers is not None
    connection = transfers._session.connection
    agent.pause()
    connection.send_only(SyncArenas(list(range(1 << 20, (1 << 20) + 200_000))))  # more than a socket holds
    transfers._notify()
    assert connection.unsent
    agent.resume()
    wait_until(lambda: not connection.unsent, "the rest went out by itself", 10)
    engine.save(hashes(1))


@pytest.fixture
def patient(agent: AgentProcess) -> Iterator[Engine]:
    """An engine whose calls take a minute at most, unless they say otherwise."""
    with Engine(agent, timeout_ms=60_000) as engine:
        yield engine


def test_an_answer_that_comes_too_late_leaves_nothing_leased(agent: AgentProcess, patient: Engine) -> None:
    patient.save(hashes(1))
    agent.pause()
    start = time.monotonic()
    with refused(ErrorKind.TIMEOUT):
        patient.client.query_prefetch("r", [hashes(1)], instance=patient.instance, timeout_ms=20)
    assert time.monotonic() - start < 30
    agent.resume()
    again = patient.query("r", hashes(1))
    assert again.pages == 1
    assert agent.status()["leases"]["live"] == 1, "the answer that came too late was given back"
    patient.client.cancel_query("r")
    patient.client.health()
    assert agent.status()["leases"]["live"] == 0


def test_cancelling_towards_a_stalled_agent_never_waits(agent: AgentProcess, patient: Engine) -> None:
    agent.pause()
    start = time.monotonic()
    for i in range(200):
        with pytest.raises(OrbitKVError):
            patient.client.query_prefetch(f"r{i}", [hashes(1)], instance=patient.instance, timeout_ms=0)
        patient.client.cancel_query(f"r{i}")
    assert time.monotonic() - start < 30
    agent.resume()
    assert patient.query("r", hashes(1)).reason == "miss"


# -------------------------------------------------------------------------------------------------- process boundaries


@pytest.mark.parametrize("in_vain", [False, True])
def test_calls_look_for_replies_without_sleeping_only_while_nobody_else_wants_the_processor(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, in_vain: bool
) -> None:
    look, looks = Connection._look, []

    def counted(connection: Connection, end: float) -> float:
        looks.append(end)
        return end + 1e-9 if in_vain else look(connection, end)

    monkeypatch.setattr(engine.client._session.connection, "_shortcut", None)
    monkeypatch.setattr(Connection, "_look", counted)
    monkeypatch.setattr(Connection, "_credit", 0)
    monkeypatch.setattr(Connection, "_crowded_until", 0.0)
    monkeypatch.setattr(connection_module, "_BUSY_POLL_S", 5.0)  # every reply here comes that soon
    monkeypatch.setattr(connection_module, "_SHORTEST_PAUSE_S", 60.0)
    for _ in range(6):
        engine.client.health()
    assert len(looks) == 1 if in_vain else len(looks) >= 5  # the first reply may have been the first that came so soon


@pytest.fixture
def fresh_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no client of this process had looked for a reply yet."""
    for name, value in (("_credit", 0), ("_crowded_until", 0.0), ("_pause_s", 0.005)):
        monkeypatch.setattr(Connection, name, value)


@pytest.mark.usefixtures("fresh_looks")
def test_looking_in_vain_is_worth_a_short_pause_and_once_more_a_longer_one() -> None:
    now, pauses = 100.0, []
    for calm in (60, 0.002, 0.002, 0.002, 60, 60):  # seconds from the end of a pause to the next one
        now = max(now, Connection._crowded_until) + calm
        Connection._looked(now, in_vain=True)
        pauses.append(round(Connection._crowded_until - now, 4))
    assert pauses == [0.005, 0.01, 0.02, 0.04, 0.005, 0.005]
    for _ in range(20):
        Connection._looked(Connection._crowded_until, in_vain=True)
    assert Connection._pause_s == 0.2


@pytest.mark.usefixtures("fresh_looks")
@pytest.mark.parametrize(("one_in", "pauses"), [(20, False), (4, True)])
def test_a_look_in_vain_now_and_then_is_no_reason_to_pause(one_in: int, pauses: bool) -> None:
    for number in range(1, 200):
        Connection._looked(100.0 + number, in_vain=number % one_in == 0)
    assert (Connection._crowded_until > 0) is pauses


def test_copies_make_room_for_the_engines_own_threads(engine: Engine) -> None:
    usual = slice_s()
    if not usual:
        pytest.skip("this kernel has no slices that a thread can choose (Linux 6.12 has)")
    transfers = engine.client._transfers
    assert transfers is not None and transfers._thread.native_id is not None
    assert slice_s(transfers._thread.native_id) == LONG_SLICE_S
    assert slice_s() == usual, "the engine's own thread is none of our business"


def test_a_forked_child_may_not_use_the_client(engine: Engine) -> None:
    child = os.fork()
    if child == 0:
        try:
            engine.client.health()
        except OrbitKVError as error:
            os._exit(0 if error.kind is ErrorKind.CLOSED else 2)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert engine.client.health()[0], "the parent goes on"


def test_polling_makes_no_system_call(engine: Engine) -> None:
    """A child in seccomp's strict mode may only read, write and exit: anything else kills it."""
    engine.save(hashes(1))
    lease = engine.query("r", hashes(1)).leases[0]
    restore = engine.client.start_restore(engine.registration, lease, [np.array([9])])
    save = engine.client.start_save(engine.registration, [hashes(2)], [np.array([1])])
    engine.client.wait_restore(restore, 10)
    engine.client.wait_save(save, 10)
    client, libc = engine.client, ctypes.CDLL(None)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        libc.prctl(22, 1)  # PR_SET_SECCOMP, SECCOMP_MODE_STRICT
        for _ in range(20_000):
            client.poll_restore(restore)
            client.poll_save(save)
            client.layers_ready(restore)
            client.restore_completions_ready()
            client.instance_changed()
        os.write(write_end, b"done")
        libc.syscall(60, 0)  # exit: the only way out that strict mode allows
    os.close(write_end)
    assert os.waitpid(child, 0)[1] == 0, "the child was killed: polling made a system call"
    assert os.read(read_end, 4) == b"done"
    os.close(read_end)


def test_closing_ends_the_thread_and_closes_the_descriptors(agent: AgentProcess) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    gc.collect()
    before, threads = descriptors(), set(threading.enumerate())
    for i in range(5):
        engine = Engine(agent)
        engine.save(hashes(i))
        engine.client.close()
        engine.client.close()
    assert descriptors() == before
    assert set(threading.enumerate()) <= threads
    with refused(ErrorKind.CLOSED):
        engine.client.health()


def test_close_finishes_what_was_queued(agent: AgentProcess) -> None:
    engine = Engine(agent)
    handles = [engine.client.start_save(engine.registration, [hashes(100 + i)], [np.array([i])]) for i in range(20)]
    engine.client.close()
    assert all(handle.status.pages_released for handle in handles)
    other = Engine(agent, engine.identity)
    assert other.query("r", hashes(*range(100, 120))).pages == 20
    other.close()
