"""The program `orbitkv-csi`: serves the node's kubelet until it is stopped.

Exit codes: 0 it was stopped; 1 it has to be started again, and the log says why; 2 the command line is wrong.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import grpc

from orbitkv_agent.csi import csi_pb2_grpc, registration_pb2_grpc
from orbitkv_agent.csi.mounts import KernelMounts, Mounts
from orbitkv_agent.csi.service import Folders, Identity, Node, Registration, lost_folder
from orbitkv_agent.logs import set_up_logging
from orbitkv_crds.names import CSI_DRIVER, SOCKET_DIRECTORY

LOOK_SECONDS: Final = 5.0
"""Rhythm in which the driver looks whether its sockets and the agent's folder are still those of the node."""
GRACE_SECONDS: Final = 5.0
_ABOUT: Final = f"""\
The CSI driver {CSI_DRIVER} of OrbitKV on one node: it mounts {SOCKET_DIRECTORY}, where the agent's socket is, for pods
that ask for it by an inline volume. The chart runs it (injection.socketVolume: csi).
"""

logger = logging.getLogger(__name__)


class Driver:
    """One server on two sockets: for volumes, and for the kubelet to find it.

    Calls are done one after the other by a single thread, so two never work on the same path.
    """

    def __init__(self, node: str, folders: Folders, mounts: Mounts, look_seconds: float = LOOK_SECONDS) -> None:
        self._folders = folders
        self._look_seconds = look_seconds
        self._stop = threading.Event()
        self._server = grpc.server(ThreadPoolExecutor(1, "csi"))
        csi_pb2_grpc.add_IdentityServicer_to_server(Identity(), self._server)
        csi_pb2_grpc.add_NodeServicer_to_server(Node(node, folders, mounts), self._server)
        registration_pb2_grpc.add_RegistrationServicer_to_server(
            Registration(folders, self._mark_registered), self._server
        )

    def run(self) -> bool:
        """Serve until `stop` (returns True), or until only a new start helps (False).

        Raises:
            OSError: a folder of the kubelet is missing.
            RuntimeError: a socket cannot be opened.
        """
        self._folders.registered.unlink(missing_ok=True)
        # The kubelet asks as soon as it sees the second one.
        inodes = {path: self._listen(path) for path in (self._folders.endpoint, self._folders.registration)}
        try:
            self._server.start()
            logger.info("serving", extra={"socket": str(self._folders.endpoint)})
            while not (lost := self._lost(inodes)) and not self._stop.wait(self._look_seconds):
                pass
        finally:
            self._server.stop(GRACE_SECONDS).wait()
            # Without the file the kubelet forgets the driver, which is right when it goes for good.
            for path in (self._folders.registered, *inodes):
                path.unlink(missing_ok=True)
        if lost:
            logger.error("the driver ends and is to be started again", extra={"reason": lost})
        return not lost

    def stop(self) -> None:
        """Have `run` end; callable from a signal handler."""
        self._stop.set()

    def _listen(self, path: Path) -> int:
        path.unlink(missing_ok=True)  # of a driver that was killed
        self._server.add_insecure_port(f"unix:{path}")
        return path.stat().st_ino

    def _lost(self, inodes: dict[Path, int]) -> str:
        """Return what keeps the driver from being of use; empty if nothing does."""
        for path, inode in inodes.items():
            try:
                same = path.stat().st_ino == inode
            except FileNotFoundError:
                same = False
            if not same:
                return f"{path} was removed, so the kubelet cannot find the driver"
        return lost_folder(self._folders.socket)

    def _mark_registered(self, registered: bool) -> None:
        if registered:
            self._folders.registered.touch()
        else:
            self._folders.registered.unlink(missing_ok=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; return its exit code. `--help` and a wrong command line end with SystemExit instead."""
    parser = argparse.ArgumentParser(prog="orbitkv-csi", description=_ABOUT, allow_abbrev=False)
    parser.add_argument("--node", required=True, help="name of this node")
    parser.add_argument(
        "--kubelet-directory",
        default=Path("/var/lib/kubelet"),
        type=Path,
        metavar="PATH",
        help="the kubelet's own folder (its --root-dir); default: /var/lib/kubelet",
    )
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    options = parser.parse_args(arguments)
    if not options.node or not options.kubelet_directory.is_absolute():
        parser.error("--node must not be empty, and --kubelet-directory has to be an absolute path")
    set_up_logging(options.log_level, "json")
    driver = Driver(options.node, Folders(options.kubelet_directory), KernelMounts())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: driver.stop())
    try:
        return 0 if driver.run() else 1
    except (OSError, RuntimeError) as error:
        logger.error("the driver cannot start", extra={"reason": str(error)})
        return 1


if __name__ == "__main__":
    sys.exit(main())
