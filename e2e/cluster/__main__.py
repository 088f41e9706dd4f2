"""`python -m e2e.cluster up`, `down`, `status` or `build`. Progress goes to stderr, the kubeconfig's path to stdout."""

import argparse
import sys
import time

from e2e.cluster import programs
from e2e.cluster.cluster import Cluster, state_folder
from e2e.cluster.processes import ClusterError
from tools.cache import SetUpError, say

COMMANDS = {
    "build": "build the cluster's programs, if they are not there",
    "up": "start the cluster, if it does not run",
    "status": "say whether the cluster runs; exit with 1 if it does not",
    "down": "end the cluster and remove all of it but its programs",
}


def main() -> int:
    """Runs one command; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m e2e.cluster", description="A real Kubernetes on this machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, meaning in COMMANDS.items():
        commands.add_parser(name, help=meaning, description=meaning)
    command = parser.parse_args().command
    started = time.monotonic()
    if command == "build":
        programs.ensure()
    elif command == "up":
        cluster = Cluster.up()
        say(f"the cluster runs after {time.monotonic() - started:.0f} s: {', '.join(cluster.nodes)}")
        print(cluster.kubeconfig)
    elif command == "status":
        running = Cluster.running()
        if running is None:
            print(f"no whole cluster runs (its folder is {state_folder()})", file=sys.stderr)
            return 1
        for node in running.nodes.values():
            say(f"{node.name}: {node.address}, files in {node.folder}")
        print(running.kubeconfig)
    else:
        Cluster.down()
        say(f"the cluster is gone after {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (SetUpError, ClusterError) as error:
        sys.exit(f"cluster: {error}")
