"""Engine incarnations: who belongs to them, and whether they may hit."""

from __future__ import annotations

import secrets
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, Final

from orbitkv.protocol.errors import ErrorKind
from orbitkv.protocol.messages import Instance as InstanceName
from orbitkv.protocol.messages import InstanceState, Ranks, Register
from orbitkv.protocol.records import Header
from orbitkv_agent.guards import guard
from orbitkv_agent.observe.demand import Demand
from orbitkv_agent.sessions.errors import Refused, invalid, stale
from orbitkv_agent.sessions.layout import (
    MAX_TEXT,
    GroupPages,
    WorkerLayout,
    kept_bytes,
    pages_of,
    rank_count,
    shard_of,
    storage_identity,
)
from orbitkv_agent.sessions.namespaces import tenant_of

if TYPE_CHECKING:
    from orbitkv_agent.queries.operations import QueryOperation
    from orbitkv_agent.sessions.session import Session
    from orbitkv_agent.store.index import KeySpace

MAX_NAME_BYTES: Final = 256


class Registration:
    """A worker's memory as the agent knows it. Copies keep it; once retired it accepts nothing new.

    Attributes:
        number: the handle that the client uses.
        shard: the worker's place in rank order.
        group_pages: its own page sizes by group, for proofs.
        proof_spaces: what proofs of its layout were saved under, by hash length.
        proven: its layout was found right.
        memory: the device's access to its memory.
        kept_bytes: about what the agent keeps of it.
        copies: accepted saves and restores that have not ended.
    """

    def __init__(
        self,
        number: int,
        session: Session,
        instance: Instance,
        message: Register,
        layout: WorkerLayout,
        memory: object = None,
    ) -> None:
        self.number = number
        self.session = session
        self.instance = instance
        self.ranks = message.ranks
        self.shard = shard_of(message.ranks)
        self.device = message.device
        self.model_identity = message.model_identity
        self.model = message.model[:MAX_TEXT]
        self.kept_bytes = kept_bytes(message)
        self.bytes = sum(allocation.size for allocation in message.allocations)
        self.layout = layout
        self.memory = memory
        self.groups = layout.by_id()
        self.group_pages = pages_of([layout])
        self.proof_spaces: dict[int, KeySpace] = {}
        self.proven = False
        self.retired = False
        self.copies = 0
        self._drained: list[Callable[[], None]] = []

    def copy_started(self) -> None:
        """One more copy was accepted."""
        self.copies += 1

    def copy_ended(self) -> None:
        """A copy ended; the last one of a retired registration completes its retirement."""
        self.copies -= 1
        assert self.copies >= 0, "a copy of a registration ended twice"
        if self.retired and not self.copies:
            waiting, self._drained = self._drained, []
            for callback in waiting:
                callback()

    def when_drained(self, callback: Callable[[], None]) -> None:
        """Call back once no copy runs, perhaps at once."""
        if self.copies:
            self._drained.append(callback)
        else:
            callback()


