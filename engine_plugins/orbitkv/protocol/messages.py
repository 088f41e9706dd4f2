"""The messages, one struct each: requests from a plugin, replies from the agent.

A message is a msgpack array with its tag first; a new field is appended with a default, so that the release before
still reads it. Fields that belong to parts which do not exist yet are carried and refused by name
(`ErrorKind.UNSUPPORTED`), never ignored. Arrays of numbers travel as little-endian blobs (`numpy` reads and writes them
without a loop), hashes as one blob of equal-sized pieces.

Words used here are those of the documentation (`docs/concepts.md`): page, group, boundary, instance, lease, key space.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from orbitkv.protocol.versions import MESSAGES, PAGE_IMAGE, RECORDS, VersionRange

FEW: Final = msgspec.Meta(max_length=1024)
MANY: Final = msgspec.Meta(max_length=65_536)
"""Longest lists in requests: one request must not keep the agent from others, and is refused before it is read."""


class Message(msgspec.Struct, array_like=True, tag_field="t", forbid_unknown_fields=True, gc=False):
    """Base of everything that is sent. `gc=False`: messages are trees and never form cycles."""


class Part(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base of what messages consist of."""


class Name(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False, frozen=True):
    """Base of parts that identify something: comparable and usable as keys."""


# -------------------------------------------------------------------------------------------------------- shared parts


class RecordRef(Part):
    """A completion word in the session's shared records: valid while the word carries this generation."""

    slot: int
    generation: int


class Instance(Name, frozen=True):
    """One engine incarnation. A restarted engine has another nonce and is another instance."""

    engine_id: str
    nonce: str

    def __str__(self) -> str:
        return f"{self.engine_id}/{self.nonce}"


class TimelineWord(Part):
    """A 32-bit word in shared device memory on which two processes' streams could wait and signal.

    Not there yet, and refused by name: a client waits for its own streams before it asks for a copy.
    """

    allocation: int
    offset: int
    value: int


class GroupHashes(Part):
    """Engine hashes of consecutive pages of one KV group: `blob` holds them one after another."""

    group: int
    hash_bytes: int
    blob: bytes


class GroupBlocks(Part):
    """Engine block ids of one KV group as little-endian int32, in page order; -1 skips a page."""

    group: int
    blob: bytes


class PagePlaces(Part):
    """Where pages of one group lie: arena ids (uint32 blob) and byte offsets in them (uint64 blob), in page order."""

    group: int
    arenas: bytes
    offsets: bytes


# --------------------------------------------------------------------------------------------------------------- hello


class Hello(Message, tag=1):
    """First message of a session.

    `token` authenticates in a cluster and is empty elsewhere. `cache_namespace` is the tenant ("" for the default one).
    """

    cache_namespace: str = ""
    token: bytes = b""
    client: str = ""
    messages: VersionRange = MESSAGES
    records: VersionRange = RECORDS
    page_image: VersionRange = PAGE_IMAGE


class Welcome(Message, tag=2):
    """The session is open. Descriptors that come along: completion records (read-only), hint (a pipe), agent's pidfd,
    and from version 2 of the records on the shortcut and the permit.

    Sizes in bytes, times in milliseconds.
    """

    boot_id: str
    epoch: int
    release: str
    messages_version: int
    records_version: int
    page_image_version: int
    mode: str
    cache_namespace: str
    max_session_queries: int
    reply_ttl_ms: int
    query_budget_bytes: int
    heartbeat_ms: int
    """0 when the agent watches the client's pidfd; otherwise a `Ping` must come at least this often."""
    namespace_options: dict[str, Any] = {}
    """Settings of the cache namespace that override the plugin's own (names of the plugin's configuration)."""


class Refusal(Message, tag=3):
    """The request was refused; nothing of it happened. `kind` is an `ErrorKind`."""

    kind: str
    message: str


class Done(Message, tag=4):
    """The request was carried out and has nothing to return."""


