"""CUDA mode: engine memory is imported by handle, and the agent copies between it and pinned pages."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from orbitkv.cuda import Driver
from orbitkv.protocol.errors import ErrorKind
from orbitkv.protocol.messages import MapArenas, Register, RetiredArenas, SyncArenas
from orbitkv_agent.devices.base import PROOF_BYTES, CopyPart, Progress
from orbitkv_agent.devices.cuda.geometry import GroupPlaces, group_places
from orbitkv_agent.devices.cuda.gpu import Gpu, Imported
from orbitkv_agent.devices.cuda.lanes import CopyJob
from orbitkv_agent.devices.cuda.nvml import device_count
from orbitkv_agent.devices.cuda.pinned import LARGEST_ARENA, PinnedArenas
from orbitkv_agent.devices.cuda.plans import PagesOfGroup
from orbitkv_agent.sessions.errors import Refused, unsupported
from orbitkv_agent.store.arenas import ArenaPool, default_arena_bytes

if TYPE_CHECKING:
    from orbitkv_agent.config import AgentConfig
    from orbitkv_agent.sessions.instances import Registration
    from orbitkv_agent.sessions.session import Session

logger = logging.getLogger(__name__)

SMALL_SEGMENT: Final = 32 << 10
"""Segments below this are copied at a fraction of the speed: 18 GB/s at 16 KiB where 54 GB/s are possible."""


def exporter(session: Session) -> Hashable:
    """Return what tells the process apart that a session's handles are of.

    Handles of two processes may be equal, and so may be their numbers, which are 0 for other containers. Where the
    kernel does not tell them apart, no mapping is shared between sessions.
    """
    return session if session.peer.process is None else session.peer.process


@dataclass(frozen=True, eq=False)
class DeviceMemory:
    """The imported memory of one registration."""

    gpu: Gpu
    imported: Imported
    groups: dict[int, GroupPlaces]


class CudaDevice:
    """All GPUs that the agent sees (`Device` and `Copier`). Used by the owner thread only.

    Args:
        driver: the CUDA driver.
        post: has a callback called on the owner thread.
        lost: called when a GPU fails so that it cannot be known whether copies have ended.

    Attributes:
        count: GPUs that the agent sees.
    """

    name: Final = "cuda"

    def __init__(self, driver: Driver, post: Callable[[Callable[[], None]], None], lost: Callable[[str], None]) -> None:
        self._driver = driver
        self._post = post
        self._lost = lost
        self._infos = {info.uuid: info for info in driver.gpus()}
        counted = device_count()
        self.count = len(self._infos) if counted is None else counted
        self._gpus: dict[str, Gpu] = {}
        self._entered: Gpu | None = None  # the one that is current to the owner thread
        self._arenas: ArenaPool | None = None
        self.pinned = PinnedArenas(driver, self.any_context)
        self.copy_plans: dict[str, str] = {}
        if not driver.batches:
            logger.warning(
                "this CUDA driver is older than 12.8: copies are submitted one by one, at about nine tenths of the "
                "speed for whole pages and a fifth for small segments"
            )
        if not driver.words:
            logger.warning(
                "a GPU or its driver writes no words on streams: the agent tells the ends of copies itself, "
                "about 0.1 ms later"
            )

    @staticmethod
    def arena_bytes(config: AgentConfig) -> int:
        """Size of arenas: as configured, otherwise what can be pinned by one call without a long wait for others."""
        return config.arena_bytes or min(default_arena_bytes(config.pool_bytes), LARGEST_ARENA)

    def use(self, arenas: ArenaPool) -> None:
        """The arenas that pages lie in."""
        self._arenas = arenas

    @property
    def copier(self) -> CudaDevice:
        """See `Device`."""
        return self

    @property
    def visible(self) -> Sequence[str]:
        """See `Device`."""
        return list(self._infos)

    @property
    def max_page_bytes(self) -> int:
        """See `Device`."""
        assert self._arenas is not None
        return self._arenas.arena_bytes

    @property
    def context_bytes(self) -> dict[str, int]:
        """See `Device`."""
        return {uuid: gpu.context_bytes for uuid, gpu in self._gpus.items() if gpu.context}

    def any_context(self) -> int:
        """A context that is there, 0 when there is none yet. For any thread."""
        return next((gpu.context for gpu in list(self._gpus.values()) if gpu.context), 0)

    # ------------------------------------------------------------------------------------------- registrations

    def open(self, session: Session, message: Register, opened: Callable[[object | Refused], None]) -> None:
        """See `Device`."""
        gpu = self._gpus.get(message.device)
        if gpu is None:
            gpu = self._gpus[message.device] = Gpu(self._driver, self._infos[message.device], self._post, self._lost)

        def done(result: Imported | str) -> None:
            if isinstance(result, str):
                opened(Refused(ErrorKind.UNSUPPORTED, result))
                return
            addresses = dict(enumerate(result.addresses))
            groups = {group.group: group_places(group, addresses) for group in message.groups}
            self._describe(message, groups)
            opened(DeviceMemory(gpu, result, groups))

        gpu.open(
            exporter(session),
            [allocation.handle for allocation in message.allocations],
            [allocation.size for allocation in message.allocations],
            session.records,
            done,
        )

    def places_to_prove(self, message: Register) -> Sequence[tuple[int, int]]:
        """See `Device`. The first block of a layer in each allocation: engines keep it empty."""
        layers = [layer for group in message.groups for layer in group.layers]
        places: dict[int, int] = {}
        for layer in layers:
            if layer.block_bytes >= PROOF_BYTES:
                places.setdefault(layer.allocation, layer.offset)
        missing = {layer.allocation for layer in layers} - places.keys()
        if missing:
            raise unsupported(
                f"allocations[{min(missing)}]: none of its layers has {PROOF_BYTES} bytes in a block, as many as it "
                "takes to show whose memory it is"
            )
        return list(places.items())

    def prove(
        self, memory: object, places: Sequence[tuple[int, int]], values: Sequence[bytes], proven: Callable[[bool], None]
    ) -> None:
        """See `Device`."""
        assert isinstance(memory, DeviceMemory)
        addresses = [memory.imported.addresses[allocation] + offset for allocation, offset in places]
        memory.gpu.compare(addresses, values, proven)

    def close(self, memory: object) -> None:
        """See `Device`."""
        assert isinstance(memory, DeviceMemory)
        memory.gpu.close(memory.imported)

    def _describe(self, message: Register, groups: dict[int, GroupPlaces]) -> None:
        whole = all(places.whole for places in groups.values())
        smallest = min(int(places.size.min()) for places in groups.values())
        way = "batch" if self._driver.batches else "single"
        self.copy_plans[message.device] = f"{way}-pages" if whole else f"{way}-segments"
        logger.info(
            "instance %s: pages are copied as %s",
            message.instance,
            "one piece each" if whole else f"segments of {smallest} bytes or more",
        )
        if smallest < SMALL_SEGMENT:
            logger.warning(
                "instance %s: its pages lie in pieces of %d bytes, which are copied slowly; a layout in which a page is"
                " one piece (orbitkv.kv_layout=auto), or larger blocks (--block-size), avoid that",
                message.instance,
                smallest,
            )

    # -------------------------------------------------------------------------------------------------- copies

    def start(
        self,
        registration: Registration,
        parts: Sequence[CopyPart],
        ended: Callable[[str], None],
        *,
        to_engine: bool,
        landed: Callable[[], None] | None = None,
        progress: Progress | None = None,
        layered: bool = False,
    ) -> CopyJob:
        """See `Copier`."""
        memory = registration.memory
        assert isinstance(memory, DeviceMemory)
        gpu = memory.gpu
        job = CopyJob(
            [self._pages(memory, part) for part in parts],
            ended,
            landed,
            progress,
            words=memory.imported.pinned,
            layered=layered,
        )
        lane = gpu.saves if not to_engine else gpu.layered if layered else gpu.restores
        assert lane is not None
        # Layer by layer there is much to plan, and a driver that pins or maps memory might make this thread wait.
        at_once = not layered and not self._driver.busy
        if at_once and self._entered is not gpu:
            self._driver.set_current(gpu.context)
            self._entered = gpu
        lane.submit(job, at_once=at_once)
        return job

    def lanes_wait(self) -> bool:
        """Whether a lane's thread will need the interpreter, to hand more over before its GPU has nothing to do."""
        return any(lane.waits for gpu in self._gpus.values() for lane in gpu.lanes)

    def lane(self, registration: Registration) -> object:
        """See `Copier`."""
        return registration.device

    def _pages(self, memory: DeviceMemory, part: CopyPart) -> PagesOfGroup:
        offsets = part.offsets.view(np.int64)
        begins = self.pinned.addresses[part.arenas]
        assert np.count_nonzero(begins) == begins.size, "pages lie in arenas that are not pinned"
        return PagesOfGroup(memory.groups[part.group], part.blocks.astype(np.int64), begins + offsets, offsets == 0)

    # -------------------------------------------------------------------------------------------------- arenas

    def map_arenas(self, session: Session, sequence: int, message: MapArenas) -> None:
        """See `Device`."""
        raise unsupported("arenas: this agent copies by itself and shares no memory with engines")

    def sync_arenas(self, session: Session, message: SyncArenas) -> RetiredArenas:
        """See `Device`."""
        return RetiredArenas([])

    def tell_retired(self, sessions: Iterable[Session]) -> None:
        """See `Device`."""

    def shut_down(self) -> None:
        """See `Device`."""
        for gpu in self._gpus.values():
            gpu.shut_down()
