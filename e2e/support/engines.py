"""Pods of engines for tests: they mount the agents' socket, and a token if they are to have one."""

import json
import os
import select
import subprocess
import tempfile
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from e2e.support.kubectl import Kubectl, KubectlError, Object
from orbitkv_crds.names import ANNOTATION_CACHE_NAMESPACE, SOCKET_DIRECTORY, engine_audience

PROGRAM = Path(__file__).with_name("engine_program.py").read_text()
PYTHON = "python"
ATTACHING = Path(__file__).with_name("attaching_program.py").read_text()
HELD = {"name": "orbitkv-test/held"}
"""What keeps a pod that was admitted from being started."""


class Shell:
    """The program in a pod, told by its standard input what to do; it ends with the pod, or with this object."""

    def __init__(self, kubectl: Kubectl, name: str, namespace: str) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (it goes with this object)
        command = [kubectl.program, f"--kubeconfig={kubectl.kubeconfig}", "exec", "--stdin", name, f"-n={namespace}"]
        self._process = subprocess.Popen(
            [*command, "--", PYTHON, "-c", PROGRAM, "serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        self.end = weakref.finalize(self, end, self._process)
        self._read = b""

    @property
    def ended(self) -> bool:
        """Whether nothing can be asked of it any more."""
        return self._process.poll() is not None

    def ask(self, action: str, options: dict[str, Any], timeout: float) -> list[dict[str, Any]]:
        """What an action prints. Raises KubectlError where it fails, or the way to the pod breaks."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([action, options]).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._failed(f"{error}") from None
        found: list[dict[str, Any]] = []
        deadline = time.monotonic() + timeout
        while not (found and "done" in found[-1]):
            found.append(json.loads(self._line(deadline)))
        if found.pop()["done"] or not found:
            raise self._failed(f"{action} failed")
        return found

    def _line(self, deadline: float) -> bytes:
        assert self._process.stdout is not None
        while b"\n" not in self._read:
            if not select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                self.end()
                raise self._failed("no answer in time")
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                self._process.wait()
                raise self._failed("the way to the pod has ended")
            self._read += piece
        line, _, self._read = self._read.partition(b"\n")
        return line

    def _failed(self, what: str) -> KubectlError:
        self._errors.seek(0)
        return KubectlError(f"kubectl exec: {what}: {self._errors.read()[-3000:].decode(errors='replace')}")


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that may have ended."""
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(OSError):  # what was not written goes nowhere
                stream.close()


@dataclass
class EnginePod:
    """A pod in which engines can be run."""

    kubectl: Kubectl
    name: str
    namespace: str
    _shell: Shell | None = field(default=None, init=False, repr=False, compare=False)

    def run(self, action: str, *, timeout: float = 120, **options: Any) -> dict[str, Any]:
        """Runs an action of the program to its end; returns the last line that it printed. Raises KubectlError."""
        if self._shell is None or self._shell.ended:
            self._shell = Shell(self.kubectl, self.name, self.namespace)
        return self._shell.ask(action, options, timeout)[-1]

    def said(self) -> list[dict[str, Any]]:
        """What the pod's own program has printed."""
        return [json.loads(line) for line in self.kubectl.logs(self.name, self.namespace).splitlines()]

    def wait_said(self, key: str, *, timeout: float = 90) -> dict[str, Any]:
        """Waits until the pod's own program prints a line with a key; returns the line."""
        self.kubectl.until(
            lambda: any(key in line for line in self.said()), f"{self.name} to say {key}", timeout=timeout
        )
        return next(line for line in self.said() if key in line)


def make_engine_pod(
    kubectl: Kubectl,
    image: str,
    name: str,
    namespace: str,
    node: str,
    *,
    token: bool = True,
    account: str = "default",
    program: str = PROGRAM,
    action: str = "",
    **options: Any,
) -> EnginePod:
    """Makes a pod on a node and waits until it runs. Without an action it waits for `EnginePod.run`."""
    system = kubectl.get("namespace", "kube-system")
    assert system is not None
    command = [PYTHON, "-c", program, action, json.dumps(options)] if action else ["sleep", "infinity"]
    mounts = [{"name": "socket", "mountPath": SOCKET_DIRECTORY, "readOnly": True}]
    volumes: list[Object] = [
        {"name": "socket", "hostPath": {"path": SOCKET_DIRECTORY, "type": "DirectoryOrCreate"}},
    ]
    if token:
        source = {"audience": engine_audience(system["metadata"]["uid"]), "expirationSeconds": 600, "path": "token"}
        mounts.append({"name": "token", "mountPath": "/var/run/secrets/orbitkv", "readOnly": True})
        volumes.append({"name": "token", "projected": {"sources": [{"serviceAccountToken": source}]}})
    kubectl.apply(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {
                "nodeName": node,
                "serviceAccountName": account,
                "automountServiceAccountToken": False,
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": 0,
                "tolerations": [{"operator": "Exists"}],
                "containers": [
                    {
                        "name": "engine",
                        "image": image,
                        "imagePullPolicy": "IfNotPresent",
                        "command": command,
                        "volumeMounts": mounts,
                    }
                ],
                "volumes": volumes,
            },
        }
    )
    kubectl.wait("pod", name, _runs, f"pod {name} to run", namespace=namespace, timeout=90)
    return EnginePod(kubectl, name, namespace)


def _runs(pod: Object) -> bool:
    return bool(pod.get("status", {}).get("phase") == "Running")


def held_pod(image: str, name: str, namespace: str, node: str, ask: str) -> Object:
    """A pod that asks for a cache and attaches as the plugin does; it is admitted, and starts once it is let go."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "annotations": {ANNOTATION_CACHE_NAMESPACE: ask}},
        "spec": {
            "schedulingGates": [HELD],
            "nodeSelector": {"kubernetes.io/hostname": node},
            "terminationGracePeriodSeconds": 0,
            "containers": [
                {
                    "name": "engine",
                    "image": image,
                    "imagePullPolicy": "IfNotPresent",
                    "command": [PYTHON, "-c", ATTACHING],
                }
            ],
        },
    }


def let_go(kubectl: Kubectl, name: str, namespace: str) -> None:
    """Has a pod started that is held, and waits until it runs."""
    change = json.dumps([{"op": "remove", "path": "/spec/schedulingGates"}])
    kubectl.run("patch", "pod", name, f"--namespace={namespace}", "--type=json", "-p", change)
    kubectl.wait("pod", name, _runs, f"pod {name} to run", namespace=namespace, timeout=90)


def heard(kubectl: Kubectl, name: str, namespace: str) -> tuple[list[str], list[dict[str, Any]]]:
    """What such a pod has logged, and what it has said of itself."""
    lines = kubectl.logs(name, namespace).splitlines()
    return [each for each in lines if not each.startswith("{")], [json.loads(it) for it in lines if it.startswith("{")]
