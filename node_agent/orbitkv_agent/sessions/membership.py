"""Joining and leaving an instance, and what follows for what was promised to it."""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from orbitkv.protocol.errors import ErrorKind
from orbitkv.protocol.messages import (
    AttachInstance,
    Challenge,
    ChallengeMet,
    Done,
    InstanceState,
    ProofReport,
    Query,
    Register,
    Registered,
    ResetDone,
    ResetInstance,
    Unregister,
)
from orbitkv_agent.devices.base import PROOF_BYTES
from orbitkv_agent.guards import guard
from orbitkv_agent.loop import Loop
from orbitkv_agent.observe.counters import Counters
from orbitkv_agent.queries.leases import handle_numbers
from orbitkv_agent.queries.lookup import MAX_HASH_BYTES, check_hashes
from orbitkv_agent.queries.service import QueryService
from orbitkv_agent.sessions.errors import Refused, invalid, stale
from orbitkv_agent.sessions.instances import Instance, Instances, Registration
from orbitkv_agent.sessions.layout import WorkerLayout, check_register, kept_bytes
from orbitkv_agent.sessions.session import Session, is_own
from orbitkv_agent.sessions.spaces import KeySpaces
from orbitkv_agent.store.cache import PageCache

if TYPE_CHECKING:
    from orbitkv_agent.devices.base import Device

logger = logging.getLogger(__name__)

_STORAGE_WAIT_S: Final = 10.0
MAX_REGISTRATIONS: Final = 64
"""Of one session."""
MAX_INSTANCES: Final = 64
"""That one session may attach,"""
MAX_INSTANCES_OF_ONE: Final = 512
"""and all sessions of one cache namespace."""
CHALLENGES: Final = 2
"""Version of the messages from which on clients know `Challenge`."""


@dataclass(frozen=True)
class _Claim:
    """A registration whose memory is opened, and what the worker has to write there to show that it may."""

    session: Session
    message: Register
    layout: WorkerLayout
    memory: object
    places: Sequence[tuple[int, int]]
    values: Sequence[bytes]


