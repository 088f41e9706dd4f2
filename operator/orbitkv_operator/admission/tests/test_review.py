"""Reviews in, answers out: whatever comes, objects pass."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import pytest

from orbitkv_crds import names, stamps
from orbitkv_operator.admission.review import Reviewer, ReviewError, read
from orbitkv_operator.admission.tests.pods import NAMESPACE, RULES, FakeWorld, make_pod, patched

Object = dict[str, Any]
ENGINE = {"name": "engine", "image": "vllm/vllm-openai:v0.11.0"}


def review(thing: Object, kind: str = "Pod", **request: Any) -> bytes:
    body = {
        "kind": "AdmissionReview",
        "apiVersion": "admission.k8s.io/v1",
        "request": {
            "uid": "uid-of-review",
            "kind": {"group": "", "version": "v1", "kind": kind},
            "operation": "CREATE",
            "namespace": NAMESPACE,
            "object": thing,
            **request,
        },
    }
    return json.dumps(body).encode()


def parsed(thing: Object, kind: str = "Pod", **request: Any) -> Object:
    return read(review(thing, kind, **request))


def reviewer(world: FakeWorld | None = None) -> Reviewer:
    return Reviewer(world or FakeWorld(), lambda: RULES)


def patch_of(body: Mapping[str, Any]) -> list[Object]:
    response = body["response"]
    assert response["allowed"] is True
    if "patch" not in response:
        return []
    assert response["patchType"] == "JSONPatch"
    found: list[Object] = json.loads(base64.b64decode(response["patch"]))
    return found


def asking(**annotations: str) -> Object:
    given = {f"orbitkv.io/{key.replace('_', '-')}": value for key, value in annotations.items()}
    return make_pod([ENGINE], {names.ANNOTATION_CACHE_NAMESPACE: "chat"} | given)


def test_pod_is_injected() -> None:
    answer = reviewer().answer(parsed(asking()))
    assert answer.outcome == "injected"
    assert answer.body["response"]["uid"] == "uid-of-review"
    after = patched(asking(), patch_of(answer.body))
    assert stamps.read_injected(after["metadata"]["annotations"]) is not None
    assert "warnings" not in answer.body["response"]


def test_namespace_is_the_requests_own() -> None:
    """The object of a CREATE may carry none, or a forged one."""
    pod = asking()
    pod["metadata"]["namespace"] = "other"
    after = patched(pod, patch_of(reviewer().answer(parsed(pod)).body))
    stamp = stamps.read_injected(after["metadata"]["annotations"])
    assert stamp is not None and stamp.namespace == f"{NAMESPACE}/chat"


def test_skipped_pod_says_why_and_whoever_made_it_is_told() -> None:
    answer = reviewer().answer(parsed(asking(mode="x" * 500)))
    assert (answer.outcome, answer.reason) == ("skipped", "invalid-annotation")
    (warning,) = answer.body["response"]["warnings"]
    assert warning.startswith("OrbitKV: invalid-annotation: orbitkv.io/mode is") and len(warning) <= 256
    after = patched(asking(), patch_of(answer.body))
    found = stamps.read_skip(after["metadata"]["annotations"])
    assert found is not None and found.reason == "invalid-annotation"


def test_pod_that_asks_for_nothing_is_left() -> None:
    answer = reviewer().answer(parsed(make_pod([ENGINE])))
    assert (answer.outcome, patch_of(answer.body)) == ("left", [])


def test_workload_gets_its_copy_and_its_author_a_warning() -> None:
    owner = {
        "metadata": {"name": "a", "annotations": {"orbitkv.io/cache-namspace": "chat"}},
        "spec": {"template": {"metadata": {}, "spec": {}}},
    }
    answer = reviewer().answer(parsed(owner, "Deployment"))
    assert answer.outcome == "copied"
    assert "orbitkv.io/cache-namspace" in answer.body["response"]["warnings"][0]
    assert patched(owner, patch_of(answer.body))["spec"]["template"]["metadata"]["annotations"]


@pytest.mark.parametrize(("kind", "more"), [("ConfigMap", {}), ("Pod", {"subResource": "ephemeralcontainers"})])
def test_what_is_not_meant_passes(kind: str, more: Object) -> None:
    answer = reviewer().answer(parsed(asking(), kind, **more))
    assert (answer.outcome, patch_of(answer.body)) == ("left", [])


def test_pod_of_a_namespace_that_is_too_new_to_be_known_passes_with_its_reason() -> None:
    """Pod Security may forbid what injection adds: nobody knows yet, and the pod must start."""
    waiting = parsed(asking(), namespace="new")
    assert reviewer().waits_for(waiting) == "new"
    assert reviewer().answer(waiting).reason == "internal-error"
    assert reviewer().waits_for(parsed(asking())) == ""
    assert reviewer().waits_for(parsed({"metadata": {}}, "Deployment", namespace="new")) == ""


class Broken(FakeWorld):
    """A world that fails."""

    def cache(self, namespace: str, name: str) -> Any:
        raise RuntimeError("a defect")


def test_defect_of_ours_lets_the_pod_pass_with_its_reason() -> None:
    answer = reviewer(Broken()).answer(parsed(asking()))
    assert answer.outcome == "failed"
    (warning,) = answer.body["response"]["warnings"]
    assert warning.startswith("OrbitKV: internal-error: The webhook failed on this pod")
    after = patched(asking(), patch_of(answer.body))
    found = stamps.read_skip(after["metadata"]["annotations"])
    assert found is not None and found.reason == "internal-error"
    assert after["spec"] == asking()["spec"]


@pytest.mark.parametrize("thing", [{}, {"spec": []}, {"metadata": [], "spec": {"containers": "x"}}, {"metadata": None}])
def test_object_of_no_shape_passes(thing: Object) -> None:
    annotated = {"metadata": {"annotations": {names.ANNOTATION_CACHE_NAMESPACE: "chat"}}} | thing
    assert reviewer().answer(parsed(annotated)).body["response"]["allowed"] is True


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"kind": "AdmissionReview"}',
        json.dumps({"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1beta1", "request": {}}).encode(),
        review([]),  # type: ignore[arg-type]
        review({}, uid=1),
        review({"many": [{}] * 600_000}),
    ],
)
def test_what_is_no_review_is_refused(body: bytes) -> None:
    with pytest.raises(ReviewError):
        read(body)
