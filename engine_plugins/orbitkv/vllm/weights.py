"""Content hash of a model's weight files, computed once for each file and remembered.

A file is hashed again when its device, inode, size or modification time is another. What was hashed is remembered in a
small file under the user's cache folder, which all engines of the user share.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".tensors"})
REMEMBERED_FILES = 4096
SETTLED_S = 2.0
"""A file that was changed more recently than this is not remembered: it may change again without another time."""
_THREADS = 4


class WeightsUnknownError(Exception):
    """There are no weight files to hash; the message says where they were looked for."""


def cache_path(environ: Mapping[str, str]) -> Path:
    """Return where hashes are remembered: `$XDG_CACHE_HOME/orbitkv/weights.json`."""
    base = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "orbitkv" / "weights.json"


def weights_hash(folder: Path, cache: Path) -> str:
    """Return a digest of all weight files in `folder`, by name and content (hexadecimal).

    Raises:
        WeightsUnknownError: there are none, or one cannot be read.
    """
    files = (
        [folder]
        if folder.is_file()
        else sorted(path for path in folder.rglob("*") if path.suffix in WEIGHT_SUFFIXES and path.is_file())
    )
    if not files:
        raise WeightsUnknownError(f"{folder} has no weight files ({', '.join(sorted(WEIGHT_SUFFIXES))})")
    with _locked(cache):
        remembered = _read(cache)
    try:
        with ThreadPoolExecutor(_THREADS) as threads:
            found = list(threads.map(lambda path: _file_hash(path, remembered), files))
    except OSError as error:
        raise WeightsUnknownError(f"a weight file cannot be read: {error}") from error
    news = {key: digest for key, digest in found if key and key not in remembered}
    if news:
        with _locked(cache):
            _write(cache, {**_read(cache), **news})
    total = hashlib.sha256()
    for path, (_, digest) in zip(files, found, strict=True):
        total.update(f"{path.relative_to(folder) if path != folder else path.name}\0{digest}\n".encode())
    return total.hexdigest()


def _file_hash(path: Path, remembered: Mapping[str, str]) -> tuple[str, str]:
    """Return (key under which it may be remembered or "", digest)."""
    with path.open("rb") as file:
        before = _key(os.fstat(file.fileno()))
        if before in remembered:
            return before, remembered[before]
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        after = os.fstat(file.fileno())
    settled = time.time() - after.st_mtime > SETTLED_S
    return (before if settled and _key(after) == before else ""), digest


def _key(status: os.stat_result) -> str:
    return f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}"


@contextmanager
def _locked(cache: Path) -> Iterator[None]:
    """One process at a time reads or writes the file. A cache folder that cannot be written is done without."""
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(cache.with_suffix(".lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        yield
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _read(cache: Path) -> dict[str, str]:
    try:
        content = json.loads(cache.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {key: value for key, value in content.items() if isinstance(key, str) and isinstance(value, str)}


def _write(cache: Path, content: Mapping[str, str]) -> None:
    newest = dict(list(content.items())[-REMEMBERED_FILES:])
    fresh = cache.with_suffix(f".{os.getpid()}.new")
    try:
        fresh.write_text(json.dumps(newest))
        fresh.replace(cache)
    except OSError:
        fresh.unlink(missing_ok=True)
