"""Two tenants on one node: what one of them tries on the other, and how each attempt ends.

The victim looks for its pages all the while: none is ever missing, and look-ups take no longer than a step of an
engine's scheduler may.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from e2e.support.engines import EnginePod, make_engine_pod
from e2e.support.installation import Installation, cache_object
from e2e.support.kubectl import Kubectl, KubectlError, Object
from orbitkv_crds.names import SOCKET_PATH, engine_audience

ATTACKS = (Path(__file__).parent / "support" / "attacker_program.py").read_text()
NODE, OTHER_NODE = "node-a", "node-b"
PAGES = 64
PAGE = 65536
POOL = 512 << 20
STEP_S = 0.005
"""What a step of an engine's scheduler may spend on the cache. The machine is not the test's alone, so what counts is
the best second of an attack, beside the best second without one, and twice this is let pass."""

TOKENS = {
    "none": "token-missing",
    "of another audience": "token-audience",
    "of a pod on another node": "token-node",
    "of no pod": "token-unbound",
    "forged": "token-invalid",
    "random": "token-invalid",
    "of a pod that is gone": "token-invalid",
    "own, for the cache of another namespace": "access-denied",
}
GUESSES = {
    "restore from a lease": "unknown-lease",
    "give a lease back": "Done",
    "save by a registration": "unknown-registration",
    "retire a registration": "unknown-registration",
    "use one of an earlier session": "unknown-registration",
    "join a session": "stale-session",
    "go on from an earlier session": "stale-session",
    "go on from an earlier agent": "agent-changed",
    "end a restore": "unknown-restore",
    "commit a save": "unknown-save",
    "poll an operation": "Nothing gone",
    "reset an engine": "unknown-instance",
    "look up for an engine": "Nothing not-serving",
    "map all memory": "0 bytes",
    "the other's hash keys": "Nothing miss",
    "save from a block beyond its own": "out-of-range",
    "the agent's state": "forbidden",
    "configure a cache": "forbidden",
    "reset its own": "ResetDone",
}
FRAMES = {
    "version": "version-mismatch",
    "torn": "bad-frame",
    "oversized": "bad-frame",
    "random": "bad-frame",
    "early": "bad-frame",
}


@dataclass(frozen=True)
class Judged:
    """What the victim saw: the fewest of its pages, and in each attack's best second the median look-up, in seconds."""

    fewest: int
    best: dict[str, float]

    @property
    def good(self) -> bool:
        """Whether there were seconds of the long attacks, and as good ones as without."""
        if not {"burst by 1", "burst by 100", "deaf", "flood", "hoard", "nothing"} <= self.best.keys():
            return False
        return max(self.best.values()) < 2 * STEP_S + 3 * self.best["nothing"]


@dataclass
class Tenants:
    """Both tenants: the attacker's pod, and what the victim's has said."""

    kubectl: Kubectl
    attacker: EnginePod
    cache: str
    victim: EnginePod
    theirs: str
    agent: EnginePod
    """The agent's own pod, which may ask for its state."""
    before: dict[str, Any] = field(default_factory=dict)
    """What the agent counted of the victim before the attacks."""
    attacks: list[tuple[str, float, float]] = field(default_factory=list)
    """Name, begin and end of each attack so far, in seconds since 1970."""

    def attack(self, action: str, *, timeout: float = 120, **options: Any) -> dict[str, Any]:
        """Runs an action of the attacker's program to its end."""
        facts = {"cache": self.cache, "theirs": self.theirs, "identity": "model", **options}
        pod = self.attacker
        printed = self.kubectl.execute(
            pod.name, pod.namespace, "python", "-c", ATTACKS, action, json.dumps(facts), timeout=timeout
        )
        *_, last, times = map(json.loads, printed.splitlines())
        self.attacks.append(
            (f"{action} by {options['sessions']}" if "sessions" in options else action, *times["attack"])
        )
        found: dict[str, Any] = last
        return found

    @property
    def facts(self) -> dict[str, Any]:
        """By what numbers the agent knows the victim."""
        return next(line for line in self.victim.said() if "lease" in line)

    def counted(self) -> dict[str, Any]:
        """What the agent counts of the victim."""
        command = ("orbitkv-agent", "status", "--json", "--socket", SOCKET_PATH)
        state = json.loads(self.kubectl.execute(self.agent.name, self.agent.namespace, *command, container="agent"))
        return {
            "pages": [each for each in state["namespaces"] if each["name"] == self.theirs],
            "sessions": state["sessions"]["by_namespace"].get(self.theirs),
            "engines": [
                {name: each[name] for name in ("engine", "model", "serving", "off", "restores", "saves")}
                for each in state["instances"]
                if each["cache_namespace"] == self.theirs
            ],
        }

    def judged(self) -> Judged:
        """What the victim found, second by second, so far."""
        best: dict[str, float] = {}
        seen = [line for line in self.victim.said() if "fewest" in line]
        for line in seen:
            name = next((each for each, began, ended in self.attacks if began + 1 < line["at"] < ended), "nothing")
            best[name] = min(best.get(name, line["median"]), line["median"])
        return Judged(min(line["fewest"] for line in seen), best)


