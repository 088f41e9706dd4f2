"""Follows an engine's KV cache events with vLLM's own event types. Runs in the engine's process, beside the engine."""

from collections import defaultdict
from typing import Any

QUIET_MS = 200
"""The publisher's thread has sent all it has when nothing came for this long. On a busy machine it may still be about
to: who waits for something asks again."""


class Subscriber:
    """Hears every event from its construction on, and keeps what a cache-aware router would take to be cached."""

    def __init__(self, endpoint: str) -> None:
        import msgspec
        import zmq
        from vllm.distributed.kv_events import KVEventBatch

        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(endpoint)
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self._hashes: dict[str, set[Any]] = defaultdict(set)
        self._next: int | None = None

    def cached(self) -> dict[str, list[str]]:
        """Takes in what has come and returns the hashes by medium: the last 8 bytes, in hex, which is all vLLM sends.

        Raises ValueError if a batch was missed.
        """
        while self._socket.poll(QUIET_MS):
            _, number, payload = self._socket.recv_multipart()
            self._take(int.from_bytes(number, "big"), self._decoder.decode(payload))
        return {medium: sorted(f"{number:016x}" for number in hashes) for medium, hashes in self._hashes.items()}

    def _take(self, number: int, batch: Any) -> None:
        if self._next is not None and number != self._next:
            raise ValueError(f"event batch {number} came where {self._next} was expected")
        self._next = number + 1
        for event in batch.events:
            kind = type(event).__name__
            if kind == "BlockStored":
                self._hashes[event.medium or "GPU"].update(event.block_hashes)
            elif kind == "BlockRemoved":
                self._hashes[event.medium or "GPU"].difference_update(event.block_hashes)
            else:  # all cleared: vLLM's block pool says so of its own cache, when that is reset
                self._hashes["GPU"].clear()
