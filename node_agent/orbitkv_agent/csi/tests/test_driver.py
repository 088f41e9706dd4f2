"""The driver as the kubelet sees it: two sockets, and folders that appear where they should."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from orbitkv_agent.csi import csi_pb2, csi_pb2_grpc, registration_pb2, registration_pb2_grpc
from orbitkv_agent.csi.main import Driver, main
from orbitkv_agent.csi.mounts import mounted
from orbitkv_agent.csi.service import Folders
from orbitkv_crds.names import CSI_DRIVER

SECONDS = 10
OF_KUBERNETES = {
    "csi.storage.k8s.io/ephemeral": "true",
    "csi.storage.k8s.io/pod.name": "engine-0",
    "csi.storage.k8s.io/pod.namespace": "team",
    "csi.storage.k8s.io/serviceAccount.name": "default",
}


@dataclass
class FakeMounts:
    """Mounts as links: what is mounted looks like the source and can be removed as a folder no more."""

    flags: set[str] = field(default_factory=set)
    stacks: dict[str, int] = field(default_factory=dict)
    stuck: bool = False
    broken: OSError | None = None

    def count(self, target: str) -> int:
        return self.stacks.get(target, 0)

    def bind(self, source: str, target: str) -> None:
        if self.broken:
            raise self.broken
        os.rmdir(target)
        os.symlink(source, target)
        self.stacks[target] = 1

    def protect(self, target: str) -> None:
        if self.broken:
            raise self.broken
        self.flags.add(target)

    def unmount(self, target: str) -> None:
        if self.stuck:
            return
        self.stacks[target] -= 1
        if not self.stacks[target]:
            self.flags.discard(target)
            os.unlink(target)
            os.mkdir(target)


@dataclass
class World:
    """A node: the kubelet's folders, the agent's, and a driver that can be started and stopped."""

    folders: Folders
    mounts: FakeMounts
    driver: Driver | None = None
    thread: threading.Thread | None = None
    ended: list[bool] = field(default_factory=list)

    def start(self) -> None:
        driver = Driver("node-1", self.folders, self.mounts, look_seconds=0.02)
        self.driver = driver
        self.thread = threading.Thread(target=lambda: self.ended.append(driver.run()))
        self.thread.start()
        deadline = time.monotonic() + SECONDS
        while not self.folders.registration.is_socket():  # who calls before waits a second until he tries again
            assert time.monotonic() < deadline, "the driver does not listen"
            time.sleep(0.002)
        self.ask("Probe", csi_pb2.ProbeRequest())

    def stop(self) -> bool:
        assert self.driver is not None
        self.driver.stop()
        return self.wait_ended()

    def wait_ended(self) -> bool:
        assert self.thread is not None
        self.thread.join(SECONDS)
        assert not self.thread.is_alive()
        self.thread = None
        return self.ended.pop()

    def ask(self, method: str, request: Any) -> Any:
        """One call as the kubelet makes it."""
        with grpc.insecure_channel(f"unix:{self.folders.endpoint}") as channel:
            of_node = method.startswith("Node")
            stub = csi_pb2_grpc.NodeStub(channel) if of_node else csi_pb2_grpc.IdentityStub(channel)
            return getattr(stub, method)(request, timeout=SECONDS, wait_for_ready=True)

    def target(self, pod: str = "uid") -> Path:
        """Where a pod's volume is to be; the kubelet makes the folder above."""
        above = self.folders.pods / pod / "volumes/kubernetes.io~csi/orbitkv-socket"
        above.mkdir(parents=True, exist_ok=True)
        return above / "mount"

    def publish(self, target: Path | str, *, volume: str = "csi-1", **changes: Any) -> None:
        request: dict[str, Any] = {
            "volume_id": volume,
            "target_path": str(target),
            "readonly": True,
            "volume_context": OF_KUBERNETES,
            "volume_capability": csi_pb2.VolumeCapability(mount=csi_pb2.MountVolume()),
        }
        self.ask("NodePublishVolume", csi_pb2.NodePublishVolumeRequest(**{**request, **changes}))

    def unpublish(self, target: Path | str, volume: str = "csi-1") -> None:
        self.ask("NodeUnpublishVolume", csi_pb2.NodeUnpublishVolumeRequest(volume_id=volume, target_path=str(target)))

    def register(self, call: str, request: Any) -> Any:
        """What the kubelet's plugin manager asks."""
        with grpc.insecure_channel(f"unix:{self.folders.registration}") as channel:
            return getattr(registration_pb2_grpc.RegistrationStub(channel), call)(
                request, timeout=SECONDS, wait_for_ready=True
            )


