"""An agent, without a pod around it, against a real apiserver: real tokens, real watches, real refusals."""

import base64
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, utils

from e2e.cluster import programs
from e2e.cluster.control_plane import ControlPlane, standalone
from e2e.support.installation import cache_object, namespace_object, pool_object
from e2e.support.kubectl import Kubectl, Object
from orbitkv.client import CacheManagerClient, ErrorKind, OrbitKVError
from orbitkv_crds.names import engine_audience

NODE = "node-a"
CACHE = "team-a/qwen"
REPOSITORY = Path(__file__).parent.parent


@dataclass
class Agent:
    """A running agent."""

    process: subprocess.Popen[bytes]
    socket: str
    folder: Path

    def log(self) -> str:
        """What it has logged."""
        return (self.folder / "log").read_text()


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """An apiserver with the CRDs, a namespace, and a pod on the agent's node."""
    built = programs.ensure(programs.CLUSTER[:1])
    with standalone(built["kube-apiserver"], tmp_path_factory.mktemp("plane")) as plane:
        yield plane


@pytest.fixture(scope="module")
def kubectl(plane: ControlPlane) -> Kubectl:
    kubectl = Kubectl(programs.ensure(programs.CLUSTER[:1])["kubectl"], plane.kubeconfig)
    kubectl.apply(*(REPOSITORY / "crds").glob("*.yaml"))
    for name in ("managerpools", "cachenamespaces"):
        kubectl.run("wait", "--for=condition=Established", f"crd/{name}.orbitkv.io", "--timeout=30s")
    kubectl.apply(namespace_object("team-a"), pool_object("default"), account("team-a"))
    return kubectl


@pytest.fixture
def cache(kubectl: Kubectl) -> Iterator[str]:
    """A cache namespace of the agent's pool."""
    kubectl.apply(cache_object("qwen", "team-a", "default"))
    yield CACHE
    kubectl.delete("cachenamespace", "qwen", "team-a")


