from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from orbitkv_agent.devices.cuda.device import exporter
from orbitkv_agent.sessions.peers import Peer
from orbitkv_agent.sessions.session import Session


@dataclass(eq=False)
class Stranger:
    """What is asked of a session here."""

    peer: Peer


def session(peer: Peer) -> Session:
    return cast(Session, Stranger(peer))


def test_sessions_of_one_process_share_its_mappings() -> None:
    first, second = (session(Peer(7, 0, None, ("pid", 7))) for _ in range(2))
    assert exporter(first) == exporter(second)


def test_processes_of_two_containers_share_none_though_both_have_no_number_here() -> None:
    first = session(Peer(0, 0, None, ("pidfd", 1, 10)))
    second = session(Peer(0, 0, None, ("pidfd", 1, 11)))
    assert exporter(first) != exporter(second)


def test_sessions_whose_processes_cannot_be_told_apart_share_none() -> None:
    first, second = (session(Peer(0, 0, None, None)) for _ in range(2))
    assert exporter(first) != exporter(second)
