"""Real engines with one annotation, beside the same engines without it, through what happens to pods in a cluster.

Both are asked the same prompts all the while, which are more than an engine keeps in its own memory: nearly every
request of the annotated ones restores. Several engines start again and again, which takes minutes of processor time:
these tests run when ORBITKV_TEST_THOROUGH is set, and on the project's own cluster, whose nodes have the engine.
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
from e2e.support.completions import Load, complete, counter, sources
from e2e.support.installation import Installation
from e2e.support.kubectl import Kubectl, Object, has_condition
from orbitkv_crds import stamps
from orbitkv_crds.names import ANNOTATION_CACHE_NAMESPACE, SOCKET_PATH
from tools.demo_k8s.__main__ import APP, deployment
from tools.harness.agent import in_flight

pytestmark = [
    pytest.mark.skipif(
        not os.environ.get("ORBITKV_TEST_THOROUGH"),
        reason="starts a dozen real engines, which takes ten minutes: set ORBITKV_TEST_THOROUGH=1",
    ),
    pytest.mark.timeout(1500),
]
HELM_VALUES: dict[str, object] = {}
"""With two replicas of each, of which one stays while a node is drained."""
CACHE = "chat"
PLAIN = f"{APP}-plain"
START_SECONDS = 420.0
DRAIN_SECONDS = 600.0
KILLS = 10
RULES = "Answer shortly, name the hall, and never guess a date. " * 5
PROMPTS = [
    f"Shipyard {number}, help desk. {RULES} When does slipway {number} get its crane back?" for number in range(8)
]
"""Of about 370 tokens each, with nothing in common from the first block on."""
OWN_BLOCKS = 48
"""What an engine keeps itself, in blocks of 32 tokens: a third of the prompts."""
FLAG = "--kv-transfer-config"
STORAGE = "/their-storage"
THEIRS = {
    "kv_connector": "ExampleConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"shared_storage_path": STORAGE},
}
"""A connector that a user may have chosen."""


def as_two_see_it(objects: list[Object], replicas: int) -> list[Object]:
    """The Deployment and Service of the demo, as they are run in earnest, and in little memory."""
    made = copy.deepcopy(objects)
    spec = made[0]["spec"]
    spec["replicas"] = replicas
    pod = spec["template"]["spec"]
    del pod["nodeSelector"]
    container = pod["containers"][0]
    container["args"] = [each for each in container["args"] if not each.startswith("--max-model-len")]
    container["args"] += ["--max-model-len=1024", f"--num-gpu-blocks-override={OWN_BLOCKS}"]
    container["resources"] = {"requests": {"cpu": "100m", "memory": "512Mi"}}
    container["lifecycle"] = {"preStop": {"exec": {"command": ["sleep", "10"]}}}
    spec["strategy"] = {"rollingUpdate": {"maxSurge": "100%", "maxUnavailable": 0}}
    budget = {"selector": spec["selector"], "minAvailable": 1}  # a drain takes one after the other
    name = made[0]["metadata"]["name"]
    kept: Object = {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": name}}
    return [*made, {**kept, "spec": budget}]


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
        objects = as_two_see_it(deployment(self.image), replicas)
        self.kubectl.apply(*objects, *without_annotation(objects), arguments=[f"--namespace={self.namespace}"])
        self.settle()
        for name in (APP, PLAIN):
            service = self.kubectl.get("service", name, self.namespace)
            assert service is not None
            self.hosts[name] = service["spec"]["clusterIP"]

    def settle(self) -> None:
        """Wait until both are rolled out."""
        for name in (APP, PLAIN):
            self.roll_out(name)

    def roll_out(self, name: str) -> None:
        """Wait until a Deployment is rolled out."""
        waiting = [f"--namespace={self.namespace}", f"--timeout={START_SECONDS:.0f}s"]
        self.kubectl.run("rollout", "status", f"deployment/{name}", *waiting, timeout=START_SECONDS + 30)

    def scale(self, replicas: int) -> None:
        """Have so many annotated ones, and wait until it is so and no pod beyond them is left."""
        self.kubectl.run("scale", f"--replicas={replicas}", f"deployment/{APP}", f"--namespace={self.namespace}")
        self.settle()
        self.kubectl.until(
            lambda: len(self.kubectl.list_all("pods", self.namespace, f"app={APP}")) == replicas,
            f"{replicas} annotated engines, and no other pod of theirs",
            timeout=120,
        )

    def pods(self, name: str = APP) -> list[Object]:
        """The ready pods of a Deployment that stay."""
        found = self.kubectl.list_all("pods", self.namespace, f"app={name}")
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"] and has_condition("Ready")(pod)]

    def restored(self) -> dict[str, int]:
        """How many prompt tokens each annotated engine has restored. Raises OSError."""
        return {pod["metadata"]["name"]: sources(pod["status"]["podIP"])["orbitkv"] for pod in self.pods()}

    def restore(self) -> bool:
        """Whether every annotated engine restores prompts, each asked twice: what nobody has saved, the first time
        saves."""
        try:
            before = self.restored()
            for pod in self.pods():
                for prompt in 2 * PROMPTS:
                    complete(pod["status"]["podIP"], prompt, max_tokens=1)
            after = self.restored()
        except OSError:
            return False
        return bool(before) and before.keys() == after.keys() and all(after[name] > before[name] for name in before)


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
    assert len({min(answers) for answers in plain.values()}) > 1, (
        "the prompts' answers are all the same: they show nothing"
    )


def report(capsys: pytest.CaptureFixture[str], load: Load, what: str, restored: dict[str, int]) -> None:
    """Say how both fared, whether the test passes or not."""
    with capsys.disabled():
        print()
        for name, heard in load.heard.items():
            print(f"{what}: {name}: {heard.asked} requests, {len(heard.failures)} failed {heard.failures[:3]}")
        print(f"{what}: prompt tokens restored by the engines that are there: {restored}")


def test_requests_go_on_through_a_rollout_an_upgrade_of_agents_and_a_drain(
    installation: Installation, engines: Engines, pool: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl = installation.target.kubectl
    kubectl.until(engines.restore, "the engines to restore prompts", timeout=120)
    with Load(engines.hosts, PROMPTS) as load:
        kubectl.until(lambda: load.asked() >= 2 * len(PROMPTS), "the load to run", timeout=120)
        for name in (APP, PLAIN):
            kubectl.run("rollout", "restart", f"deployment/{name}", f"--namespace={engines.namespace}")
        engines.settle()
        started = {pod["metadata"]["uid"] for pod in engines.pods()}
        assert len(started) == 2

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
        kubectl.until(engines.restore, "hits to resume without an engine's restart", timeout=180)
        assert {pod["metadata"]["uid"] for pod in engines.pods()} == started
        assert not any(restarts(pod) for pod in engines.pods())

        node = engines.pods()[0]["spec"]["nodeName"]
        arguments = ["--ignore-daemonsets", "--delete-emptydir-data", "--force", f"--timeout={DRAIN_SECONDS:.0f}s"]
        try:
            kubectl.run("drain", node, *arguments, timeout=DRAIN_SECONDS + 30)
            engines.settle()
            assert node not in {pod["spec"]["nodeName"] for pod in engines.pods()}
        finally:
            kubectl.run("uncordon", node)
    report(capsys, load, "rollout, upgrade, drain", engines.restored())
    same_answers(load)
    assert len(load.heard[APP].failures) <= len(load.heard[PLAIN].failures), load.heard[APP].failures


def test_whatever_is_killed_nothing_wrong_is_restored_and_all_comes_back(
    installation: Installation, engines: Engines, pool: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl, chance = installation.target.kubectl, random.Random(os.environ.get("ORBITKV_TEST_SEED", "5"))
    with Load(engines.hosts, PROMPTS) as load:
        for number in range(KILLS):
            victim = ("agent", "engine", "operator")[number % 3]
            asked = load.asked() + chance.randrange(1, 20)
            kubectl.until(lambda: load.asked() >= asked, "the load to go on", timeout=120)  # noqa: B023
            kubectl.until(lambda: bool(candidates(installation, engines, pool, victim)), f"an {victim} that runs")  # noqa: B023
            kill(installation, chance.choice(candidates(installation, engines, pool, victim)))
        engines.settle()
        restored = load.asked()
        kubectl.until(lambda: load.asked() >= restored + 2 * len(PROMPTS), "the load to go on", timeout=120)
    report(capsys, load, f"{KILLS} kills", engines.restored())
    same_answers(load)
    installation.wait_ready("managerpool", pool, timeout=180)
    kubectl.until(lambda: bool(installation.leader()), "an operator to act", timeout=120)
    kubectl.until(engines.restore, "the engines to restore prompts", timeout=180)
    engines.scale(0)
    for pod in installation.agents(pool).values():
        name = pod["metadata"]["name"]
        kubectl.until(lambda: at_rest(installation, name), f"{name} to hold nothing", timeout=60)  # noqa: B023


def test_scaled_engines_serve_new_requests(engines: Engines, capsys: pytest.CaptureFixture[str]) -> None:
    for replicas in (1, 3, 1):
        engines.scale(replicas)
        with Load(engines.hosts, PROMPTS) as load:
            engines.kubectl.until(lambda: load.asked() >= 4 * len(PROMPTS), "new requests", timeout=180)
        report(capsys, load, f"{replicas} replicas", engines.restored())
        same_answers(load)
        assert not load.heard[APP].failures
        assert all(engines.restored().values()), "an engine has restored nothing"


def test_connector_of_the_users_is_left_alone_and_named_or_joined(engines: Engines) -> None:
    """Two pods that have it by their own flags: one with the annotation, and one that asks for both connectors."""
    kubectl, namespace = engines.kubectl, engines.namespace
    engines.scale(0)
    objects = as_two_see_it(deployment(engines.image), 1)
    pods: dict[str, Object] = {}
    for name, asks in (("alone", {}), ("joined", {stamps.ANNOTATION_MULTI_CONNECTOR: "true"})):
        kubectl.apply(*with_a_connector(objects, name, asks), arguments=[f"--namespace={namespace}"])
    for name in ("alone", "joined"):
        engines.roll_out(name)
        (pods[name],) = engines.pods(name)
        (argument,) = (each for each in pods[name]["spec"]["containers"][0]["args"] if each.startswith(FLAG))
        assert argument == f"{FLAG}={json.dumps(THEIRS)}"
        assert stamps.read_injected(pods[name]["metadata"]["annotations"]) is not None

    def told() -> bool:
        events = kubectl.events("Pod", pods["alone"]["metadata"]["name"], namespace)
        why = [event["note"] for event in events if event["reason"] == "CacheNotAttached"]
        return any("kv-transfer-config-present" in note and "ExampleConnector" in note for note in why)

    kubectl.until(told, "the connector to be named", timeout=120)
    expected = [complete(engines.hosts[PLAIN], prompt) for prompt in PROMPTS]

    def answers(name: str) -> list[str]:
        return [complete(pods[name]["status"]["podIP"], prompt) for prompt in PROMPTS]

    def theirs(name: str, *command: str) -> str:
        return kubectl.execute(
            pods[name]["metadata"]["name"], namespace, "sh", "-c", f"{' '.join(command)} {STORAGE}/*"
        )

    def restores(name: str) -> int:
        return counter(pods[name]["status"]["podIP"], "vllm:orbitkv_restores")

    for name in pods:
        assert answers(name) == expected
        assert theirs(name, "ls", "-d"), "their connector keeps nothing"
        before = sources(pods[name]["status"]["podIP"])["orbitkv"]
        assert answers(name) == expected
        assert sources(pods[name]["status"]["podIP"])["orbitkv"] > before, "their connector restores nothing"
    assert restores("alone") == 0
    restored = restores("joined")
    theirs("joined", "rm", "-r")

    def by_ours() -> bool:
        assert answers("joined") == expected
        return restores("joined") > restored

    kubectl.until(by_ours, "OrbitKV to restore what their connector has lost", timeout=120)
    assert not any(restarts(pod) for name in pods for pod in engines.pods(name))


def with_a_connector(objects: list[Object], name: str, asks: dict[str, str]) -> list[Object]:
    """The same under another name, with a connector of the user's own and further annotations."""
    made: list[Object] = json.loads(json.dumps(objects).replace(f'"{APP}"', f'"{name}"'))
    template = made[0]["spec"]["template"]
    template["metadata"]["annotations"] |= asks
    (container,) = template["spec"]["containers"]
    container["args"].append(f"{FLAG}={json.dumps(THEIRS)}")
    container["volumeMounts"].append({"name": "theirs", "mountPath": STORAGE})
    template["spec"]["volumes"].append({"name": "theirs", "emptyDir": {}})
    return made


