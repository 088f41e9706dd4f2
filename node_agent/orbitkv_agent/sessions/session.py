"""One connection: its frames, its process, and what it holds.

OPEN       requests are served
LINGERING  the stream ended; copies that its process may still be making keep their memory
CLOSED     the process said goodbye, exited, or held nothing
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import select
import socket
from collections import deque
from collections.abc import Generator, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Final, Protocol

from orbitkv.protocol import framing
from orbitkv.protocol.errors import ErrorKind
from orbitkv.protocol.messages import Refusal, Reply
from orbitkv.protocol.records import Header, RecordWriter
from orbitkv.protocol.versions import MESSAGES
from orbitkv_agent.guards import guard
from orbitkv_agent.loop import Loop
from orbitkv_agent.sessions.errors import Refused, bad_frame
from orbitkv_agent.sessions.namespaces import tenant_of
from orbitkv_agent.sessions.peers import Peer
from orbitkv_agent.sessions.shortcut import ShortcutEnd
from orbitkv_agent.sessions.turns import TenantTurns

if TYPE_CHECKING:
    from orbitkv_agent.queries.operations import QueryOperation
    from orbitkv_agent.sessions.instances import Registration
    from orbitkv_agent.transfers.restores import Restore
    from orbitkv_agent.transfers.saves import Save

logger = logging.getLogger(__name__)

MAX_WAITING_BYTES: Final = 8 << 20
"""Replies that a client may leave unread before its stream is closed."""
_READABLE: Final = select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR
_WRITABLE: Final = select.EPOLLOUT
_FRAMES_A_TURN: Final = 32
"""Requests of one session that are served in a row: a flood of small ones must not keep the others waiting."""
_TURN_S: Final = 0.0005
"""Nor a few large ones: after this long the next one waits for another turn. (A step waits 5 ms for its answer.)"""
_HINT: Final = (1).to_bytes(8, "little")
"""As an eventfd reads, which earlier releases passed."""
_LAST_READS: Final = 64
"""Reads of what a process left in the socket when it exited."""


class SessionState(Enum):
    """See the module."""

    OPEN = "open"
    LINGERING = "lingering"
    CLOSED = "closed"


class SessionEvents(Protocol):
    """What a session reports to its owner."""

    def frame(self, session: Session, sequence: int, body: bytes | memoryview) -> None:
        """A whole frame came. `body` is valid only until this returns."""

    def holds(self, session: Session, size: int) -> None:
        """The session makes the agent keep so many bytes now. To end sessions for it is for another turn."""

    def stream_ended(self, session: Session, reason: str) -> None:
        """No request comes any more, and no reply can be sent. `reason` is one word for the metrics, or ""."""

    def closed(self, session: Session) -> None:
        """No copy of the session's process runs any more."""


def is_own(owner: Session, session: Session) -> bool:
    """Whether what `owner` got may be used, or its end be reported, by `session`."""
    return owner is session or not guard("own-session")


