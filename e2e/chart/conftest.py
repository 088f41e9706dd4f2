"""Helm 3 and Helm 4, built if they are not there yet."""

import pytest

from e2e.chart.helm import Helm
from e2e.cluster import programs

MODULES = {module.name: module for module in programs.CLUSTER if module.name in ("helm3", "helm4")}


def helm_of(name: str) -> Helm:
    """Returns that Helm."""
    return Helm(programs.ensure((MODULES[name],))[name])


@pytest.fixture(scope="session", params=["helm3", "helm4"])
def each_helm(request: pytest.FixtureRequest) -> Helm:
    """Helm 3, then Helm 4: for what they decide differently. They render the same, which has its own test."""
    return helm_of(request.param)


@pytest.fixture(scope="session")
def helm() -> Helm:
    """Helm 3."""
    return helm_of("helm3")


@pytest.fixture(scope="session")
def helm4() -> Helm:
    """Helm 4."""
    return helm_of("helm4")
