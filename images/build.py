"""Builds the images with buildah, and loads them into the nodes of a cluster.

Nothing is done where nothing changed: a stamp beside the results has a digest of all that goes into them.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.cluster import Cluster
from e2e.cluster.node import Node
from images import base, sbom, wheels
from images.archive import Layout
from tools.cache import cache_folder, locked, say

FOLDER = Path(__file__).resolve().parent
RESULTS = wheels.ROOT / "build" / "images"
LAYOUT = Layout(RESULTS / "layout")
REPOSITORY = "localhost/orbitkv"


@dataclass(frozen=True)
class Image:
    """One image: its name, and the extra of pyproject.toml that it installs (none: OrbitKV's own files only)."""

    name: str
    extra: str | None

    @property
    def reference(self) -> str:
        """The name that pods use."""
        return f"{REPOSITORY}/{self.name}:{wheels.VERSION}"

    @property
    def folder(self) -> Path:
        """Its Containerfile, and what that copies beside the wheels."""
        return FOLDER / self.name

    @property
    def containerfile(self) -> Path:
        """How it is built."""
        return self.folder / "Containerfile"


IMAGES = (Image("operator", "operator"), Image("node-agent", "agent"), Image("engine-plugin", None))


def inputs(base_image: str) -> str:
    """A digest of all that the images are made from."""
    own = [path for image in IMAGES for path in sorted(image.folder.iterdir())]
    files = [*wheels.sources(), *own, *sorted(FOLDER.glob("*.py"))]
    return hashlib.sha256(f"{base_image} {wheels.digest(files)}".encode()).hexdigest()


def fill_context(context: Path, image: Image, wheel: Path, python: str) -> None:
    """Makes the folder that an image is built from: its own files and the wheels."""
    for path in image.folder.iterdir():
        shutil.copy(path, context)
    (context / "wheels" / "orbitkv").mkdir(parents=True)
    shutil.copy2(wheel, context / "wheels" / "orbitkv")
    if image.extra is not None:
        shutil.copytree(wheels.download(image.extra, python), context / "wheels" / "dependencies")


def write_contexts(target: Path, python: str) -> list[Path]:
    """Makes a folder for each image that any builder of images can build, without this machine's buildah.

    `python` is the version of the base's Python. Raises SetUpError.
    """
    (cache_folder() / "images").mkdir(parents=True, exist_ok=True)
    wheel = wheels.build_wheel(RESULTS / "wheel")
    contexts = [target / image.name for image in IMAGES]
    for image, context in zip(IMAGES, contexts, strict=True):
        context.mkdir(parents=True)
        fill_context(context, image, wheel, python)
    return contexts


def build(base_image: str | None = None) -> list[str]:
    """Builds all images, unless they are there and nothing changed. Returns their names. Raises SetUpError.

    The images, as one OCI layout, and a bill of materials for each are in build/images.
    """
    (cache_folder() / "images").mkdir(parents=True, exist_ok=True)
    with locked(cache_folder() / "images" / ".lock", "the images"):
        buildah = base.Buildah()
        base_image = base_image or base.ensure(buildah)
        stamp = RESULTS / "stamp"
        wanted = inputs(f"{base_image} {buildah('inspect', '--type=image', '--format={{.FromImageID}}', base_image)}")
        if not (stamp.exists() and stamp.read_text() == wanted):
            stamp.unlink(missing_ok=True)
            build_all(buildah, base_image)
            stamp.write_text(wanted)
    return [image.reference for image in IMAGES]


def push(registry: str, buildah: Callable[..., str]) -> list[str]:
    """Pushes all images, which were built, to REGISTRY/orbitkv/NAME; returns their names there. Raises SetUpError.

    Logins are those of `buildah login`.
    """
    pushed = []
    for image in IMAGES:
        name = image.reference.replace(REPOSITORY, f"{registry.rstrip('/')}/orbitkv", 1)
        buildah("push", "--quiet", image.reference, f"docker://{name}")
        pushed.append(name)
    return pushed


def present() -> str:
    """A name for the images as they are now: another build of other sources has another."""
    return (RESULTS / "stamp").read_text()[:16]


def build_all(buildah: base.Buildah, base_image: str) -> None:
    """Builds every image and writes the archive's contents and the bills of materials."""
    started = time.monotonic()
    say("building the images")
    RESULTS.mkdir(parents=True, exist_ok=True)
    wheel = wheels.build_wheel(RESULTS / "wheel")
    python = python_version(buildah, base_image)
    LAYOUT.clear()
    for image in IMAGES:
        context = RESULTS / f"context-{image.name}"
        shutil.rmtree(context, ignore_errors=True)
        context.mkdir()
        fill_context(context, image, wheel, python)
        arguments = [f"--build-arg=BASE={base_image}", f"--build-arg=VERSION={wheels.VERSION}", "--layers"]
        buildah("build", "--quiet", *arguments, f"--tag={image.reference}", str(context), offline=True)
        shutil.rmtree(context)
        saved = RESULTS / f"{image.name}.docker.tar"
        saved.unlink(missing_ok=True)
        buildah("push", "--quiet", image.reference, f"docker-archive:{saved}:{image.reference}")
        size = LAYOUT.add(saved, image.reference)
        saved.unlink()
        count = describe(buildah, image)
        say(f"  {image.reference}: {size / 1e6:.0f} MB, {count} packages in {image.name}.cdx.json")
    LAYOUT.sweep()
    say(f"  {time.monotonic() - started:.0f} s")


def load(cluster: Cluster) -> None:
    """Imports the images on every node of a cluster that does not have them as they are now. Raises ClusterError."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(load_node, cluster.nodes.values()))


def load_node(node: Node, images: Sequence[Image] = IMAGES) -> None:
    """Imports images on one node, without the layers that it has."""
    names = [image.reference for image in images]
    wanted = LAYOUT.digests(names)
    loaded = node.folder / "images-loaded.json"
    there = set(json.loads(loaded.read_text())) if loaded.exists() else set()
    if wanted <= there:
        return
    archive = node.folder / "images.tar"
    LAYOUT.write_archive(archive, without=there, names=names)
    node.import_image(archive)
    archive.unlink()
    # what earlier images alone had may be gone by now
    loaded.write_text(json.dumps(sorted(wanted | (there & LAYOUT.digests()))))


def describe(buildah: base.Buildah, image: Image) -> int:
    """Writes an image's bill of materials."""
    container = buildah("from", image.reference)
    try:
        root = Path(buildah("mount", container))
        return sbom.write(image.reference, wheels.VERSION, root, RESULTS / f"{image.name}.cdx.json")
    finally:
        buildah("rm", container)


def python_version(buildah: base.Buildah, base_image: str) -> str:
    """The version of a base image's Python, such as 3.12."""
    container = buildah("from", base_image)
    try:
        program = "import sys; print('%d.%d' % sys.version_info[:2])"
        return buildah("run", container, "python3", "-c", program, offline=True)
    finally:
        buildah("rm", container)
