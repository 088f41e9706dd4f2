"""Fixtures of the tests on a cluster.

`target` is the cluster and the programs to talk to it, `kubectl` one of them. `installation` is OrbitKV, installed from
its chart once for a module (with the module's HELM_VALUES, if it has them). `own_cluster` is the project's own cluster,
to stop and kill parts of: tests that use it are skipped on any other.
"""

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.cluster import FIRST, Cluster
from e2e.support import diagnostics
from e2e.support import installation as installations
from e2e.support.installation import Installation
from e2e.support.kubectl import Kubectl
from e2e.support.target import Target, connect
from images import build

FOLDER = Path(__file__).resolve().parent
TEST_SECONDS = 300
TARGET = pytest.StashKey[Target]()
FAILURES = pytest.StashKey[list[BaseException]]()


@pytest.fixture(scope="session")
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    """The cluster: the project's own, started if it does not run, or the one that KUBECONFIG names."""
    with connect() as found:
        request.config.stash[TARGET] = found
        yield found


@pytest.fixture(scope="session")
def kubectl(target: Target) -> Kubectl:
    """kubectl against the cluster."""
    return target.kubectl


@pytest.fixture(scope="session")
def images(target: Target) -> list[str]:
    """The names of OrbitKV's images, built from this tree and on the nodes of the project's own cluster."""
    if target.own is None:
        return [image.reference.replace("localhost", target.registry, 1) for image in build.IMAGES]
    names = build.build()
    build.load(target.own)
    return names


@pytest.fixture(scope="module")
def installation(target: Target, images: list[str], request: pytest.FixtureRequest) -> Iterator[Installation]:
    """OrbitKV, installed for the tests of a module; removed after them, with the pools and namespaces they made."""
    values: dict[str, Any] = getattr(request.module, "HELM_VALUES", {})
    with installations.installed(target, values) as there:
        yield there


@pytest.fixture
def clean(installation: Installation) -> Iterator[Installation]:
    """The installation, without what the test makes: its pools and namespaces are deleted after it."""
    yield installation
    installation.clean_up()


@pytest.fixture
def own_cluster(target: Target) -> Iterator[Cluster]:
    """The project's own cluster, for a test that breaks it; made whole again after the test."""
    if target.own is None:
        pytest.skip("stops parts of the cluster, so it runs on the project's own only: unset KUBECONFIG")
    yield target.own
    target.own.repair()
    assert list(target.own.nodes) == list(FIRST)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Limits the time of each test itself: what tests share may take minutes to make, and has deadlines of its own."""
    for item in items:
        if item.path.is_relative_to(FOLDER):
            given = item.get_closest_marker("timeout")
            seconds = given.args[0] if given is not None and given.args else TEST_SECONDS
            item.add_marker(pytest.mark.timeout(seconds, func_only=True), append=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keeps what can be learned of the cluster when a test on it fails, and says where.

    A fixture of a module that fails does so for each of its tests, with the same error: it is looked into once.
    """
    report = yield
    found = item.config.stash.get(TARGET, None)
    if not report.failed or found is None or call.excinfo is None:
        return report
    known = item.config.stash.setdefault(FAILURES, [])
    if not any(call.excinfo.value is each for each in known):
        known.append(call.excinfo.value)
        folder = diagnostics.collect(found, f"{item.nodeid}-{report.when}")
        report.sections.append(("the cluster", f"its objects, events and logs are in {folder}"))
    return report
