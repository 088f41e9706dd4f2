"""One OCI archive of several images, in which what they share is once and nothing is compressed.

buildah writes an archive for each image; most of building and importing them would be compressing, decompressing and
copying the same layers again and again.
"""

import hashlib
import io
import json
import shutil
import tarfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"


class Layout:
    """The blobs and the index of an OCI image layout, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._blobs = folder / "blobs" / "sha256"
        self._index = folder / "index.json"

    def clear(self) -> None:
        """Forgets the images; keeps the blobs, as the next images share most of them."""
        self._blobs.mkdir(parents=True, exist_ok=True)
        self._write([])

    def digests(self, names: Collection[str] | None = None) -> set[str]:
        """The digests of all blobs that the images consist of, or those with these names."""
        found = set()
        for top in self._manifests(names):
            manifest = json.loads((self._blobs / hex_part(top["digest"])).read_text())
            found |= {top["digest"], manifest["config"]["digest"], *(layer["digest"] for layer in manifest["layers"])}
        return found

    def sweep(self) -> None:
        """Removes the blobs that no image has."""
        kept = {hex_part(digest) for digest in self.digests()}
        for path in self._blobs.iterdir():
            if path.name not in kept:
                path.unlink()

    def add(self, docker_archive: Path, name: str) -> int:
        """Adds an image from an archive as `docker save` writes it. Returns the size of its layers, in bytes."""
        with tarfile.open(docker_archive) as tar:
            (listed,) = json.loads(read(tar, "manifest.json"))
            config = self._put(read(tar, listed["Config"]), CONFIG)
            diffs = json.loads((self._blobs / hex_part(config["digest"])).read_text())["rootfs"]["diff_ids"]
            layers = [self._layer(tar, file, digest) for file, digest in zip(listed["Layers"], diffs, strict=True)]
        manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": layers}
        top = self._put(json.dumps(manifest).encode(), MANIFEST)
        top["annotations"] = {
            "io.containerd.image.name": name,
            "org.opencontainers.image.ref.name": name.rsplit(":", 1)[1],
        }
        self._write([*self._manifests(), top])
        return sum(layer["size"] for layer in layers)

    def write_archive(self, target: Path, without: set[str], names: Collection[str] | None = None) -> None:
        """Writes the images, or those with these names, as one archive, without what its reader has already."""
        with tarfile.open(target, "w") as tar:
            add(tar, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
            add(tar, "index.json", index_of(self._manifests(names)))
            for digest in sorted(self.digests(names) - without):
                path = self._blobs / hex_part(digest)
                tar.add(path, arcname=f"blobs/sha256/{path.name}")

    def _layer(self, tar: tarfile.TarFile, file: str, digest: str) -> dict[str, Any]:
        member = tar.getmember(file)
        path = self._blobs / hex_part(digest)
        if not path.exists():
            content = tar.extractfile(member)
            assert content is not None
            part = path.with_suffix(".part")
            with part.open("wb") as output:
                shutil.copyfileobj(content, output, 1 << 20)
            part.rename(path)
        return {"mediaType": LAYER, "digest": digest, "size": path.stat().st_size}

    def _put(self, data: bytes, kind: str) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        (self._blobs / digest).write_bytes(data)
        return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(data)}

    def _manifests(self, names: Collection[str] | None = None) -> list[dict[str, Any]]:
        found = json.loads(self._index.read_text())["manifests"]
        return [each for each in found if names is None or each["annotations"]["io.containerd.image.name"] in names]

    def _write(self, manifests: list[dict[str, Any]]) -> None:
        self._index.write_bytes(index_of(manifests))


def index_of(manifests: list[dict[str, Any]]) -> bytes:
    """The index of a layout with these images."""
    return json.dumps({"schemaVersion": 2, "manifests": manifests}).encode()


def hex_part(digest: str) -> str:
    """A digest without the name of its kind."""
    return digest.removeprefix("sha256:")


def read(tar: tarfile.TarFile, name: str) -> bytes:
    """A file of an archive."""
    content = tar.extractfile(name)
    assert content is not None
    return content.read()


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    """Adds a file to an archive."""
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    tar.addfile(entry, io.BytesIO(data))
