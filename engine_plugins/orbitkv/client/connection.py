"""One connection to the agent: frames out, replies in, in the time the caller allows.

A connection is used by one thread, except for `send_only`, which any thread may call. It is never reopened: after an
error that breaks the stream it stays broken, and its owner makes a new one.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from orbitkv.client.user_namespace import user_without_number
from orbitkv.protocol import framing
from orbitkv.protocol.errors import ErrorKind, OrbitKVError
from orbitkv.protocol.messages import Refusal, Reply, Request
from orbitkv.protocol.shortcut import BEFORE, MOST_BYTES, REPLY, REQUEST, STORES_IN_ORDER, WATCHED, Shortcut

_TIMEVAL = struct.Struct("ll")
_CREDENTIALS = struct.Struct("iII")
_RECEIVE_BYTES = 1 << 16
_LARGEST_FRAME = framing.MAX_FRAME_BYTES + framing.HEADER.size
_BUSY_POLL_S = 200e-6 if len(os.sched_getaffinity(0)) > 1 else 0.0
"""Most replies come sooner, and being woken up for one takes a good part of that time."""
_IN_VAIN_COSTS = 8
"""Looking pays while fewer than one look in so many is in vain; more often others want the processors."""
_MOST_CREDIT = 4 * _IN_VAIN_COSTS
_SHORTEST_PAUSE_S = 5e-3
_LONGEST_PAUSE_S = 0.2
"""So long calls sleep at once then. The kernel lets a thread that slept go first when its reply is there; one that
spent its share on looking waits until another one's is spent, for milliseconds. What only passes by is worth a short
pause; where it happens again sooner than the last pause was long, the pause is doubled."""
_NEVER_WAIT = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_fork_count = 0


def _count_fork() -> None:
    global _fork_count  # noqa: PLW0603 - one number for the process, changed in a forked child only
    _fork_count += 1


os.register_at_fork(after_in_child=_count_fork)


class Connection:
    """A stream socket to the agent at `path`.

    Args:
        path: the agent's socket.
        server_uid: user that must own the agent's process, besides this process's own user and root.
        on_late_reply: called with a reply whose caller gave up waiting.

    Raises:
        OrbitKVError: UNAVAILABLE, no agent listens there; DENIED, somebody else's process does.
    """

    # Whether looking pays; one for all, because they share the processors. Times are of the performance counter.
    _credit = 0
    _crowded_until = 0.0
    _pause_s = _SHORTEST_PAUSE_S

    def __init__(
        self, path: str, *, server_uid: int | None, timeout_ms: int, on_late_reply: Callable[[Reply], None]
    ) -> None:
        self.path = path
        self._on_late_reply = on_late_reply
        self._fork_count = _fork_count
        self._sequences = itertools.count()
        self._reader = framing.FrameReader(framing.MAX_FRAME_BYTES)
        self._received = memoryview(bytearray(_RECEIVE_BYTES))  # what came last; nothing stays in it
        self._receive_timeout_us = -1
        self._soon = False  # the last reply came so soon that looking for the next one beats sleeping
        self._shortcut: Shortcut | None = None
        self._outbox = bytearray()
        self._sent = 0  # bytes that the kernel took
        # Invariant: bytes of frames reach the socket in the order of the outbox, and an outbox that is not empty starts
        # with what the kernel did not take. Held across non-blocking sends only.
        self._outbox_lock = threading.Lock()
        self._answered: dict[int, Callable[[Reply], None]] = {}
        self.broken: OrbitKVError | None = None
        self._socket = _connect(path, timeout_ms)
        self._input = select.poll()
        self._input.register(self._socket, select.POLLIN)
        try:
            _check_server(self._socket, path, server_uid)
        except BaseException:
            self._socket.close()
            raise

    def fileno(self) -> int:
        """Descriptor of the socket, to poll on."""
        return self._socket.fileno()

    def use_shortcut(self, fd: int) -> None:
        """Take the shortcut whose memory `fd` is, when it pays. `fd` may be closed then."""
        if STORES_IN_ORDER:
            self._shortcut = Shortcut(fd)

    def send_only(self, request: Request) -> None:
        """Send a request that wants no reply. Never waits; what the kernel does not take now goes with the next frame.

        On a broken connection it does nothing: the agent drops all that a lost session held.
        """
        if self.broken is None and self._fork_count == _fork_count:
            with contextlib.suppress(OrbitKVError):
                self._push(framing.encode(request, 0))

    def post(self, request: Request, answered: Callable[[Reply], None]) -> None:
        """Send a request without waiting. For any thread.

        `answered` gets the reply, a refusal too, on the thread that reads (`call`, `take_late_replies`); it is not
        called when the connection is lost before.

        Raises:
            OrbitKVError: UNAVAILABLE, the connection is lost; INVALID, the request is too large.
        """
        self.check()
        sequence = self._next_sequence()
        frame = _frame(request, sequence)
        self._answered[sequence] = answered
        self._push(frame)

    def _next_sequence(self) -> int:
        return next(self._sequences) % 0xFFFFFFFF + 1

    def call(self, request: Request, timeout_ms: float) -> Reply:
        """Send `request`, return its reply.

        Raises:
            OrbitKVError: TIMEOUT, no reply in time (it may still come, and then goes to `on_late_reply`); UNAVAILABLE,
                the connection ended; INVALID, the request is too large; otherwise what the agent refused.
        """
        return self._exchange(request, timeout_ms, None)

    def call_for_descriptors(self, request: Request, timeout_ms: float) -> tuple[Reply, list[int]]:
        """As `call`, for replies that come with descriptors; the caller owns them."""
        descriptors: list[int] = []
        try:
            return self._exchange(request, timeout_ms, descriptors), descriptors
        except BaseException:
            for fd in descriptors:
                os.close(fd)
            raise

    @property
    def unsent(self) -> bool:
        """Whether the kernel has not taken all that was sent."""
        return bool(self._outbox)

    def flush(self) -> None:
        """Send on, without waiting, what the kernel did not take.

        Raises:
            OrbitKVError: UNAVAILABLE, the connection ended.
        """
        self.check()
        self._push(b"")

    def take_late_replies(self) -> None:
        """Read, without waiting, what came after its caller gave up; it goes to `on_late_reply`.

        Raises:
            OrbitKVError: UNAVAILABLE, the connection ended.
        """
        self.check()
        try:
            size = self._socket.recv_into(self._received, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError as error:
            raise self._break(f"receiving failed: {error.strerror}") from None
        for number, body in self._frames(self._received[:size]):
            reply = self._decode(body)
            if number == 0 and isinstance(reply, Refusal):
                raise self._refused(reply)
            self._answered.pop(number, self._on_late_reply)(reply)

    def check(self) -> None:
        """Raise when the connection cannot be used: broken, closed, or inherited through a fork."""
        if self._fork_count != _fork_count:
            raise OrbitKVError(
                ErrorKind.CLOSED,
                "this OrbitKV client belongs to the parent process, which forked; make a new client in the child",
            )
        if self.broken is not None:
            raise self.broken

    def close(self) -> None:
        """Close the socket. Later calls raise CLOSED."""
        if self.broken is None:
            self.broken = OrbitKVError(ErrorKind.CLOSED, "this OrbitKV client is closed; make a new one")
        self._socket.close()
        if self._shortcut is not None:
            self._shortcut.close()
            self._shortcut = None

    # ------------------------------------------------------------------------------------------------------ internals

    def _exchange(self, request: Request, timeout_ms: float, descriptors: list[int] | None) -> Reply:
        """Send, wait for the reply. Descriptors that come along are added to `descriptors`."""
        if self.broken is not None or self._fork_count != _fork_count:
            self.check()
        left_s = timeout_ms / 1000
        deadline = time.perf_counter() + left_s
        sequence = self._next_sequence()
        frame = _frame(request, sequence)
        answer: Reply | None = None
        body = self._by_shortcut(sequence, frame, left_s) if self._soon and descriptors is None else None
        if body:
            answer = self._decode(body)
        elif body is None:
            self._send_all(frame, deadline)
        while answer is None:
            for number, body in self._receive(deadline - time.perf_counter(), descriptors):
                reply = self._decode(body)
                if number == sequence:
                    answer = reply
                elif number == 0 and isinstance(reply, Refusal):
                    raise self._refused(reply)
                else:
                    self._answered.pop(number, self._on_late_reply)(reply)
        if isinstance(answer, Refusal):
            raise refusal_error(answer)
        return answer

    def _by_shortcut(self, sequence: int, frame: bytes, left_s: float) -> bytes | None:
        """Return the body of the reply; empty if it is on the socket; None if the frame is to be sent by the socket."""
        shortcut, clock = self._shortcut, time.perf_counter
        start = clock()
        if (
            shortcut is None
            or not shortcut.words[WATCHED]
            or start < self._crowded_until
            or len(frame) > MOST_BYTES
            or self._outbox
        ):
            return None
        words = shortcut.words
        words[BEFORE] = self._sent
        shortcut.put(REQUEST, sequence, frame)
        end = start + min(left_s, _BUSY_POLL_S)
        try:
            now = start
            while words[REPLY] != sequence:
                if now > end:
                    self._looked(now, in_vain=True)
                    self._soon = False  # it has been looked for
                    return None
                now = clock()  # before the yield, which may take all the time that there is, and bring the reply
                os.sched_yield()  # to who makes the reply, if it has to share this processor
        except BaseException:  # nobody will look there: have the reply come as a late one, which the next call reads
            self._soon = False
            with contextlib.suppress(OrbitKVError):
                self._push(frame)
            raise
        self._looked(end, in_vain=False)
        return shortcut.body(REPLY)

    def _send_all(self, frame: bytes, deadline: float) -> None:
        try:
            self._push(frame)
        except OrbitKVError as error:
            self._hear_last_words()
            raise (self.broken or error) from None
        while self._outbox:
            self._wait_writable(deadline)
            self.flush()

    def _refused(self, refusal: Refusal) -> OrbitKVError:
        """The agent refuses the connection as such, which ends now."""
        self.broken = refusal_error(refusal)
        return self.broken

    def _hear_last_words(self) -> None:
        """The connection broke while sending: the agent may have said why before it closed it."""
        with contextlib.suppress(OSError, OrbitKVError):
            size = self._socket.recv_into(self._received, 0, socket.MSG_DONTWAIT)
            for number, body in self._frames(self._received[:size]):
                reply = self._decode(body)
                if number == 0 and isinstance(reply, Refusal):
                    self._refused(reply)

    def _push(self, frame: bytes | bytearray) -> None:
        with self._outbox_lock:
            outbox = self._outbox
            if outbox:
                outbox += frame
                frame = outbox
            try:
                sent = self._socket.send(frame, _NEVER_WAIT) if frame else 0
            except BlockingIOError:
                sent = 0
            except OSError as error:
                raise self._break(f"sending failed: {error.strerror}") from None
            self._sent += sent
            if frame is outbox:
                del outbox[:sent]
            elif sent < len(frame):
                outbox += frame[sent:]

    def _wait_writable(self, deadline: float) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        if not poll.poll(max(0.0, deadline - time.perf_counter()) * 1000):
            raise self._timeout()

    def _receive(self, left_s: float, descriptors: list[int] | None) -> list[tuple[int, Any]]:
        """Wait for input; return the frames that are whole now. A body is valid until the next call."""
        soon, self._soon = self._soon, False  # unless it comes: the next call by the socket finds it as a late one
        if left_s <= 0:
            raise self._timeout()
        start = time.perf_counter()
        try:
            if soon and start >= self._crowded_until:
                end = start + min(left_s, _BUSY_POLL_S)
                now = self._look(end)
                self._looked(now, in_vain=now > end)
            data = self._receive_waiting(left_s, descriptors)
        except BlockingIOError:
            return []
        except OSError as error:
            raise self._break(f"receiving failed: {error.strerror}") from None
        self._soon = time.perf_counter() - start < _BUSY_POLL_S
        return self._frames(data)

    @classmethod
    def _looked(cls, now: float, *, in_vain: bool) -> None:
        """Count a look; where too many are in vain, let calls sleep for a while."""
        if not in_vain:
            if cls._credit < _MOST_CREDIT:
                cls._credit += 1
            return
        cls._credit -= _IN_VAIN_COSTS
        if cls._credit < 0:
            cls._credit = 0
            calm = now - cls._crowded_until > cls._pause_s
            cls._pause_s = _SHORTEST_PAUSE_S if calm else min(2 * cls._pause_s, _LONGEST_PAUSE_S)
            cls._crowded_until = now + cls._pause_s

    def _look(self, end: float) -> float:
        """Look for input without sleeping until there is some, or until `end`; return the time.

        Only while replies come as soon as that. Two processors may be one core: what is done here between two looks
        slows down who makes the reply.
        """
        poll, clock = self._input.poll, time.perf_counter
        while not poll(0) and clock() < end:
            pass
        return clock()

    def _receive_waiting(self, left_s: float, descriptors: list[int] | None) -> bytes | memoryview:
        # The kernel's receive timeout saves a poll per call. It need not be exact: it is set again only when it is too
        # long, or shorter than half of what is allowed (then the loop goes round).
        left_us = int(left_s * 1e6)
        if not left_us // 2 <= self._receive_timeout_us <= left_us:
            self._receive_timeout_us = left_us * 3 // 4 + 1
            timeval = _TIMEVAL.pack(*divmod(self._receive_timeout_us, 1_000_000))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
        if descriptors is None:
            return self._received[: self._socket.recv_into(self._received)]
        data, received = framing.receive_with_descriptors(self._socket, _RECEIVE_BYTES)
        descriptors += received
        return data

    def _frames(self, data: bytes | memoryview) -> list[tuple[int, Any]]:
        if not data:
            raise self._break("it closed the connection (the agent ended, or refused this client; its log says why)")
        try:
            return self._reader.feed(data)
        except framing.FrameError as error:
            raise self._break(f"it sent {error}") from None

    def _decode(self, body: bytes | memoryview) -> Reply:
        try:
            return framing.reply_decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise self._break(f"it sent a reply that this release cannot read ({error})") from None

    def _break(self, what: str) -> OrbitKVError:
        if self.broken is None:
            self.broken = OrbitKVError(ErrorKind.UNAVAILABLE, f"lost the OrbitKV agent at {self.path}: {what}")
        return self.broken

    def _timeout(self) -> OrbitKVError:
        return OrbitKVError(ErrorKind.TIMEOUT, f"the OrbitKV agent at {self.path} did not answer in time")


def _frame(request: Request, sequence: int) -> bytes:
    """The request as a frame that the agent takes: a larger one would cost the connection."""
    frame = framing.encode(request, sequence)
    if len(frame) > _LARGEST_FRAME:
        raise OrbitKVError(
            ErrorKind.INVALID,
            f"a request of {len(frame)} bytes; at most {_LARGEST_FRAME} are accepted: ask for, or save, fewer pages",
        )
    return frame


def _connect(path: str, timeout_ms: int) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    sock.settimeout(timeout_ms / 1000)
    try:
        sock.connect(path)
    except OSError as error:
        sock.close()
        hint = {
            errno.ENOENT: "there is no such socket: start the agent (`orbitkv-agent serve`), or correct the path",
            errno.ECONNREFUSED: "nobody listens there: the agent ended without cleaning up; start it again",
            errno.EACCES: "this user may not use it: run as the agent's user",
            errno.EPERM: "this user may not use it: run as the agent's user",
        }.get(error.errno or 0, error.strerror or "no answer in time")
        raise OrbitKVError(ErrorKind.UNAVAILABLE, f"no OrbitKV agent at {path}: {hint}") from None
    sock.settimeout(None)
    return sock


def _check_server(sock: socket.socket, path: str, server_uid: int | None) -> None:
    """A socket in a shared folder may be somebody else's: nothing is sent before its owner is known."""
    _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    allowed = {os.geteuid(), 0} if server_uid is None else {server_uid}
    if uid not in allowed and not (server_uid is None and uid == user_without_number()):
        raise OrbitKVError(
            ErrorKind.DENIED,
            f"the process that listens on {path} runs as user {uid}, not {' or '.join(map(str, sorted(allowed)))}: "
            "it is no agent of yours, and nothing was sent to it",
        )


def refusal_error(refusal: Refusal) -> OrbitKVError:
    """What the agent refused, as an error; a kind that this release does not know is INTERNAL."""
    try:
        kind = ErrorKind(refusal.kind)
    except ValueError:
        kind = ErrorKind.INTERNAL
    return OrbitKVError(kind, refusal.message)