@pytest.fixture
def node() -> Iterator[World]:
    """A node with a driver that serves."""
    place = Path(tempfile.mkdtemp(prefix="csi-"))  # the path of a socket has at most 107 characters
    folders = Folders(place / "kubelet", place / "run")
    for folder in (folders.pods, folders.own, folders.registration.parent, folders.socket):
        folder.mkdir(parents=True)
    world = World(folders, FakeMounts())
    world.start()
    try:
        yield world
    finally:
        if world.thread is not None:
            world.stop()
        shutil.rmtree(place)


def refusal(call: Callable[[], None]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as raised:
        call()
    error: Any = raised.value
    return error.code(), error.details()


# ------------------------------------------------------------------------------------------------------- registration


def test_kubelet_learns_what_it_needs_to_register_the_driver(node: World) -> None:
    told = node.register("GetInfo", registration_pb2.InfoRequest())
    assert (told.type, told.name, told.supported_versions) == ("CSIPlugin", CSI_DRIVER, ["1.0.0"])
    assert told.endpoint == str(node.folders.endpoint)
    assert node.ask("GetPluginInfo", csi_pb2.GetPluginInfoRequest()).name == CSI_DRIVER
    assert node.ask("NodeGetInfo", csi_pb2.NodeGetInfoRequest()).node_id == "node-1"


def test_driver_says_that_it_can_nothing_more_than_mount(node: World) -> None:
    # The messages have no field for capabilities: bytes on the wire would be one.
    for method, request in (
        ("NodeGetCapabilities", csi_pb2.NodeGetCapabilitiesRequest()),
        ("GetPluginCapabilities", csi_pb2.GetPluginCapabilitiesRequest()),
    ):
        assert node.ask(method, request).SerializeToString() == b""


@pytest.mark.parametrize("method", ["NodeStageVolume", "NodeUnstageVolume", "NodeExpandVolume", "NodeGetVolumeStats"])
def test_calls_for_other_kinds_of_volumes_are_unimplemented(node: World, method: str) -> None:
    with grpc.insecure_channel(f"unix:{node.folders.endpoint}") as channel:
        call: Any = channel.unary_unary(f"/csi.v1.Node/{method}", bytes, bytes)
        code, _ = refusal(lambda: call(b"", timeout=SECONDS, wait_for_ready=True))
    assert code is grpc.StatusCode.UNIMPLEMENTED


def test_driver_is_ready_once_the_kubelet_has_registered_it(node: World) -> None:
    marker = node.folders.registered
    assert not marker.exists()
    node.register("NotifyRegistrationStatus", registration_pb2.RegistrationStatus(plugin_registered=True))
    assert marker.exists()
    node.register("NotifyRegistrationStatus", registration_pb2.RegistrationStatus(error="no such version"))
    assert not marker.exists()


# ------------------------------------------------------------------------------------------------------------ volumes


def test_pod_gets_the_folder_read_only_and_leaves_nothing_behind(node: World) -> None:
    target = node.target()
    node.publish(target)
    assert target.samefile(node.folders.socket)
    assert node.mounts.flags == {str(target)}
    node.unpublish(target)
    assert not target.exists()
    assert target.parent.exists(), "the kubelet's own"
    assert node.folders.socket.exists()


def test_every_call_may_be_repeated(node: World) -> None:
    target = node.target()
    for _ in range(3):
        node.publish(target)
    assert node.mounts.stacks[str(target)] == 1
    for _ in range(3):
        node.unpublish(target)
    assert not target.exists()


def test_volume_that_never_was_can_be_taken_away(node: World) -> None:
    node.unpublish(node.target())
    node.unpublish(node.folders.pods / "unknown" / "mount")


def test_mount_that_a_call_cut_short_left_writable_is_made_read_only(node: World) -> None:
    target = node.target()
    target.mkdir()
    node.mounts.bind(str(node.folders.socket), str(target))
    node.publish(target)
    assert node.mounts.flags == {str(target)}


def test_mount_of_another_folder_is_replaced(node: World) -> None:
    target, other = node.target(), node.folders.pods / "other"
    other.mkdir()
    target.mkdir()
    node.mounts.bind(str(other), str(target))
    node.publish(target)
    assert target.samefile(node.folders.socket)
    assert node.mounts.stacks[str(target)] == 1


def test_mounts_that_lie_over_each_other_all_go(node: World) -> None:
    target = node.target()
    node.publish(target)
    node.mounts.stacks[str(target)] = 3
    node.unpublish(target)
    assert not target.exists()


def test_files_are_never_deleted(node: World) -> None:
    """Were a mount missed, what lies in the folder would be the agent's."""
    target = node.target()
    target.mkdir()
    (target / "agent.sock").touch()
    code, words = refusal(lambda: node.unpublish(target))
    assert code is grpc.StatusCode.INTERNAL and "not empty" in words
    assert (target / "agent.sock").exists()


def test_volume_that_stays_mounted_is_said_and_kept(node: World) -> None:
    target = node.target()
    node.publish(target)
    node.mounts.stuck = True
    code, words = refusal(lambda: node.unpublish(target))
    assert code is grpc.StatusCode.INTERNAL and f"{target} is still mounted" in words
    assert target.exists()


def test_kernels_refusal_reaches_the_pods_event(node: World) -> None:
    node.mounts.broken = PermissionError(1, "Operation not permitted", "/x")
    code, words = refusal(lambda: node.publish(node.target()))
    assert code is grpc.StatusCode.INTERNAL and "Operation not permitted: '/x'" in words
    node.mounts.broken = None
    node.publish(node.target())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"volume_context": {**OF_KUBERNETES, "size": "1Gi", "cache": "a"}}, "cache, size: leave them out"),
        ({"volume_context": {"csi.storage.k8s.io/ephemeral": "false"}}, "no PersistentVolumes"),
        ({"readonly": False}, "readOnly: true"),
        ({"volume_capability": csi_pb2.VolumeCapability(block=csi_pb2.BlockVolume())}, "no block devices"),
        ({"volume": ""}, "volume_id is missing"),
    ],
)
def test_what_a_volume_cannot_have_is_refused_by_name(node: World, changes: dict[str, Any], named: str) -> None:
    target = node.target()
    code, words = refusal(lambda: node.publish(target, **changes))
    assert code is grpc.StatusCode.INVALID_ARGUMENT and named in words
    assert not target.exists()