def restarts(pod: Object) -> int:
    """How often the containers of a pod were started again."""
    return sum(each["restartCount"] for each in pod["status"]["containerStatuses"])


def candidates(installation: Installation, engines: Engines, pool: str, victim: str) -> list[Object]:
    """The pods of a kind whose first container runs."""
    if victim == "engine":
        found = engines.pods()
    else:
        found = list(installation.agents(pool).values()) if victim == "agent" else installation.operators()
    return [pod for pod in found if "running" in pod["status"].get("containerStatuses", [{}])[0].get("state", {})]


def kill(installation: Installation, pod: Object) -> None:
    """kill -9 the first process of a pod's first container, from outside of it."""
    own = installation.target.own
    assert own is not None
    node = own.nodes[pod["spec"]["nodeName"]]
    name = pod["status"]["containerStatuses"][0]["containerID"].rpartition("/")[2]
    found = int(node.crictl("inspect", "--output=go-template", "--template={{.info.pid}}", name))
    assert found > 1  # os.kill takes 0 for this process's own group
    os.kill(found, signal.SIGKILL)


def at_rest(installation: Installation, agent: str) -> bool:
    """Whether an agent says that nothing is asked for, promised or being copied."""
    command = ("orbitkv-agent", "status", "--json", "--socket", SOCKET_PATH)
    told = installation.target.kubectl.execute(agent, installation.namespace, *command, container="agent")
    return not in_flight(json.loads(told))
