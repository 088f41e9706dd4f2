"""What runs in an engine's pod in tests: a stand-in for an engine, with plain memory and no model.

    python -c PROGRAM ACTION OPTIONS-AS-JSON
    python -c PROGRAM serve

It needs nothing but OrbitKV's client, and prints one JSON object a line. This file's text is the PROGRAM. `serve` does
what comes as lines of [ACTION, OPTIONS], one after the other and each in a process of its own, and says so when it is
done: to start Python and load all of this takes longer than most actions.
"""

import json
import os
import socket
import sys
import time
import traceback
import uuid
from typing import Any

import numpy as np

from orbitkv.client import BlockHashes, CacheManagerClient, OrbitKVError, QueryReady, SaveStatus
from orbitkv.client.allocations import HostAllocation
from orbitkv.protocol import framing
from orbitkv.protocol.messages import GroupGeometry, Hello, Instance, LayerRegion

SOCKET = "/run/orbitkv/agent.sock"
TOKEN = os.environ.get("ORBITKV_TOKEN_PATH", "/var/run/secrets/orbitkv/token")
ROUND = 64


def say(**facts: Any) -> None:
    """Prints one line."""
    print(json.dumps(facts), flush=True)


def names(first: int, count: int) -> BlockHashes:
    """Hashes of pages `first` and those after it."""
    return BlockHashes([number.to_bytes(8, "little") * 4 for number in range(first + 1, first + count + 1)])


class Engine:
    """An attached, registered and proven engine; those of one `identity` share pages."""

    def __init__(self, cache: str, token: bool, page: int, identity: str) -> None:
        self.client = CacheManagerClient(
            SOCKET, cache_namespace=cache, token_path=TOKEN if token else "", timeout_ms=10_000
        )
        self.memory = np.zeros((ROUND, page), np.uint8)
        self.memory[:] = np.arange(ROUND, dtype=np.uint8)[:, None]
        self.instance = Instance("engine", uuid.uuid4().hex)
        self.client.attach_instance(self.instance)
        region = LayerRegion("layer", 0, 0, ROUND, page, page, "uint8")
        self.registration = self.client.register_context_batch(
            instance=self.instance,
            ranks=_ranks(),
            model_identity=identity,
            model="stand-in",
            groups=[GroupGeometry(0, "full", 16, [region])],
            allocations=[HostAllocation(self.memory.ctypes.data, self.memory.nbytes, self.memory)],
        )
        self.client.report_proof(self.registration, proven=True)

    def save(self, first: int, count: int) -> int:
        """Saves pages, again those that were dropped for a while; returns how many were kept."""
        kept = 0
        for start in range(first, first + count, ROUND):
            part = names(start, min(ROUND, first + count - start))
            blocks = np.arange(len(part))
            for _ in range(200):
                handle = self.client.start_save(self.registration, [part], [blocks])
                status = self.client.wait_save(handle, timeout=60)
                if status is SaveStatus.COMMITTED and not handle.dropped:
                    kept += len(part)
                    break
                if "quota" in handle.dropped:
                    break
                time.sleep(0.05)  # memory is on its way
        return kept

    def hits(self, first: int, count: int) -> int:
        """How many of these pages are there, one by one. Nothing is used, so nothing becomes recent."""
        found = 0
        for number in range(first, first + count):
            found += self._ask(names(number, 1)) == 1
        return found

    def prefix(self, first: int, count: int) -> int:
        """How many of these pages are there from the first on, without a gap."""
        return self._ask(names(first, count))

    def _ask(self, hashes: BlockHashes) -> int:
        request = uuid.uuid4().hex
        answer = self.client.query_prefetch(request, [hashes], instance=self.instance, max_wait_ms=0)
        if isinstance(answer, QueryReady):
            self.client.release(answer)
            return answer.pages
        self.client.cancel_query(request)
        return 0


def _ranks() -> Any:
    from orbitkv.protocol.messages import Ranks

    return Ranks()


def engine(options: dict[str, Any]) -> Engine:
    """The engine that the options ask for; waits for an agent that is not ready for it yet."""
    deadline = time.monotonic() + options.get("patience", 0)
    while True:
        try:
            return Engine(
                options["cache"],
                options.get("token", True),
                options.get("page", 65536),
                options.get("identity", "model"),
            )
        except OrbitKVError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def own_shmem() -> int:
    """Shared memory that this pod's control group pays for, in bytes."""
    for path, key in (
        ("/sys/fs/cgroup/memory.stat", "shmem"),
        ("/sys/fs/cgroup/memory/memory.stat", "total_shmem"),
    ):
        try:
            with open(path) as file:
                found = dict(line.split() for line in file)
        except OSError:
            continue
        return int(found.get(key, found.get("shmem", "0")))
    raise OSError("no memory.stat of this control group")


