"""Real engines with one annotation, beside the same engines without it, through what happens to pods in a cluster.

Several engines start again and again, which takes minutes of processor time: these tests run when
ORBITKV_TEST_THOROUGH is set, and on the project's own cluster, whose nodes have the engine.
"""

import copy
import json
import os
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from e2e.support import engine_image
from e2e.support.completions import Load, complete, forget, sources
from e2e.support.installation import Installation
from e2e.support.kubectl import Kubectl, Object, has_condition
from orbitkv_crds.names import ANNOTATION_CACHE_NAMESPACE
from tools.demo_k8s.__main__ import APP, deployment

pytestmark = [
    pytest.mark.skipif(
        not os.environ.get("ORBITKV_TEST_THOROUGH"),
        reason="starts a dozen real engines, which takes ten minutes: set ORBITKV_TEST_THOROUGH=1",
    ),
    pytest.mark.timeout(1500),
]
CACHE = "chat"
PLAIN = f"{APP}-plain"
START_SECONDS = 420.0
KILLS = 10
SYSTEM = "You are the help desk of a shipyard. Answer shortly, name the hall, and never guess a date. " * 4
PROMPTS = [f"{SYSTEM} Question {number}: when does slipway {number} get its crane back?" for number in range(8)]


def without_annotation(objects: list[Object]) -> list[Object]:
    """The same under another name, and without the annotation."""
    plain: list[Object] = json.loads(json.dumps(objects).replace(f'"{APP}"', f'"{PLAIN}"'))
    del plain[0]["spec"]["template"]["metadata"]["annotations"][ANNOTATION_CACHE_NAMESPACE]
    return plain


@dataclass
class Engines:
    """Two Deployments of the same engines, one with the annotation."""

    kubectl: Kubectl
    namespace: str
    image: engine_image.EngineImage
    hosts: dict[str, str] = field(default_factory=dict)
    """Name of the Deployment to the address of its Service."""

    def apply(self, replicas: int) -> None:
        """Make them."""
        objects = deployment(self.image)
        spec = objects[0]["spec"]
        spec["replicas"] = replicas
        pod = spec["template"]["spec"]
        del pod["nodeSelector"]
        pod["containers"][0]["lifecycle"] = {"preStop": {"exec": {"command": ["sleep", "10"]}}}
        for each in copy.deepcopy([*objects, *without_annotation(objects)]):
            each["metadata"]["namespace"] = self.namespace
            self.kubectl.apply(each)
        self.settle()
        for name in (APP, PLAIN):
            service = self.kubectl.get("service", name, self.namespace)
            assert service is not None
            self.hosts[name] = service["spec"]["clusterIP"]

    def settle(self) -> None:
        """Wait until both are rolled out."""
        for name in (APP, PLAIN):
            self.kubectl.run(
                "rollout",
                "status",
                f"deployment/{name}",
                f"--namespace={self.namespace}",
                f"--timeout={START_SECONDS:.0f}s",
                timeout=START_SECONDS + 30,
            )

    def both(self, *words: str) -> None:
        """Run kubectl on both Deployments."""
        for name in (APP, PLAIN):
            self.kubectl.run(*words, f"deployment/{name}", f"--namespace={self.namespace}")

    def pods(self, name: str = APP) -> list[Object]:
        """The ready pods of a Deployment that stay."""
        found = self.kubectl.list_all("pods", self.namespace, f"app={name}")
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"] and has_condition("Ready")(pod)]

    def restores(self) -> bool:
        """Whether every annotated engine gets its prompts back after it forgot them."""
        hosts = [pod["status"]["podIP"] for pod in self.pods()]
        for host in hosts:
            for _ in range(2):  # what it had before the agent came is saved when it is computed once more
                forget(host)
                before = sources(host)["orbitkv"]
                for prompt in PROMPTS[:2]:
                    complete(host, prompt)
            if sources(host)["orbitkv"] == before:
                return False
        return bool(hosts)


@pytest.fixture(scope="module")
def pool(installation: Installation) -> str:
    return installation.make_pool(memory="256Mi")


@pytest.fixture(scope="module")
def engines(installation: Installation, pool: str) -> Iterator[Engines]:
    own = installation.target.own
    if own is None:
        pytest.skip(
            "needs the engine's environment on the nodes, as the project's own cluster has it: unset KUBECONFIG"
        )
    namespace = installation.make_namespace()
    installation.make_cache(namespace, pool, CACHE)
    made = Engines(installation.target.kubectl, namespace, engine_image.ensure(list(own.nodes.values())))
    made.apply(replicas=2)
    for each in made.pods():
        assert each["metadata"]["annotations"][ANNOTATION_CACHE_NAMESPACE] == CACHE
    yield made
    made.kubectl.run("delete", "deployments", "--all", f"--namespace={namespace}", timeout=120)


def same_answers(load: Load) -> None:
    """No annotated engine ever answered otherwise than those without a cache."""
    plain, cached = load.heard[PLAIN].answers, load.heard[APP].answers
    assert set(plain) == set(cached) == set(PROMPTS)
    for prompt in PROMPTS:
        assert cached[prompt].keys() == plain[prompt].keys(), prompt


