"""Reports to the operator: a thread that pushes the agent's state, and never makes anybody wait."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Final

import grpc

from orbitkv_agent.cluster.settings import ClusterSettings
from orbitkv_crds.agent_api.reports_pb2 import Ack, Report
from orbitkv_crds.agent_api.reports_pb2_grpc import ReportsStub

logger = logging.getLogger(__name__)

PUSH_S: Final = 5.0
"""A push takes no longer."""
OWNER_S: Final = 5.0
"""Nor does the owner thread to make a report."""
_LONGEST_S: Final = 120.0
BUSY_S: Final = 5.0
"""Where agents begin in a crowd the operator sends some away: they come again after about so long."""
_OFTEN: Final = 5
"""Times in a row after which being sent away is a failure like any other."""


class Reporter:
    """Pushes a report at once, then every interval, give or take a fifth, and when `soon` says so; less often while
    nobody takes it.

    The connection is kept from push to push, as opening one costs the operator more than a report, and is opened anew
    when it fails or the certificate authority on disk is another one; an operator that is too busy closes none. The
    token is read for each push.

    Args:
        settings: where to, and how often.
        make: makes the report; called on the owner thread.
        post: hands a callable to the owner thread.

    Attributes:
        problem: why the last push failed, for people; "" when it did not.
    """

    def __init__(
        self, settings: ClusterSettings, make: Callable[[], Report], post: Callable[[Callable[[], None]], None]
    ) -> None:
        self.problem = ""
        self._settings = settings
        self._make = make
        self._post = post
        self._interval_s = settings.reports_interval_seconds
        self._failures = 0
        self._sent_away = 0
        """Pushes in a row that the operator was too busy for."""
        self._wake = threading.Event()
        self._stopping = False
        # Set by the thread, closed by it and by whoever stops it: that ends a push.
        self._channel: grpc.Channel | None = None
        self._authority = b""  # that the channel trusts
        self._thread = threading.Thread(target=self._run, name="orbitkv-reports", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def soon(self) -> None:
        """Push now rather than at the end of the interval: something changed that people wait for."""
        self._wake.set()

    def stop(self) -> None:
        """Tell the thread to end."""
        self._stopping = True
        self._wake.set()
        channel = self._channel
        if channel is not None:
            channel.close()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread's end."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    # ------------------------------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while not self._stopping:
            self._wake.clear()
            try:
                self._push()
            except (grpc.RpcError, OSError, TimeoutError) as error:
                self._sent_away = self._sent_away + 1 if _is_busy(error) else 0
                if not 0 < self._sent_away <= _OFTEN:
                    self._disconnect()
                    self._failed(_words(error))
            except Exception:
                if self._stopping:
                    break  # its channel was closed under it
                logger.exception("internal error in a report; please report it")
                self._disconnect()
                self._failed("internal error")
            else:
                if self._failures:
                    logger.info("the operator takes reports again")
                self._failures, self._sent_away, self.problem = 0, 0, ""
            self._wait()
        self._disconnect()

    def _wait(self) -> None:
        interval_s = self._interval_s
        if self._failures:  # an operator that has begun anew is to hear of everybody, however seldom it was told before
            interval_s = min(interval_s, self._settings.reports_interval_seconds)
        wait_s = interval_s * random.uniform(0.8, 1.2)
        if 0 < self._sent_away <= _OFTEN:
            wait_s = min(wait_s, BUSY_S * random.uniform(0.5, 1.5))
        elif self._failures > 1:
            wait_s = min(wait_s * 2.0 ** min(self._failures - 1, 8), _LONGEST_S)
            self._wake.clear()  # what changes does not matter to who does not listen
        if not self._stopping:
            self._wake.wait(wait_s)

    def _failed(self, why: str) -> None:
        self._failures += 1
        problem = f"the operator at {self._settings.reports_address} takes no reports: {why}"
        if problem != self.problem and self._failures > 1:  # a leader that changes is no news
            logger.warning("%s; the cache goes on, and reports are tried again", problem)
            self.problem = problem

    def _push(self) -> None:
        answer: Future[Report] = Future()

        def on_owner() -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(self._make())
                except Exception as error:
                    answer.set_exception(error)

        self._post(on_owner)
        try:
            report = answer.result(OWNER_S)
        finally:
            answer.cancel()
        settings = self._settings
        token = Path(settings.reports_token_path).read_text(encoding="ascii").strip()
        authority = Path(settings.reports_ca_path).read_bytes()
        kept = self._channel is not None and authority == self._authority
        channel = self._channel if kept else None
        try:
            ack = self._send(report, token, channel or self._connect(authority))
        except grpc.RpcError as error:
            if not kept or self._stopping or not _may_be_the_connections(error):
                raise
            # whoever took the last report may have gone without a word
            ack = self._send(report, token, self._connect(authority))
        if ack is not None and ack.interval_seconds:
            self._interval_s = float(min(max(ack.interval_seconds, 1), 3600))

    def _send(self, report: Report, token: str, channel: grpc.Channel) -> Ack | None:
        """Return the answer; None when the thread is to end."""
        if self._stopping:
            return None
        return ReportsStub(channel).Push(
            report, timeout=PUSH_S, metadata=(("authorization", f"Bearer {token}"),), wait_for_ready=False
        )

    def _connect(self, authority: bytes) -> grpc.Channel:
        """Return a new channel, in the place of the present one."""
        self._disconnect()
        options = [
            ("grpc.ssl_target_name_override", self._settings.reports_server_name),
            ("grpc.enable_retries", 0),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        credentials = grpc.ssl_channel_credentials(authority)
        self._authority = authority
        self._channel = grpc.secure_channel(self._settings.reports_address, credentials, options)
        return self._channel

    def _disconnect(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()


def _may_be_the_connections(error: grpc.RpcError) -> bool:
    """Whether a push may have failed only because its connection leads nowhere any more."""
    return isinstance(error, grpc.Call) and error.code() in (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    )


def _is_busy(error: BaseException) -> bool:
    """Whether the operator has too many reports at once."""
    return isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def _words(error: BaseException) -> str:
    if isinstance(error, grpc.Call):
        return f"{error.code().name.lower().replace('_', ' ')}: {(error.details() or '')[:200]}"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return "the agent's main thread did not answer in time" if isinstance(error, TimeoutError) else type(error).__name__
