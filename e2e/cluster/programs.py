"""The programs of the cluster: built once from Go modules at pinned versions, for all trees of a user.

Each folder under `go/` is one Go module. Its go.mod and go.sum say what is built, to the byte; its `tool` lines are the
programs. They lie in ${ORBITKV_CACHE:-~/.cache/orbitkv}/kubernetes/MODULE-VERSION-DIGEST, where the digest changes with
anything that the module is built from. etcd, runc, the CNI plugins and iptables are Debian's.
"""

import hashlib
import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from tools.cache import SetUpError, cache_folder, locked, say

GO = Path(__file__).resolve().parent / "go"
DISK_BYTES = 12 << 30
"""What must be free to begin: the programs take 0.9 GB, and Go's own caches of sources and objects about 8 GB."""

TOOLS = re.compile(r"^tool \(\n((?:\t\S+\n)+)\)|^tool (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Module:
    """One Go module of `go/`, and what the linker is told so that its programs know their version.

    In `stamps`, {v} is the version, {minor} the second number of it.
    """

    name: str
    source: str
    stamps: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Where its go.mod is."""
        return GO / self.name

    def version(self) -> str:
        """The version of `source` that is built, without the v."""
        if not self.source:
            return "1"
        found = re.search(rf"^(?:require )?\s*{re.escape(self.source)} v(\S+)", self.text("go.mod"), re.MULTILINE)
        if found is None:
            raise SetUpError(f"{self.folder}/go.mod does not require {self.source}")
        return found[1]

    def text(self, name: str) -> str:
        """One of the module's own files; empty where it has none."""
        path = self.folder / name
        return path.read_text() if path.exists() else ""

    def packages(self) -> dict[str, str]:
        """Program name to the Go package that it is built from."""
        found = TOOLS.search(self.text("go.mod"))
        if found is None:
            return {self.name: "."}
        packages = (found[1] or found[2]).split()
        # a package of a module's root is named by the module, which may end in its major version
        return {re.sub(r"/v\d+$", "", package).rsplit("/", 1)[1]: package for package in packages}

    def linker_flags(self) -> str:
        """The value of -ldflags."""
        version = self.version()
        minor = version.split(".")[1] if "." in version else "0"
        return " ".join(["-s -w", *(f"-X {stamp.format(v=version, minor=minor)}" for stamp in self.stamps)])

    def place(self) -> Path:
        """Where the built programs lie."""
        inputs = [self.linker_flags(), *(path.read_text() for path in sorted(self.folder.iterdir()) if path.is_file())]
        digest = hashlib.sha256("\0".join(inputs).encode()).hexdigest()[:12]
        return cache_folder() / "kubernetes" / f"{self.name}-{self.version()}-{digest}"

    def missing(self) -> list[str]:
        """The programs that are not built yet."""
        place = self.place()
        return [program for program in self.packages() if not (place / program).exists()]


def kubernetes(name: str) -> Module:
    """A module of k8s.io/kubernetes itself."""
    stamps = ("gitVersion=v{v}", "gitMajor=1", "gitMinor={minor}")
    return Module(name, "k8s.io/kubernetes", tuple(f"k8s.io/component-base/version.{stamp}" for stamp in stamps))


CLUSTER = (
    kubernetes("kubernetes"),
    Module(
        "containerd",
        "github.com/containerd/containerd/v2",
        ("github.com/containerd/containerd/v2/version.Version=v{v}",),
    ),
    Module("coredns", "github.com/coredns/coredns"),
    Module("helm3", "helm.sh/helm/v3", ("helm.sh/helm/v3/internal/version.version=v{v}",)),
    Module("helm4", "helm.sh/helm/v4", ("helm.sh/helm/v4/internal/version.version=v{v}",)),
    Module("kwok", "sigs.k8s.io/kwok", ("sigs.k8s.io/kwok/pkg/consts.Version=v{v}",)),
    Module("crictl", "sigs.k8s.io/cri-tools", ("sigs.k8s.io/cri-tools/pkg/version.Version=v{v}",)),
    Module("pause", ""),
)
"""What a whole cluster and its tests need."""

OTHER_APISERVERS = (kubernetes("apiserver-1.31"), kubernetes("apiserver-1.37"))
"""The apiserver alone, of the oldest and the newest Kubernetes that the schemas are tested on."""


class Programs:
    """The paths of built programs, by name."""

    def __init__(self, modules: tuple[Module, ...]) -> None:
        self._paths = {name: module.place() / name for module in modules for name in module.packages()}
        # both are called helm: told apart by the major version
        for module in modules:
            if module.name.startswith("helm"):
                self._paths[module.name] = module.place() / "helm"
        self.folders = [module.place() for module in modules]

    def __getitem__(self, name: str) -> str:
        return str(self._paths[name])

    def folder(self, name: str) -> str:
        """The folder of a program."""
        return str(self._paths[name].parent)

    def search_path(self) -> str:
        """A PATH on which these come first."""
        return os.pathsep.join([*map(str, self.folders), os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def build(module: Module, program: str) -> None:
    """Builds one program of a module. It appears under its name only when it is whole.

    Go keeps every object that it compiled, so an interrupted build goes on where it was. Raises SetUpError.
    """
    if shutil.which("go") is None:
        raise SetUpError(
            "there is no Go here, and the cluster's programs are built with it. Install Go 1.26 or newer "
            "(https://go.dev/dl; Debian's is older) and put it on PATH"
        )
    place = module.place()
    place.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(place).free
    if free < DISK_BYTES:
        raise SetUpError(
            f"{place.parent} has {free / 1e9:.1f} GB free and building the cluster needs {DISK_BYTES / 1e9:.0f} GB. "
            "Make room, or name another folder with ORBITKV_CACHE="
        )
    for leftover in place.glob(f".{program}.*"):
        leftover.unlink()
    unfinished = place / f".{program}.{os.getpid()}"
    done = subprocess.run(
        ["go", "build", "-ldflags", module.linker_flags(), "-o", str(unfinished), module.packages()[program]],
        cwd=module.folder,
        env={**os.environ, "GOWORK": "off", "GOFLAGS": "-mod=readonly -trimpath -buildvcs=false"},
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        unfinished.unlink(missing_ok=True)
        raise SetUpError(f"{program} {module.version()} could not be built:\n{done.stderr[-3000:]}")
    unfinished.rename(place / program)


def ensure(modules: tuple[Module, ...] = CLUSTER) -> Programs:
    """Returns the programs of `modules`; builds those that are missing first. Raises SetUpError."""
    if any(module.missing() for module in modules):
        parent = cache_folder() / "kubernetes"
        parent.mkdir(parents=True, exist_ok=True)
        with locked(parent / ".lock", "the cluster's programs"):
            work = [(module, program) for module in modules for program in module.missing()]
            for index, (module, program) in enumerate(work, 1):
                started = time.monotonic()
                say(f"building {program} {module.version()} ({index} of {len(work)})")
                build(module, program)
                say(f"  {time.monotonic() - started:.0f} s")
    return Programs(modules)


def tested_apiservers() -> tuple[Module, ...]:
    """The apiservers that schemas and chart are tested on: the cluster's own, and with
    ORBITKV_TEST_API_VERSIONS=1 (`make test ONLY=api-versions`) the oldest and the newest too."""
    others = OTHER_APISERVERS if os.environ.get("ORBITKV_TEST_API_VERSIONS") else ()
    return (CLUSTER[0], *others)
