"""Queries: one operation a request, asked again until it is known, on the control connection."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import msgspec

from orbitkv.protocol.errors import ErrorKind, OrbitKVError
from orbitkv.protocol.messages import (
    CancelQuery,
    Instance,
    LeasedPages,
    Loading,
    Nothing,
    PollQuery,
    Query,
    Ready,
    RecordRef,
    Release,
    Reply,
)
from orbitkv.protocol.records import RecordState

from .hashes import BlockHashes
from .session import Session


class QueryLoading(msgspec.Struct, frozen=True):
    """Not known yet: nothing is promised. `admitted` is false while the query waits for a place."""

    admitted: bool


class QueryReady(msgspec.Struct, frozen=True):
    """The answer. With `pages` > 0 these pages stay until the lease is used, released or expires.

    Attributes:
        leases: one lease a shard, in rank order.
        pages: leased pages of the first group, from the start of the hashes asked for.
        boundaries: page counts at which the request may resume, as runs (first, last, step).
        group_pages: the leased pages of each group.
        bytes: what the leases hold, padding included.
        tier: where the pages are.
        reason: why there is nothing ("" when there is something).
    """

    leases: tuple[int, ...] = ()
    pages: int = 0
    boundaries: tuple[tuple[int, int, int], ...] = ()
    group_pages: tuple[LeasedPages, ...] = ()
    bytes: int = 0
    tier: str = ""
    reason: str = ""


LOADING = QueryLoading(admitted=True)
QUEUED = QueryLoading(admitted=False)


class _Operation(msgspec.Struct):
    number: int
    hashes: tuple[BlockHashes, ...]
    proof: bool
    wait_for_full_prefix: bool
    revision: int = 0
    record: RecordRef | None = None
    loading: QueryLoading = LOADING
    ready: QueryReady | None = None
    expires: float = 0.0
    unknown: bool = False
    """A call timed out: what the agent holds under this revision is not known, the next call revises it."""


class Queries:
    """The operations of one session. Used by the thread that owns the control connection."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._operations: dict[str, _Operation] = {}
        self._numbers = itertools.count(1)
        # The agent keeps an answer this long; a little less here, so that no lease is used that just expired there.
        self._lifetime = session.welcome.reply_ttl_ms * 0.9 / 1000

    def query(
        self,
        request_id: str,
        hashes: Sequence[BlockHashes],
        instance: Instance,
        max_wait_ms: int,
        wait_for_full_prefix: bool,
        proof: bool,
        timeout_ms: float,
    ) -> QueryLoading | QueryReady:
        """Ask, or ask again; see `CacheManagerClient.query_prefetch`."""
        operation = self._operations.get(request_id)
        if operation is None:
            operation = _Operation(next(self._numbers), tuple(hashes), proof, wait_for_full_prefix)
            self._operations[request_id] = operation
        elif not operation.unknown and (
            operation.hashes == tuple(hashes)
            and operation.proof == proof
            and operation.wait_for_full_prefix == wait_for_full_prefix
        ):
            if operation.ready is not None:
                if time.monotonic() < operation.expires:
                    return operation.ready
            elif operation.record is not None and (
                self._session.records.state(operation.record) is RecordState.PENDING
            ):
                return operation.loading
            else:
                return self._ask(request_id, operation, PollQuery(operation.number, operation.revision), timeout_ms)
        else:
            operation.hashes = tuple(hashes)
            operation.proof, operation.wait_for_full_prefix = proof, wait_for_full_prefix
        operation.revision += 1
        parts = [part.wire() for part in hashes]
        query = Query(instance, operation.number, operation.revision, parts, max_wait_ms, wait_for_full_prefix, proof)
        return self._ask(request_id, operation, query, timeout_ms)

    def watch(self, request_id: str) -> tuple[memoryview, int, int] | None:
        """Where to see that the last answer still is "loading"; see `CacheManagerClient.query_watch`."""
        operation = self._operations.get(request_id)
        record = operation.record if operation is not None else None
        if record is None:
            return None
        return self._session.records.words, record.slot, record.generation << 8 | RecordState.PENDING

    def cancel(self, request_id: str) -> None:
        """Withdraw interest; an unknown request is none."""
        operation = self._operations.pop(request_id, None)
        if operation is not None:
            self._session.connection.send_only(CancelQuery([operation.number]))

    def consumed(self, request_id: str) -> None:
        """Forget an operation whose lease went into a restore."""
        self._operations.pop(request_id, None)

    def release(self, ready: QueryReady) -> None:
        """Give the leases of an answer back unused."""
        if ready.leases:
            self._session.connection.send_only(Release(list(ready.leases)))

    def late_reply(self, reply: Reply) -> None:
        """Give back what an answer promised that came after its caller had gone."""
        if isinstance(reply, Ready):
            self._session.connection.send_only(Release(reply.leases))

    def __len__(self) -> int:
        return len(self._operations)

    def _ask(
        self, request_id: str, operation: _Operation, request: Query | PollQuery, timeout_ms: float
    ) -> QueryLoading | QueryReady:
        operation.ready, operation.record = None, None
        operation.unknown = True
        reply = self._session.connection.call(request, timeout_ms)
        operation.unknown = False
        match reply:
            case Ready():
                operation.expires = time.monotonic() + self._lifetime
                operation.ready = QueryReady(
                    leases=tuple(reply.leases),
                    pages=reply.pages[0].count if reply.pages else 0,
                    boundaries=tuple(reply.boundaries),
                    group_pages=tuple(reply.pages),
                    bytes=reply.bytes,
                    tier=reply.tier,
                )
                return operation.ready
            case Loading():
                operation.record = reply.record
                operation.loading = LOADING if reply.admitted else QUEUED
                return operation.loading
            case Nothing():
                # Nothing is held for this operation, so it is not kept: the next call asks afresh.
                del self._operations[request_id]
                return QueryReady(reason=reply.reason)
            case _:
                raise OrbitKVError(ErrorKind.INTERNAL, f"a query was answered with {type(reply).__name__}")
