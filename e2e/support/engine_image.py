"""An image with a real vLLM on the CPU, for the nodes of the project's own cluster, without a copy of its 6 GB.

The engine's environment stays where `make engine` made it: a pod mounts it from the node at the path that it has there,
because a virtual environment names its own path. The image has what is missing to start it (the library that vLLM
loads, `vllm` on the path, its settings for a machine without GPU and network) and a tiny model.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.node import Node
from e2e.support.kubectl import Object
from images import base
from tools import engine_env
from tools.cache import SetUpError, cache_folder, say

REPOSITORY = "localhost/orbitkv-test/vllm-cpu"
MODEL = "/models/tiny"
CACHE = "/models/cache"
LIBRARY = "libnuma.so.1"
"""vLLM's kernels load it; minimal systems lack it."""
LOOK = "import sys; from vllm.engine.arg_utils import EngineArgs; EngineArgs(sys.argv[1]).create_engine_config()"
"""Has vLLM find out what it wants to know of the model's class, which it keeps in its cache: else every start would
take ten seconds of processor time more."""
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "HOME": "/tmp",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # what it would compile needs a C++ compiler
    "VLLM_CACHE_ROOT": CACHE,
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # no worker of its own: a third less memory, and time to start
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
}


@dataclass(frozen=True)
class EngineImage:
    """The image's name, and the folders of the node that its pods mount at their own paths."""

    reference: str
    folders: tuple[Path, ...]

    def volumes(self) -> tuple[list[Object], list[Object]]:
        """The volumes of a pod, and the mounts of its container."""
        volumes, mounts = [], []
        for number, folder in enumerate(self.folders):
            name = f"engine-{number}"
            volumes.append({"name": name, "hostPath": {"path": str(folder), "type": "Directory"}})
            mounts.append({"name": name, "mountPath": str(folder), "readOnly": True})
        return volumes, mounts


def ensure(nodes: list[Node]) -> EngineImage:
    """Builds the image unless it is there, and imports it on nodes that lack it. Raises SetUpError and ClusterError."""
    python = engine_env.ensure()
    prefix = subprocess.run(
        [python, "-c", "import sys; print(sys.base_prefix)"], capture_output=True, text=True, check=True
    ).stdout.strip()
    buildah = base.Buildah()
    under = base.ensure(buildah)
    model = engine_env.TOOLS / "tiny_model.py"
    inputs = [under, str(python), prefix, model.read_text(), Path(__file__).read_text()]
    tag = hashlib.sha256("\0".join(inputs).encode()).hexdigest()[:12]
    image = EngineImage(f"{REPOSITORY}:{tag}", tuple(dict.fromkeys([python.parents[1], Path(prefix)])))
    lacking = [node for node in nodes if image.reference not in node.images()]
    if lacking:
        say("making the image of the engine")
        with tempfile.TemporaryDirectory(dir=cache_folder() / "images") as folder:
            archive = _build(buildah, under, python, model, image.reference, Path(folder))
            for node in lacking:
                node.import_image(archive)
    return image


def _build(buildah: base.Buildah, under: str, python: Path, model: Path, reference: str, folder: Path) -> Path:
    root = folder / "root"
    (root / "usr" / "local" / "bin").mkdir(parents=True)
    (root / "usr" / "local" / "lib").mkdir()
    (root / "usr" / "local" / "bin" / "vllm").symlink_to(python.parent / "vllm")
    shutil.copy(_library(), root / "usr" / "local" / "lib" / LIBRARY)
    settings = {**os.environ, **SETTINGS, "VLLM_CACHE_ROOT": str(root) + CACHE}
    for arguments in ([str(model), str(root) + MODEL, "--dtype", "float32"], ["-c", LOOK, str(root) + MODEL]):
        command = [str(python), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=settings, check=False)
        if done.returncode:
            raise SetUpError(f"the tiny model could not be made: {' '.join(command)}\n{done.stderr[-3000:]}")
    container = buildah("from", under)
    buildah("copy", "--quiet", container, str(root), "/")
    for name, value in {**SETTINGS, "LD_LIBRARY_PATH": "/usr/local/lib"}.items():
        buildah("config", f"--env={name}={value}", container)
    buildah("config", '--entrypoint=["vllm"]', "--cmd=--help", container)
    buildah("commit", "--quiet", "--rm", container, reference)
    archive = folder / "image.tar"
    buildah("push", "--quiet", reference, f"docker-archive:{archive}:{reference}")
    return archive


def _library() -> Path:
    """The library on this machine. Raises SetUpError."""
    found = next(Path("/usr/lib").glob(f"*-linux-gnu/{LIBRARY}"), None)
    if found is None:
        raise SetUpError(f"{LIBRARY} is missing: install the Debian package libnuma1")
    return found.resolve()
