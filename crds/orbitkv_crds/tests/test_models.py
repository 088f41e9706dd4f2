"""What the models take and refuse. The same objects go to a real apiserver in e2e/test_crds.py."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from orbitkv_crds.cachenamespace import CacheNamespace
from orbitkv_crds.managerpool import GPU_TAINT, ManagerPool
from orbitkv_crds.model import describe_errors, each_error
from orbitkv_crds.tests.cases import Case, cases

CASES = cases()
GIB = 1 << 30


def pool(**spec: Any) -> ManagerPool:
    return ManagerPool.model_validate({"metadata": {"name": "pool"}, "spec": {"memory": {"pool": "8Gi"}} | spec})


def cache(**spec: Any) -> CacheNamespace:
    body = {"metadata": {"name": "cache", "namespace": "team-a"}, "spec": {"poolRef": {"name": "pool"}} | spec}
    return CacheNamespace.model_validate(body)


@pytest.mark.parametrize("case", [case for case in CASES if case.refused is None], ids=str)
def test_model_takes_what_the_apiserver_takes(case: Case) -> None:
    case.kind.model.model_validate(case.body, extra="forbid")


@pytest.mark.parametrize("case", [case for case in CASES if case.refused is not None], ids=str)
def test_model_refuses_what_the_apiserver_refuses_and_names_the_field(case: Case) -> None:
    assert case.refused is not None
    with pytest.raises(ValidationError) as caught:
        case.kind.model.model_validate(case.body)
    (line,) = each_error(caught.value)  # one thing is wrong with each object: nothing else can be what is refused
    assert line.startswith(f"{case.refused.field}: " if case.refused.field else case.refused.says)


def test_there_are_enough_objects_of_each_kind() -> None:
    assert len(CASES) >= 60
    for refused in (True, False):
        assert all(
            sum(case.kind.plural == plural and (case.refused is not None) == refused for case in CASES) >= 10
            for plural in ("managerpools", "cachenamespaces")
        )


def test_object_of_a_newer_release_is_read_without_what_this_one_does_not_know() -> None:
    it = pool(ssd={"path": "/data", "capacity": "1Ti"}, memory={"pool": "8Gi", "numa": "spread"})
    assert it.spec.memory.pool_bytes == 8 * GIB
    assert "ssd" not in it.to_body()["spec"]


def test_value_that_only_a_newer_release_knows_is_refused_by_its_field() -> None:
    with pytest.raises(ValidationError) as caught:
        cache(mode="prefetch")
    assert describe_errors(caught.value).startswith("spec.mode: ")


def test_status_that_this_release_cannot_read_does_not_hide_the_spec() -> None:
    body = {"metadata": {"name": "pool"}, "spec": {"memory": {"pool": "8Gi"}}, "status": {"conditions": "many"}}
    it = ManagerPool.model_validate(body)
    assert it.spec.memory.pool_bytes == 8 * GIB
    assert it.status.conditions is None


def test_body_without_a_status_has_an_empty_one() -> None:
    assert pool().status.conditions is None
    assert cache().to_body()["status"] == {}


def test_agents_run_on_gpu_nodes_unless_told_otherwise() -> None:
    assert pool().spec.node_selector_in_force == {"nvidia.com/gpu.present": "true"}
    assert pool(nodeSelector={}).spec.node_selector_in_force == {}
    assert pool(gpu={"access": "none"}).spec.node_selector_in_force == {}
    assert pool(gpu={"access": "none"}, nodeSelector={"a": "b"}).spec.node_selector_in_force == {"a": "b"}


def test_agents_tolerate_the_taint_of_gpu_nodes_unless_told_otherwise() -> None:
    assert pool().spec.tolerations_in_force == [GPU_TAINT]
    assert pool(tolerations=[]).spec.tolerations_in_force == []


def test_engine_options_are_those_that_are_set() -> None:
    assert cache().spec.engine_options == {}
    it = cache(mode="save_only", maxWaitMs=0, saveDecode=False, modelFingerprint="")
    assert it.spec.engine_options == {
        "mode": "save_only",
        "max_wait_ms": 0,
        "save_decode": False,
        "model_fingerprint": "",
    }


def test_longest_name_of_a_cache_namespace_has_317_characters() -> None:
    it = CacheNamespace.model_validate(
        {"metadata": {"name": "n" * 253, "namespace": "s" * 63}, "spec": {"poolRef": {"name": "pool"}}}
    )
    assert len(it.full_name) == 317


def test_all_errors_are_told_in_one_line() -> None:
    with pytest.raises(ValidationError) as caught:
        pool(memory={"pool": "8GiB"}, tolerations=[{"value": "x"}], logging={"level": "loud"})
    text = describe_errors(caught.value)
    assert "spec.memory.pool: must be a size of at least 1Mi" in text
    assert "spec.tolerations[0].operator: operator must be Exists where no key is given" in text
    assert "spec.logging.level: " in text
    assert "\n" not in text