@pytest.fixture(scope="module")
def agent(plane: ControlPlane, kubectl: Kubectl, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    agent = start(plane, tmp_path_factory.mktemp("agent"))
    yield agent
    agent.process.terminate()
    assert agent.process.wait(30) == 0, agent.log()


@pytest.fixture(scope="module", autouse=True)
def left_behind(agent: Agent, kubectl: Kubectl) -> Iterator[tuple[CacheManagerClient, float]]:
    """A session whose pod is gone, and since when: the other tests are run meanwhile."""
    kubectl.apply(cache_object("other", "team-a", "default"))
    with attach(agent, token(kubectl, "short-lived"), "team-a/other") as client:
        kubectl.run("delete", "pod", "short-lived", "--namespace=team-a", "--grace-period=0", "--force")
        yield client, time.monotonic()


def start(plane: ControlPlane, folder: Path) -> Agent:
    """Start an agent that uses the administrator's way into the cluster."""
    (folder / "live.yaml").write_text("log_level: debug\n")
    settings = {
        "pool": "64MiB",
        "mode": "host",
        "socket_path": str(folder / "agent.sock"),
        "metrics_address": "off",
        "cluster": {
            "pool": "default",
            "live_path": str(folder / "live.yaml"),
            "state_path": str(folder / "state"),
            "reports_address": "off",
            "kubeconfig": str(plane.kubeconfig),
        },
    }
    (folder / "agent.yaml").write_text(json.dumps(settings))
    pod = {"NODE_NAME": NODE, "POD_NAME": "agent", "POD_NAMESPACE": "orbitkv-system", "POD_UID": "uid"}
    command = [sys.executable, "-m", "orbitkv_agent", "serve", "--config", str(folder / "agent.yaml")]
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(command, stderr=log, env={**os.environ, **pod})
    return Agent(process, str(folder / "agent.sock"), folder)


def account(namespace: str) -> Object:
    """The ServiceAccount that a controller would make."""
    return {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default", "namespace": namespace}}


def token(kubectl: Kubectl, pod: str, node: str = NODE, audience: str = "") -> bytes:
    """Make a pod, and a token of it as the kubelet would ask for it."""
    body: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": pod, "namespace": "team-a"},
        "spec": {"nodeName": node, "containers": [{"name": "engine", "image": "none"}]},
    }
    kubectl.apply(body)
    system = kubectl.get("namespace", "kube-system")
    assert system is not None
    audience = audience or engine_audience(system["metadata"]["uid"])
    bound = ["--bound-object-kind=Pod", f"--bound-object-name={pod}", f"--audience={audience}"]
    return kubectl.run("create", "token", "default", "--namespace=team-a", *bound).strip().encode()


def expired(plane: ControlPlane, shown: bytes) -> bytes:
    """The same token as if it had been made two hours ago for one: signed with the apiserver's own key."""
    head, body, _ = shown.split(b".")
    claims = json.loads(base64.urlsafe_b64decode(body + b"=="))
    made = int(time.time()) - 7200
    claims |= {"iat": made, "nbf": made, "exp": made + 3600}
    text = b".".join([head, encoded(json.dumps(claims).encode())])
    file = plane.authority.folder / "service-accounts.key"
    key = serialization.load_pem_private_key(file.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    r, s = utils.decode_dss_signature(key.sign(text, ec.ECDSA(hashes.SHA256())))
    return b".".join([text, encoded(r.to_bytes(32, "big") + s.to_bytes(32, "big"))])


def encoded(data: bytes) -> bytes:
    """As the parts of a token are written."""
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def attach(
    agent: Agent, shown: bytes, cache: str = CACHE, seconds: float = 60, *, exists: bool = True
) -> CacheManagerClient:
    """Attach, as soon as the agent can say yes or no. A cache namespace that `exists` it may yet have to hear of."""
    deadline = time.monotonic() + seconds
    while True:
        assert agent.process.poll() is None, agent.log()
        try:
            return CacheManagerClient(agent.socket, cache_namespace=cache, token=shown)
        except OrbitKVError as error:
            unheard = exists and str(error).startswith("cache-namespace-not-found: ")
            if (error.kind is not ErrorKind.UNAVAILABLE and not unheard) or time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def denial(agent: Agent, shown: bytes, cache: str = CACHE) -> str:
    """Why the agent lets nobody in with this token."""
    with pytest.raises(OrbitKVError) as caught:
        attach(agent, shown, cache, exists=False).close()
    assert caught.value.kind is ErrorKind.DENIED
    return str(caught.value)


def test_a_real_token_of_a_pod_on_this_node_is_let_in(agent: Agent, kubectl: Kubectl, cache: str) -> None:
    with attach(agent, token(kubectl, "engine")) as client:
        assert client.health() == (True, "ok")


def test_other_real_tokens_are_not(agent: Agent, kubectl: Kubectl, cache: str) -> None:
    assert "a pod on node elsewhere" in denial(agent, token(kubectl, "away", node="elsewhere"))
    assert "token-audience: " in denial(agent, token(kubectl, "wrong", audience="orbitkv.io/reports"))
    usual = ["create", "token", "default", "--namespace=team-a"]
    assert "token-audience: " in denial(agent, kubectl.run(*usual).strip().encode())
    system = kubectl.get("namespace", "kube-system")
    assert system is not None
    unbound = kubectl.run(*usual, f"--audience={engine_audience(system['metadata']['uid'])}").strip().encode()
    assert "token-unbound: " in denial(agent, unbound)
    log = agent.log()
    assert "refused" in log
    assert "eyJ" not in log


def test_a_real_token_that_has_expired_is_not_let_in(
    plane: ControlPlane, agent: Agent, kubectl: Kubectl, cache: str
) -> None:
    words = denial(agent, expired(plane, token(kubectl, "engine")))
    assert words.startswith("token-invalid: ") and "expired" in words


def test_changes_arrive_by_the_watch(agent: Agent, kubectl: Kubectl, cache: str) -> None:
    shown = token(kubectl, "engine")
    with attach(agent, shown) as client:
        assert client.options == {}
    kubectl.patch("cachenamespace", "qwen", {"spec": {"mode": "save_only"}}, "team-a")
    kubectl.until(lambda: _options(agent, shown) == {"mode": "save_only"}, "the option", timeout=20)
    with attach(agent, shown) as client:
        kubectl.delete("cachenamespace", "qwen", "team-a")
        kubectl.until(lambda: _ended(client), "the session to end", timeout=20)
    assert "no CacheNamespace" in denial(agent, shown)


def test_without_the_apiserver_sessions_go_on_and_a_restarted_agent_knows_its_namespaces(
    plane: ControlPlane, kubectl: Kubectl, cache: str, tmp_path: Path
) -> None:
    agent = start(plane, tmp_path)
    try:
        shown = token(kubectl, "engine")
        with attach(agent, shown) as client:
            plane.processes.stop("apiserver")
            time.sleep(2)
            assert client.health() == (True, "ok")
            with attach(agent, shown):
                pass  # the token was reviewed less than a minute ago
        agent.process.terminate()
        assert agent.process.wait(30) == 0
        agent = start(plane, tmp_path)
        kubectl.until(lambda: "cannot be checked now" in _later(agent, shown), "the agent to ask again", timeout=30)
    finally:
        plane.start_apiserver()
        plane.wait_apiserver()
    try:
        with attach(agent, shown) as client:
            assert client.health() == (True, "ok")
    finally:
        agent.process.terminate()
        assert agent.process.wait(30) == 0


def test_a_session_ends_within_a_minute_of_its_pod(
    agent: Agent, kubectl: Kubectl, left_behind: tuple[CacheManagerClient, float]
) -> None:
    client, since = left_behind
    kubectl.until(lambda: _ended(client), "the session to end", timeout=max(1.0, since + 60 - time.monotonic()))


def _options(agent: Agent, shown: bytes) -> dict[str, Any]:
    with attach(agent, shown) as client:
        return client.options


def _later(agent: Agent, shown: bytes) -> str:
    """What an agent says that cannot decide: not a no."""
    with pytest.raises(OrbitKVError) as caught:
        attach(agent, shown, seconds=0)
    assert caught.value.kind is ErrorKind.UNAVAILABLE
    return str(caught.value)


def _ended(client: CacheManagerClient) -> bool:
    try:
        client.health()
    except OrbitKVError:
        return True
    return False