class Instance:
    """One engine incarnation in one cache namespace.

    Attributes:
        tenant: whose its cache namespace is.
        demand: what it asks for; counts for its cache namespace too.
        scheduler: the session that attached it.
        registrations: live ones by shard.
        key_generation: moved on by an external reset.
        identity: digest of the model and the pages of all workers; None until all are there.
        group_pages: page sizes by group, while all are there.
        spaces: open key spaces by hash length; emptied whenever something that they depend on changes.
        off: why it never hits, or "".
        serving: whether it may hit; kept by `changed`.
        operations: its query operations that are not retired.
        saves: its accepted saves that have not ended.
    """

    def __init__(self, namespace: str, name: InstanceName, demand: Demand) -> None:
        self.namespace = namespace
        self.tenant = tenant_of(namespace)
        self.demand = demand
        self.name = name
        self.scheduler: Session | None = None
        self.wants_events = False
        self.registrations: dict[int, Registration] = {}
        self.key_generation = ""
        self.identity: str | None = None
        self.group_pages: dict[int, GroupPages] = {}
        self.spaces: dict[int, KeySpace] = {}
        self.off = ""
        self.serving = False
        self.operations: dict[QueryOperation, None] = {}
        self.saves = 0
        self._proven: set[tuple[int, Hashable, bytes]] = set()

    def __str__(self) -> str:
        return str(self.name)

    @property
    def shards(self) -> int:
        """Declared number of workers, 0 when none has registered."""
        return next((rank_count(each.ranks) for each in self.registrations.values()), 0)

    @property
    def sealed(self) -> bool:
        """Whether all declared workers are there."""
        return self.identity is not None

    @property
    def tracked(self) -> bool:
        """Whether it has queries, leases, restores or saves."""
        return bool(self.operations or self.saves or any(each.copies for each in self.registrations.values()))

    @property
    def missing(self) -> str:
        """What it lacks before it can hit, in words; "" when nothing."""
        parts = []
        if self.scheduler is None:
            parts.append("the engine's scheduler has not attached")
        if not self.registrations:
            parts.append("no worker has registered")
        absent = [shard for shard in range(self.shards) if shard not in self.registrations]
        if absent:
            parts.append(f"workers {absent} of {self.shards} have not registered")
        unproven = [shard for shard, each in sorted(self.registrations.items()) if not each.proven]
        if unproven:
            parts.append(f"the layout of workers {unproven} is not proven")
        return "; ".join(parts)

    @property
    def model(self) -> str:
        """The model for people, "" when no worker has registered."""
        return next((each.model for each in self.registrations.values()), "")

    def state(self) -> InstanceState:
        """The answer to `AttachInstance`."""
        serving = self.serving
        return InstanceState(serving, "" if serving else self.missing, self.off)

    def sessions(self) -> list[Session]:
        """Sessions that take part in it."""
        found = dict.fromkeys(each.session for each in self.registrations.values())
        if self.scheduler is not None:
            found[self.scheduler] = None
        return list(found)

    def changed(self) -> None:
        """Find out anew whether it serves, and tell its sessions that `state` may have another answer."""
        self.serving = (
            self.identity is not None
            and self.scheduler is not None
            and not self.off
            and all(each.proven for each in self.registrations.values())
        )
        for session in self.sessions():
            session.notify(Header.INSTANCE)

    # ------------------------------------------------------------------------------------------ membership

    def attach(self, session: Session, key_generation: str, wants_events: bool) -> None:
        """Make `session` its scheduler. Doing it again changes nothing.

        Raises:
            Refused: another live session is its scheduler (INVALID), or the key generation differs while work is
                tracked (BUSY).
        """
        if self.scheduler is not None and self.scheduler is not session:
            raise invalid(f"instance {self} is attached by another session; an engine's start needs a nonce of its own")
        if len(key_generation) > MAX_TEXT:
            raise invalid(f"key_generation has {len(key_generation)} characters; at most {MAX_TEXT} are accepted")
        if key_generation and key_generation != self.key_generation:
            if self.tracked:
                raise Refused(ErrorKind.BUSY, f"instance {self} has work under key generation {self.key_generation!r}")
            self.key_generation = key_generation
            self.spaces.clear()
        self.wants_events = wants_events
        if self.scheduler is None:
            self.scheduler = session
            self.changed()

    def check_joins(self, registration: Registration) -> None:
        """Whether a worker may join.

        Raises:
            Refused: naming what does not fit the workers that are there; BUSY where a worker of these ranks is.
        """
        shard = registration.shard
        if shard in self.registrations and guard("duplicate-rank"):
            # BUSY, as a worker that lost its session comes again before the agent knows that the old one is over.
            raise Refused(
                ErrorKind.BUSY,
                f"ranks {_place(registration.ranks)}: worker {shard} of instance {self} is registered already "
                f"by {self.registrations[shard].session}",
            )
        for other in self.registrations.values():
            if _sizes(other.ranks) != _sizes(registration.ranks):
                raise invalid(
                    f"ranks declare sizes (tensor, pipeline, context) {_sizes(registration.ranks)}; "
                    f"worker {other.shard} of instance {self} declared {_sizes(other.ranks)}"
                )
            if other.model_identity != registration.model_identity:
                raise invalid(
                    f"model_identity {registration.model_identity!r} differs from {other.model_identity!r} of worker "
                    f"{other.shard} of instance {self}"
                )
            self._check_agreement(registration, other)

    def _check_agreement(self, registration: Registration, other: Registration) -> None:
        mine, theirs = registration.groups, other.groups
        kinds = {key: (each.kind, each.block_tokens) for key, each in mine.items()}
        if kinds != {key: (each.kind, each.block_tokens) for key, each in theirs.items()}:
            raise invalid(f"groups differ from those of worker {other.shard} of instance {self}")
        if registration.ranks.pipeline == other.ranks.pipeline and registration.layout.groups != other.layout.groups:
            group = next(key for key in mine if mine[key] != theirs[key])
            raise invalid(
                f"group {group}: layers, sizes or block counts differ from those of worker {other.shard} of instance "
                f"{self}; ranks of one pipeline stage must agree"
            )

    def join(self, registration: Registration) -> None:
        """Add a worker that `check_joins` accepted."""
        registration.proven = self._proof_key(registration) in self._proven
        self.registrations[registration.shard] = registration
        if len(self.registrations) == self.shards:
            layouts = [self.registrations[shard].layout for shard in range(self.shards)]
            self.identity = storage_identity(registration.model_identity, registration.ranks, layouts)
            self.group_pages = pages_of(layouts)
        self.changed()

    def leave(self, registration: Registration) -> None:
        """Remove a worker; the instance is not sealed any more."""
        if self.registrations.get(registration.shard) is registration:
            del self.registrations[registration.shard]
            self.identity = None
            self.spaces.clear()
            self.changed()

    def proof(self, registration: Registration, proven: bool, detail: str) -> None:
        """Take the result of a proof of layout. A mismatch turns the cache off for this instance."""
        if proven:
            registration.proven = True
            self._proven.add(self._proof_key(registration))
        else:
            registration.proven = False
            self.off = f"the proof of layout failed for worker {registration.shard}: {detail or 'no detail given'}"
        self.changed()

    def next_key_generation(self) -> str:
        """Move on to a key generation under which nothing is stored."""
        self.key_generation = secrets.token_hex(8)
        self.spaces.clear()
        return self.key_generation

    def _proof_key(self, registration: Registration) -> tuple[int, Hashable, bytes]:
        """A proof holds for one worker's process (or connection, where that is unknown) and placement of its layers."""
        process = registration.session.peer.process
        where = registration.session.epoch if process is None else process
        return (registration.shard, where, registration.layout.placement)


