"""What the driver answers: who it is, and a pod's volume made and taken away.

Calls come from the node's kubelet alone (the sockets lie in folders of root), and one at a time.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final

import grpc

from orbitkv_agent.csi import csi_pb2, csi_pb2_grpc, registration_pb2, registration_pb2_grpc
from orbitkv_agent.csi.mounts import Mounts
from orbitkv_crds.names import CSI_DRIVER, SOCKET_DIRECTORY

VERSIONS: Final = ("1.0.0",)
"""Of the Container Storage Interface; a kubelet looks at the first number."""
KUBERNETES: Final = "csi.storage.k8s.io/"
"""Prefix of what the kubelet says of the pod; it alone can set these."""
MOST_MOUNTS: Final = 8
"""Mounts that are taken off one path before that counts as failed."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Folders:
    """Where things are, the same on the node and in the driver's container."""

    kubelet: Path
    """The kubelet's own folder (its `--root-dir`)."""
    socket: Path = Path(SOCKET_DIRECTORY)
    """The folder that pods get."""

    @property
    def pods(self) -> Path:
        """All that is mounted for pods lies below it."""
        return self.kubelet / "pods"

    @property
    def own(self) -> Path:
        """The driver's."""
        return self.kubelet / "plugins" / CSI_DRIVER

    @property
    def endpoint(self) -> Path:
        """The socket that the driver serves on."""
        return self.own / "csi.sock"

    @property
    def registered(self) -> Path:
        """A file that is there while the kubelet has registered the driver."""
        return self.own / "registered"

    @property
    def registration(self) -> Path:
        """The socket by which the kubelet gets to know the driver."""
        return self.kubelet / "plugins_registry" / f"{CSI_DRIVER}-reg.sock"


class Refused(Exception):
    """A call cannot be done; the kubelet shows the message in an event of the pod."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


@contextmanager
def _told(context: grpc.ServicerContext) -> Iterator[None]:
    """End the call with what went wrong."""
    try:
        yield
    except Refused as error:
        logger.warning("refused", extra={"reason": str(error)})
        context.abort(error.code, str(error))
    except OSError as error:
        logger.error("failed", extra={"reason": str(error)})
        context.abort(grpc.StatusCode.INTERNAL, f"{CSI_DRIVER} on this node: {error}")


class Identity(csi_pb2_grpc.IdentityServicer):
    """Who the driver is."""

    def GetPluginInfo(
        self, request: csi_pb2.GetPluginInfoRequest, context: grpc.ServicerContext
    ) -> csi_pb2.GetPluginInfoResponse:
        """Return name and release."""
        return csi_pb2.GetPluginInfoResponse(name=CSI_DRIVER, vendor_version=version("orbitkv"))

    def GetPluginCapabilities(
        self, request: csi_pb2.GetPluginCapabilitiesRequest, context: grpc.ServicerContext
    ) -> csi_pb2.GetPluginCapabilitiesResponse:
        """Return none: there is no controller, and all nodes are alike."""
        return csi_pb2.GetPluginCapabilitiesResponse()

    def Probe(self, request: csi_pb2.ProbeRequest, context: grpc.ServicerContext) -> csi_pb2.ProbeResponse:
        """Return that it is ready."""
        return csi_pb2.ProbeResponse()


class Node(csi_pb2_grpc.NodeServicer):
    """Volumes of pods on one node: each is a read-only bind mount of the folder with the agent's socket.

    What is mounted is all of the state, and the kernel keeps it: every call may be repeated, also by another process.
    """

    def __init__(self, name: str, folders: Folders, mounts: Mounts) -> None:
        self._name = name
        self._folders = folders
        self._mounts = mounts

    def NodeGetInfo(
        self, request: csi_pb2.NodeGetInfoRequest, context: grpc.ServicerContext
    ) -> csi_pb2.NodeGetInfoResponse:
        """Return the node's name; any number of pods may have a volume."""
        return csi_pb2.NodeGetInfoResponse(node_id=self._name)

    def NodeGetCapabilities(
        self, request: csi_pb2.NodeGetCapabilitiesRequest, context: grpc.ServicerContext
    ) -> csi_pb2.NodeGetCapabilitiesResponse:
        """Return none: nothing is staged, measured or resized."""
        return csi_pb2.NodeGetCapabilitiesResponse()

    def NodePublishVolume(
        self, request: csi_pb2.NodePublishVolumeRequest, context: grpc.ServicerContext
    ) -> csi_pb2.NodePublishVolumeResponse:
        """Mount the folder for a pod."""
        with _told(context):
            check_request(request)
            target = self._target(request.volume_id, request.target_path)
            self._publish(target)
            about = request.volume_context
            pod = f"{about.get(KUBERNETES + 'pod.namespace', '')}/{about.get(KUBERNETES + 'pod.name', '')}"
            logger.info("published", extra={"pod": pod, "volume": request.volume_id})
        return csi_pb2.NodePublishVolumeResponse()

    def NodeUnpublishVolume(
        self, request: csi_pb2.NodeUnpublishVolumeRequest, context: grpc.ServicerContext
    ) -> csi_pb2.NodeUnpublishVolumeResponse:
        """Take a pod's mount away, and the empty folder that it lay on."""
        with _told(context):
            target = self._target(request.volume_id, request.target_path)
            self._uncover(target)
            with suppress(FileNotFoundError):
                target.rmdir()  # never more than an empty folder: what lies in it would be the agent's
            logger.info("unpublished", extra={"volume": request.volume_id})
        return csi_pb2.NodeUnpublishVolumeResponse()

    def _publish(self, target: Path) -> None:
        if gone := lost_folder(self._folders.socket):
            raise Refused(grpc.StatusCode.UNAVAILABLE, gone)
        # Absent parents are an error: the kubelet makes them, and another folder is not the pod's.
        with suppress(FileExistsError):
            target.mkdir(0o750)
        if self._mounts.count(str(target)) and not target.samefile(self._folders.socket):
            self._uncover(target)
        if not self._mounts.count(str(target)):
            self._mounts.bind(str(self._folders.socket), str(target))
        self._mounts.protect(str(target))  # also after a call that was cut short before this

    def _uncover(self, target: Path) -> None:
        for _ in range(MOST_MOUNTS):
            if not self._mounts.count(str(target)):
                return
            self._mounts.unmount(str(target))
        raise Refused(grpc.StatusCode.INTERNAL, f"{target} is still mounted after {MOST_MOUNTS} attempts to unmount it")

    def _target(self, volume: str, path: str) -> Path:
        if not volume:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "volume_id is missing")
        target = Path(path)
        if self._folders.pods not in target.parents or ".." in target.parts:
            raise Refused(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"target_path is {path!r}, and has to lie below {self._folders.pods}: set the chart's "
                "injection.csi.kubeletDirectory to the kubelet's folder (--root-dir)",
            )
        return target


