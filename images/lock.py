"""`python -m images.lock`: chooses the versions of what the images install, anew or after pyproject.toml changed.

For each extra that an image installs, images/locks has a file with every package at one version and the digests of its
files, for every Python from 3.11 on. `--upgrade` takes the newest versions; without it, those that still fit stay.
"""

import argparse
import subprocess
import sys

from images import build, wheels
from tools.cache import SetUpError, say

OLDEST_PYTHON = "3.11"


def write(extra: str, upgrade: bool) -> None:
    """Writes the lock of an extra. Raises SetUpError."""
    target = wheels.lock(extra)
    target.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "uv", "pip", "compile", "-", "--quiet", "--generate-hashes", "--universal"]
    command += [f"--python-version={OLDEST_PYTHON}", "--no-annotate", "--no-header", f"--output-file={target}"]
    command += ["--upgrade"] if upgrade else []
    done = subprocess.run(
        command, input="\n".join(wheels.dependencies(extra)), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SetUpError(f"the versions for the {extra} could not be chosen:\n{done.stderr[-3000:]}")
    say(f"{target.relative_to(wheels.ROOT)}: {len(wheels.locked(extra, OLDEST_PYTHON))} packages")


def main() -> None:
    """Reads the command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m images.lock", description=__doc__.splitlines()[0])
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that fit")
    upgrade = parser.parse_args().upgrade
    for image in build.IMAGES:
        if image.extra is not None:
            write(image.extra, upgrade)


if __name__ == "__main__":
    try:
        main()
    except SetUpError as error:
        sys.exit(f"images: {error}")
