"""Pods of engines for tests: they mount the agents' socket, and a token if they are to have one."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.support.kubectl import Kubectl, Object
from orbitkv_crds.names import SOCKET_DIRECTORY, engine_audience

PROGRAM = Path(__file__).with_name("engine_program.py").read_text()
PYTHON = "python"


@dataclass(frozen=True)
class EnginePod:
    """A pod in which engines can be run."""

    kubectl: Kubectl
    name: str
    namespace: str

    def run(self, action: str, *, timeout: float = 120, **options: Any) -> dict[str, Any]:
        """Runs an action of the program to its end; returns the last line that it printed."""
        printed = self.kubectl.execute(
            self.name, self.namespace, PYTHON, "-c", PROGRAM, action, json.dumps(options), timeout=timeout
        )
        last: dict[str, Any] = json.loads(printed.splitlines()[-1])
        return last

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