def check_request(request: csi_pb2.NodePublishVolumeRequest) -> None:
    """Check what a pod says of its volume.

    Raises:
        Refused: it cannot be had; the message names what is wrong.
    """
    unknown = sorted(key for key in request.volume_context if not key.startswith(KUBERNETES))
    if unknown:
        what = f"{CSI_DRIVER} knows no volumeAttributes, and the volume has {', '.join(unknown)}: leave them out"
    elif request.volume_context.get(KUBERNETES + "ephemeral", "true") != "true":
        what = f"{CSI_DRIVER} serves inline volumes only (spec.volumes[].csi), no PersistentVolumes"
    elif request.volume_capability.WhichOneof("access_type") == "block":
        what = f"{CSI_DRIVER} has folders, no block devices"
    elif not request.readonly:
        what = f"volumes of {CSI_DRIVER} are read-only: set readOnly: true in the pod's spec.volumes[].csi"
    else:
        return
    raise Refused(grpc.StatusCode.INVALID_ARGUMENT, what)


def lost_folder(folder: Path) -> str:
    """Return why the folder that the driver sees is not the one of the node; empty if it is."""
    try:
        if folder.stat().st_nlink:
            return ""
    except FileNotFoundError:
        return f"{folder} is not there"
    return f"{folder} was deleted on the node; the driver starts anew to find the one that is there now"


class Registration(registration_pb2_grpc.RegistrationServicer):
    """Tells the kubelet what is served, and hears what came of it."""

    def __init__(self, folders: Folders, on_registered: Callable[[bool], None]) -> None:
        self._folders = folders
        self._on_registered = on_registered

    def GetInfo(
        self, request: registration_pb2.InfoRequest, context: grpc.ServicerContext
    ) -> registration_pb2.PluginInfo:
        """Return kind, name and socket."""
        return registration_pb2.PluginInfo(
            type="CSIPlugin", name=CSI_DRIVER, endpoint=os.fspath(self._folders.endpoint), supported_versions=VERSIONS
        )

    def NotifyRegistrationStatus(
        self, request: registration_pb2.RegistrationStatus, context: grpc.ServicerContext
    ) -> registration_pb2.RegistrationStatusResponse:
        """Hear whether the kubelet has registered the driver; if not, it tries again by itself."""
        if request.plugin_registered:
            logger.info("registered with the kubelet")
        else:
            logger.error("the kubelet did not register the driver", extra={"reason": request.error})
        self._on_registered(request.plugin_registered)
        return registration_pb2.RegistrationStatusResponse()