class Instances:
    """All instances, by cache namespace and name.

    Args:
        demand: by cache namespace; where what they ask for is counted.
    """

    def __init__(self, demand: defaultdict[str, Demand] | None = None) -> None:
        self._instances: dict[tuple[str, InstanceName], Instance] = {}
        self._demand: defaultdict[str, Demand] = defaultdict(Demand) if demand is None else demand
        self._of_tenant: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Instance]:
        return iter(list(self._instances.values()))

    def find(self, session: Session, name: InstanceName) -> Instance | None:
        """The instance of that name in the session's cache namespace, if it is known."""
        return self._instances.get((session.namespace or "", name))

    def get(self, session: Session, name: InstanceName) -> Instance:
        """As `find`.

        Raises:
            Refused: STALE.
        """
        instance = self.find(session, name)
        if instance is None:
            raise stale(f"unknown-instance: {name} is not known to this agent; attach or register it first")
        return instance

    def make(self, session: Session, name: InstanceName) -> Instance:
        """The instance of that name; a new one if it is not known.

        Raises:
            Refused: INVALID, the name is empty or too long.
        """
        for part, text in (("engine_id", name.engine_id), ("nonce", name.nonce)):
            if not 1 <= len(text.encode()) <= MAX_NAME_BYTES:
                raise invalid(f"instance.{part} has {len(text.encode())} bytes; 1 to {MAX_NAME_BYTES} are accepted")
        key = (session.namespace or "", name)
        instance = self._instances.get(key)
        if instance is None:
            instance = self._instances[key] = Instance(key[0], name, Demand(self._demand[key[0]]))
            self._of_tenant[instance.tenant] += 1
        return instance

    def of_several_tenants(self) -> bool:
        """Whether they are not all of one tenant."""
        return len(self._of_tenant) > 1

    def drop_unused(self) -> None:
        """Forget all instances that nobody takes part in."""
        for instance in self:
            self.drop_if_unused(instance)

    def drop_if_unused(self, instance: Instance) -> None:
        """Forget an instance that nobody takes part in."""
        if instance.scheduler is not None or instance.registrations or instance.tracked:
            return
        if self._instances.pop((instance.namespace, instance.name), None) is not None:
            self._of_tenant[instance.tenant] -= 1
            if not self._of_tenant[instance.tenant]:
                del self._of_tenant[instance.tenant]


def _sizes(ranks: Ranks) -> tuple[int, int, int]:
    return (ranks.tensor_size, ranks.pipeline_size, ranks.context_size)


def _place(ranks: Ranks) -> tuple[int, int, int]:
    return (ranks.tensor, ranks.pipeline, ranks.context)
