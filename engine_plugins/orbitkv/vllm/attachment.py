"""Late and repeated attachment to the agent: one mechanism for the scheduler's half and the worker's.

A thread makes what is attached (a client, with whatever belongs to it), publishes it, watches whether the agent is
still there, and makes it again when it is not. The engine's own thread never waits for any of that: once a step it
compares what is published with what it uses, and gives back what it no longer uses.

    published   made and alive; None while there is no agent
    adopted     what the engine's thread uses; only that thread sets it, and the thread here never touches it

What is adopted is closed only after the engine's thread gave it back, so no call of the engine meets a closed client.
"""

from __future__ import annotations

import logging
import os
import queue
import random
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from orbitkv.client import CacheManagerClient, ErrorKind, OrbitKVError
from orbitkv.config import PluginConfig
from orbitkv.protocol.reasons import OffReason

logger = logging.getLogger("vllm.orbitkv")

FIRST_RETRY_S = 0.1
LAST_RETRY_S = 5.0
WATCH_S = 0.5
"""How often the agent's process is looked at."""


class Attached(Protocol):
    """What is attached: one boot of the agent."""

    @property
    def boot_id(self) -> str:
        """The agent's boot."""

    def alive(self) -> bool:
        """Whether the agent is still there; called on the attachment's thread."""

    def close(self) -> None:
        """Leave the agent; called on the attachment's thread, once."""


A = TypeVar("A", bound=Attached)


class Off(Exception):
    """This engine cannot use the cache at all; the message says why. It is not tried again.

    Args:
        message: what was found, and what can be done.
        reason: in one word.
    """

    def __init__(self, message: str, reason: OffReason = OffReason.PLUGIN_ERROR) -> None:
        super().__init__(message)
        self.reason = reason


class Attachment(Generic[A]):
    """Keeps `make()` made.

    Args:
        name: of the thread, and in the log.
        make: attaches; raises OrbitKVError (tried again) or Off (never again). Runs on the attachment's thread.
    """

    def __init__(self, name: str, make: Callable[[], A]) -> None:
        self.published: A | None = None
        self.off = ""
        """Why nothing will ever be attached, or ""."""
        self.last_error: OrbitKVError | None = None
        self._name = name
        self._make = make
        self._taken: A | None = None
        # Invariant: `published` is what was made last and is not known to be lost, and `_taken` is it if the engine's
        # thread has it. Both change under this lock only.
        self._lock = threading.Lock()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._tried = threading.Event()
        self._stopping = False
        self._retry_s = FIRST_RETRY_S
        self._said = ""
        self._thread = threading.Thread(target=self._run, name=f"orbitkv-{name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wait_first(self, timeout_s: float) -> bool:
        """Wait until the first attempt ended, well or not; return whether it did."""
        return self._tried.wait(timeout_s)

    def take(self) -> A | None:
        """The engine's thread takes what is published, and gives it back when it no longer uses it."""
        with self._lock:
            self._taken = self.published
            return self.published

    def give_back(self, attached: A) -> None:
        """The engine's thread no longer uses it: close it."""
        self._commands.put(lambda: self._close(attached))

    def renew(self, attached: A, why: str) -> None:
        """The engine's thread found that it is of no more use: attach again. The caller gives it back as well."""
        self._lose(attached, why)
        self._commands.put(lambda: None)

    def post(self, work: Callable[[], None]) -> None:
        """Run `work` on the attachment's thread, where waiting for the agent is allowed."""
        self._commands.put(work)

    def stop(self, timeout_s: float = 10.0) -> None:
        """Close what is published and end the thread. What was adopted must have been given back before."""
        self._stopping = True
        self._commands.put(lambda: None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    # --- the attachment's thread

    def _run(self) -> None:
        while not self._stopping:
            if self.published is None and not self.off:
                self._attempt()
            elif self.published is not None:
                self._watch(self.published)
            wait = None if self.off else (WATCH_S if self.published is not None else self._backoff())
            self._obey(wait)
        while self._obey(0):
            pass
        if self.published is not None:
            last, self.published = self.published, None
            self._close(last)

    def _obey(self, wait_s: float | None) -> bool:
        try:
            command = self._commands.get(timeout=wait_s) if wait_s != 0 else self._commands.get_nowait()
        except queue.Empty:
            return False
        try:
            command()
        except Exception:
            logger.exception("OrbitKV: a task of %s failed", self._name)
        return True

    def _attempt(self) -> None:
        try:
            made = self._make()
        except Off as reason:
            self.off = str(reason)
            logger.warning("OrbitKV is off for this engine, which serves on without it: %s", reason)
        except OrbitKVError as error:
            self.last_error = error
            if str(error) != self._said:
                self._said = str(error)
                logger.warning("OrbitKV is not attached (%s); the engine computes, and attaches when it can", error)
        except Exception as error:
            logger.exception("OrbitKV is off for this engine, which serves on without it: attaching failed")
            self.off = f"attaching failed: {error!r}"
        else:
            self.last_error, self._said, self._retry_s = None, "", FIRST_RETRY_S
            with self._lock:
                self.published = made
            logger.info("OrbitKV: %s is attached to agent boot %s", self._name, made.boot_id)
        self._tried.set()

    def _watch(self, attached: A) -> None:
        try:
            alive = attached.alive()
        except OrbitKVError:
            alive = False
        if not alive:
            self._lose(attached, "the agent ended")

    def _lose(self, attached: A, why: str) -> None:
        with self._lock:
            lost = self.published is attached
            unused = lost and self._taken is not attached
            if lost:
                self.published = None
        if unused:
            self._close(attached)
        if lost:
            logger.warning("OrbitKV: %s lost the agent (%s); the engine computes until it is back", self._name, why)

    def _close(self, attached: A) -> None:
        try:
            attached.close()
        except OrbitKVError as error:
            if error.kind not in (ErrorKind.UNAVAILABLE, ErrorKind.CLOSED):
                logger.warning("OrbitKV: leaving the agent: %s", error)

    def _backoff(self) -> float:
        delay = self._retry_s * random.uniform(0.8, 1.2)
        self._retry_s = min(self._retry_s * 2, LAST_RETRY_S)
        return delay


def connect(config: PluginConfig, name: str, timeout_ms: float) -> CacheManagerClient:
    """Make a client as the settings say.

    Raises:
        OrbitKVError: as `CacheManagerClient`; UNAVAILABLE also when the token cannot be read.
    """
    return CacheManagerClient(
        config.socket_path,
        cache_namespace=config.cache_namespace,
        token_path=config.token_path,
        name=f"{name} (pid {os.getpid()})",
        timeout_ms=timeout_ms,
    )
