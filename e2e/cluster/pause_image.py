"""The image that holds a pod's namespaces, made from one static program without any other tool."""

import hashlib
import io
import json
import tarfile
from pathlib import Path

NAME = "localhost/pause:1"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"


def archive(files: dict[str, tuple[bytes, int]]) -> bytes:
    """A tar archive of files: name to content and mode."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, (data, mode) in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), mode
            tar.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def write(program: Path, target: Path) -> None:
    """Writes an OCI archive, to be imported by containerd, of an image that runs `program` and has nothing else."""
    blobs: dict[str, tuple[bytes, int]] = {}

    def descriptor(data: bytes, kind: str) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        blobs[f"blobs/sha256/{digest}"] = (data, 0o644)
        return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(data)}

    layer = descriptor(archive({"pause": (program.read_bytes(), 0o755)}), LAYER)
    image = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": ["/pause"], "User": "65535:65535"},
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]},
    }
    config = descriptor(json.dumps(image).encode(), CONFIG)
    manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": [layer]}
    top = descriptor(json.dumps(manifest).encode(), MANIFEST)
    top["annotations"] = {"io.containerd.image.name": NAME, "org.opencontainers.image.ref.name": "1"}
    index = {"schemaVersion": 2, "manifests": [top]}
    files = {
        "oci-layout": (b'{"imageLayoutVersion":"1.0.0"}', 0o644),
        "index.json": (json.dumps(index).encode(), 0o644),
        **blobs,
    }
    target.write_bytes(archive(files))
