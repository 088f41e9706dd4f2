"""What annotations, namespaces and the cluster's objects do to a decision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from orbitkv_crds import names, stamps
from orbitkv_crds.stamps import Note
from orbitkv_operator.admission.decide import Decision, Inject, Leave, Rules, Skip, decide
from orbitkv_operator.admission.patch import make_patch
from orbitkv_operator.admission.tests.pods import NAMESPACE, RULES, FakeWorld, make_pod, patched
from orbitkv_operator.tests.fakes import cache_body, pool_body

ENGINE = {"name": "engine", "image": "vllm/vllm-openai:v0.11.0", "args": ["--model", "a/b"]}
STRANGER = {"name": "web", "image": "nginx:1"}
ASK = names.ANNOTATION_CACHE_NAMESPACE
DEFAULT = FakeWorld({NAMESPACE: {stamps.ANNOTATION_INJECT: "true"}}, {NAMESPACE: {ASK: "default"}})


def run(annotations: dict[str, str], world: FakeWorld | None = None, rules: Rules = RULES, **spec: Any) -> Decision:
    pod = make_pod(spec.pop("containers", [ENGINE]), annotations, **spec)
    return decide(pod, NAMESPACE, world or FakeWorld(), rules)


def reason(decision: Decision) -> str:
    assert isinstance(decision, Skip), decision
    return decision.note.reason


def injected(decision: Decision) -> Inject:
    assert isinstance(decision, Inject), decision
    return decision


# -------------------------------------------------------------------------------------------------------- annotations


def test_pod_that_asks_for_nothing_is_left() -> None:
    assert run({"example.com/a": "b"}) == Leave()


def test_name_without_a_namespace_is_in_the_pods_own() -> None:
    assert injected(run({ASK: "chat"})).stamp.namespace == "team/chat"
    assert injected(run({ASK: "other/chat"})).stamp.namespace == "other/chat"


def test_pod_opts_out() -> None:
    assert run({ASK: "chat", stamps.ANNOTATION_INJECT: "false"}) == Leave()
    assert run({stamps.ANNOTATION_INJECT: "false"}, DEFAULT) == Leave()


def test_unknown_key_is_named() -> None:
    decision = run({ASK: "chat", "orbitkv.io/containr": "engine"})
    assert reason(decision) == "unknown-annotation"
    assert isinstance(decision, Skip) and "orbitkv.io/containr" in decision.note.message


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("mode", "readwrite", "read_write or save_only"),
        ("multi-connector", "yes", "true or false"),
        ("inject-via", "env", "plugin or args"),
        ("inject", "no", "true or false"),
        ("cache-namespace", "", "NAMESPACE/NAME"),
        ("cache-namespace", "a/b/c", "NAMESPACE/NAME"),
        ("cache-namespace", "Team", "NAMESPACE/NAME"),
        ("cache-namespace", "a/" + "b" * 254, "NAMESPACE/NAME"),
    ],
)
def test_value_that_cannot_be_used_is_named_with_what_can(key: str, value: str, wanted: str) -> None:
    decision = run({ASK: "chat", f"orbitkv.io/{key}": value})
    assert reason(decision) == "invalid-annotation"
    assert isinstance(decision, Skip)
    assert f"orbitkv.io/{key}" in decision.note.message and wanted in decision.note.message


def test_cache_that_is_not_named_is_missed() -> None:
    decision = run({stamps.ANNOTATION_CONTAINER: "engine"})
    assert reason(decision) == "invalid-annotation"
    assert isinstance(decision, Skip) and f"{ASK}, which names the cache, is missing" in decision.note.message


def test_engine_that_is_not_served_is_named() -> None:
    decision = run({ASK: "chat", stamps.ANNOTATION_ENGINE: "trtllm"})
    assert reason(decision) == "engine-unknown"
    assert isinstance(decision, Skip) and "vllm and sglang" in decision.note.message


def test_forged_stamps_ask_for_nothing_and_are_taken_off() -> None:
    forged = {stamps.ANNOTATION_INJECTED: "{}", stamps.ANNOTATION_SKIP_REASON: "internal-error: x"}
    pod = make_pod([ENGINE], forged)
    pod["metadata"]["labels"][names.LABEL_CACHE] = "true"
    decision = decide(pod, NAMESPACE, FakeWorld(), RULES)
    assert decision == Leave()
    after = patched(pod, make_patch(pod, decision, RULES))
    assert after["metadata"]["annotations"] == {}
    assert after["metadata"]["labels"] == {"app": "engine"}
    assert after["spec"] == pod["spec"]


# ----------------------------------------------------------------------------------------------- default of a namespace


def test_default_counts_for_recognised_engines_only() -> None:
    assert injected(run({}, DEFAULT)).stamp.namespace == "team/default"
    assert run({}, DEFAULT, containers=[STRANGER]) == Leave()


def test_annotations_without_the_label_are_no_default() -> None:
    assert run({}, FakeWorld({NAMESPACE: {}}, DEFAULT.annotations)) == Leave()


def test_pods_own_annotations_count_more_than_the_default() -> None:
    assert injected(run({ASK: "mine"}, DEFAULT)).stamp.namespace == "team/mine"
    decision = injected(run({stamps.ANNOTATION_CONTAINER: "web"}, DEFAULT, containers=[STRANGER]))
    assert (decision.stamp.namespace, decision.stamp.container) == ("team/default", "web")


@pytest.mark.parametrize("wrong", [{}, {ASK: "Team"}, {"orbitkv.io/cash": "x"}])
def test_wrong_default_is_said_on_engines_and_on_nothing_else(wrong: dict[str, str]) -> None:
    world = FakeWorld(DEFAULT.labels, {NAMESPACE: wrong})
    assert reason(run({}, world)) in ("invalid-annotation", "unknown-annotation")
    assert run({}, world, containers=[STRANGER]) == Leave()


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("level", ["baseline", "restricted"])
def test_namespace_that_forbids_hostpath_is_skipped_with_what_to_do(level: str) -> None:
    decision = run({ASK: "chat"}, FakeWorld({NAMESPACE: {"pod-security.kubernetes.io/enforce": level}}))
    assert reason(decision) == "pod-security-forbids-hostpath"
    assert isinstance(decision, Skip) and "kubectl label namespace team" in decision.note.message


def test_default_of_the_cluster_counts_where_there_is_no_label() -> None:
    strict = replace(RULES, pod_security_default="baseline")
    assert reason(run({ASK: "chat"}, rules=strict)) == "pod-security-forbids-hostpath"
    open_namespace = FakeWorld({NAMESPACE: {"pod-security.kubernetes.io/enforce": "privileged"}})
    injected(run({ASK: "chat"}, open_namespace, strict))


@pytest.mark.parametrize("level", ["baseline", "restricted"])
def test_volume_of_the_csi_driver_is_allowed_everywhere(level: str) -> None:
    rules = replace(RULES, socket_volume="csi", pod_security_default="restricted")
    injected(run({ASK: "chat"}, FakeWorld({NAMESPACE: {"pod-security.kubernetes.io/enforce": level}}), rules))
    injected(run({ASK: "chat"}, rules=rules))


def test_payload_that_no_node_can_pull_is_not_put_into_pods() -> None:
    failing = replace(RULES, pull_failing="No node can pull registry/payload:1: not found.")
    decision = run({ASK: "chat"}, rules=failing)
    assert decision == Skip(Note("payload-pull-failing", "No node can pull registry/payload:1: not found."))


# --------------------------------------------------------------------------------------------------------- information


def info(decision: Decision) -> list[str]:
    return [note.reason for note in injected(decision).stamp.info]


def ready(pool: dict[str, Any], status: str = "True") -> dict[str, Any]:
    condition = {
        "type": "Ready",
        "status": status,
        "reason": "A",
        "message": "No agent.",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    return pool | {"status": {"conditions": [condition]}}


def test_objects_that_come_later_are_information_only() -> None:
    world = FakeWorld()
    assert info(run({ASK: "one"}, world)) == ["cache-namespace-not-found"]
    world.caches["team/one"] = cache_body()
    assert info(run({ASK: "one"}, world)) == ["pool-not-ready"]
    world.pools["main"] = pool_body()
    assert info(run({ASK: "one"}, world)) == ["pool-not-ready"]
    world.pools["main"] = ready(pool_body(), "False")
    (note,) = injected(run({ASK: "one"}, world)).stamp.info
    assert note.message.endswith("No agent.")
    world.pools["main"] = ready(pool_body())
    assert info(run({ASK: "one"}, world)) == []


def test_cache_that_is_not_open_to_the_pod_is_information_only() -> None:
    world = FakeWorld(caches={"other/one": cache_body(namespace="other")}, pools={"main": ready(pool_body())})
    assert info(run({ASK: "other/one"}, world)) == ["access-denied"]
    world.caches["other/one"] = cache_body(
        namespace="other", access={"namespaces": "All", "serviceAccounts": ["team/engines"]}
    )
    assert info(run({ASK: "other/one"}, world)) == ["access-denied"]
    assert info(run({ASK: "other/one"}, world, serviceAccountName="engines")) == []


def test_image_volume_is_used_only_where_the_cluster_keeps_it() -> None:
    wanted = replace(RULES, payload_mode="imageVolume")
    decision = injected(run({ASK: "one"}, rules=wanted))
    assert decision.stamp.payload == "init"
    assert "image-volume-unavailable" in info(decision)
    decision = injected(run({ASK: "one"}, rules=replace(wanted, image_volumes=True)))
    assert decision.stamp.payload == "imageVolume"
    assert "image-volume-unavailable" not in info(decision)


def test_reasons_are_those_that_are_documented() -> None:
    assert set(stamps.INFORMATION) == {
        "cache-namespace-not-found",
        "access-denied",
        "pool-not-ready",
        "image-volume-unavailable",
    }


# ------------------------------------------------------------------------------------------------------------- LMCache


def lmcache_pod(**annotations: str) -> dict[str, Any]:
    pod = make_pod(
        [STRANGER, ENGINE], {f"lmcache.ai/lmcache-{key.replace('_', '-')}": v for key, v in annotations.items()}
    )
    pod["metadata"]["labels"]["lmcache.ai/lmcache-inject"] = "true"
    return pod


def test_pods_for_lmcaches_operator_are_served_when_asked_for() -> None:
    pod = lmcache_pod(engine="chat", container="web", image_pull_secrets="a, b")
    assert decide(pod, NAMESPACE, FakeWorld(), RULES) == Leave()
    decision = injected(decide(pod, NAMESPACE, FakeWorld(), replace(RULES, lmcache=True)))
    assert (decision.stamp.namespace, decision.stamp.container) == ("team/chat", "web")
    after = patched(pod, make_patch(pod, decision, RULES))
    assert after["spec"]["imagePullSecrets"] == [{"name": "a"}, {"name": "b"}]


def test_lmcaches_label_without_a_name_is_said() -> None:
    assert reason(decide(lmcache_pod(), NAMESPACE, FakeWorld(), replace(RULES, lmcache=True))) == "invalid-annotation"


def test_lmcaches_annotations_without_the_label_ask_for_nothing() -> None:
    pod = lmcache_pod(engine="chat")
    pod["metadata"]["labels"]["lmcache.ai/lmcache-inject"] = "false"
    assert decide(pod, NAMESPACE, FakeWorld(), replace(RULES, lmcache=True)) == Leave()


def test_our_annotation_counts_more_than_lmcaches() -> None:
    pod = lmcache_pod(engine="chat")
    pod["metadata"]["annotations"][ASK] = "mine"
    assert injected(decide(pod, NAMESPACE, FakeWorld(), replace(RULES, lmcache=True))).stamp.namespace == "team/mine"
