"""kubectl for tests: objects as dictionaries, and waiting for a state with a deadline."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from e2e.support.reader import Reader, ReadError

Object = dict[str, Any]

FIRST_INTERVAL, LAST_INTERVAL = 0.1, 0.5
"""Seconds between two questions of `until`, at first and after a while."""


class KubectlError(Exception):
    """kubectl refused or failed; the message is what it printed."""


class StillWaitingError(AssertionError):
    """A state was not reached in time. The message has the object as it was last."""


def condition(obj: Object, kind: str) -> Object:
    """A condition of an object's status; empty if it has none of that type."""
    for each in obj.get("status", {}).get("conditions", []):
        if each["type"] == kind:
            return dict(each)
    return {}


def has_condition(kind: str, status: str = "True", reason: str | None = None) -> Callable[[Object], bool]:
    """A predicate for `wait`: the condition is there, for the object's present generation, with this status."""

    def holds(obj: Object) -> bool:
        found = condition(obj, kind)
        current = found.get("observedGeneration", obj["metadata"].get("generation"))
        return (
            found.get("status") == status
            and (reason is None or found.get("reason") == reason)
            and current == obj["metadata"].get("generation")
        )

    return holds


class Kubectl:
    """Runs kubectl against one cluster, each call with a time limit. What only reads asks the apiserver itself."""

    def __init__(self, program: str, kubeconfig: Path) -> None:
        self.program = program
        self.kubeconfig = kubeconfig
        self._reader = Reader(kubeconfig)

    def run(self, *arguments: str, stdin: str | None = None, timeout: float = 60) -> str:
        """Runs kubectl and returns its stdout. Raises KubectlError."""
        done = subprocess.run(
            [self.program, f"--kubeconfig={self.kubeconfig}", *arguments],
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            errors="replace",
            env={**os.environ, "KUBECONFIG": str(self.kubeconfig)},
            timeout=timeout,
            check=False,
        )
        if done.returncode:
            raise KubectlError(f"kubectl {' '.join(arguments)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def apply(self, *objects: Object | Path, arguments: Iterable[str] = ()) -> None:
        """Applies objects, or files of them. Raises KubectlError with what the apiserver says against them."""
        paths = [each for each in objects if isinstance(each, Path)]
        for path in paths:
            self.run("apply", *arguments, "-f", str(path))
        items = [each for each in objects if not isinstance(each, Path)]
        if items:
            listed = {"apiVersion": "v1", "kind": "List", "items": items}
            self.run("apply", *arguments, "-f", "-", stdin=json.dumps(listed))

    def create(self, obj: Object) -> Object:
        """Creates one object and returns it as the apiserver has it."""
        return dict(json.loads(self.run("create", "-o", "json", "-f", "-", stdin=json.dumps(obj))))

    def get(self, kind: str, name: str, namespace: str | None = None) -> Object | None:
        """One object; None if it does not exist. Raises KubectlError."""
        try:
            return self._reader.get(kind, name, namespace)
        except ReadError as error:
            raise KubectlError(str(error)) from None

    def list_all(self, kind: str, namespace: str | None = None, selector: str = "") -> list[Object]:
        """All objects of a kind in a namespace; without one, in all. Raises KubectlError."""
        try:
            return self._reader.list_all(kind, namespace, selector)
        except ReadError as error:
            raise KubectlError(str(error)) from None

    def patch(self, kind: str, name: str, patch: Object, namespace: str | None = None, subresource: str = "") -> None:
        """Merges `patch` into an object."""
        more = [f"--subresource={subresource}"] if subresource else []
        self.run("patch", kind, name, "--type=merge", f"--patch={json.dumps(patch)}", *place(namespace), *more)

    def delete(self, kind: str, name: str, namespace: str | None = None, *, wait: float = 60) -> None:
        """Deletes an object and waits for its end, `wait` seconds at most (0: not at all). None is fine too."""
        waiting = [f"--wait={'true' if wait else 'false'}", f"--timeout={wait:.0f}s"]
        self.run("delete", kind, name, "--ignore-not-found", *waiting, *place(namespace), timeout=wait + 30)

    def wait(
        self,
        kind: str,
        name: str,
        predicate: Callable[[Object], bool],
        what: str,
        *,
        namespace: str | None = None,
        timeout: float = 60,
    ) -> Object:
        """Waits until an object exists and `predicate` holds; returns it. Raises StillWaitingError, naming `what`."""
        found: list[Object] = []

        def holds() -> bool:
            obj = self.get(kind, name, namespace)
            found[:] = [obj] if obj is not None else []
            return obj is not None and predicate(obj)

        try:
            self.until(holds, what, timeout=timeout)
        except StillWaitingError as error:
            last = json.dumps(found[0], indent=1) if found else "it does not exist"
            raise StillWaitingError(f"{error}\n{kind} {name}: {last}") from None
        return found[0]

    def wait_gone(self, kind: str, name: str, namespace: str | None = None, *, timeout: float = 60) -> None:
        """Waits until an object does not exist. Raises StillWaitingError."""
        self.until(lambda: self.get(kind, name, namespace) is None, f"{kind} {name} to be gone", timeout=timeout)

    def until(self, holds: Callable[[], bool], what: str, *, timeout: float = 60) -> None:
        """Asks `holds` until it says yes. Raises StillWaitingError, naming `what`, after `timeout` seconds.

        While the apiserver cannot be reached, the answer counts as no.
        """
        deadline = time.monotonic() + timeout
        interval = FIRST_INTERVAL
        trouble = ""
        while True:
            try:
                if holds():
                    return
            except (KubectlError, subprocess.TimeoutExpired) as error:
                trouble = f"; the last question failed: {error}"
            if time.monotonic() > deadline:
                raise StillWaitingError(f"waited {timeout:g} s in vain: {what}{trouble}")
            time.sleep(interval)
            interval = min(interval * 1.3, LAST_INTERVAL)

    def logs(self, pod: str, namespace: str, container: str = "") -> str:
        """What a container of a pod has logged; without a name that which the pod names, or its first. Raises
        KubectlError."""
        try:
            return self._reader.logs(pod, namespace, container)
        except ReadError as error:
            raise KubectlError(str(error)) from None

    def execute(self, pod: str, namespace: str, *command: str, container: str = "", timeout: float = 60) -> str:
        """Runs a command in a pod and returns its stdout. Raises KubectlError."""
        where = [f"--container={container}"] if container else []
        return self.run("exec", pod, *place(namespace), *where, "--", *command, timeout=timeout)

    def events(self, kind: str, name: str, namespace: str | None = None) -> list[Object]:
        """The events about one object, the oldest first."""
        events = self.list_all("events.v1.events.k8s.io", namespace)
        about = [event for event in events if (event["regarding"]["kind"], event["regarding"]["name"]) == (kind, name)]
        return sorted(about, key=lambda event: str(event["metadata"]["creationTimestamp"]))


def place(namespace: str | None) -> list[str]:
    """The argument that names a namespace; none for what is of the whole cluster."""
    return [f"--namespace={namespace}"] if namespace else []