def token(kubectl: Kubectl, namespace: str, audience: str, pod: Object | None = None) -> str:
    """A token of the default account of a namespace, bound to a pod if there is one."""
    bound = [] if pod is None else ["--bound-object-kind=Pod", f"--bound-object-name={pod['metadata']['name']}"]
    if pod is not None:
        bound.append(f"--bound-object-uid={pod['metadata']['uid']}")
    command = ["create", "token", "default", f"--namespace={namespace}", f"--audience={audience}", *bound]
    return kubectl.run(*command).strip()


@pytest.fixture(scope="module")
def tenants(installation: Installation, kubectl: Kubectl, images: list[str]) -> Iterator[Tenants]:
    image = next(name for name in images if "/node-agent" in name)
    pool = installation.make_pool(memory=str(POOL))
    agents = installation.agents(pool)
    node = NODE if NODE in agents else next(iter(agents))
    theirs, mine = installation.make_namespace(), installation.make_namespace()
    installation.make_cache(theirs, pool, "cache")
    installation.make_cache(mine, pool, "cache", quota={"dram": "8Mi"})
    victim = make_engine_pod(
        kubectl, image, "victim", theirs, node, action="victim", cache=f"{theirs}/cache", count=PAGES, patience=30
    )
    attacker = make_engine_pod(kubectl, image, "attacker", mine, node)
    assert victim.wait_said("lease")["kept"] == PAGES
    agent = EnginePod(kubectl, agents[node]["metadata"]["name"], installation.namespace)
    found = Tenants(kubectl, attacker, f"{mine}/cache", victim, f"{theirs}/cache", agent)
    found.before = found.counted()
    assert found.before["pages"][0]["used_bytes"] == PAGES * PAGE
    yield found
    installation.clean_up()


@pytest.fixture(scope="module")
def shown(tenants: Tenants, installation: Installation, images: list[str]) -> dict[str, Any]:
    """What the agent answers to each kind of token."""
    kubectl, namespace = tenants.kubectl, tenants.attacker.namespace
    system = kubectl.get("namespace", "kube-system")
    own = kubectl.get("pod", tenants.attacker.name, namespace)
    assert system is not None
    assert own is not None
    audience = engine_audience(system["metadata"]["uid"])
    away: Object = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "away", "namespace": namespace},
        "spec": {
            "nodeName": OTHER_NODE,
            "terminationGracePeriodSeconds": 0,
            "tolerations": [{"operator": "Exists"}],
            "containers": [{"name": "c", "image": images[0], "command": ["sleep", "infinity"]}],
        },
    }
    elsewhere = kubectl.create(away)
    gone = kubectl.create({**away, "metadata": {"name": "gone", "namespace": namespace}})
    tokens = {
        "of another audience": token(kubectl, namespace, "https://kubernetes.default.svc", own),
        "of a pod on another node": token(kubectl, namespace, audience, elsewhere),
        "of no pod": token(kubectl, namespace, audience),
        "of a pod that is gone": token(kubectl, namespace, audience, gone),
    }
    kubectl.delete("pod", "gone", namespace)
    answers = tenants.attack("tokens", tokens=tokens)
    kubectl.delete("pod", "away", namespace, wait=0)
    return answers


@pytest.mark.parametrize("kind", TOKENS)
def test_a_token(shown: dict[str, Any], kind: str) -> None:
    assert shown[kind] == TOKENS[kind]


@pytest.fixture(scope="module")
def guessed(tenants: Tenants) -> dict[str, Any]:
    """What comes of using what is the other's."""
    facts = tenants.facts
    found = {name: facts[name] for name in ("lease", "registration", "instance", "epoch")}
    return tenants.attack("guesses", count=PAGES, operation=1, **found)