class Ping(Message, tag=5):
    """Heartbeat and health check."""


class Pong(Message, tag=6):
    """`ok` is false while the agent drains; `message` says so in words."""

    boot_id: str
    ok: bool
    message: str


class Goodbye(Message, tag=7):
    """The client closes in order: it has no copy of its own running on any arena."""


class RenewToken(Message, tag=8):
    """The client's token was replaced by a newer one of the same pod. A session does not outlive its token."""

    token: bytes


class JoinSession(Message, tag=70):
    """This session belongs with another one of the same client, to which `boot_id` and `epoch` were said in `Welcome`.

    Refused (STALE) as `agent-changed` if that was another boot of the agent, and as `stale-session` unless the other
    session is open and of the same process and cache namespace. An agent of an earlier release does not know this
    message and refuses it (INVALID).
    """

    boot_id: str
    epoch: int


# ---------------------------------------------------------------------------------------------- instance, registration


class EngineReport(Message, tag=18):
    """What a client knows of its engine: which it is and, if it does not use the cache, why.

    `engine` is a name and a version ("vllm 0.32.0"). `reason` is one of `reasons.OffReason`, or "" for an engine that
    uses the cache; `message` is for people and says what to do. An agent of an earlier release does not know this
    message and refuses it.
    """

    engine: str
    reason: str = ""
    message: str = ""


class AttachInstance(Message, tag=10):
    """The scheduler of an engine joins its instance.

    `key_generation` names the key generation it continues (empty: the first). `events` asks for the store's changes
    (`TakeEvents`).
    """

    instance: Instance
    key_generation: str = ""
    events: bool = False


class InstanceState(Message, tag=11):
    """What an instance still lacks before it can hit.

    `serving` is true once the scheduler and all declared ranks are there and the layout is proven. `off` is the reason
    why it never will, or "".
    """

    serving: bool
    missing: str
    off: str


class Allocation(Part):
    """A piece of engine memory. In CUDA mode it is a whole allocation, which the agent opens by `handle`; in host mode
    `handle` is empty, and the bytes stay in the engine's process."""

    size: int
    handle: bytes = b""


class LayerRegion(Part):
    """One layer's part of every block: block b starts at `offset + b * block_stride` in its allocation. All in bytes.

    `pieces` is the number of contiguous pieces in the layer's part of one block (1, or the layout is refused);
    `replica_class` > 0 says that ranks of that class hold the same bytes.
    """

    name: str
    allocation: int
    offset: int
    block_count: int
    block_bytes: int
    block_stride: int
    dtype: str
    pieces: int = 1
    replica_class: int = 0


class GroupGeometry(Part):
    """One KV cache group. `kind` names the state it holds: only "full" (full attention) can be restored yet."""

    group: int
    kind: str
    block_tokens: int
    layers: Annotated[list[LayerRegion], MANY]


class Ranks(Name, frozen=True):
    """This worker's place, and how many there are, along each axis of parallelism."""

    tensor: int = 0
    tensor_size: int = 1
    pipeline: int = 0
    pipeline_size: int = 1
    context: int = 0
    context_size: int = 1


class Register(Message, tag=12):
    """A worker registers all its layers at once.

    `model_identity` is a digest of all that gives the bytes their meaning; `model` is its description for people.
    `used` says that requests have computed on this memory already (late attachment).
    """

    instance: Instance
    ranks: Ranks
    model_identity: str
    model: str
    device: str
    allocations: Annotated[list[Allocation], MANY]
    groups: Annotated[list[GroupGeometry], FEW]
    used: bool = False


class Registered(Message, tag=13):
    """`page_bytes`: unpadded size of a page of each group, in the order of `Register.groups`."""

    registration: int
    proof_required: bool
    page_bytes: list[int]


