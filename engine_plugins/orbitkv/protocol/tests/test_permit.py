import fcntl
import mmap
import os
from collections.abc import Iterator

import pytest

from orbitkv.protocol.permit import PARTS, Permit, Withdrawal


@pytest.fixture
def permit() -> Iterator[Permit]:
    permit = Permit()
    yield permit
    permit.close()


@pytest.fixture
def shared(permit: Permit) -> Iterator[int]:
    fd = permit.share()
    yield fd
    os.close(fd)


def test_parts_are_taken_by_many_and_given_back(permit: Permit) -> None:
    assert all(permit.take() for _ in range(PARTS)) and not permit.take()
    permit.give_back()
    assert permit.take()


def test_no_part_is_lost_however_often_they_are_taken(permit: Permit, shared: int) -> None:
    for _ in range(4 * mmap.PAGESIZE):
        assert permit.take() and permit.take()
        permit.give_back()
        permit.give_back()
    assert all(permit.take() for _ in range(PARTS)) and not permit.take()
    for _ in range(PARTS):
        permit.give_back()
    assert Withdrawal(shared).complete()


def test_what_a_client_took_away_stays_away(permit: Permit) -> None:
    fd = permit.share()
    assert Withdrawal(fd).complete() and not permit.take()
    os.close(fd)
    assert not permit.take(), "also when the client is gone"


def test_a_part_that_is_held_keeps_it_from_being_complete(permit: Permit, shared: int) -> None:
    assert permit.take()
    withdrawal = Withdrawal(shared)
    assert not withdrawal.complete() and not permit.take()
    assert not withdrawal.complete()
    permit.give_back()
    assert withdrawal.complete() and withdrawal.complete()
    assert not permit.take()


def test_what_nobody_can_give_back_any_more_is_complete() -> None:
    permit = Permit()
    fd = permit.share()
    assert permit.take()
    withdrawal = Withdrawal(fd)
    assert not withdrawal.complete()
    permit.close()
    assert withdrawal.complete()
    os.close(fd)


def test_no_client_makes_the_agent_wait(permit: Permit, shared: int) -> None:
    fcntl.fcntl(shared, fcntl.F_SETFL, 0)  # not O_NONBLOCK
    assert len(os.read(shared, PARTS)) == PARTS
    assert not permit.take()
    with open(f"/proc/self/fd/{shared}", "wb", buffering=0) as writer:
        os.set_blocking(writer.fileno(), False)
        while writer.write(bytes(4096)):
            pass
        fcntl.fcntl(writer.fileno(), fcntl.F_SETFL, os.O_WRONLY)
        permit.give_back()


def test_an_agent_of_the_release_before_has_none() -> None:
    assert not Withdrawal(-1).complete()