@pytest.mark.parametrize("attempt", GUESSES)
def test_guessing(guessed: dict[str, Any], attempt: str) -> None:
    """The answer is the same for what the other has and for what nobody has."""
    assert guessed[attempt] == GUESSES[attempt]


def test_frames_that_are_none_and_versions_that_are_gone(tenants: Tenants) -> None:
    assert tenants.attack("frames") == FRAMES


def test_a_client_that_stops_reading_is_ended(tenants: Tenants) -> None:
    found = tenants.attack("deaf", seconds=3)
    assert found["ended"] == found["tried"] > 0


@pytest.mark.parametrize("sessions", [1, 100])
def test_requests_by_the_thousand_are_answered_in_turn(tenants: Tenants, sessions: int) -> None:
    """What they cost the other is seen in the last test."""
    assert tenants.attack("burst", sessions=sessions, seconds=3)["answered"]


def test_floods_cost_only_who_sends_them(tenants: Tenants) -> None:
    found = tenants.attack("flood", count=512, seconds=5)
    assert set(found["answers"]) == {"Ready", "Nothing miss", "Nothing budget"}, found
    assert found["patient"] == {"Loading admitted=False": 10}, found
    hellos = {"token-invalid", "too-many-reviews", "too-many-connections", "no answer in time"}
    assert set(found["hellos"]) <= hellos, found