class Membership:
    """Who belongs to which instance. Used by the owner thread only."""

    def __init__(
        self,
        loop: Loop,
        cache: PageCache,
        instances: Instances,
        queries: QueryService,
        spaces: KeySpaces,
        device: Device,
        counters: Counters,
    ) -> None:
        self._loop = loop
        self._cache = cache
        self._instances = instances
        self._queries = queries
        self._spaces = spaces
        self._device = device
        self._counters = counters
        self._numbers = handle_numbers()
        self._registrations: dict[int, Registration] = {}
        self.registered_bytes: Counter[str] = Counter()
        self._unanswered: dict[int, tuple[Registration, int, Registered]] = {}
        self._claims: dict[int, _Claim] = {}
        self._coming: Counter[Session] = Counter()
        """Registrations whose memory is being opened or proven."""

    # -------------------------------------------------------------------------------------------- requests

    def attach(self, session: Session, message: AttachInstance) -> InstanceState:
        """Make the session the scheduler of an instance; again, it says how the instance is."""
        known = self._instances.find(session, message.instance)
        if known is None or known.scheduler is None:
            attached = [each for each in self._instances if each.scheduler is not None]
            if sum(each.scheduler is session for each in attached) >= MAX_INSTANCES:
                raise Refused(ErrorKind.BUSY, f"this session has attached {MAX_INSTANCES} instances already")
            if sum(each.namespace == session.namespace for each in attached) >= MAX_INSTANCES_OF_ONE:
                raise Refused(
                    ErrorKind.BUSY, f"this cache namespace has {MAX_INSTANCES_OF_ONE} engines attached to this agent"
                )
        instance = self._instances.make(session, message.instance)
        try:
            instance.attach(session, message.key_generation, message.events)
        finally:
            self._instances.drop_if_unused(instance)
        return instance.state()

    def register(self, session: Session, sequence: int, message: Register) -> None:
        """Take a worker into its instance. The answer waits for the device to open the worker's memory, and a while for
        memory that its first pages can go to."""
        if len(session.registrations) + self._coming[session] >= MAX_REGISTRATIONS:
            raise Refused(ErrorKind.BUSY, f"this session has {MAX_REGISTRATIONS} registrations already")
        device = self._device
        layout = check_register(
            message,
            devices=device.visible,
            handles=device.copier is not None,
            max_page_bytes=device.max_page_bytes,
        )
        places = device.places_to_prove(message) if guard("own-memory") else ()
        proves = session.messages_version >= CHALLENGES
        if places and not proves and not session.trusted:
            raise Refused(
                ErrorKind.INCOMPATIBLE,
                "version-mismatch: this release of the plugin cannot show that GPU memory is its own; use a newer one",
            )

        def opened(memory: object | Refused) -> None:
            if isinstance(memory, Refused):
                self._decided(session, message)
                session.refuse(sequence, memory)
                return
            values = [secrets.token_bytes(PROOF_BYTES) for _ in places]
            claim = _Claim(session, message, layout, memory, places, values)
            if places and proves:
                self._challenge(session, sequence, claim)
            else:
                self._admit(session, sequence, claim)

        self._coming[session] += 1
        session.keeps(kept_bytes(message))
        device.open(session, message, opened)

    def _decided(self, session: Session, message: Register) -> None:
        """A registration does not wait for its memory to be opened or proven any more."""
        session.keeps(-kept_bytes(message))
        self._coming[session] -= 1
        if not self._coming[session]:
            del self._coming[session]

    def _challenge(self, session: Session, sequence: int, claim: _Claim) -> None:
        if not session.is_open:
            self._decided(session, claim.message)
            self._device.close(claim.memory)
            return
        number = next(self._numbers)
        self._claims[number] = claim
        session.reply(sequence, Challenge(number, list(claim.places), list(claim.values)))

    def challenge_met(self, session: Session, sequence: int, message: ChallengeMet) -> None:
        """The worker says that it wrote what it was told to: look, before anything is ever written there."""
        claim = self._claims.get(message.challenge)
        if claim is None or not is_own(claim.session, session):
            raise stale(f"unknown-challenge: {message.challenge} was not asked of this session; register again")
        del self._claims[message.challenge]

        def looked(proven: bool) -> None:
            if proven:
                self._admit(session, sequence, claim)
                return
            self._decided(claim.session, claim.message)
            self._device.close(claim.memory)
            logger.error("%s registered memory that it cannot write: it is refused", session)
            text = "not-owner: the memory does not hold what this process should have written there: it is not its own"
            session.refuse(sequence, Refused(ErrorKind.DENIED, text))

        self._device.prove(claim.memory, claim.places, claim.values, looked)

    def _admit(self, session: Session, sequence: int, claim: _Claim) -> None:
        self._decided(claim.session, claim.message)
        try:
            if not session.is_open:
                raise stale("the session ended while the memory of its worker was opened")
            reply = self._join(session, sequence, claim.message, claim.layout, claim.memory)
        except Refused as error:
            self._device.close(claim.memory)
            session.refuse(sequence, error)
        else:
            if reply is not None:
                session.reply(sequence, reply)

    def _join(
        self, session: Session, sequence: int, message: Register, layout: WorkerLayout, memory: object
    ) -> Registered | None:
        instance = self._instances.make(session, message.instance)
        registration = Registration(next(self._numbers), session, instance, message, layout, memory)
        try:
            instance.check_joins(registration)
        except Refused:
            self._instances.drop_if_unused(instance)
            raise
        instance.join(registration)
        self._registrations[registration.number] = registration
        session.registrations[registration.number] = registration
        session.keeps(registration.kept_bytes)
        self.registered_bytes[registration.device] += registration.bytes
        if registration.proven:
            self._counters.layout_proofs["known"] += 1
        logger.info(
            "%s registered worker %d of instance %s, %d bytes: %s",
            session,
            registration.shard,
            instance,
            registration.bytes,
            registration.model,
        )
        reply = Registered(
            registration.number, not registration.proven, [group.page_bytes for group in registration.layout.groups]
        )
        self._spaces.of_proof(registration, MAX_HASH_BYTES)  # has the first arena of the namespace made
        if self._cache.is_ready(instance.namespace):
            return reply
        self._unanswered[registration.number] = (registration, sequence, reply)
        self._loop.call_later(_STORAGE_WAIT_S, lambda: self._answer(registration.number))
        return None

    def storage_changed(self) -> None:
        """Answer registrations whose memory is there now."""
        for number, (registration, _, _) in list(self._unanswered.items()):
            if self._cache.is_ready(registration.instance.namespace):
                self._answer(number)

    def _answer(self, number: int) -> None:
        waiting = self._unanswered.pop(number, None)
        if waiting is not None:
            registration, sequence, reply = waiting
            registration.session.reply(sequence, reply)

    def unregister(self, session: Session, sequence: int, message: Unregister) -> None:
        """Retire a registration; the reply comes when its copies ended."""
        registration = self.registration(session, message.registration)
        self._retire(registration)
        registration.when_drained(lambda: session.reply(sequence, Done()))

    def proof(self, session: Session, message: ProofReport) -> Done:
        """Take the result of a proof of layout."""
        registration = self.registration(session, message.registration)
        registration.instance.proof(registration, message.proven, message.detail[:1000])
        self._counters.layout_proofs["proven" if message.proven else "mismatch"] += 1
        if not message.proven:
            logger.error("instance %s: %s; the cache is off for it", registration.instance, registration.instance.off)
            self._queries.revoke(registration.instance)
        self._spaces.drop_proofs(registration)
        return Done()

    def reset(self, session: Session, message: ResetInstance) -> ResetDone:
        """Move an idle instance to a new key generation."""
        instance = self._instances.get(session, message.instance)
        if instance.scheduler is not session:
            raise invalid(
                f"instance {instance} is attached by another session, or by none; only its scheduler resets it"
            )
        if instance.tracked:
            raise Refused(
                ErrorKind.BUSY, f"instance {instance} has queries, restores or saves; reset it when they have ended"
            )
        own = [] if not instance.key_generation else list(instance.spaces.values())
        generation = instance.next_key_generation()
        # What was stored under a generation of its own is found by nobody any more, unless another engine continues it.
        shared = {space for each in self._instances for space in each.spaces.values()}
        for space in own:
            if space not in shared and not space.closed:
                self._cache.drop_key_space(space)
        logger.info("instance %s moved to key generation %s", instance, generation)
        return ResetDone(generation)

    # --------------------------------------------------------------------------------------------- look up

    def registration(self, session: Session, number: int) -> Registration:
        """The live registration of that number.

        Raises:
            Refused: STALE, it is not this session's, or retired.
        """
        registration = self._registrations.get(number)
        if registration is None or not is_own(registration.session, session):
            raise stale(f"unknown-registration: {number} is not alive in this session; register again")
        return registration

    def query_parties(self, session: Session, message: Query) -> tuple[Instance | None, Registration | None]:
        """The instance that a query is about and, for a proof, the registration of the process that asks.

        There is no instance for a session that is not its scheduler.

        Raises:
            Refused: INVALID, a proof is asked for by a process that has no worker in the instance.
        """
        instance = self._instances.find(session, message.instance)
        if instance is None or not message.proof:
            return (instance if instance is not None and instance.scheduler is session else None), None
        for registration in instance.registrations.values():
            if self._proves(registration, session, message):
                return instance, registration
        raise invalid(f"proof: no worker of instance {instance} was registered by this process")

    def _proves(self, registration: Registration, session: Session, message: Query) -> bool:
        """Whether a proof that a session asks for is that of a registration: both are of one process.

        Processes in other containers cannot be told apart by older kernels: then the pages say whose proof it is.
        """
        process = session.peer.process
        if process is not None:
            return registration.session.peer.process == process
        return any(
            check_hashes(part)
            and len(self._spaces.of_proof(registration, part.hash_bytes).lookup_run(part.group, part.blob))
            for part in message.hashes
        )

    # ---------------------------------------------------------------------------------------------- ending

    def end_stream(self, session: Session) -> None:
        """A session that ended takes part in nothing any more."""
        for number in [number for number, claim in self._claims.items() if claim.session is session]:
            claim = self._claims.pop(number)
            self._decided(session, claim.message)
            self._device.close(claim.memory)
        for registration in list(session.registrations.values()):
            self._retire(registration)
        for instance in self._instances:
            if instance.scheduler is session:
                instance.scheduler = None
                instance.wants_events = False
                self._lost(instance)

    def _retire(self, registration: Registration) -> None:
        registration.retired = True
        self._unanswered.pop(registration.number, None)
        del self._registrations[registration.number]
        del registration.session.registrations[registration.number]
        registration.session.keeps(-registration.kept_bytes)
        self.registered_bytes[registration.device] -= registration.bytes
        self.registered_bytes = +self.registered_bytes
        registration.instance.leave(registration)
        self._lost(registration.instance)
        if guard("mapping-drained"):
            registration.when_drained(lambda: self._drained(registration))
        else:
            self._drained(registration)

    def _drained(self, registration: Registration) -> None:
        self._spaces.drop_proofs(registration)
        self._device.close(registration.memory)

    def _lost(self, instance: Instance) -> None:
        instance.changed()
        self._queries.revoke(instance)
        self._instances.drop_if_unused(instance)
