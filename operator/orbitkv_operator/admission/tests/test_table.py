"""What becomes of pods as people write them: the container that is chosen, and what changes and what never does."""

from __future__ import annotations

from typing import Any

import pytest

from orbitkv_crds import names, stamps
from orbitkv_operator.admission.decide import ARGUMENTS, Decision, Inject, Leave, Skip, decide
from orbitkv_operator.admission.patch import make_patch
from orbitkv_operator.admission.tests.pods import NAMESPACE, RULES, FakeWorld, Row, patched, table

Object = dict[str, Any]
ROWS = pytest.mark.parametrize("row", table(), ids=lambda row: row.name)
WITH_DEFAULT = FakeWorld(
    labels={NAMESPACE: {stamps.ANNOTATION_INJECT: "true"}},
    annotations={NAMESPACE: {names.ANNOTATION_CACHE_NAMESPACE: "chat"}},
)


def run(pod: Object, world: FakeWorld | None = None) -> tuple[Decision, Object]:
    """Decide on a pod; return the decision and the pod after it."""
    decision = decide(pod, NAMESPACE, world or FakeWorld(), RULES)
    return decision, patched(pod, make_patch(pod, decision, RULES))


def test_table_is_long_enough() -> None:
    assert len(table()) >= 100
    assert len({row.name for row in table()}) == len(table())


@ROWS
def test_container_is_chosen(row: Row) -> None:
    decision, _ = run(row.pod)
    if row.chosen in stamps.SKIP_REASONS:
        assert isinstance(decision, Skip)
        assert decision.note.reason == row.chosen
    else:
        assert isinstance(decision, Inject), decision
        assert (decision.target.name, decision.target.engine) == (row.chosen, row.engine)


@ROWS
def test_default_of_a_namespace_touches_recognised_engines_only(row: Row) -> None:
    pod = row.silent()
    decision, after = run(pod, WITH_DEFAULT)
    if row.default in stamps.SKIP_REASONS:
        assert isinstance(decision, Skip)
        assert decision.note.reason == row.default
    elif row.default == "touched" or stamps.asked(pod["metadata"]["annotations"]):
        assert isinstance(decision, Inject)
    else:
        assert isinstance(decision, Leave)
        assert after == pod


@ROWS
def test_flags_are_appended_only_where_the_arguments_are_plainly_the_engines(row: Row) -> None:
    pod = row.asking(inject_via="args")
    decision, after = run(pod)
    if row.args in stamps.SKIP_REASONS:
        assert isinstance(decision, Skip), decision
        assert decision.note.reason == row.args
        return
    assert isinstance(decision, Inject)
    before, now = (each["spec"]["containers"][decision.target.index] for each in (pod, after))
    assert now["args"] == [*before.get("args", []), *ARGUMENTS]
    assert now.get("command") == before.get("command")


@ROWS
def test_what_the_pod_has_stays(row: Row) -> None:
    decision, after = run(row.pod)
    spec, now = row.pod["spec"], after["spec"]
    kept = {"volumes", "initContainers", "imagePullSecrets", "containers"}
    assert {k: v for k, v in now.items() if k not in kept} == {k: v for k, v in spec.items() if k not in kept}
    assert [each["name"] for each in now["containers"]] == [each["name"] for each in spec["containers"]]
    changed = decision.target.index if isinstance(decision, Inject) else None
    for index, (before, container) in enumerate(zip(spec["containers"], now["containers"], strict=True)):
        if index != changed:
            assert container == before
            continue
        same = {key: value for key, value in container.items() if key not in ("env", "volumeMounts")}
        assert same == {key: value for key, value in before.items() if key not in ("env", "volumeMounts")}
        kept_names = [variable["name"] for variable in before.get("env", [])]
        assert [it["name"] for it in container["env"] if it["name"] in kept_names] == kept_names
        assert container["volumeMounts"][: len(before.get("volumeMounts", []))] == before.get("volumeMounts", [])
    for kind in ("volumes", "initContainers", "imagePullSecrets"):
        assert [each for each in now.get(kind, []) if each in spec.get(kind, [])] == spec.get(kind, [])


@ROWS
def test_second_look_changes_nothing(row: Row) -> None:
    for pod in (row.pod, row.asking(inject_via="args"), row.asking(mode="save_only", multi_connector="true")):
        decision, after = run(pod)
        again = decide(after, NAMESPACE, FakeWorld(), RULES)
        assert make_patch(after, again, RULES) == []
        assert type(again) is type(decision)


@ROWS
def test_every_pod_that_asked_carries_the_answer(row: Row) -> None:
    decision, after = run(row.pod)
    annotations, labels = after["metadata"]["annotations"], after["metadata"]["labels"]
    assert stamps.is_stamped(labels)
    assert labels["app"] == "engine"
    injected, skipped = stamps.read_injected(annotations), stamps.read_skip(annotations)
    assert (injected is None) != (skipped is None)
    assert isinstance(decision, Inject) == (injected is not None)


@ROWS
def test_class_and_sums_of_resources_stay(row: Row) -> None:
    _, after = run(row.pod)
    before, now = row.pod["spec"], after["spec"]
    assert quality_of_service(now) == quality_of_service(before)
    for container in now.get("initContainers", []):
        if container["name"] == "orbitkv-payload":
            (engine,) = (each for each in before["containers"] if each["name"] == row.chosen)
            for kind in ("requests", "limits"):
                given = engine.get("resources", {}).get(kind, {})
                assert container["resources"].get(kind, {}).items() <= given.items()
                assert not {name for name in container["resources"].get(kind, {}) if "/" in name}


def quality_of_service(spec: Object) -> str:
    """The class that the kubelet would give: as Kubernetes works it out, for whole amounts."""
    every = [*spec["containers"], *spec.get("initContainers", [])]
    resources = [each.get("resources", {}) for each in every]
    shared = [
        (each.get("requests", {}).get(name, each.get("limits", {}).get(name)), each.get("limits", {}).get(name))
        for each in resources
        for name in ("cpu", "memory")
    ]
    if all(request is None and limit is None for request, limit in shared):
        return "BestEffort"
    return "Guaranteed" if all(limit is not None and request == limit for request, limit in shared) else "Burstable"
