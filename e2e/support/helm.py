"""Helm for tests, version 3 or 4."""

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parents[2] / "charts" / "orbitkv"


class HelmError(Exception):
    """Helm refused or failed; the message is what it printed."""


class Helm:
    """Runs one of Helm's programs against one cluster, with a configuration folder of its own."""

    def __init__(self, program: str, kubeconfig: Path) -> None:
        self.program = program
        self.kubeconfig = kubeconfig
        self._home = tempfile.TemporaryDirectory(prefix="orbitkv-helm-")

    def run(self, *arguments: str, stdin: str | None = None, timeout: float = 180) -> str:
        """Runs Helm and returns its stdout. Raises HelmError."""
        home = {f"HELM_{kind}_HOME": f"{self._home.name}/{kind}" for kind in ("CACHE", "CONFIG", "DATA")}
        done = subprocess.run(
            [self.program, *arguments],
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            errors="replace",
            env={**os.environ, **home, "KUBECONFIG": str(self.kubeconfig)},
            timeout=timeout,
            check=False,
        )
        if done.returncode:
            raise HelmError(f"helm {' '.join(arguments)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def install(
        self,
        release: str,
        namespace: str,
        values: dict[str, Any] | None = None,
        *arguments: str,
        chart: Path = CHART,
        wait: float = 120,
    ) -> str:
        """Installs a chart, or upgrades it, and waits until it is ready, `wait` seconds at most (0: not at all)."""
        waiting = ["--wait", f"--timeout={wait:.0f}s"] if wait else []
        command = ["upgrade", "--install", release, str(chart), f"--namespace={namespace}", "--values=-", *waiting]
        return self.run(*command, *arguments, stdin=yaml.safe_dump(values or {}), timeout=wait + 60)

    def uninstall(self, release: str, namespace: str, *arguments: str) -> str:
        """Uninstalls a release and waits until it is gone; none is fine too."""
        return self.run("uninstall", release, f"--namespace={namespace}", "--ignore-not-found", "--wait", *arguments)

    def releases(self, namespace: str) -> list[str]:
        """The names of the releases in a namespace."""
        listed = json.loads(self.run("list", f"--namespace={namespace}", "--output=json", "--all"))
        return [str(each["name"]) for each in listed]