class Challenge(Message, tag=19):
    """Answers `Register` where the agent would write to memory that it opened by a handle: first the process shows that
    it may write there itself, because a handle says nothing about who shows it.

    It writes `values[i]` at byte `places[i][1]` of the allocation `places[i][0]`, waits until that is done, and sends
    `ChallengeMet`, which is answered as `Register` would have been. The places lie in the first block, in which nothing
    is computed meanwhile; what was there may be put back after the answer.
    """

    challenge: int
    places: list[tuple[int, int]]
    values: list[bytes]


class ChallengeMet(Message, tag=9):
    """The values of a challenge are in place."""

    challenge: int


class Unregister(Message, tag=14):
    """Retire a registration. Its accepted copies drain first."""

    registration: int


class ProofReport(Message, tag=15):
    """Result of the proof of layout. Until a registration is proven its instance gets no hit."""

    registration: int
    proven: bool
    detail: str = ""


class ResetInstance(Message, tag=16):
    """Move the instance to a new key generation. Refused (BUSY) while it has leases, restores or saves."""

    instance: Instance


class ResetDone(Message, tag=17):
    """The key generation that the instance uses from now on."""

    key_generation: str


# --------------------------------------------------------------------------------------------------------------- query


class Query(Message, tag=20):
    """Start, or revise, the operation `operation` of this session.

    A known operation with a higher `revision` retires the older one. `max_wait_ms` bounds the time in which the answer
    may stay "loading". `proof` asks for pages that were saved under `SaveRequest.proof`.
    """

    instance: Instance
    operation: int
    revision: int
    hashes: Annotated[list[GroupHashes], FEW]
    max_wait_ms: int = 2000
    wait_for_full_prefix: bool = False
    proof: bool = False


class PollQuery(Message, tag=21):
    """Ask for the state of an operation that was loading."""

    operation: int
    revision: int


class Loading(Message, tag=22):
    """Not known yet; nothing is promised. `record` turns to another state when there is something to ask for."""

    admitted: bool
    record: RecordRef | None


class LeasedPages(Part):
    """Pages of one group that a lease covers: `count` pages from index `first` of the hashes asked for."""

    group: int
    first: int
    count: int


class Ready(Message, tag=23):
    """Pages are leased: one lease for each shard, in rank order.

    `boundaries` are the page counts at which the request may resume, as runs (first, last, step).
    """

    leases: list[int]
    boundaries: list[tuple[int, int, int]]
    pages: list[LeasedPages]
    bytes: int
    tier: str = "dram"


class Nothing(Message, tag=24):
    """Nothing can be restored; `reason` says why in one word (`miss`, `budget`, `oversized`, `not-serving`, `gone`)."""

    reason: str


class CancelQuery(Message, tag=25):
    """Withdraw interest. A lease that was promised and not consumed returns."""

    operations: Annotated[list[int], MANY]


class Release(Message, tag=26):
    """Give leases back unused."""

    leases: Annotated[list[int], MANY]


# ------------------------------------------------------------------------------------------------------------- restore


class StartRestore(Message, tag=30):
    """Consume a lease once, into these blocks (one entry a leased page and group).

    `ready` would fence the destination, and `layer_words` be signalled layer by layer; both are refused by name: a
    client waits for its own stream before it asks, and reads in the records what is in place.
    """

    registration: int
    lease: int
    blocks: Annotated[list[GroupBlocks], FEW]
    ready: TimelineWord | None = None
    layer_words: Annotated[list[TimelineWord], MANY] = []


class StartLayeredRestore(StartRestore, tag=33):
    """The same, layer after layer: in CUDA mode the records tell how many layers are in place (`RecordReader.layers`).

    An agent of an earlier release does not know this message and refuses it.
    """


class RestorePlan(Message, tag=31):
    """The restore is accepted: `record` tells its end. In host mode the client copies from `pages`; in CUDA mode the
    agent copies, and `pages` is empty."""

    restore: int
    record: RecordRef
    pages: list[PagePlaces]


class RestoreDone(Message, tag=32):
    """Host mode: the client's copies of this restore ended; `copied` is false when they failed. (In CUDA mode the agent
    knows by itself.)"""

    restore: int
    copied: bool


