"""Fixtures of the tests on a cluster.

`target` is the cluster and the programs to talk to it, `kubectl` one of them. `installation` is OrbitKV, installed from
its chart (with the module's HELM_VALUES, if it has them) and kept for the modules that want the same; `bare` is a
cluster without it. `own_cluster` is the project's own cluster, to stop and kill parts of: tests that use it are skipped
on any other. Tests that use none of these get along without nodes, and may run beside those that do.
"""

from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from e2e.cluster.cluster import FIRST, Cluster
from e2e.support import diagnostics
from e2e.support.installation import SMALL, Installation, Installations, remove_everything
from e2e.support.kubectl import Kubectl
from e2e.support.target import Target, connect, foreign_kubeconfig
from images import build

FOLDER = Path(__file__).resolve().parent
TEST_SECONDS = 300
TARGET = pytest.StashKey[Target]()
FAILURES = pytest.StashKey[list[BaseException]]()


@pytest.fixture(scope="session")
def building() -> Iterator[Future[list[str]] | None]:
    """The images, built from this tree while the cluster starts; None where they come from a registry."""
    if foreign_kubeconfig() is not None:
        yield None
        return
    with ThreadPoolExecutor(1) as thread:
        yield thread.submit(build.build)


@pytest.fixture(scope="session")
def target(request: pytest.FixtureRequest, building: Future[list[str]] | None) -> Iterator[Target]:
    """The cluster: the project's own, started if it does not run, or the one that KUBECONFIG names."""
    with connect() as found:
        request.config.stash[TARGET] = found
        yield found


@pytest.fixture(scope="session")
def kubectl(target: Target) -> Kubectl:
    """kubectl against the cluster."""
    return target.kubectl


@pytest.fixture(scope="session")
def images(target: Target, building: Future[list[str]] | None) -> list[str]:
    """The names of OrbitKV's images, built from this tree and on the nodes of the project's own cluster."""
    if target.own is None or building is None:
        return [image.reference.replace("localhost", target.registry, 1) for image in build.IMAGES]
    names = building.result()
    build.load(target.own)
    return names


@pytest.fixture(scope="session")
def installations(target: Target, images: list[str]) -> Iterator[Installations]:
    """What keeps OrbitKV installed from module to module."""
    kept = Installations(target)
    yield kept
    kept.end()


@pytest.fixture(scope="module")
def installation(installations: Installations, request: pytest.FixtureRequest) -> Iterator[Installation]:
    """OrbitKV, installed; the pools and namespaces that the tests of a module make are removed after them."""
    there = installations.get(getattr(request.module, "HELM_VALUES", SMALL)).part()
    yield there
    there.clean_up()


@pytest.fixture
def clean(installation: Installation) -> Iterator[Installation]:
    """The installation, without what the test makes: its pools and namespaces are deleted after it."""
    there = installation.part()
    yield there
    there.clean_up()


@pytest.fixture(scope="module")
def bare(target: Target, installations: Installations) -> Iterator[Target]:
    """The project's own cluster with the images on its nodes, and nothing else of OrbitKV."""
    if target.own is None:
        pytest.skip("installs and removes OrbitKV, so it runs on the project's own cluster only: unset KUBECONFIG")
    installations.end()
    remove_everything(target)
    names = [each["metadata"]["name"] for each in target.kubectl.list_all("namespaces")]
    for name in names:
        if name.startswith("orbitkv-test"):  # it goes by itself, after the test that made it
            target.kubectl.wait_gone("namespace", name, timeout=90)
    yield target
    remove_everything(target)


@pytest.fixture
def own_cluster(target: Target) -> Iterator[Cluster]:
    """The project's own cluster, for a test that breaks it; made whole again after the test."""
    if target.own is None:
        pytest.skip("stops parts of the cluster, so it runs on the project's own only: unset KUBECONFIG")
    yield target.own
    target.own.repair()
    assert list(target.own.nodes) == list(FIRST)


def pytest_configure(config: pytest.Config) -> None:
    """Makes the marks known."""
    config.addinivalue_line("markers", "nodes: runs on a cluster with nodes; each test that uses them gets it here")
    config.addinivalue_line("markers", "ends_cluster: ends the cluster and starts another one: runs after all others")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests that need nodes, and puts those first that share an installation.

    Limits the time of each test itself: what tests share may take minutes to make, and has deadlines of its own.
    """
    for item in items:
        if item.path.is_relative_to(FOLDER):
            given = item.get_closest_marker("timeout")
            seconds = given.args[0] if given is not None and given.args else TEST_SECONDS
            item.add_marker(pytest.mark.timeout(seconds, func_only=True), append=False)
            if "target" in fixtures(item):
                item.add_marker("nodes")
    items.sort(key=turn)


def fixtures(item: pytest.Item) -> list[str]:
    """The names of all fixtures that a test uses, those of its fixtures included."""
    return item.fixturenames if isinstance(item, pytest.Function) else []


def turn(item: pytest.Item) -> int:
    """When a test has its turn: with the others on an installation that is kept, after them, or last of all."""
    if item.get_closest_marker("ends_cluster"):
        return 2
    return 0 if "installation" in fixtures(item) else 1


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