def report(load: Load, what: str) -> None:
    for name, heard in load.heard.items():
        print(f"{what}: {name}: {heard.asked} requests, {len(heard.failures)} failed {heard.failures[:3]}")


def test_requests_go_on_through_rollouts_an_upgrade_of_agents_and_a_drain(
    installation: Installation, engines: Engines, pool: str
) -> None:
    kubectl = installation.target.kubectl
    kubectl.until(engines.restores, "the engines to get their prompts back", timeout=120)
    with Load(engines.hosts, PROMPTS) as load:
        kubectl.until(lambda: load.asked() >= 2 * len(PROMPTS), "the load to run", timeout=120)
        engines.both("rollout", "restart")
        engines.settle()
        started = {pod["metadata"]["uid"] for pod in engines.pods()}

        agents = {pod["metadata"]["uid"] for pod in installation.agents(pool).values()}
        kubectl.patch("managerpool", pool, {"spec": {"podAnnotations": {"upgraded": "yes"}}})
        kubectl.until(
            lambda: (
                len(installation.agents(pool)) == 2
                and not agents & {pod["metadata"]["uid"] for pod in installation.agents(pool).values()}
            ),
            "both agents to be replaced",
            timeout=180,
        )
        installation.wait_ready("managerpool", pool)
        kubectl.until(engines.restores, "hits to resume without an engine's restart", timeout=180)
        assert {pod["metadata"]["uid"] for pod in engines.pods()} == started

        node = engines.pods()[0]["spec"]["nodeName"]
        arguments = ["--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=240s"]
        try:
            kubectl.run("drain", node, *arguments, timeout=270)
            engines.settle()
        finally:
            kubectl.run("uncordon", node)
    report(load, "rollouts, upgrade, drain")
    same_answers(load)
    assert len(load.heard[APP].failures) <= len(load.heard[PLAIN].failures)


def test_scaled_engines_serve_new_requests(engines: Engines) -> None:
    for replicas in (1, 3, 1):
        engines.both("scale", f"--replicas={replicas}")
        engines.settle()
        engines.kubectl.until(lambda: len(engines.pods()) == replicas, f"{replicas} engines", timeout=START_SECONDS)  # noqa: B023
        with Load(engines.hosts, PROMPTS) as load:
            engines.kubectl.until(lambda: load.asked() >= 2 * len(PROMPTS), "new requests", timeout=120)
        report(load, f"{replicas} replicas")
        same_answers(load)
        assert not load.heard[APP].failures


def test_whatever_is_killed_nothing_wrong_is_restored_and_all_comes_back(
    installation: Installation, engines: Engines, pool: str
) -> None:
    kubectl, chance = installation.target.kubectl, random.Random(os.environ.get("ORBITKV_TEST_SEED", "5"))
    with Load(engines.hosts, PROMPTS) as load:
        for number in range(KILLS):
            victim = ("agent", "engine", "operator")[number % 3]
            if victim == "engine":
                candidates = engines.pods()
            else:
                candidates = list(installation.agents(pool).values()) if victim == "agent" else installation.operators()
            asked = load.asked() + chance.randrange(1, 20)
            kubectl.until(lambda: load.asked() >= asked, "the load to go on", timeout=120)  # noqa: B023
            if candidates:
                kill(installation, chance.choice(candidates))
        engines.settle()
    report(load, f"{KILLS} kills")
    same_answers(load)
    installation.wait_ready("managerpool", pool, timeout=180)
    kubectl.until(lambda: bool(installation.leader()), "an operator to act", timeout=120)
    kubectl.until(engines.restores, "the engines to get their prompts back", timeout=180)
    engines.both("scale", "--replicas=0")
    kubectl.until(lambda: not kubectl.list_all("pods", engines.namespace), "the engines to be gone", timeout=120)
    for pod in installation.agents(pool).values():
        name = pod["metadata"]["name"]
        kubectl.until(lambda: at_rest(installation, name), f"{name} to hold nothing", timeout=60)  # noqa: B023


def kill(installation: Installation, pod: Object) -> None:
    """kill -9 the first process of a pod's first container, from outside of it."""
    own = installation.target.own
    assert own is not None
    node = own.nodes[pod["spec"]["nodeName"]]
    name = pod["status"]["containerStatuses"][0].get("containerID", "").rpartition("/")[2]
    found = node.crictl("inspect", "--output=go-template", "--template={{.info.pid}}", name)
    os.kill(int(found.strip()), signal.SIGKILL)


def at_rest(installation: Installation, agent: str) -> bool:
    """Whether an agent says that nothing is asked for, promised or being copied."""
    command = ("orbitkv-agent", "status", "--json")
    told = installation.target.kubectl.execute(agent, installation.namespace, *command, container="agent")
    status = json.loads(told)
    queries, leases, transfers = status["queries"], status["leases"], status["transfers"]
    held = [
        queries["outstanding"],
        *queries["reserved_bytes_by_phase"].values(),
        leases["live"],
        leases["pinned_pages"],
    ]
    return not any([*held, transfers["saves_inflight"], transfers["restores_inflight"]])
