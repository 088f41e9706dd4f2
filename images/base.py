"""An image to build on where no registry can be reached: Python from this machine's Debian."""

import os
import shutil
import subprocess
import tarfile
import tempfile
import time
from pathlib import Path

from images.wheels import run
from tools.cache import SetUpError, cache_folder, say

PACKAGES = "ca-certificates,python3,python3-venv"
NOT_NEEDED = (
    "var/cache/apt",
    "var/lib/apt/lists",
    "var/log",
    "usr/share/doc",
    "usr/share/info",
    "usr/share/locale",
    "usr/share/man",
)
"""Folders that are emptied: what apt can fetch again, and what only people read."""


class Buildah:
    """buildah with a storage of its own, away from that of the machine's user."""

    def __init__(self) -> None:
        self.storage = cache_folder() / "images" / "storage"
        self._command = ["buildah", f"--root={self.storage}", f"--runroot={self.storage}-run"]
        self._environment = {
            **os.environ,
            "BUILDAH_ISOLATION": "chroot",  # needs no more of the kernel than root
            "STORAGE_DRIVER": "overlay",
            "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin",
        }

    def __call__(self, *arguments: str, offline: bool = False) -> str:
        """Runs buildah and returns its stdout; `offline` in a network namespace that reaches nothing."""
        prefix = ["unshare", "--net"] if offline else []
        return run([*prefix, *self._command, *arguments], "the images", self._environment).strip()

    def has(self, image: str) -> bool:
        """Whether an image is in the storage."""
        command = [*self._command, "inspect", "--type=image", image]
        return subprocess.run(command, capture_output=True, env=self._environment, check=False).returncode == 0


def codename() -> str:
    """This machine's release of Debian. Raises SetUpError where it is none."""
    lines = Path("/etc/os-release").read_text().splitlines()
    values = dict(line.split("=", 1) for line in lines if "=" in line)
    if values.get("ID") != "debian":
        raise SetUpError(
            "images are built on this machine's Debian packages, and this is no Debian: name a base, BASE="
        )
    return values["VERSION_CODENAME"].strip('"')


def ensure(buildah: Buildah) -> str:
    """Returns the name of the base image; makes it first if it is not there. Raises SetUpError."""
    suite = codename()
    name = f"localhost/orbitkv/base:{suite}"
    if buildah.has(name):
        return name
    say(f"making the base image from Debian's packages ({suite}), about two minutes")
    started = time.monotonic()
    buildah.storage.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=buildah.storage.parent) as temporary:
        root = Path(temporary) / "root"
        path = {"PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}
        run(["debootstrap", "--variant=minbase", f"--include={PACKAGES}", suite, str(root)], "the base image", path)
        for folder in NOT_NEEDED:
            for entry in (root / folder).iterdir() if (root / folder).is_dir() else ():
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        archive = Path(temporary) / "root.tar"  # as an archive: a copied folder would lose its owners
        with tarfile.open(archive, "w") as tar:
            tar.add(root, arcname=".")
        container = buildah("from", "scratch")
        buildah("add", "--quiet", container, str(archive), "/")
        buildah("config", "--cmd", "python3", container)
        buildah("commit", "--quiet", "--rm", container, name)
    say(f"  {time.monotonic() - started:.0f} s")
    return name
