"""A container runtime for nodes: runc, and what NVIDIA's runtime would add where it is asked to.

    python runtime.py FOLDER HANDLER RUNC-ARGUMENTS...

HANDLER is the one that containerd was asked for. FOLDER/gpus.json says what there is (`Node.give_gpus`); without it,
this is runc and nothing more.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

LIBRARIES = "/usr/lib/x86_64-linux-gnu"
COUNT_FILE = "/run/orbitkv-test-gpus"
"""Where the libraries find how many GPUs there are, in the container."""
NAMES = ("libcuda.so.1", "libnvidia-ml.so.1")


def wished(config: dict[str, Any]) -> str:
    """The container's NVIDIA_VISIBLE_DEVICES."""
    found: dict[str, str] = dict(line.partition("=")[::2] for line in config["process"].get("env") or ())
    return found.get("NVIDIA_VISIBLE_DEVICES", "")


def add_gpus(config: dict[str, Any], folder: Path, count: int) -> None:
    """Adds libraries and devices to a container."""
    read_only, device = ["bind", "ro"], ["bind", "rw"]
    (folder / f"count-{count}").write_text(str(count))
    mounts = [(f"{LIBRARIES}/{name}", folder / "stub.so", read_only) for name in NAMES]
    mounts.append((COUNT_FILE, folder / f"count-{count}", read_only))
    if not any(mount["destination"] == "/dev" and mount.get("type") == "bind" for mount in config["mounts"]):
        mounts += [(f"/dev/nvidia{index}", Path("/dev/null"), device) for index in range(count)]
    config["mounts"] += [
        {"destination": destination, "source": str(source), "type": "bind", "options": options}
        for destination, source, options in mounts
    ]


def main() -> None:
    """Becomes runc."""
    folder, handler, *arguments = Path(sys.argv[1]), *sys.argv[2:]
    given = folder / "gpus.json"
    if "create" in arguments and given.exists():
        gpus = json.loads(given.read_text())
        bundle = Path(arguments[arguments.index("--bundle") + 1], "config.json")
        config = json.loads(bundle.read_text())
        count = gpus["devices"].get(wished(config), 0)
        if count and handler in gpus["handlers"]:
            add_gpus(config, folder, count)
            bundle.write_text(json.dumps(config))
    os.execvp("runc", ["runc", *arguments])


if __name__ == "__main__":
    main()
