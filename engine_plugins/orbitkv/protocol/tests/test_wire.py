"""The bytes of every message, as the first release sends them.

A later release must still read these, and answer so that this release can read it: the file is only ever added to.
`python -m orbitkv.protocol.tests.test_wire` prints the bytes of messages that are not in it yet.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from msgspec import inspect

from orbitkv.protocol import framing, messages
from orbitkv.protocol.messages import (
    Allocation,
    GroupBlocks,
    GroupGeometry,
    GroupHashes,
    Instance,
    LayerRegion,
    LeasedPages,
    PagePlaces,
    Ranks,
    RecordRef,
    Reply,
    Request,
    SavePlan,
    SaveRequest,
    TimelineWord,
)
from orbitkv.protocol.versions import VersionRange

GOLDEN = Path(__file__).with_name("wire_v1.json")
NAME = Instance("engine", "nonce")
HASHES = [GroupHashes(0, 2, b"aabb")]
BLOCKS = [GroupBlocks(0, b"\x01\0\0\0\x02\0\0\0")]
PLACES = [PagePlaces(0, b"\x03\0\0\0", b"\0\x10\0\0\0\0\0\0")]
LAYER = LayerRegion("layer.0", 0, 64, 8, 32, 128, "bfloat16", 1, 2)
EXAMPLES: list[Request | Reply] = [
    messages.Hello("team-a", b"token", "vllm", VersionRange(1, 2), VersionRange(1, 1)),
    messages.Welcome("boot", 7, "0.1.0", 1, 1, 1, "host", "team-a", 128, 60000, 1 << 30, 5000, {"mode": "save_only"}),
    messages.Refusal("invalid", "blocks: too many"),
    messages.Done(),
    messages.Ping(),
    messages.Pong("boot", True, "serving"),
    messages.Goodbye(),
    messages.RenewToken(b"token"),
    messages.JoinSession("boot", 7),
    messages.EngineReport("vllm 0.32.0", "setting-invalid", "mode"),
    messages.AttachInstance(NAME, "g1", True),
    messages.InstanceState(False, "worker 1", ""),
    messages.Register(
        NAME,
        Ranks(1, 2),
        "identity",
        "model",
        "host",
        [Allocation(4096, b"h")],
        [GroupGeometry(0, "full", 16, [LAYER])],
        True,
    ),
    messages.Registered(3, True, [32]),
    messages.Challenge(5, [(0, 64)], [b"random"]),
    messages.ChallengeMet(5),
    messages.Unregister(3),
    messages.ProofReport(3, False, "layer.0"),
    messages.ResetInstance(NAME),
    messages.ResetDone("g2"),
    messages.Query(NAME, 5, 2, HASHES, 100, True, True),
    messages.PollQuery(5, 2),
    messages.Loading(True, RecordRef(9, 4)),
    messages.Ready([11, 12], [(1, 2, 1)], [LeasedPages(0, 0, 2)], 8192, "dram"),
    messages.Nothing("miss"),
    messages.CancelQuery([5]),
    messages.Release([11]),
    messages.StartRestore(3, 11, BLOCKS, TimelineWord(0, 8, 1), [TimelineWord(0, 12, 1)]),
    messages.StartLayeredRestore(3, 11, BLOCKS),
    messages.RestorePlan(21, RecordRef(10, 1), PLACES),
    messages.RestoreDone(21, True),
    messages.SubmitSaves([SaveRequest(3, HASHES, BLOCKS, TimelineWord(0, 16, 2), True)]),
    messages.SavesAccepted([SavePlan(31, RecordRef(11, 1), [b"\0\0\0\0"], PLACES, 1, {"pool-full": 1})]),
    messages.CommitSave(31, True),
    messages.MapArenas([3]),
    messages.Arenas([(3, 1 << 26)]),
    messages.SyncArenas([3]),
    messages.RetiredArenas([3]),
    messages.TakeEvents(NAME),
    messages.Events(HASHES, True),
    messages.GetStatus(),
    messages.Status(b"{}"),
    messages.ConfigureNamespace("team-a", "uid", 1 << 30, 1 << 20, "retained", 2, 10, 60),
]


def encoded(message: Request | Reply) -> str:
    return bytes(framing.encode(message, 1)[framing.HEADER.size :]).hex()


def golden() -> dict[str, str]:
    loaded: dict[str, str] = json.loads(GOLDEN.read_text())
    return loaded


def test_every_message_has_an_example() -> None:
    assert {type(example) for example in EXAMPLES} == {*get_args(Request), *get_args(Reply)}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: type(example).__name__)
def test_the_first_release_is_still_read(example: Request | Reply) -> None:
    body = bytes.fromhex(golden()[type(example).__name__])
    decoder: msgspec.msgpack.Decoder[Request | Reply] = (
        framing.request_decoder if isinstance(example, get_args(Request)) else framing.reply_decoder  # type: ignore[assignment]
    )
    assert decoder.decode(body) == example


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: type(example).__name__)
def test_what_is_sent_begins_as_the_first_release_sent_it(example: Request | Reply) -> None:
    """New fields come last: the old ones keep their places."""
    old = msgspec.msgpack.decode(bytes.fromhex(golden()[type(example).__name__]))
    new = msgspec.msgpack.decode(bytes.fromhex(encoded(example)))
    assert new[: len(old)] == old


def lists_of(kind: Any, where: str) -> Iterator[tuple[str, int | None]]:
    """Every list that a message of this type can hold, and how long it may be."""
    if isinstance(kind, inspect.StructType):
        for field in kind.fields:
            yield from lists_of(field.type, f"{where}.{field.name}")
    elif isinstance(kind, inspect.ListType | inspect.VarTupleType):
        yield where, kind.max_length
        yield from lists_of(kind.item_type, f"{where}[]")
    elif isinstance(kind, inspect.UnionType):
        for each in kind.types:
            yield from lists_of(each, where)


def test_no_request_holds_a_list_without_an_end() -> None:
    """A list of millions would keep the agent from others for as long as it takes to read."""
    found = [each for request in get_args(Request) for each in lists_of(inspect.type_info(request), request.__name__)]
    assert ("Query.hashes", 1024) in found
    assert [where for where, longest in found if longest is None] == []
    too_long = framing.encode(messages.CancelQuery([1] * 65_537), 1)[framing.HEADER.size :]
    with pytest.raises(msgspec.ValidationError, match="length <= 65536"):
        framing.request_decoder.decode(too_long)


if __name__ == "__main__":
    known = golden() if GOLDEN.exists() else {}
    print(json.dumps({type(e).__name__: known.get(type(e).__name__, encoded(e)) for e in EXAMPLES}, indent=1))
