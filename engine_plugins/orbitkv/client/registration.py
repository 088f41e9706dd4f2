"""Engine memory that is registered with the agent."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from orbitkv.protocol.messages import GroupGeometry

from .allocations import HostAllocation
from .copies import plan_pages
from .gpu import EngineGpu
from .layout import GroupLayout


class GpuRegistration:
    """Engine memory that the agent knows. Keeps the exporting objects alive until it is unregistered and drained.

    Attributes:
        id: the agent's number for it.
        page_bytes: unpadded page size of each group, in bytes.
        layers: number of layers, of the group that has most.
        proof_required: nothing hits until `report_proof` said that the layout is right.
        retired: it accepts nothing new.
    """

    def __init__(
        self,
        number: int,
        client: object,
        groups: Sequence[GroupGeometry],
        allocations: Sequence[HostAllocation],
        *,
        proof_required: bool,
        gpu: EngineGpu | None = None,
    ) -> None:
        self.gpu = gpu
        self.id = number
        self.client = client
        self.proof_required = proof_required
        self.retired = False
        self._allocations = tuple(allocations)
        addresses = [allocation.address for allocation in allocations]
        self.layouts = {geometry.group: GroupLayout(geometry, addresses) for geometry in groups}
        self.page_bytes = [layout.page_bytes for layout in self.layouts.values()]
        self.layers = max((layout.size.size for layout in self.layouts.values()), default=0)

    def image(self, group: int, block: int) -> npt.NDArray[np.uint8]:
        """Return the page image of one block, gathered as a save would: (page_bytes,) uint8.

        Raises:
            OrbitKVError: INVALID, no such block.
        """
        layout = self.layouts[group]
        image = np.empty(layout.page_bytes, np.uint8)
        plan = plan_pages(layout, np.array([block], np.int64), np.array([image.ctypes.data], np.int64), to_engine=False)
        if self.gpu is None:
            plan.run()
        else:
            for piece in zip(plan.destinations.tolist(), plan.sources.tolist(), plan.sizes.tolist(), strict=True):
                self.gpu.read(*piece)
        return image
