"""The node agent: its parts, put together, and its life from start to drain."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import resource
import secrets
import sys
from typing import TYPE_CHECKING, Final

from orbitkv.cuda import Driver
from orbitkv.protocol.errors import ErrorKind
from orbitkv.protocol.messages import (
    AttachInstance,
    CancelQuery,
    ChallengeMet,
    CommitSave,
    ConfigureNamespace,
    Done,
    EngineReport,
    GetStatus,
    Goodbye,
    JoinSession,
    MapArenas,
    Ping,
    PollQuery,
    Pong,
    ProofReport,
    Query,
    Register,
    Release,
    RenewToken,
    Reply,
    ResetInstance,
    RestoreDone,
    StartLayeredRestore,
    StartRestore,
    Status,
    SubmitSaves,
    SyncArenas,
    TakeEvents,
    Unregister,
)
from orbitkv.protocol.versions import RELEASE
from orbitkv.scheduling import SHORT_SLICE_S, use_slices
from orbitkv_agent.config import AgentConfig
from orbitkv_agent.devices import choose_mode
from orbitkv_agent.devices.base import Device
from orbitkv_agent.devices.cuda.device import CudaDevice
from orbitkv_agent.devices.host import HostDevice
from orbitkv_agent.loop import Loop, Timer
from orbitkv_agent.observe.counters import Counters
from orbitkv_agent.observe.http import MetricsServer
from orbitkv_agent.observe.snapshot import Snapshot
from orbitkv_agent.observe.state import make_snapshot
from orbitkv_agent.queries.budget import Phase
from orbitkv_agent.queries.service import QueryService
from orbitkv_agent.sessions.admission import Admission, KnownUsers
from orbitkv_agent.sessions.dispatch import Dispatcher, Steps
from orbitkv_agent.sessions.errors import Refused
from orbitkv_agent.sessions.events import EventFeed
from orbitkv_agent.sessions.instances import Instances
from orbitkv_agent.sessions.membership import Membership
from orbitkv_agent.sessions.namespaces import Namespaces
from orbitkv_agent.sessions.server import Server
from orbitkv_agent.sessions.session import Session
from orbitkv_agent.sessions.spaces import KeySpaces
from orbitkv_agent.store.arenas import ArenaPool
from orbitkv_agent.store.cache import PageCache
from orbitkv_agent.transfers.restores import Restores
from orbitkv_agent.transfers.saves import Saves
from orbitkv_agent.transfers.watchdog import Watchdog

if TYPE_CHECKING:
    from orbitkv_agent.cluster.cluster import Cluster

logger = logging.getLogger(__name__)

_SWITCH_INTERVAL_S: Final = 0.0005
"""The owner gets the interpreter back this soon after another thread took it."""
_YOUNG_OBJECTS: Final = 5_000
_NEVER: Final = 1_000_000
_UPKEEP_S: Final = 0.02
_LONGEST_WAIT_S: Final = 3600.0
_GPU_LOST: Final = 70
"""Exit code: the process ended because a GPU failed."""


class Agent:
    """One agent in this process. Whoever calls `run` is the owner thread of everything in it.

    Args:
        config: the settings.
        loop: for tests; otherwise one of its own.
        driver: of the GPUs, for tests; otherwise the machine's, if the mode asks for it.

    Raises:
        OSError: the socket or the metrics address cannot be had; the message names it and says what to do.
    """

    def __init__(self, config: AgentConfig, loop: Loop | None = None, driver: Driver | None = None) -> None:
        self.config = config
        self.boot_id = secrets.token_hex(16)
        self.loop = loop or Loop(busy_poll_s=config.busy_poll_us / 1e6)
        self.counters = Counters()
        self.started = self.loop.now()
        self.draining = False
        self._deadline_passed = False
        self._upkeep_timer: Timer | None = None
        _raise_descriptor_limit()
        gpus = self._gpus(config, driver)
        self.gpu_count = None if gpus is None else gpus.count
        self.cache = PageCache(
            ArenaPool(
                config.pool_bytes,
                config.arena_bytes if gpus is None else gpus.arena_bytes(config),
                config.prefault,
                notify=lambda: self.loop.post(self._upkeep),
                memory=None if gpus is None else gpus.pinned,
            )
        )
        self.namespaces = Namespaces(self.cache, config, self._schedule_upkeep, self._namespace_reset)
        self.instances = Instances(self.counters.demand)
        self.spaces = KeySpaces(self.cache)
        self.queries = QueryService(
            self.loop, self.cache, self.spaces, self.counters, config, self.instances.of_several_tenants
        )
        self._pinned = None if gpus is None else gpus.pinned
        if gpus is not None:
            gpus.use(self.cache.arenas)
            self.loop.crowded = gpus.lanes_wait
        self.device: Device = gpus or HostDevice(self.cache)
        self.membership = Membership(
            self.loop, self.cache, self.instances, self.queries, self.spaces, self.device, self.counters
        )
        copier = self.device.copier
        self.restores = Restores(self.loop, self.queries, self.counters, config.max_restores_per_device, copier)
        self.saves = Saves(self.loop, self.cache, self.spaces, self.membership, self.counters, copier)
        self.events = EventFeed(self.cache, self.instances)
        self.watchdog = Watchdog(self.loop, config.watchdog_warn_ms / 1000, (self.saves, self.restores))
        self.cluster = _cluster(self)
        self.admission: Admission = KnownUsers(self.namespaces) if self.cluster is None else self.cluster.admission
        self._metrics: MetricsServer | None = None
        try:
            if config.metrics_endpoint is not None:
                self._metrics = MetricsServer(
                    config.metrics_endpoint,
                    post=self.loop.post,
                    snapshot=self.snapshot,
                    not_ready=self.not_ready,
                    draining=lambda: self.draining,
                    gate=None if self.cluster is None else self.cluster.metrics_gate,
                )
            self.server = Server(
                self.loop,
                config,
                self.counters,
                self.boot_id,
                handle=self._dispatcher(),
                ended=self._stream_ended,
                left=self._session_closed,
                mode=self.device.name,
                admission=self.admission,
            )
        except BaseException:
            if self._metrics is not None:
                self._metrics.close()
            self.cache.close()
            self.loop.close()
            raise

    def _gpus(self, config: AgentConfig, driver: Driver | None) -> CudaDevice | None:
        driver = driver or choose_mode(config.mode)
        return None if driver is None else CudaDevice(driver, self.loop.post, self._gpu_lost)

    @staticmethod
    def _gpu_lost(why: str) -> None:
        """Nobody can know whether copies still run on a GPU that failed. The end of this process is what ends them, and
        what engines wait for before they use their blocks again."""
        logger.critical("the agent ends, because a GPU failed: %s", why)
        os._exit(_GPU_LOST)

    @property
    def metrics_endpoint(self) -> tuple[str, int] | None:
        """(host, port) where metrics are served, None when they are off."""
        return None if self._metrics is None else self._metrics.endpoint

    def run(self) -> bool:
        """Serve until asked to stop, and drain; return whether nothing was left over."""
        _tune_interpreter()
        use_slices(SHORT_SLICE_S)  # who waits for an answer has waited for its own turn already
        return self.serve()

    def serve(self) -> bool:
        """As `run`, without settings that concern the whole process."""
        if self._metrics is not None:
            self._metrics.start()
        if self.cluster is not None:
            self.cluster.start()
        logger.info(
            "serving", extra={"socket_path": self.config.socket_path, "boot_id": self.boot_id, "release": RELEASE}
        )
        while not (self.draining and (self._deadline_passed or not self._copies)):
            self.loop.run_once(_LONGEST_WAIT_S)
        return self._close()

    def request_stop(self) -> None:
        """Ask for a drain. For any thread, and for signal handlers."""
        self.loop.post(self._begin_drain)

    def revoke(self, session: Session, error: Refused) -> None:
        """End a session that may not use its cache namespace any more. What its process maps takes no new page."""
        self.server.expel(session, error)
        self.cache.expose(session.passed_arenas)
        self._schedule_upkeep()

    def not_ready(self) -> str:
        """Why the agent cannot serve engines yet, or any more; "" when it can. On the owner thread only."""
        if self.draining:
            return "the agent is draining: it finishes what it began and then stops"
        return "" if self.cluster is None else self.cluster.not_ready

    def snapshot(self) -> Snapshot:
        """All figures at this moment. On the owner thread only."""
        return make_snapshot(self)

    # -------------------------------------------------------------------------------------------- requests

    def _dispatcher(self) -> Dispatcher:
        return Dispatcher(
            {
                Ping: lambda session, sequence, message: self._pong(),
                Goodbye: self._goodbye,
                AttachInstance: self._attach,
                Register: self.membership.register,
                ChallengeMet: self.membership.challenge_met,
                Unregister: self.membership.unregister,
                ProofReport: lambda session, sequence, message: self.membership.proof(session, message),
                ResetInstance: self._reset,
                Query: self._query,
                PollQuery: lambda session, sequence, message: self.queries.poll(session, message),
                CancelQuery: self._cancel,
                Release: self._release,
                StartRestore: self._start_restore,
                StartLayeredRestore: self._start_restore,
                RestoreDone: self._restore_done,
                SubmitSaves: self._submit_saves,
                CommitSave: self._commit_save,
                MapArenas: self.device.map_arenas,
                SyncArenas: lambda session, sequence, message: self.device.sync_arenas(session, message),
                RenewToken: self._renew_token,
                JoinSession: lambda session, sequence, message: self.server.join(session, message),
                EngineReport: self._engine_report,
                TakeEvents: lambda session, sequence, message: self.events.take(session, message),
                GetStatus: self._status,
                ConfigureNamespace: self._configure,
            }
        )

    def _pong(self) -> Pong:
        return Pong(self.boot_id, not self.draining, "the agent is shutting down" if self.draining else "ok")

    def _goodbye(self, session: Session, sequence: int, message: Goodbye) -> None:
        session.reply(sequence, Done())
        session.close()

    def _attach(self, session: Session, sequence: int, message: AttachInstance) -> Reply:
        state = self.membership.attach(session, message)
        self.events.follow(self.instances.get(session, message.instance))
        return state

    def _reset(self, session: Session, sequence: int, message: ResetInstance) -> Reply:
        reply = self.membership.reset(session, message)
        self.events.cleared(self.instances.get(session, message.instance))
        return reply

    def _query(self, session: Session, sequence: int, message: Query) -> None:
        instance, proving = self.membership.query_parties(session, message)
        self.queries.query(session, sequence, message, instance, proving)

    def _cancel(self, session: Session, sequence: int, message: CancelQuery) -> Reply:
        self.queries.cancel(session, message.operations)
        self._schedule_upkeep()
        return Done()

    def _release(self, session: Session, sequence: int, message: Release) -> Reply:
        self.queries.release(session, message.leases)
        self._schedule_upkeep()
        return Done()

    def _start_restore(self, session: Session, sequence: int, message: StartRestore) -> None:
        registration = self.membership.registration(session, message.registration)
        self.restores.start(session, sequence, message, registration)

    def _restore_done(self, session: Session, sequence: int, message: RestoreDone) -> Reply:
        self.restores.done(session, message)
        self._schedule_upkeep()
        return Done()

    def _submit_saves(self, session: Session, sequence: int, message: SubmitSaves) -> Steps:
        reply = yield from self.saves.submit(session, message)
        self._schedule_upkeep()
        return reply

    def _commit_save(self, session: Session, sequence: int, message: CommitSave) -> Reply:
        self.saves.commit(session, message)
        self._schedule_upkeep()
        return Done()

    def _status(self, session: Session, sequence: int, message: GetStatus) -> Reply:
        _check_administrator(session)
        return Status(json.dumps(self.snapshot()).encode())

    def _configure(self, session: Session, sequence: int, message: ConfigureNamespace) -> Reply:
        _check_administrator(session)
        self.namespaces.configure(message)
        return Done()

    def _renew_token(self, session: Session, sequence: int, message: RenewToken) -> Reply:
        self.admission.renew(session, message.token)
        return Done()

    def _engine_report(self, session: Session, sequence: int, message: EngineReport) -> Reply:
        self.admission.reported(session, message.engine, message.reason, message.message)
        return Done()

    def _namespace_reset(self, name: str) -> None:
        """All pages of a cache namespace were dropped: what was promised lies among them."""
        for instance in self.instances:
            if instance.namespace == name:
                self.queries.revoke_leases(instance)
                self.events.cleared(instance)

    # -------------------------------------------------------------------------------------------- sessions

    def _stream_ended(self, session: Session) -> None:
        self.queries.end_session(session)
        self.restores.end_stream(session)
        self.saves.end_stream(session)
        self.membership.end_stream(session)
        for instance in self.instances:
            self.events.follow(instance)

    def _session_closed(self, session: Session) -> None:
        self.saves.end_copies(session)
        self.restores.end_copies(session)
        self.instances.drop_unused()
        self._schedule_upkeep()

    # ---------------------------------------------------------------------------------------------- upkeep

    def _schedule_upkeep(self, seconds: float = _UPKEEP_S) -> None:
        """Look after the store soon: something was dropped, or what it could not move may be free now."""
        if self._upkeep_timer is None:
            self._upkeep_timer = self.loop.call_later(seconds, self._upkeep_due)

    def _upkeep_due(self) -> None:
        self._upkeep_timer = None
        self._upkeep()

    def _upkeep(self) -> None:
        """Carry on with what the store does in small steps."""
        again = self.cache.reclaim_step()
        self.device.tell_retired(self.server.sessions)
        self.membership.storage_changed()
        if again:
            self._schedule_upkeep(0.0)

    # ----------------------------------------------------------------------------------------------- drain

    @property
    def memory_problem(self) -> str:
        """Why memory cannot be taken for pages of GPUs, for people; "" when it can."""
        return "" if self._pinned is None else self._pinned.problem

    @property
    def _copies(self) -> int:
        return len(self.saves) + len(self.restores) + self.restores.waiting

    def _begin_drain(self) -> None:
        if self.draining:
            return
        logger.info("draining", extra={"saves": len(self.saves), "restores": len(self.restores)})
        self.draining = True
        self.server.draining = True
        self.saves.draining = True
        self.queries.drain()
        self.loop.call_later(self.config.drain_timeout_ms / 1000, self._give_up_draining)

    def _give_up_draining(self) -> None:
        self._deadline_passed = True

    def _close(self) -> bool:
        left = self._copies
        if left:
            logger.error(
                "stopping with copies in flight: their engines did not report in time",
                extra={
                    "saves": len(self.saves),
                    "restores": len(self.restores),
                    "waited_ms": self.config.drain_timeout_ms,
                },
            )
        self.server.close()
        self.watchdog.close()
        if self.cluster is not None:
            self.cluster.stop()
        rest = {name: value for name, value in self.oracle().items() if value}
        if rest:
            logger.error("the drain left something over; please report it", extra={"left": rest})
        else:
            logger.info("drained: nothing is reserved, in flight, pinned or queued")
        if self._metrics is not None:
            self._metrics.close()
        self.device.shut_down()
        self.cache.close()
        self.loop.close()
        return not left and not rest

    def oracle(self) -> dict[str, int]:
        """Everything that is zero when no work is outstanding. On the owner thread only."""
        queries = self.queries
        return {
            "query_reserved_bytes": queries.budget.reserved,
            **{f"query_reserved_bytes_{phase.label}": queries.budget.by_phase[phase] for phase in Phase},
            "queries_outstanding": queries.outstanding,
            "queries_for_place": queries.unadmitted,
            "queries_for_bytes": queries.waiting_for_bytes,
            "leases": len(queries.leases),
            "leases_live": queries.leases.live,
            "pinned_for_load_pages": queries.leases.pinned_pages,
            "pinned_for_load_bytes": queries.leases.pinned_bytes,
            "saves": len(self.saves),
            "save_inflight_bytes": self.saves.inflight_bytes,
            "restores": len(self.restores),
            "restores_waiting": self.restores.waiting,
            "restore_inflight_bytes": self.restores.inflight_bytes,
            "publish_stalled": self.watchdog.stalled,
        }


def _check_administrator(session: Session) -> None:
    if not session.administrator:
        raise Refused(
            ErrorKind.DENIED,
            f"forbidden: user {session.peer.uid} may not administrate this agent, only its own user and root; in a "
            "cluster only processes of its own pod (`kubectl exec`)",
        )


def _cluster(agent: Agent) -> Cluster | None:
    """The agent's side of a cluster; what it needs is imported only there."""
    if agent.config.cluster is None:
        return None
    from orbitkv_agent.cluster.cluster import Cluster

    return Cluster(agent, agent.config.cluster)


def _tune_interpreter() -> None:
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    # What is there now stays; later objects are few and young. Walking over the older ones takes milliseconds, and no
    # cycles are made that only that could free.
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, _NEVER, _NEVER)


def _raise_descriptor_limit() -> None:
    """A session takes up to ten descriptors; the usual soft limit of 1024 is for programs that use select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # where it may not be raised, fewer sessions find room
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
