"""`python -m images`: builds the images, and loads them into the nodes of the cluster on this machine, if it runs.

python -m images --push REGISTRY                     pushes them as well
python -m images --contexts FOLDER --python 3.12     only fills FOLDER/operator, ... for another builder of images:
docker build --build-arg VERSION=0.1.0 -t registry.example.com/orbitkv/operator:0.1.0 FOLDER/operator
"""

import argparse
import os
import sys
from pathlib import Path

from e2e.cluster.cluster import Cluster, require_machine
from e2e.cluster.processes import ClusterError
from images import base, build
from tools.cache import SetUpError, say


def main() -> int:
    """Runs the command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m images", description="OrbitKV's container images.")
    parser.add_argument("--base", help="an image that buildah has and that has Python (default: made from Debian's)")
    parser.add_argument("--contexts", type=Path, metavar="FOLDER", help="fill a new folder to build from elsewhere")
    parser.add_argument("--python", default="3.12", help="with --contexts: the Python version of the base (3.12)")
    parser.add_argument("--push", metavar="REGISTRY", help="push them to REGISTRY/orbitkv (after `buildah login`)")
    arguments = parser.parse_args()
    if arguments.contexts is not None:
        print("\n".join(map(str, build.write_contexts(arguments.contexts, arguments.python))))
        return 0
    require_machine()
    names = build.build(arguments.base)
    cluster = Cluster.running() if os.geteuid() == 0 else None
    if cluster is not None:
        build.load(cluster)
        say(f"loaded on {', '.join(cluster.nodes)}")
    if arguments.push:
        names = build.push(arguments.push, base.Buildah())
    print("\n".join(names))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (SetUpError, ClusterError) as error:
        sys.exit(f"images: {error}")