class Session:
    """A connection and what hangs on it.

    Attributes:
        epoch: number of the session within this boot of the agent.
        namespace: cache namespace, once `open`; `tenant`: whose that is.
        administrator: it may ask for the agent's state, once `open`.
        client: the client's own name, for people.
        messages_version: of the protocol, once `open`.
        trusted: it may open memory by a handle without showing that it may write there.
        records, hint_fd: shared with the client, once `open`. (What is passed shares its flags: a client can make the
            agent wait on it. So of the hint, a pipe, the client gets the reading end, and the agent only writes.)
        operations: query operations by the client's number.
        registrations, saves, restores: by the agent's number.
        turns: its tenant's; before it is `open`, those of all strangers.
        last_heard: when the last request came, in seconds of the loop's clock.
        passed_arenas: ids of all arenas whose descriptors were passed to the client, whatever it said of them since.
        arenas: ids of the arenas whose descriptors were passed to the client and not reported unmapped.
        complained_of: the log has a warning about its requests.
        retired_arenas: those among them that the client should unmap.
    """

    def __init__(
        self,
        connection: socket.socket,
        peer: Peer,
        epoch: int,
        loop: Loop,
        events: SessionEvents,
        turns: TenantTurns,
    ) -> None:
        self.peer = peer
        self.epoch = epoch
        self.state = SessionState.OPEN
        self.namespace: str | None = None
        self.tenant = ""
        self.administrator = False
        self.client = ""
        self.messages_version = MESSAGES.lowest
        self.trusted = True
        self.records: RecordWriter | None = None
        self.hint_fd = self._hint = -1
        self.operations: dict[int, QueryOperation] = {}
        self.registrations: dict[int, Registration] = {}
        self.saves: dict[int, Save] = {}
        self.restores: dict[int, Restore] = {}
        self.passed_arenas: set[int] = set()
        self.arenas: set[int] = set()
        self.retired_arenas: set[int] = set()
        self.turns = turns
        self.last_heard = loop.now()
        self.complained_of = False
        self._loop = loop
        self._events = events
        self._socket = connection
        self._reader = framing.FrameReader(framing.MAX_HELLO_BYTES)
        self._backlog: deque[tuple[int, bytes | memoryview]] = deque()
        self._steps: Generator[None] | None = None
        self._kept_bytes = 0  # see `keeps`
        self._request_bytes = 0  # of the request that is served, or takes several turns
        self._noted = 0  # what was said of the bytes that it holds
        self._shortcut: ShortcutEnd | None = None
        self._received = 0  # bytes, by the socket
        self._exited = False
        self._outbox: deque[tuple[memoryview, Sequence[int]]] = deque()
        self._outbox_bytes = 0
        connection.setblocking(False)
        loop.watch(connection.fileno(), _READABLE, self._on_socket)
        if peer.pidfd is not None:
            loop.watch(peer.pidfd, select.EPOLLIN, self._on_exit)

    def __str__(self) -> str:
        return f"session {self.epoch} ({self.client or 'unnamed'}, pid {self.peer.pid})"

    @property
    def backlog(self) -> int:
        """Requests that have come and have not had their turn."""
        return len(self._backlog)

    @property
    def is_open(self) -> bool:
        """Whether the handshake is done and requests are served."""
        return self.state is SessionState.OPEN and self.namespace is not None

    def same_client(self, other: Session) -> bool:
        """Whether both are of one process, as far as the kernel can tell, and of one cache namespace."""
        here, there = (self.namespace, self.peer.process), (other.namespace, other.peer.process)
        return here == there or not guard("own-session")

    def open(self, namespace: str, client: str) -> RecordWriter:
        """Accept the handshake; return the records that the client will read."""
        self.namespace = namespace
        self.tenant = tenant_of(namespace)
        self.client = client
        self.records = RecordWriter()
        self.hint_fd, self._hint = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        fcntl.fcntl(self._hint, fcntl.F_SETPIPE_SZ, mmap.PAGESIZE)
        self._reader.max_bytes = framing.MAX_FRAME_BYTES
        return self.records

    def open_shortcut(self) -> int:
        """Share a shortcut with the client; return its descriptor."""
        self._shortcut = ShortcutEnd()
        return self._shortcut.fd

    # ---------------------------------------------------------------------------------------------- output

    def reply(self, sequence: int, message: Reply, descriptors: Sequence[int] = ()) -> None:
        """Send the reply to request `sequence` the way it came; nothing for 0, nor when the stream has ended.

        `descriptors` need to live only until this returns.
        """
        if not sequence or self.state is not SessionState.OPEN:
            return
        frame = framing.encode(message, sequence)
        if self._shortcut is None or not self._shortcut.answer(sequence, frame, descriptors=bool(descriptors)):
            self._send(frame, descriptors)

    def _send(self, frame: bytes, descriptors: Sequence[int] = ()) -> None:
        sent = 0
        if not self._outbox:
            try:
                if descriptors:
                    sent = framing.send_with_descriptors(self._socket, frame, list(descriptors))
                else:
                    sent = self._socket.send(frame)
            except BlockingIOError:
                pass
            except OSError as error:  # the peer is gone, or too many descriptors are on their way to it
                logger.info("%s: sending failed: %s", self, error.strerror)
                self.end_stream()
                return
            if sent == len(frame):
                return
            self._loop.change(self._socket.fileno(), _READABLE | _WRITABLE)
        self._queue(memoryview(frame)[sent:], () if sent else descriptors)

    def notify(self, counter: Header | None = None) -> None:
        """Tell the client to look at its records, after advancing one of the session's counters if given."""
        if self.records is None or self.state is not SessionState.OPEN:
            return
        if counter is not None:
            self.records.bump(counter)
        with contextlib.suppress(BlockingIOError):  # a client that does not read has hundreds of hints to read already
            os.write(self._hint, _HINT)

    def refuse(self, sequence: int, error: Refused) -> None:
        """Send a refusal as the reply to request `sequence`."""
        self.reply(sequence, Refusal(error.kind, str(error)))

    def refuse_stream(self, kind: ErrorKind, message: str, sequence: int = 0) -> None:
        """Send a last refusal if it fits, without waiting. With sequence 0 it refuses the connection as such."""
        if self._outbox:  # it would end up in the middle of another frame
            return
        with contextlib.suppress(OSError):
            self._socket.send(framing.encode(Refusal(kind, message), sequence), socket.MSG_NOSIGNAL)

    def _queue(self, rest: memoryview, descriptors: Sequence[int]) -> None:
        # What waits must survive its owner, so descriptors are duplicated for the wait.
        self._outbox.append((rest, [os.dup(fd) for fd in descriptors]))
        self._outbox_bytes += len(rest)
        self._note_held()
        if self._outbox_bytes > MAX_WAITING_BYTES:
            logger.warning("%s: closed, because it left %d bytes of replies unread", self, self._outbox_bytes)
            self.end_stream("not-reading")

    def _flush(self) -> None:
        while self._outbox:
            rest, descriptors = self._outbox[0]
            try:
                sent = framing.send_with_descriptors(self._socket, rest, list(descriptors))  # type: ignore[arg-type]
            except BlockingIOError:
                return
            except OSError as error:
                logger.info("%s: sending failed: %s", self, error.strerror)
                self.end_stream()
                return
            for fd in descriptors:
                os.close(fd)
            self._outbox_bytes -= sent
            if sent < len(rest):
                self._outbox[0] = (rest[sent:], ())
                return
            self._outbox.popleft()
        self._loop.change(self._socket.fileno(), _READABLE)

    # ----------------------------------------------------------------------------------------------- input

    def _on_socket(self, events: int) -> None:
        if events & _WRITABLE:
            self._flush()
            self._note_held()
        if events & _READABLE and not self._backlog and self._steps is None:
            self.turns.now(self, self._take)

    def _take(self) -> None:
        """Read what has come and serve a turn of it, if nothing is left of what came before."""
        if self.state is SessionState.OPEN and not self._backlog and self._steps is None:
            self._read(whole=False)
            if self._shortcut is not None and self.state is SessionState.OPEN:
                self._loop.look_also(self)

    def _read(self, *, whole: bool) -> bool:
        """Take one piece of input and serve a turn of it, or the whole; return whether there may be more."""
        buffer = self._loop.scratch
        try:
            size = self._socket.recv_into(buffer)  # not recvmsg: descriptors that a client sends are dropped
        except BlockingIOError:
            return False
        except OSError:
            size = 0
        if not size:
            torn = self._reader.pending_bytes
            if torn and not self._exited:
                self._refuse_frame(f"the connection is closed, because it ended {torn} bytes into a message")
            else:
                self.end_stream()
            return False
        try:
            frames = self._reader.feed(buffer[:size])
        except framing.FrameError as error:
            logger.warning("%s: closed, because it sent %s", self, error)
            self._refuse_frame(f"the connection is closed, because the agent received {error}")
            return False
        self._received += size
        self.last_heard = self._loop.now()
        self._note_held()
        self._backlog.extend(frames)  # of several frames the bodies are their own; one alone is served now
        self._serve(whole=whole)
        return self.state is SessionState.OPEN

    def _refuse_frame(self, why: str) -> None:
        refusal = bad_frame(why)
        self.refuse_stream(refusal.kind, str(refusal))
        self.end_stream(refusal.reason)

    def _serve(self, *, whole: bool) -> None:
        """Serve a turn of the requests that have come, or all; the rest after everybody else has had a turn."""
        backlog, served = self._backlog, 0
        end = self._loop.now() + _TURN_S
        try:
            while backlog and self._steps is None:
                if served and not whole and (served == _FRAMES_A_TURN or self._loop.now() >= end):
                    break
                served += 1
                sequence, body = backlog.popleft()
                self._request_bytes = len(body)
                if not (sequence and self._shortcut is not None and self._served(self._shortcut, sequence)):
                    self._events.frame(self, sequence, body)
                if self.state is not SessionState.OPEN:
                    backlog.clear()
        finally:  # whatever became of these
            if backlog and self._steps is None:
                self.turns.later(self, self._go_on)

    def _served(self, shortcut: ShortcutEnd, sequence: int) -> bool:
        """Whether a request was taken by the shortcut before it came here. Its client waits here now."""
        reply = shortcut.sent_again(sequence)
        if reply:
            self._send(reply)
        return reply is not None

    def rings(self) -> bool:
        """Whether something came by the shortcut."""
        return self._shortcut is not None and self._shortcut.rings()

    def look(self) -> bool:
        """Serve a request that came by the shortcut, after all before it; return whether there was one."""
        shortcut = self._shortcut
        if shortcut is None or self._backlog or self._steps is not None:
            return False
        request = shortcut.take(self._received)
        if request is None:
            return False
        self.last_heard = self._loop.now()
        self._request_bytes = len(request[1])
        self._events.frame(self, *request)
        return True

    def watched(self, *, watched: bool) -> None:
        """The loop calls `look` from now on, or does not any more."""
        if self._shortcut is not None:
            self._shortcut.watch(watched=watched)

    def work_on(self, steps: Generator[None]) -> None:
        """Carry on with a request in several turns, each up to the next `yield`; requests after it wait.

        When the session ends before it, `steps` are closed.
        """
        if self._exited:
            steps.close()  # nobody is left to use what it would grant
        else:
            self._step(steps)

    def _step(self, steps: Generator[None]) -> None:
        for _ in steps:
            if self.state is SessionState.OPEN:
                self._steps = steps
                self.turns.later(self, self._go_on)
                self._note_held()
            else:
                steps.close()
            return
        self._note_held()

    def keeps(self, more: int) -> None:
        """The agent keeps so many bytes more, or less, of what the client has sent."""
        self._kept_bytes += more
        self._note_held()

    def _note_held(self) -> None:
        """Say how many bytes are held, if that has changed."""
        held = self._kept_bytes + self._reader.pending_bytes + self._outbox_bytes
        if self._steps is not None:
            held += self._request_bytes
        if held != self._noted and self.state is SessionState.OPEN:
            self._noted = held
            self._events.holds(self, held)

    def _go_on(self) -> None:
        """Go on with a request that takes several turns, or else with the next ones of a piece that came at once."""
        steps, self._steps = self._steps, None
        if steps is None:
            if self.state is SessionState.OPEN:
                self._serve(whole=False)
            return
        self._step(steps)
        if self._backlog and self._steps is None:
            self.turns.later(self, self._go_on)

    def _drop_steps(self) -> None:
        steps, self._steps = self._steps, None
        if steps is not None:
            steps.close()

    def _on_exit(self, _events: int) -> None:
        self._exited = True
        self._drop_steps()
        if self.state is SessionState.OPEN:
            self._serve(whole=True)
        for _ in range(_LAST_READS):
            if self.state is not SessionState.OPEN or not self._read(whole=True):
                break
        self.close()

    # -------------------------------------------------------------------------------------------- lifetime

    @property
    def holds_memory(self) -> bool:
        """Whether its process may still be touching arenas."""
        return bool(self.saves or self.restores or self.arenas)

    def end_stream(self, reason: str = "") -> None:
        """Stop serving. What the process may still be copying stays held until it is known to have ended."""
        if self.state is not SessionState.OPEN:
            return
        self.state = SessionState.LINGERING
        self._loop.forget(self._socket.fileno())
        self._loop.look_no_more(self)
        self._socket.close()
        for _, descriptors in self._outbox:
            for fd in descriptors:
                os.close(fd)
        self._outbox.clear()
        self._outbox_bytes = 0
        self._reader = framing.FrameReader(0)
        self._drop_steps()
        self._events.stream_ended(self, reason)
        # The end of a stream proves nothing about the copies of the process that had it.
        if not self.holds_memory or not guard("held-copies"):
            self.close()
        elif self.peer.pidfd is None:
            logger.warning("%s: its exit cannot be observed here; what it mapped stays held", self)

    def close_if_drained(self) -> None:
        """A copy ended: if it was all that a stream which is over still held, the session is over too."""
        if self.state is SessionState.LINGERING and not self.holds_memory:
            self.close()

    def close(self) -> None:
        """End everything: its process exited, or said that it copies nothing any more."""
        self.end_stream()
        if self.state is SessionState.CLOSED:
            return
        self.state = SessionState.CLOSED
        self._events.closed(self)
        if self.peer.pidfd is not None:
            self._loop.forget(self.peer.pidfd)
            self.peer.close()
        if self.records is not None:
            self.records.destroy()
            if self._shortcut is not None:
                self._shortcut.close()
                self._shortcut = None
            os.close(self.hint_fd)
            os.close(self._hint)
