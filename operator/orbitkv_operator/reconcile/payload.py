"""Whether nodes can pull the payload that engines' pods get: agents' pods pull it ahead, in a container of their own.

While every node that tried has failed, the webhook injects nothing: an engine must not wait for an image that never
comes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from orbitkv_operator.cluster.api import Manifest
from orbitkv_operator.health import IMAGE_PROBLEMS
from orbitkv_operator.names import PAYLOAD_CONTAINER

_LONGEST: Final = 300


@dataclass(frozen=True)
class Pulls:
    """How nodes fared with one image. Those that have not tried yet count in neither."""

    had: int = 0
    failed: int = 0
    last_words: str = ""
    """Of a node that failed."""


def pulls(pods: Iterable[Manifest], image: str) -> Pulls:
    """Return what the pods of agents show of pulling `image`; those that pull another one do not count."""
    had, failed, words = 0, 0, ""
    for pod in pods:
        specs = [it for it in pod["spec"]["containers"] if it["name"] == PAYLOAD_CONTAINER]
        if not specs or specs[0]["image"] != image:
            continue
        statuses: Iterable[dict[str, Any]] = (pod.get("status") or {}).get("containerStatuses") or ()
        for status in statuses:
            if status["name"] != PAYLOAD_CONTAINER:
                continue
            waiting = (status.get("state") or {}).get("waiting") or {}
            if status.get("imageID"):
                had += 1
            elif waiting.get("reason") in IMAGE_PROBLEMS:
                failed += 1
                words = str(waiting.get("message") or waiting["reason"])
    return Pulls(had, failed, " ".join(words.split())[:_LONGEST])


def with_image(pods: Iterable[Manifest], image: str) -> list[Manifest]:
    """Return what to apply to pods of agents that pull another image than `image`: the agents themselves run on."""
    return [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {key: pod["metadata"][key] for key in ("name", "namespace", "uid")},
            "spec": {"containers": [{"name": PAYLOAD_CONTAINER, "image": image}]},
        }
        for pod in pods
        if image
        and not pod["metadata"].get("deletionTimestamp")
        and any(it["name"] == PAYLOAD_CONTAINER and it["image"] != image for it in pod["spec"]["containers"])
    ]


@dataclass
class PayloadPulls:
    """What is known of all pools. The lock guards `_pools`; nothing waits under it."""

    changed: Callable[[], None] = lambda: None
    """Called when a pool fares otherwise than before."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _pools: dict[str, Pulls] = field(default_factory=dict)

    def note(self, pool: str, found: Pulls) -> None:
        """Keep what the agents of a pool show."""
        with self._lock:
            before = self._pools.get(pool, Pulls())
            self._pools[pool] = found
        if (bool(before.had), bool(before.failed)) != (bool(found.had), bool(found.failed)):
            self.changed()

    def forget(self, pool: str) -> None:
        """A pool is gone."""
        with self._lock:
            known = self._pools.pop(pool, None)
        if known is not None:
            self.changed()

    def failing(self, image: str) -> str:
        """Return why no node can pull the image, in words for a person; nothing if one can, or none has tried."""
        with self._lock:
            every = list(self._pools.values())
        failed = sum(each.failed for each in every)
        if not failed or any(each.had for each in every):
            return ""
        words = next(each.last_words for each in every if each.failed)
        return (
            f"No node could pull the payload's image {image}, so the pod would not start with it. One says: {words}. "
            "Check injection.payload of the chart; pods that are made once a node has the image are injected."
        )
