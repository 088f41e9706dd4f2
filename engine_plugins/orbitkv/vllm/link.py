"""The scheduler's link to the agent: the client in use, whether it may hit, and how long it may be waited for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orbitkv.client import CacheManagerClient, ErrorKind, Instance, InstanceState, OrbitKVError
from orbitkv.config import PluginConfig
from orbitkv.protocol.messages import Events

from .allowance import Allowance
from .attachment import Attachment, connect
from .injected import engine_name

if TYPE_CHECKING:
    from .events import CacheEvents

logger = logging.getLogger("vllm.orbitkv")


@dataclass(frozen=True)
class SchedulerAttachment:
    """A client that joined the instance as its scheduler.

    Attributes:
        resets: how many of the external resets that were asked for have been carried out.
    """

    client: CacheManagerClient
    config: PluginConfig
    state: InstanceState
    resets: int

    @property
    def boot_id(self) -> str:
        """The agent's boot."""
        return self.client.boot_id

    def alive(self) -> bool:
        """Whether the agent's process exists."""
        return self.client.lost is None and self.client.peer_alive()

    def close(self) -> None:
        """Leave the agent."""
        self.client.close()


class SchedulerLink:
    """Used by the scheduler's thread, except for `_attach`.

    Args:
        config: the plugin's settings.
        instance: this engine incarnation.
        events: told what left the store; None when the engine publishes no events.
        on_lost: called when the client is let go: its queries and leases are gone.

    Attributes:
        config: the settings in force, with those of the cache namespace.
        client: the client to use, None while there is no agent.
        serving: a lookup may hit.
        allowance: the step's time, and the breaker.
    """

    def __init__(
        self, config: PluginConfig, instance: Instance, events: CacheEvents | None, on_lost: Callable[[], None]
    ) -> None:
        self.config = config
        self.client: CacheManagerClient | None = None
        self.serving = False
        self.allowance = Allowance()
        self._base_config = config
        self._instance = instance
        self._events = events
        self._on_lost = on_lost
        self._adopted: SchedulerAttachment | None = None
        self._attachment: Attachment[SchedulerAttachment] = Attachment("scheduler", self._attach)
        self._state_known = False
        # Written by the scheduler's thread while it has a client, by the attachment's while it makes one.
        self._key_generation = ""
        self._resets_wanted = 0  # scheduler's thread
        self._resets_done = 0  # attachment's thread
        self._said: set[str] = set()

    def start(self) -> None:
        """Attach, in a thread of its own.

        Raises:
            RuntimeError: there is no agent, and `orbitkv.on_missing` is "fail".
        """
        self._attachment.start()
        self._attachment.wait_first(self._base_config.timeout_ms / 1000 + 1)
        error = self._attachment.last_error
        if error is not None and self._base_config.on_missing == "fail":
            self._attachment.stop()
            raise RuntimeError(f"{error}. (orbitkv.on_missing=run lets the engine start without the agent.)")

    def shutdown(self) -> None:
        """Leave the agent."""
        if self._adopted is not None:
            self._drop()
        self._attachment.stop()

    def begin_step(self) -> None:
        """A step of the scheduler begins: see what is attached, and what changed there."""
        allowance = self.allowance
        allowance.begin()
        if self._adopted is not self._attachment.published:
            if self._adopted is not None:
                self._drop()
            published = self._attachment.take()
            if published is not None:
                self._adopt(published)
        client = self.client
        if client is None:
            return
        if client.lost is not None:
            self._lose(str(client.lost))
            return
        try:
            if allowance.probe_due():
                allowance.call(lambda timeout_ms: client.health(timeout_ms=timeout_ms))
                allowance.close()
                logger.info("OrbitKV: the agent answers again")
            if allowance.open:
                return
            if not self._state_known or client.instance_changed():
                self._state_known = False
                self._take_state(
                    allowance.call(
                        lambda timeout_ms: client.attach_instance(
                            self._instance, events=self._events is not None, timeout_ms=timeout_ms
                        )
                    )
                )
            if self._events is not None:
                news = allowance.call(lambda timeout_ms: client.take_events(self._instance, timeout_ms))
                if news is not None:
                    self._take_news(news, self._events)
        except OrbitKVError as error:
            self.failed(error)

    def failed(self, error: OrbitKVError) -> None:
        """A call failed: whoever made it goes on as if nothing were cached."""
        if error.kind is ErrorKind.TIMEOUT:
            if self.allowance.open:
                self._say_once(
                    "slow", "OrbitKV: the agent does not answer within a step; requests compute until it does"
                )
        elif error.kind in (ErrorKind.UNAVAILABLE, ErrorKind.CLOSED):
            self._lose(str(error))
        elif error.kind is not ErrorKind.BUSY:
            self._say_once(f"refused-{error.kind}", f"OrbitKV: the agent refused a call: {error}")

    def reset(self) -> bool:
        """Forget what was stored for this engine; false while the agent still has work of it.

        Without an answer nothing is asked any more before the next attachment, which resets first.
        """
        self.begin_step()
        client = self.client
        try:
            if client is None or self.allowance.open:
                self._reset_later()
            else:
                self._key_generation = self.allowance.call(
                    lambda timeout_ms: client.reset_instance(self._instance, timeout_ms=timeout_ms)
                )
        except OrbitKVError as error:
            if error.kind is ErrorKind.BUSY:
                return False
            self._reset_later()
        finally:
            self.allowance.end()
        if self._events is not None:
            self._events.cleared()
        return True

    # --- the attachment's thread

    def _attach(self) -> SchedulerAttachment:
        """Join the instance, and carry out an external reset that is still owed."""
        client = connect(self._base_config, f"vLLM scheduler {self._instance}", self._base_config.timeout_ms)
        try:
            config = self._base_config.with_namespace_options(client.options)
            self._introduce(client)
            state = client.attach_instance(
                self._instance, key_generation=self._key_generation, events=self._events is not None
            )
            wanted = self._resets_wanted
            if wanted > self._resets_done:
                self._key_generation = client.reset_instance(self._instance)
                self._resets_done = wanted
            return SchedulerAttachment(client, config, state, self._resets_done)
        except BaseException:
            client.close()
            raise

    @staticmethod
    def _introduce(client: CacheManagerClient) -> None:
        """Say which engine this is. An agent of an earlier release does not take it, and needs not."""
        try:
            client.report_engine(engine_name())
        except OrbitKVError as error:
            if error.kind is not ErrorKind.INVALID:
                raise

    # --- internals

    def _adopt(self, published: SchedulerAttachment) -> None:
        if published.resets < self._resets_wanted:
            self._attachment.renew(published, "an external reset has to be carried out first")
            self._attachment.give_back(published)
            return
        self._adopted, self.client = published, published.client
        self.config = published.config
        self.allowance.close()
        self._take_state(published.state)
        self._state_known = False

    def _take_state(self, state: InstanceState) -> None:
        self._state_known = True
        if self.serving != state.serving:
            logger.info("OrbitKV: %s", "serving" if state.serving else f"not serving: {state.missing or state.off}")
        self.serving = state.serving
        if state.off:
            self._say_once("off", f"OrbitKV is off for this engine, which serves on without it: {state.off}")

    @staticmethod
    def _take_news(news: Events, events: CacheEvents) -> None:
        if news.lost:
            events.cleared()
            return
        for part in news.removed:
            size = part.hash_bytes
            events.removed([part.blob[i : i + size] for i in range(0, len(part.blob), size)])

    def _reset_later(self) -> None:
        self._resets_wanted += 1
        if self._adopted is not None:
            self._lose("an external reset could not be carried out at once")

    def _lose(self, why: str) -> None:
        """The client is of no more use: let go of it and have another one made."""
        assert self._adopted is not None
        self._attachment.renew(self._adopted, why)
        self._drop()

    def _drop(self) -> None:
        adopted = self._adopted
        assert adopted is not None
        self._adopted = self.client = None
        self.serving = False
        self._on_lost()
        if self._events is not None:
            self._events.cleared()
        self._attachment.give_back(adopted)

    def _say_once(self, key: str, text: str) -> None:
        if key not in self._said:
            self._said.add(key)
            logger.warning("%s", text)
