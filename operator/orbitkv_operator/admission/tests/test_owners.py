"""Annotations of workloads and the copies on their templates."""

from __future__ import annotations

from typing import Any

import pytest

from orbitkv_crds.names import ANNOTATION_CACHE_NAMESPACE
from orbitkv_crds.stamps import ANNOTATION_FROM, ANNOTATION_MODE
from orbitkv_operator.admission.owners import copy_to_templates, unknown
from orbitkv_operator.admission.tests.pods import patched

Object = dict[str, Any]
COPY = {ANNOTATION_CACHE_NAMESPACE: "chat", ANNOTATION_FROM: "owner"}


def deployment(own: dict[str, str] | None, template: dict[str, str] | None = None, **metadata: Any) -> Object:
    of_pods: Object = {"labels": {"app": "a"}} | ({} if template is None else {"annotations": template})
    return {
        "metadata": {"name": "a", **({} if own is None else {"annotations": own}), **metadata},
        "spec": {"replicas": 1, "template": {"metadata": of_pods, "spec": {"containers": []}}},
    }


def after(owner: Object, kind: str = "Deployment") -> Object:
    return patched(owner, copy_to_templates(kind, owner))


def annotations_of(owner: Object) -> Object:
    found: Object = owner["spec"]["template"]["metadata"].get("annotations", {})
    return found


@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet"])
def test_owners_annotations_come_to_the_template(kind: str) -> None:
    owner = deployment({ANNOTATION_CACHE_NAMESPACE: "chat", "example.com/a": "b"}, {"example.com/c": "d"})
    assert annotations_of(after(owner, kind)) == {"example.com/c": "d", **COPY}
    assert after(owner, kind)["metadata"] == owner["metadata"]


def test_second_look_changes_nothing() -> None:
    changed = after(deployment({ANNOTATION_CACHE_NAMESPACE: "chat"}))
    assert copy_to_templates("Deployment", changed) == []


def test_copy_follows_the_owner_and_goes_with_it() -> None:
    owner = after(
        deployment({ANNOTATION_CACHE_NAMESPACE: "chat", ANNOTATION_MODE: "save_only"}, {"example.com/c": "d"})
    )
    owner["metadata"]["annotations"] = {ANNOTATION_CACHE_NAMESPACE: "other"}
    assert annotations_of(after(owner)) == {
        "example.com/c": "d",
        ANNOTATION_CACHE_NAMESPACE: "other",
        ANNOTATION_FROM: "owner",
    }
    owner["metadata"]["annotations"] = {}
    assert annotations_of(after(owner)) == {"example.com/c": "d"}


def test_applied_again_without_the_copy_it_comes_back() -> None:
    """A GitOps tool that replaces the object sends it as it is in Git: the template must come out as it was."""
    from_git = deployment({ANNOTATION_CACHE_NAMESPACE: "chat"}, {"example.com/c": "d"})
    assert annotations_of(after(from_git)) == annotations_of(after(after(from_git)))


def test_what_a_person_wrote_on_the_template_stays() -> None:
    owner = deployment({ANNOTATION_CACHE_NAMESPACE: "chat"}, {ANNOTATION_CACHE_NAMESPACE: "other"})
    assert copy_to_templates("Deployment", owner) == []
    assert copy_to_templates("Deployment", deployment(None, {ANNOTATION_CACHE_NAMESPACE: "other"})) == []


def test_stateful_set_of_another_controller_keeps_its_copies() -> None:
    """LeaderWorkerSet makes StatefulSets from its templates: they carry the copy and not the annotation."""
    leader = deployment(None, COPY, ownerReferences=[{"kind": "LeaderWorkerSet", "controller": True}])
    assert copy_to_templates("StatefulSet", leader) == []


def test_leader_and_workers_are_treated_alike() -> None:
    template: Object = {"spec": {"containers": []}}
    owner: Object = {
        "metadata": {"name": "a", "annotations": {ANNOTATION_CACHE_NAMESPACE: "chat"}},
        "spec": {"leaderWorkerTemplate": {"size": 2, "workerTemplate": template}},
    }
    found = after(owner, "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    assert found == {"size": 2, "workerTemplate": {**template, "metadata": {"annotations": COPY}}}
    owner["spec"]["leaderWorkerTemplate"]["leaderTemplate"] = template
    found = after(owner, "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    assert found["leaderTemplate"] == found["workerTemplate"]


def test_workload_without_annotations_is_left() -> None:
    assert copy_to_templates("Deployment", deployment(None)) == []
    assert copy_to_templates("Deployment", deployment({}, {})) == []


def test_misspelt_key_is_named() -> None:
    owner = deployment({"orbitkv.io/cache-namspace": "chat"})
    assert unknown(owner) == ["orbitkv.io/cache-namspace"]
    assert "orbitkv.io/cache-namspace" in annotations_of(after(owner))
