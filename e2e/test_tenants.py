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
from orbitkv_crds.names import engine_audience

ATTACKS = (Path(__file__).parent / "support" / "attacker_program.py").read_text()
NODE, OTHER_NODE = "node-a", "node-b"
PAGES = 64
MIB = 1 << 20
PAGE = 65536
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
    "torn": "",
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
        if not {"burst", "deaf", "flood", "nothing"} <= self.best.keys():
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
        self.attacks.append((action, *times["attack"]))
        found: dict[str, Any] = last
        return found

    @property
    def facts(self) -> dict[str, Any]:
        """By what numbers the agent knows the victim."""
        return next(line for line in self.victim.said() if "lease" in line)

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
    pool = installation.make_pool(memory="512Mi")
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
    yield Tenants(kubectl, attacker, f"{mine}/cache", victim, f"{theirs}/cache")
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


def test_requests_by_the_thousand_are_answered_in_turn(tenants: Tenants) -> None:
    """What they cost the other is seen in the last test."""
    assert tenants.attack("burst", seconds=3)["answered"]


def test_floods_cost_only_who_sends_them(tenants: Tenants) -> None:
    found = tenants.attack("flood", count=512, seconds=5)
    assert set(found["answers"]) == {"Ready", "Nothing miss", "Nothing budget"}, found
    assert found["patient"] == {"Loading admitted=False": 10}, found
    hellos = {"token-invalid", "too-many-reviews", "too-many-connections", "no answer in time"}
    assert set(found["hellos"]) <= hellos, found


def test_the_time_of_a_miss_says_nothing_of_what_the_other_has(tenants: Tenants) -> None:
    found = tenants.attack("times", rounds=400)
    assert 0.5 < found["theirs"] / found["nobodys"] < 2, found


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
        for each in ("burst", "deaf"):
            tenants.attack(each, seconds=3)
        tenants.attack("flood", count=512, seconds=3)
        time.sleep(1.5)  # of quiet, to compare with
    assert judged.fewest == PAGES
    assert judged.good, f"the best second of each attack (medians of look-ups, in seconds): {judged.best}"
