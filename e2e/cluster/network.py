"""The cluster's network: a switch to which this machine and each node are connected, all in namespaces of their own.

    this machine  10.245.0.1  ─┐
    node-a        10.245.0.10 ─┼─ switch          pods of node-a: 10.244.0.0/24, Services: 10.96.0.0/16
    node-b        10.245.0.11 ─┘                  pods of node-b: 10.244.1.0/24

A network namespace lives as long as a process in it. So when the cluster's processes are killed, its interfaces, routes
and packet filters are gone, and this machine's own were never touched. Nothing leads from here to other machines.
"""

import subprocess

from e2e.cluster.processes import ClusterError

HOST = "10.245.0.1"
HOST_INTERFACE = "orbitkv-cluster"
NODES = "10.245.0.0/24"
PODS = "10.244.0.0/16"
SERVICES = "10.96.0.0/16"
API_SERVICE = "10.96.0.1"
BRIDGE = "switch"


def node_address(index: int) -> str:
    """The address of a node."""
    return f"10.245.0.{10 + index}"


def pod_network(index: int) -> str:
    """The addresses of a node's pods."""
    return f"10.244.{index}.0/24"


def command(*words: str) -> None:
    """Runs a command. Raises ClusterError with what it printed if it fails."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ClusterError(f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")


def inside(pid: int, *words: str) -> None:
    """Runs a command in the network namespace of a process."""
    command("nsenter", f"--target={pid}", "--net", *words)


def make_switch(switch: int) -> None:
    """Sets up the switch, in the network namespace of process `switch`, and connects this machine to it."""
    inside(switch, "ip", "link", "add", BRIDGE, "type", "bridge")
    inside(switch, "ip", "link", "set", BRIDGE, "up")
    command("ip", "link", "add", HOST_INTERFACE, "type", "veth", "peer", "name", "machine", "netns", str(switch))
    inside(switch, "ip", "link", "set", "machine", "master", BRIDGE, "up")
    command("ip", "address", "add", f"{HOST}/24", "dev", HOST_INTERFACE)
    command("ip", "link", "set", HOST_INTERFACE, "up")
    command("ip", "route", "add", SERVICES, "via", node_address(0))


def connect_node(switch: int, node: int, name: str, index: int) -> None:
    """Connects the network namespace of process `node` to the switch. This machine learns the way to its pods."""
    inside(node, "ip", "link", "set", "lo", "up")
    inside(switch, "ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(node))
    inside(switch, "ip", "link", "set", name, "master", BRIDGE, "up")
    inside(node, "ip", "address", "add", f"{node_address(index)}/24", "dev", "eth0")
    inside(node, "ip", "link", "set", "eth0", "up")
    # The kernel wants a route before kube-proxy's rules turn a Service's address into a pod's
    inside(node, "ip", "route", "add", SERVICES, "dev", "eth0")
    inside(node, "sysctl", "-qw", "net.ipv4.ip_forward=1")
    command("ip", "route", "add", pod_network(index), "via", node_address(index))


def add_route(node: int, to_index: int) -> None:
    """Tells a node the way to the pods of another."""
    inside(node, "ip", "route", "replace", pod_network(to_index), "via", node_address(to_index))


def remove_host_interface() -> None:
    """Takes this machine's end of the switch away, with its routes; it is fine if there is none."""
    subprocess.run(["ip", "link", "delete", HOST_INTERFACE], capture_output=True, check=False)


def host_interface_exists() -> bool:
    """Whether this machine is connected to a switch."""
    return subprocess.run(["ip", "link", "show", HOST_INTERFACE], capture_output=True, check=False).returncode == 0
