"""Images of which most is the same, in one archive."""

import hashlib
import json
import tarfile
from pathlib import Path

import pytest

from images.archive import Layout, add


def saved(folder: Path, name: str, layers: list[bytes]) -> Path:
    """An archive as `docker save` writes it."""
    digests = [hashlib.sha256(layer).hexdigest() for layer in layers]
    config = json.dumps({"rootfs": {"type": "layers", "diff_ids": [f"sha256:{each}" for each in digests]}}).encode()
    path = folder / f"{name}.tar"
    with tarfile.open(path, "w") as tar:
        for digest, layer in zip(digests, layers, strict=True):
            add(tar, f"{digest}.tar", layer)
        add(tar, "config.json", config)
        listed = [{"Config": "config.json", "RepoTags": [name], "Layers": [f"{each}.tar" for each in digests]}]
        add(tar, "manifest.json", json.dumps(listed).encode())
    return path


BASE, FIRST, SECOND = b"the base" * 100, b"one program", b"another program"


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    made = Layout(tmp_path / "layout")
    made.clear()
    made.add(saved(tmp_path, "first", [BASE, FIRST]), "localhost/first:1")
    made.add(saved(tmp_path, "second", [BASE, SECOND]), "localhost/second:1")
    return made


def blobs(archive: Path) -> dict[str, bytes]:
    with tarfile.open(archive) as tar:
        contents = {member.name: tar.extractfile(member) for member in tar.getmembers()}
        return {name: content.read() for name, content in contents.items() if content is not None}


def test_what_images_share_is_there_once(layout: Layout, tmp_path: Path) -> None:
    layout.write_archive(tmp_path / "all.tar", without=set())
    found = blobs(tmp_path / "all.tar")
    assert sorted(found.values()).count(BASE) == 1
    assert {FIRST, SECOND} <= set(found.values())
    index = json.loads(found["index.json"])
    names = [each["annotations"]["io.containerd.image.name"] for each in index["manifests"]]
    assert names == ["localhost/first:1", "localhost/second:1"]
    for name, content in found.items():
        if name.startswith("blobs/"):
            assert name == f"blobs/sha256/{hashlib.sha256(content).hexdigest()}"


def test_every_image_is_complete(layout: Layout, tmp_path: Path) -> None:
    layout.write_archive(tmp_path / "all.tar", without=set())
    found = blobs(tmp_path / "all.tar")

    def blob(descriptor: dict[str, object]) -> bytes:
        content = found["blobs/sha256/" + str(descriptor["digest"]).removeprefix("sha256:")]
        assert len(content) == descriptor["size"]
        return content

    for top in json.loads(found["index.json"])["manifests"]:
        manifest = json.loads(blob(top))
        diffs = json.loads(blob(manifest["config"]))["rootfs"]["diff_ids"]
        assert [f"sha256:{hashlib.sha256(blob(layer)).hexdigest()}" for layer in manifest["layers"]] == diffs


def test_a_reader_gets_only_what_it_has_not(layout: Layout, tmp_path: Path) -> None:
    there = layout.digests()
    layout.clear()
    layout.add(saved(tmp_path, "first", [BASE, b"a newer program"]), "localhost/first:1")
    layout.write_archive(tmp_path / "update.tar", without=there)
    found = set(blobs(tmp_path / "update.tar").values())
    assert b"a newer program" in found
    assert BASE not in found


def test_what_no_image_has_any_more_is_swept(layout: Layout, tmp_path: Path) -> None:
    layout.clear()
    layout.add(saved(tmp_path, "first", [BASE, FIRST]), "localhost/first:1")
    layout.sweep()
    names = {path.name for path in (layout.folder / "blobs" / "sha256").iterdir()}
    assert names == {digest.removeprefix("sha256:") for digest in layout.digests()}
