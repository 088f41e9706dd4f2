"""What is installed in the images, downloaded and built beforehand, as no image's build reaches the network.

A folder `wheels` beside a Containerfile holds `orbitkv`, the project's own wheel, built so that the same tree gives the
same bytes; and `dependencies`, with a requirements.txt that names each at its version with digests of its files.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from tools.cache import SetUpError, cache_folder, say

ROOT = Path(__file__).resolve().parent.parent
LOCKS = Path(__file__).resolve().parent / "locks"
EPOCH = "1580601600"
"""SOURCE_DATE_EPOCH of the wheel: every file in it has this time, in seconds since 1970."""

PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_28_x86_64")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
VERSION: str = PROJECT["project"]["version"]
PACKAGES: list[str] = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]


def dependencies(extra: str) -> list[str]:
    """What an image installs beside OrbitKV.

    The operator leaves out what only those need who move pages (numpy), which would double it.
    """
    project = PROJECT["project"]
    listed = list(project["optional-dependencies"][extra])
    return listed if extra == "operator" else [*project["dependencies"], *listed]


def run(command: list[str], what: str, environment: dict[str, str] | None = None) -> str:
    """Runs a command and returns its stdout. Raises SetUpError with the end of its output if it fails."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        check=False,
    )
    if done.returncode:
        raise SetUpError(f"{what}: {' '.join(command)} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def sources() -> list[Path]:
    """The files that go into the wheel, or decide how it is made."""
    found = [ROOT / "pyproject.toml", ROOT / "README.md", ROOT / "LICENSE"]
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*")):
            if path.is_file() and "tests" not in path.parts and "__pycache__" not in path.parts:
                found.append(path)
    return found


def digest(paths: list[Path]) -> str:
    """A digest of files, by their names and contents."""
    whole = hashlib.sha256()
    for path in paths:
        whole.update(f"{path.relative_to(ROOT)}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return whole.hexdigest()


def build_wheel(target: Path) -> Path:
    """Builds the project's wheel into an empty folder and returns it. The same sources give the same bytes."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-cache-dir", f"--wheel-dir={target}"]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(ROOT)]
    run(command, "the project's wheel", {"SOURCE_DATE_EPOCH": EPOCH})
    (wheel,) = target.glob("*.whl")
    return wheel


def lock(extra: str) -> Path:
    """The file that names each dependency of an extra at its version, with digests of its files (`images.lock`)."""
    return LOCKS / f"{extra}.lock"


def locked(extra: str, python: str) -> list[Requirement]:
    """What is locked for an extra and a Python version such as 3.12, each at one version."""
    here = {"python_version": python, "python_full_version": f"{python}.0"}
    text = lock(extra).read_text()
    found = [Requirement(line.removesuffix("\\")) for line in text.splitlines() if line[:1].isalnum()]
    return [each for each in found if each.marker is None or each.marker.evaluate(here)]


def requirements(extra: str, python: str) -> str:
    """The text of a requirements.txt for a Python version, with the digests of `lock`."""
    wanted = {(each.name, str(each.specifier)) for each in locked(extra, python)}
    lines: list[str] = []
    taken = False
    for line in lock(extra).read_text().splitlines():
        if line[:1].isalnum():
            found = Requirement(line.removesuffix("\\"))
            taken = (found.name, str(found.specifier)) in wanted
            lines += [f"{found.name}{found.specifier} \\"] if taken else []
        elif taken and line[:1] == " ":
            lines.append(line)
    return "\n".join([*lines, ""])


def download(extra: str, python: str) -> Path:
    """Returns a folder with the wheels of an extra's dependencies for a Python version such as 3.12.

    They are downloaded once for each list of requirements, and kept; a file with another digest is refused. Raises
    SetUpError.
    """
    wanted = requirements(extra, python)
    key = hashlib.sha256("\n".join([python, *PLATFORMS, wanted]).encode()).hexdigest()[:12]
    folder = cache_folder() / "images" / f"wheels-{extra}-{key}"
    if (folder / "requirements.txt").exists():
        return folder
    say(f"downloading what the image of the {extra} needs, for Python {python}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    unfinished = folder / "requirements.txt.part"
    unfinished.write_text(wanted)
    platforms = [f"--platform={platform}" for platform in PLATFORMS]
    options = ["--quiet", "--only-binary=:all:", "--no-deps", "--require-hashes", f"--python-version={python}"]
    options += [*platforms, f"--dest={folder}", f"--requirement={unfinished}"]
    run([sys.executable, "-m", "pip", "download", *options], f"the dependencies of the {extra}")
    unfinished.rename(folder / "requirements.txt")
    return folder
