"""Connectors for tests of restores that land while their request is computed: all of them do, however small and fast
they are, and of one a layer does not come."""

import time
from collections.abc import Iterator
from typing import Any

from orbitkv.client import CacheManagerClient, RestoreStatus, transfers
from orbitkv.client.copies import CopyPlan, plan_pages
from orbitkv.vllm import worker
from orbitkv.vllm.connector import OrbitKVConnector
from orbitkv.vllm.restores import Restores, Running

COPY_S = 0.02
"""What a copy takes where the engine's process copies: longer than its request takes to begin."""

_take_landing, _wait_layer = Restores.take_landing, CacheManagerClient.wait_layer


class _SlowPlan(CopyPlan):
    def chunks(self) -> Iterator[int]:
        time.sleep(COPY_S)
        yield from super().chunks()


def plan_slowly(*args: Any, layer_order: bool = False, **options: Any) -> CopyPlan:
    """A plan whose copy takes its time, if it is made layer by layer."""
    plan = plan_pages(*args, layer_order=layer_order, **options)
    return _SlowPlan(plan.sources, plan.destinations, plan.sizes) if layer_order else plan


def take_landing(restores: Restores, request_id: str) -> Running | None:
    """Also one that a GPU copied before anybody could look."""
    running = _take_landing(restores, request_id)
    one = restores._running.get(request_id)
    if running is None and one is not None and one.by_layer and one.status is RestoreStatus.DONE:
        return restores._running.pop(request_id)
    return running


class LandingConnector(OrbitKVConnector):
    """OrbitKV, for which each restore of a lone request lands."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Make it so, in this process."""
        for owner, name, value in (
            (worker, "BY_LAYER_BYTES", 0),
            (transfers, "plan_pages", plan_slowly),
            (Restores, "take_landing", take_landing),
        ):
            setattr(owner, name, value)
        super().register_kv_caches(kv_caches)


class LosingConnector(LandingConnector):
    """The same; of the first of them the second layer is not there when it is read."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Lose it."""
        lost: list[int] = []

        def lose(handle: Any, layer: int, timeout: float | None = None) -> bool:
            in_place = _wait_layer(handle, layer, timeout)
            if layer == 1 and not lost:
                lost.append(layer)
                return False
            return in_place

        CacheManagerClient.wait_layer = staticmethod(lose)  # type: ignore[method-assign]
        super().register_kv_caches(kv_caches)