# ---------------------------------------------------------------------------------------------------------------- save


class SaveRequest(Part):
    """Pages to keep: hashes and the blocks that hold them, page by page. `producer` is refused by name."""

    registration: int
    hashes: Annotated[list[GroupHashes], FEW]
    blocks: Annotated[list[GroupBlocks], FEW]
    producer: TimelineWord | None = None
    proof: bool = False


class SubmitSaves(Message, tag=40):
    """Submit a batch of saves: all of it, or nothing."""

    saves: Annotated[list[SaveRequest], MANY]


class SavePlan(Part):
    """One accepted save.

    `positions` (one uint32 blob a group) are the indices into the request's hashes that have a place in `pages`; the
    rest was kept already (`present`) or could not be had (`dropped`, by reason). In CUDA mode the agent copies at once,
    the places stay empty, and `record` becomes SETTLED when the copy ended.
    """

    save: int
    record: RecordRef
    positions: list[bytes]
    pages: list[PagePlaces]
    present: int
    dropped: dict[str, int]


class SavesAccepted(Message, tag=41):
    """Plans in the order of the batch."""

    plans: list[SavePlan]


class CommitSave(Message, tag=42):
    """The client saw the copy done: the pages become visible. `copied=False` drops them instead."""

    save: int
    copied: bool


# --------------------------------------------------------------------------------------------------- arenas and events


class MapArenas(Message, tag=50):
    """Ask for descriptors of arenas (host mode). They come with the reply, in its order."""

    arenas: Annotated[list[int], MANY]


class Arenas(Message, tag=51):
    """(arena id, size in bytes), one descriptor each. Unknown or retired ids are left out."""

    arenas: list[tuple[int, int]]


class SyncArenas(Message, tag=52):
    """`unmapped`: arenas that the client no longer maps. The reply lists those it should unmap now."""

    unmapped: Annotated[list[int], MANY]


class RetiredArenas(Message, tag=53):
    """Arenas of this session that hold no page any more: unmap them and say so with `SyncArenas`."""

    arenas: list[int]


class TakeEvents(Message, tag=54):
    """Take what changed in the store for this instance's keys."""

    instance: Instance


class Events(Message, tag=55):
    """Hashes of pages that left the store; `lost` says that older events were dropped, so nothing may be assumed."""

    removed: list[GroupHashes]
    lost: bool


# ------------------------------------------------------------------------------------------------------ administration


class GetStatus(Message, tag=60):
    """Ask for the agent's state as one object (the socket's owner only)."""


class Status(Message, tag=61):
    """JSON object, as `orbitkv-agent status --json` prints it."""

    body: bytes


class ConfigureNamespace(Message, tag=62):
    """Set what a cache namespace may use, live. Sizes in bytes; None means no limit.

    Raising `reset_generation` retires every page stored before. `insert_class` is "probationary" or "retained".
    """

    cache_namespace: str
    uid: str = ""
    quota_bytes: int | None = None
    guaranteed_bytes: int = 0
    insert_class: str = "probationary"
    reset_generation: int = 0
    protected_percent: int = 0
    ttl_seconds: int = 0


Request = (
    Hello | Ping | Goodbye | RenewToken | JoinSession | EngineReport | AttachInstance | Register | ChallengeMet
    | Unregister | ProofReport | ResetInstance | Query | PollQuery | CancelQuery | Release | StartRestore
    | StartLayeredRestore | RestoreDone | SubmitSaves | CommitSave | MapArenas | SyncArenas | TakeEvents | GetStatus
    | ConfigureNamespace
)  # fmt: skip
Reply = (
    Welcome | Refusal | Done | Pong | InstanceState | Registered | Challenge | ResetDone | Loading | Ready | Nothing
    | RestorePlan | SavesAccepted | Arenas | RetiredArenas | Events | Status
)  # fmt: skip
