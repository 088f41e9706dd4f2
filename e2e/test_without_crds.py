"""The operator before the CustomResourceDefinitions are there, as when something else installs them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.support.installation import OWN_NAMESPACE, PRIVILEGED, RELEASE, Installation, namespace_object
from e2e.support.kubectl import Kubectl
from e2e.support.target import Target

DEFINITIONS = sorted((Path(__file__).resolve().parents[1] / "crds").glob("*.yaml"))


@pytest.fixture
def early(bare: Target) -> Iterator[Installation]:
    """OrbitKV without CustomResourceDefinitions, not waited for."""
    bare.kubectl.apply(namespace_object(OWN_NAMESPACE, PRIVILEGED))
    bare.helm[3].install(RELEASE, OWN_NAMESPACE, {"crds": {"install": False}}, wait=0)
    there = Installation(bare, OWN_NAMESPACE)
    yield there
    there.clean_up()


def test_operator_waits_for_the_definitions_and_then_works(early: Installation, kubectl: Kubectl) -> None:
    kubectl.until(
        lambda: "waiting for the CRDs" in early.operator_logs(), "the operator to say what it waits for", timeout=90
    )
    kubectl.apply(*DEFINITIONS)
    pool, namespace = early.make_pool(ready=90), early.make_namespace()
    early.make_cache(namespace, pool)
    operators = early.operators()
    assert operators
    assert not any(status["restartCount"] for pod in operators for status in pod["status"]["containerStatuses"])