def save(options: dict[str, Any]) -> None:
    """Saves pages; says how many were kept, and how its own shared memory grew."""
    it = engine(options)
    before = own_shmem()
    kept = it.save(options.get("first", 0), options["count"])
    say(kept=kept, shmem_grew=own_shmem() - before)
    it.client.close()


def find(options: dict[str, Any]) -> None:
    """Says how many pages are there."""
    it = engine(options)
    say(hits=it.hits(options.get("first", 0), options["count"]))
    it.client.close()


def hold(options: dict[str, Any]) -> None:
    """Stays attached, saves some pages, and looks for them again and again; says when that changes."""
    it = engine(options)
    it.save(0, options["count"])
    said = None
    while True:
        try:
            now: Any = it.prefix(0, options["count"])
        except OrbitKVError as error:
            say(at=time.time(), ended=str(error.kind), why=str(error))
            break
        if now != said:
            said = now
            say(at=time.time(), hits=now)
        time.sleep(0.2)
    time.sleep(3600)


def latency(options: dict[str, Any]) -> None:
    """Says the 99th percentile of the time of a look-up, in seconds."""
    it = engine(options)
    it.save(0, 64)
    times = []
    end = time.monotonic() + options["seconds"]
    while time.monotonic() < end:
        began = time.perf_counter()
        it.prefix(0, 64)
        times.append(time.perf_counter() - began)
        time.sleep(0.001)
    say(p99=float(np.percentile(times, 99)), p50=float(np.percentile(times, 50)), count=len(times))
    it.client.close()


def victim(options: dict[str, Any]) -> None:
    """Stays attached and looks for its pages on and on. Says by what numbers the agent knows it, and each second how
    many pages it found (the fewest) and the median time of a look-up, in seconds."""
    it = engine(options)
    kept = it.save(0, options["count"])
    ready = it.client.query_prefetch("held", [names(0, 4)], instance=it.instance, max_wait_ms=0)
    assert isinstance(ready, QueryReady)
    instance = [it.instance.engine_id, it.instance.nonce]
    epoch = it.client._session.welcome.epoch
    say(kept=kept, registration=it.registration.id, lease=ready.leases[0], instance=instance, epoch=epoch)
    while True:
        end = time.monotonic() + 1
        found, times = [], []
        while time.monotonic() < end:
            began = time.perf_counter()
            found.append(it.prefix(0, options["count"]))
            times.append(time.perf_counter() - began)
            time.sleep(0.005)
        say(at=time.time(), fewest=min(found), median=float(np.median(times)))


def crowd(options: dict[str, Any]) -> None:
    """Keeps connections open, making those anew that the agent closes. They are silent, or show a forged token each."""
    connections: list[socket.socket] = []
    said = False
    end = time.monotonic() + options["seconds"]
    opened = 0
    while time.monotonic() < end:
        connections = [each for each in connections if not _closed(each)]
        while len(connections) < options["count"]:
            each = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            each.settimeout(5)
            try:
                each.connect(SOCKET)
            except OSError:
                each.close()
                break
            if options.get("forged"):
                hello = Hello(cache_namespace=options["cache"], token=uuid.uuid4().hex.encode(), client="crowd")
                each.sendall(framing.encode(hello, 1))
            each.setblocking(False)
            connections.append(each)
            opened += 1
        if not said:
            said = True
            say(crowd=len(connections))
        time.sleep(0.5)
    say(opened=opened)


def _closed(connection: socket.socket) -> bool:
    try:
        data = connection.recv(4096)
    except BlockingIOError:
        return False
    except OSError:
        data = b""
    if data:
        return False  # a refusal, and then the end
    connection.close()
    return True


ACTIONS = {each.__name__: each for each in (save, find, hold, latency, victim, crowd)}


def act(action: str, options: dict[str, Any]) -> None:
    """Does one thing; a refusal of the agent is an answer too."""
    try:
        ACTIONS[action](options)
    except OrbitKVError as error:
        say(refused=str(error.kind), why=str(error))


def serve() -> None:
    """Does what is asked for, until nothing more can come."""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                act(*json.loads(line))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        say(done=os.waitstatus_to_exitcode(status))


def main() -> None:
    """Does what the command line says."""
    if sys.argv[1] == "serve":
        serve()
    else:
        act(sys.argv[1], json.loads(sys.argv[2]))


if __name__ == "__main__":
    main()
