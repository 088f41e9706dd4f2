"""Runs Helm on the chart of this tree, without a cluster."""

import functools
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parents[2] / "charts" / "orbitkv"
NAMESPACE = "orbitkv-system"
KUBERNETES = "1.34.4"
"""The Kubernetes that is rendered for: without a cluster, Helm takes one that it was built with."""

EVERYTHING: dict[str, Any] = {
    "images": {
        "registry": "registry.example.com:5000/cache",
        "pullSecrets": [{"name": "pull-a"}, {"name": "pull-b"}],
        "operator": {"registry": "other.example.com", "digest": "sha256:" + "a" * 64},
        "agent": {"tag": "next"},
    },
    "operator": {
        "priorityClassName": "system-cluster-critical",
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "tolerations": [{"operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "podAnnotations": {"example.com/a": "b"},
        "podLabels": {"example.com/team": "a"},
    },
    "injection": {
        "payload": {"pullSecrets": [{"name": "pull-c"}], "mode": "imageVolume", "pullPolicy": "Always"},
        "podSecurityDefault": "baseline",
        "socketVolume": "csi",
        "csi": {
            "kubeletDirectory": "/var/snap/microk8s/common/var/lib/kubelet",
            "priorityClassName": "system-node-critical",
            "nodeSelector": {"nvidia.com/gpu.present": "true"},
        },
    },
    "webhook": {
        "priorityClassName": "system-cluster-critical",
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "tolerations": [{"operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "podAnnotations": {"example.com/a": "b"},
        "podLabels": {"example.com/team": "a"},
    },
    "compat": {"lmcache": True},
    "certificates": {"provider": "cert-manager"},
    "networkPolicy": {"metricsFrom": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]},
    "monitoring": {
        "reader": True,
        "labels": {"release": "prometheus"},
        "serviceMonitor": {"enabled": True},
        "rules": {"enabled": True},
        "dashboard": {"enabled": True},
    },
    "openshift": {"scc": True},
}
"""Values with which every template renders something."""


class HelmError(Exception):
    """Helm refused; the message is what it wrote."""


@functools.cache
def _run(path: str, arguments: tuple[str, ...], stdin: str) -> subprocess.CompletedProcess[str]:
    """Runs a command once: what is rendered does not change during the tests."""
    return subprocess.run([path, *arguments], input=stdin, capture_output=True, text=True, check=False)


@dataclass(frozen=True)
class Helm:
    """One Helm program."""

    path: str

    def run(self, *arguments: str, stdin: str = "", cached: bool = True) -> str:
        """Runs a command and returns its output; if `cached`, that of the same command before. Raises HelmError."""
        done = (_run if cached else _run.__wrapped__)(self.path, arguments, stdin)
        if done.returncode:
            raise HelmError(done.stderr)
        return done.stdout

    def text(self, values: dict[str, Any] | None = None, *, release: str = "orbitkv", cached: bool = True) -> str:
        """Renders the chart; returns the manifests as they are."""
        command = ["template", release, str(CHART), "--namespace", NAMESPACE, "--kube-version", KUBERNETES]
        return self.run(*command, "--values", "-", stdin=yaml.safe_dump(values or {}), cached=cached)

    def render(self, values: dict[str, Any] | None = None, *, release: str = "orbitkv") -> "Objects":
        """Renders the chart; returns the objects."""
        text = self.text(values, release=release)
        return Objects([each for each in yaml.load_all(text, yaml.CSafeLoader) if each])


class Objects:
    """The objects of a rendered chart."""

    def __init__(self, objects: Sequence[dict[str, Any]]) -> None:
        self.all = list(objects)

    def of(self, kind: str) -> list[dict[str, Any]]:
        """All objects of a kind."""
        return [each for each in self.all if each["kind"] == kind]

    def one(self, kind: str, name: str) -> dict[str, Any]:
        """The one object of that kind and name."""
        found = [each for each in self.of(kind) if each["metadata"]["name"] == name]
        assert len(found) == 1, f"{len(found)} objects {kind} {name}; of this kind: {self.names(kind)}"
        return found[0]

    def names(self, kind: str) -> list[str]:
        """The names of the objects of a kind."""
        return [each["metadata"]["name"] for each in self.of(kind)]