def test_what_newer_kubelets_say_of_a_pod_is_passed_over(node: World) -> None:
    node.publish(node.target(), volume_context={**OF_KUBERNETES, "csi.storage.k8s.io/new": "x"})


@pytest.mark.parametrize("path", ["", "mount", "/etc", "{pods}", "{pods}/../../etc", "{pods}-not"])
def test_nothing_outside_of_the_pods_folder_is_touched(node: World, path: str) -> None:
    target = path.format(pods=node.folders.pods)
    for call in (node.publish, node.unpublish):
        code, words = refusal(lambda call=call: call(target))  # type: ignore[misc]
        assert code is grpc.StatusCode.INVALID_ARGUMENT and "kubeletDirectory" in words
    assert not node.mounts.stacks


# --------------------------------------------------------------------------------------------------- starts and ends


def test_volumes_of_one_driver_are_taken_away_by_the_next(node: World) -> None:
    target = node.target()
    node.publish(target)
    assert node.stop() is True
    assert target.samefile(node.folders.socket), "pods keep theirs"
    node.start()
    node.publish(target)
    assert node.mounts.stacks[str(target)] == 1
    node.unpublish(target)
    assert not target.exists()


def test_driver_that_goes_leaves_no_sockets(node: World) -> None:
    node.register("NotifyRegistrationStatus", registration_pb2.RegistrationStatus(plugin_registered=True))
    assert node.stop() is True
    assert not [*node.folders.own.iterdir(), *node.folders.registration.parent.iterdir()]