@pytest.mark.parametrize(("pages", "what"), [(128, "bytes"), (1, "leases")])
def test_who_has_leases_of_all_it_can_get_waits_in_vain_for_more(tenants: Tenants, pages: int, what: str) -> None:
    """Of bytes and of queries a tenant gets half at most, so that the other finds its pages (see the last test)."""
    found = tenants.attack("hoard", pages=pages, max_wait_ms=500, seconds=3)
    most = {"bytes": POOL * 3 // 4 // 2, "leases": 512}[what]
    assert 0.8 * most < found[what] <= most, found
    assert found["answer"] == "Nothing budget" and 500 <= found["waited_ms"] < 5000, found
    assert set(found["waiting"]) <= {"Loading admitted=True", "Loading admitted=False"}, found


def test_crowds_are_turned_away_by_name(tenants: Tenants) -> None:
    found = tenants.attack("crowds")
    assert found["silent"] == {"too-many-connections": 30}, found
    assert found["hellos"].keys() >= {"token-invalid", "too-many-reviews"}, found
    assert 0 < found["sessions"] <= 256 and found["then"] == "too-many-connections", found


def test_tokens_of_the_attacker_open_neither_metrics_nor_reports(tenants: Tenants, installation: Installation) -> None:
    """The one that opens its cache, and one for the apiserver."""
    kubectl, namespace, agent = tenants.kubectl, tenants.attacker.namespace, tenants.agent
    pod = kubectl.get("pod", agent.name, agent.namespace)
    assert pod is not None
    authority = kubectl.execute(agent.name, agent.namespace, "cat", "/etc/orbitkv/ca.crt", container="agent")
    account = token(kubectl, namespace, "https://kubernetes.default.svc")
    facts = [pod["status"]["podIP"], installation.namespace, authority, account]
    said = kubectl.execute(tenants.attacker.name, namespace, "python", "-c", SIDE_DOORS, *facts)
    metrics, reports = said.splitlines()
    assert metrics.split() == ["401", "401", "403"]
    assert reports.split() == 2 * ["UNAUTHENTICATED", "token-audience"]


SIDE_DOORS = """
import sys, urllib.error, urllib.request
import grpc
from orbitkv_crds.agent_api.reports_pb2 import Report
from orbitkv_crds.agent_api.reports_pb2_grpc import ReportsStub

address, namespace, authority, account = sys.argv[1:]
own = open("/var/run/secrets/orbitkv/token").read().strip()

def metrics(shown):
    request = urllib.request.Request(f"http://{address}:9091/metrics", headers={"Authorization": f"Bearer {shown}"})
    try:
        return urllib.request.urlopen(request, timeout=10).status
    except urllib.error.HTTPError as error:
        return error.code

def report(shown):
    credentials = grpc.ssl_channel_credentials(authority.encode())
    with grpc.secure_channel(f"orbitkv-reports.{namespace}.svc:9443", credentials) as channel:
        try:
            sent = Report(pool="default", node="node-a", boot_id="x", sequence=1)
            ReportsStub(channel).Push(sent, timeout=10, metadata=(("authorization", f"Bearer {shown}"),))
        except grpc.RpcError as error:
            return f"{error.code().name} {error.details().partition(':')[0]}"
    return "taken"

print(metrics(""), metrics(own), metrics(account))
print(report(own), report(account))
"""


def test_the_time_of_a_miss_says_nothing_of_what_the_other_has(tenants: Tenants) -> None:
    """No more than chance does, which two kinds of hashes show that nobody has."""
    found = [tenants.attack("times", rounds=400) for _ in range(3)]
    ratios = [sorted(each[name] / each["nobodys"] for each in found)[1] for name in ("theirs", "others")]
    assert abs(ratios[0] - 1) < abs(ratios[1] - 1) + 0.1, found


def test_the_api_shows_nothing_of_the_other(tenants: Tenants) -> None:
    account = f"system:serviceaccount:{tenants.attacker.namespace}:default"
    namespace = tenants.victim.namespace
    asked = [("get", each) for each in ("events", "pods", "cachenamespaces.orbitkv.io")]
    asked += [("list", "events"), ("list", "cachenamespaces.orbitkv.io")]
    for verb, what in asked:
        with pytest.raises(KubectlError, match=r"^[^\n]*\bno\b"):
            tenants.kubectl.run("auth", "can-i", verb, what, f"--namespace={namespace}", f"--as={account}")


def test_memory_that_was_kept_shows_only_what_its_owner_wrote(
    tenants: Tenants, installation: Installation, images: list[str]
) -> None:
    """Its namespace is reset, deleted and made again meanwhile, and another engine fills it."""
    kubectl, namespace = tenants.kubectl, tenants.attacker.namespace
    cache = kubectl.get("cachenamespace", "cache", namespace)
    assert cache is not None
    image = next(name for name in images if "/node-agent" in name)
    pool = cache["spec"]["poolRef"]["name"]
    kept = f"{namespace}/kept"
    installation.make_cache(namespace, pool, "kept")
    node = kubectl.get("pod", tenants.attacker.name, namespace)
    assert node is not None
    options: dict[str, Any] = {"cache": kept, "identity": "model", "seconds": 2}
    keeper = make_engine_pod(
        kubectl, image, "keeper", namespace, node["spec"]["nodeName"], program=ATTACKS, action="keep", **options
    )
    keeper.wait_said("mapped")
    kubectl.patch("cachenamespace", "kept", {"spec": {"resetGeneration": 1}}, namespace)
    kubectl.delete("cachenamespace", "kept", namespace)
    kubectl.apply(cache_object("kept", namespace, pool))
    ended = keeper.wait_said("ended")["ended"]
    assert ended in ("cache-namespace-not-found", "cache-namespace-replaced")
    assert tenants.attacker.run("save", cache=kept, count=PAGES, patience=30)["kept"] == PAGES
    assert set(keeper.wait_said("seen")["seen"]) <= {0, 0xA7}
    assert tenants.attacker.run("find", cache=kept, count=PAGES)["hits"] == PAGES


def test_the_victim_noticed_nothing(tenants: Tenants) -> None:
    """The last one: what it saw through all of the above, and through more of it while no second of an attack was as
    good as one without: on a machine that others use, too, a single one shows that it was not the attack."""
    deadline = time.monotonic() + 60
    while not (judged := tenants.judged()).good and time.monotonic() < deadline:
        for sessions in (1, 100):
            tenants.attack("burst", sessions=sessions, seconds=3)
        tenants.attack("deaf", seconds=3)
        tenants.attack("flood", count=512, seconds=3)
        tenants.attack("hoard", pages=1, max_wait_ms=0, seconds=3)
        time.sleep(1.5)  # of quiet, to compare with
    assert judged.fewest == PAGES
    assert tenants.counted() == tenants.before
    namespace, _, name = tenants.theirs.partition("/")
    cache = tenants.kubectl.wait(
        "cachenamespace", name, lambda it: bool(it["status"].get("lastHour")), "its use", namespace=namespace
    )
    attached, asked = cache["status"]["attached"], cache["status"]["lastHour"]
    assert (attached["pods"], [each["name"] for each in attached["first"]]) == (1, ["victim"])
    assert asked["hitTokens"] == asked["requestedTokens"] > 0, "what the attacker asked for is not the victim's"
    assert judged.good, f"the best second of each attack (medians of look-ups, in seconds): {judged.best}"
