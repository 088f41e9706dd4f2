from __future__ import annotations

import errno
import fcntl
import gc
import mmap
import os
import threading
import time
from collections.abc import Iterator

import pytest

from orbitkv_agent.store import ArenaPool, arenas, default_arena_bytes

MIB = 1 << 20
GIB = 1 << 30


@pytest.fixture
def pool() -> Iterator[ArenaPool]:
    made = ArenaPool(4 * MIB, 1 * MIB, prefault=False, threaded=False)
    yield made
    made.close()


def resident_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


@pytest.mark.parametrize(
    ("capacity", "arena"),
    [(32 * MIB, 32 * MIB), (100 * MIB, 64 * MIB), (2 * GIB, 128 * MIB), (9 * GIB, 576 * MIB), (512 * GIB, GIB)],
)
def test_default_size_of_an_arena(capacity: int, arena: int) -> None:
    assert default_arena_bytes(capacity) == arena


@pytest.mark.parametrize("arena", [0, 4095, 8 * MIB])
def test_an_arena_that_cannot_be_is_refused(arena: int) -> None:
    with pytest.raises(ValueError, match="must be a multiple of 4096"):
        ArenaPool(4 * MIB, arena)


def test_an_arena_cannot_be_resized_by_whoever_holds_it(pool: ArenaPool) -> None:
    arena = pool.request("red")
    assert arena is not None
    for size in (0, 2 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(arena.fd, 1033, 0x8)  # another seal
    assert fcntl.fcntl(arena.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC


def test_the_pool_never_exceeds_its_capacity(pool: ArenaPool) -> None:
    made = [pool.request("red") for _ in range(5)]
    assert [arena is not None for arena in made] == [True, True, True, True, False]
    assert pool.committed_bytes == pool.capacity_bytes
    assert pool.held_bytes("red") == 4 * MIB


def test_the_end_of_the_pool_makes_a_smaller_arena() -> None:
    pool = ArenaPool(5 * MIB, 2 * MIB, prefault=False, threaded=False)
    assert [arena.size for _ in range(3) if (arena := pool.request("red"))] == [2 * MIB, 2 * MIB, 1 * MIB]
    pool.close()


def test_a_dropped_arena_is_logged_and_its_id_never_used_again(pool: ArenaPool) -> None:
    first, second = pool.request("red"), pool.request("red")
    assert first is not None and second is not None
    start = pool.retired_sequence
    pool.drop(first)
    assert pool.retired_since(start) == [first.id]
    middle = pool.retired_sequence
    pool.drop(second)
    assert pool.retired_since(start) == [first.id, second.id]
    assert pool.retired_since(middle) == [second.id]
    assert pool.retired_since(pool.retired_sequence) == []
    third = pool.request("red")
    assert third is not None and third.id not in (first.id, second.id)
    assert pool.get(first.id) is None
    assert pool.committed_bytes == third.size


def test_a_log_that_does_not_reach_back_says_so(pool: ArenaPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_retired", type(pool._retired)(maxlen=1))
    for _ in range(2):
        arena = pool.request("red")
        assert arena is not None
        pool.drop(arena)
    with pytest.raises(LookupError, match="compare with the arenas that exist"):
        pool.retired_since(0)


def test_an_arena_with_pages_cannot_be_dropped(pool: ArenaPool) -> None:
    arena = pool.request("red")
    assert arena is not None
    arena.allocator.allocate_pages(1, 1)
    with pytest.raises(ValueError, match="still holds 4096 bytes"):
        pool.drop(arena)


def test_memory_of_a_dropped_arena_returns_although_a_client_maps_it(pool: ArenaPool) -> None:
    arena = pool.request("red")
    assert arena is not None
    clients_fd = os.dup(arena.fd)
    with mmap.mmap(clients_fd, arena.size) as mapping:
        mapping[: arena.size] = b"x" * arena.size
        assert resident_bytes(clients_fd) == arena.size
        pool.drop(arena)
        assert resident_bytes(clients_fd) == 0
        assert mapping[0] == 0
    os.close(clients_fd)


def test_empty_arenas_of_others_make_room(pool: ArenaPool) -> None:
    for _ in range(4):
        pool.request("red")
    busy, fresh, *_ = pool.of("red")
    for arena in pool.of("red"):
        arena.fresh = arena is fresh
    busy.allocator.allocate_pages(1, 1)
    pool.drop_empty(but_of="red")
    assert len(pool.of("red")) == 4, "its own are kept"
    pool.drop_empty(but_of="blue")
    assert busy in pool.of("red") and fresh in pool.of("red") and len(pool.of("red")) == 3, "one was enough"
    assert pool.request("blue") is not None


def test_prefaulted_arenas_become_ready_when_the_thread_says_so() -> None:
    told = threading.Event()
    pool = ArenaPool(8 * MIB, 4 * MIB, prefault=True, notify=told.set)
    arena = pool.request("red")
    assert arena is not None and not arena.allocatable and pool.is_preparing("red")
    assert told.wait(10)
    assert not arena.allocatable, "only the owner's thread changes the pool's state"
    assert pool.poll()
    assert arena.allocatable and not pool.is_preparing("red")
    assert resident_bytes(arena.fd) == arena.size
    pool.drop(arena)
    assert pool.committed_bytes == arena.size, "not given out again before the kernel has it back"
    assert pool.wait(10)
    assert pool.committed_bytes == 0
    pool.close()


def test_kernels_without_populate_allocate_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "_madvise", lambda address, length: errno.EINVAL)
    pool = ArenaPool(4 * MIB, 4 * MIB, prefault=True, threaded=False)
    arena = pool.request("red")
    assert arena is not None and arena.allocatable
    assert resident_bytes(arena.fd) == arena.size
    pool.close()


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.ENOSPC])
def test_an_arena_for_which_there_is_no_memory_is_counted_and_not_tried_again_at_once(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def refuse(address: int, length: int) -> int:
        calls.append(length)
        return code

    monkeypatch.setattr(arenas, "_madvise", refuse)
    pool = ArenaPool(4 * MIB, 4 * MIB, prefault=True, threaded=False)
    assert pool.request("red") is None
    assert (pool.failures, pool.committed_bytes, pool.of("red")) == (1, 0, [])
    assert pool.request("red") is None
    assert len(calls) == 1
    monkeypatch.setattr(pool, "_not_before", time.monotonic() - 1)
    assert pool.request("red") is None
    assert (pool.failures, len(calls)) == (2, 2)
    pool.close()


def test_no_descriptors_left_is_counted_too(pool: ArenaPool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, flags: int) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert pool.request("red") is None
    assert (pool.failures, pool.committed_bytes) == (1, 0)


def test_closing_leaves_no_descriptor_and_no_thread() -> None:
    gc.collect()
    before, threads = set(os.listdir("/proc/self/fd")), set(threading.enumerate())
    pool = ArenaPool(8 * MIB, 4 * MIB, prefault=True)
    first, second = pool.request("red"), pool.request("blue")
    assert first is not None and second is not None
    pool.wait(10)
    pool.close()
    assert set(os.listdir("/proc/self/fd")) == before
    assert set(threading.enumerate()) <= threads