def test_sockets_of_a_killed_driver_are_replaced(node: World) -> None:
    node.stop()
    for path in (node.folders.endpoint, node.folders.registration, node.folders.registered):
        path.touch()
    node.start()
    assert not node.folders.registered.exists()
    node.publish(node.target())


def test_driver_ends_to_start_anew_when_its_socket_was_removed(node: World) -> None:
    node.folders.registration.unlink()
    assert node.wait_ended() is False


def test_driver_ends_to_start_anew_when_the_agents_folder_was_removed(node: World) -> None:
    node.folders.socket.rmdir()
    assert node.wait_ended() is False


def test_driver_that_cannot_listen_says_where(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "orbitkv_agent.csi.main", "--node=n", f"--kubelet-directory={tmp_path}"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 1
    assert "cannot start" in done.stderr and str(tmp_path) in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("wrong", [[], ["--node="], ["--node=n", "--kubelet-directory=kubelet"]])
def test_wrong_command_line_is_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(wrong)
    assert ended.value.code == 2
    assert "--node" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------- real mounts


def test_paths_with_spaces_are_found_in_the_kernels_list() -> None:
    table = b"30 1 0:5 / / rw - tmpfs a rw\n31 30 0:5 / /a\\040b rw shared:1 - tmpfs b rw\n32 31 0:5 / /a\\040b rw\n"
    assert [mounted(table, path) for path in ("/", "/a b", "/a", "/a\\040b")] == [1, 2, 0, 0]


PROGRAM = """
import os, socket, sys
from pathlib import Path
from orbitkv_agent.csi.mounts import KernelMounts
from orbitkv_agent.csi.service import Folders, Node

place = Path(sys.argv[1])
folders, target = Folders(place / "kubelet", place / "run"), place / "kubelet/pods/a b/mount"
target.parent.mkdir(parents=True)
folders.socket.mkdir()
listening = socket.socket(socket.AF_UNIX)
listening.bind(str(folders.socket / "agent.sock"))
listening.listen()
mounts = KernelMounts()
for _ in range(2):  # as by a driver that was started again
    Node("n", folders, mounts)._publish(target)
assert mounts.count(str(target)) == 1
socket.socket(socket.AF_UNIX).connect(str(target / "agent.sock"))
flags = os.statvfs(target).f_flag
assert flags & os.ST_RDONLY and flags & os.ST_NOSUID and flags & os.ST_NODEV and flags & os.ST_NOEXEC
assert not os.statvfs(folders.socket).f_flag & os.ST_RDONLY
try:
    (target / "mine").touch()
except OSError as error:
    assert error.errno == 30, error
else:
    raise AssertionError("the pod can write to the node's folder")
os.unlink(folders.socket / "agent.sock")
again = socket.socket(socket.AF_UNIX)
again.bind(str(folders.socket / "agent.sock"))
again.listen()
socket.socket(socket.AF_UNIX).connect(str(target / "agent.sock"))  # a new agent is seen
held = os.open(target, os.O_RDONLY)  # somebody still uses it
Node("n", folders, mounts)._uncover(target)
assert mounts.count(str(target)) == 0
target.rmdir()
try:
    mounts.unmount(str(target))
except FileNotFoundError as error:
    assert error.filename == str(target)
"""


def test_kernel_mounts_read_only_and_engines_reach_every_agent_through_it(tmp_path: Path) -> None:
    alone = ["unshare", "--user", "--map-root-user", "--mount", "--propagation=private"]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no process here may make mounts of its own")
    place = tempfile.mkdtemp(prefix="csi-", dir="/tmp")
    try:
        done = subprocess.run(
            [*alone, sys.executable, "-c", PROGRAM, place], capture_output=True, text=True, timeout=60, check=False
        )
    finally:
        shutil.rmtree(place)
    assert done.returncode == 0, done.stderr
