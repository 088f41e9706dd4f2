"""What the tests share: models, a nursery that starts engines fast, one agent, and one engine for tests that
harm nothing."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from orbitkv.vllm.tests.engine.models import (
    PATIENT,
    PATIENT_SETTINGS,
    AgentMaker,
    EngineMaker,
    Models,
    Pair,
    Service,
    make_models,
)
from tools.harness.agent import AgentProcess
from tools.harness.engine import EngineProcess, EngineSpec, Nursery, orbitkv_connector
from tools.harness.serve import ServeProcess, installed_as_entry_point

ORDER = ["test_restore", "test_restart", "test_pressure", "test_cancellation", "test_modes", "test_http", "test_faults"]
"""The tests of faults come last: they look at times, and nothing else starts then."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the tests of this folder in order, at the end."""
    here = Path(__file__).parent
    ours = [item for item in items if item.path.parent == here]
    items[:] = [item for item in items if item.path.parent != here]
    items += sorted(ours, key=lambda item: ORDER.index(item.path.stem) if item.path.stem in ORDER else -1)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="session")
def nursery(folder: Path) -> Iterator[Nursery]:
    nursery = Nursery(folder)
    yield nursery
    nursery.close()


@pytest.fixture(scope="session")
def models(folder: Path, nursery: Nursery) -> Models:
    # after the nursery's start, so that both work at the same time
    return make_models(folder / "models")


@pytest.fixture(scope="session")
def agent(folder: Path) -> Iterator[AgentProcess]:
    with AgentProcess(folder) as agent:
        yield agent


@pytest.fixture(scope="session")
def shared(folder: Path, agent: AgentProcess, nursery: Nursery, models: Models) -> Iterator[Pair]:
    """One engine and its agent, for tests that leave both as they found them but for what is cached."""
    arguments = {"kv_events_endpoint": f"ipc://{folder}/events"}
    spec = EngineSpec(models.llama, orbitkv_connector(agent.socket_path, **PATIENT_SETTINGS), arguments, PATIENT)
    with EngineProcess(folder, spec, "shared", nursery) as engine:
        yield Pair(engine.ready(), agent)


@pytest.fixture(scope="session", autouse=True)
def service_in_advance(request: pytest.FixtureRequest, folder: Path) -> Iterator[Service | None]:
    """`vllm serve`, which takes a minute to start: it does so beside the tests that come before those that need it."""
    if not any(item.path.stem == "test_http" for item in request.session.items):
        yield None
        return
    models = request.getfixturevalue("models")
    # OrbitKV is found here as in an annotated pod: by its entry point, with no word on the command line.
    (folder / "installed").mkdir()
    environment = installed_as_entry_point(folder / "installed")
    with AgentProcess(folder, "http-agent") as agent:
        environment |= {"ORBITKV_INJECTED": "0.1.0", "ORBITKV_BOOTSTRAP_SOCKET": str(agent.socket_path)}
        arguments = ["--enable-prompt-tokens-details"]
        with ServeProcess(folder, models.llama, None, arguments, environment) as server:
            yield Service(server, agent)


@pytest.fixture(scope="session")
def plain(folder: Path, nursery: Nursery, models: Models) -> Iterator[EngineProcess]:
    """An engine without OrbitKV, in 32 bits: the control run of tests in which requests run side by side."""
    with EngineProcess(folder, EngineSpec(models.llama, None, {"dtype": "float32"}), "plain", nursery) as engine:
        yield engine.ready()


@pytest.fixture
def start_engine(
    folder: Path, nursery: Nursery, models: Models, request: pytest.FixtureRequest
) -> Iterator[EngineMaker]:
    """Starts engines for one test: `start_engine(agent, arguments..., model=..., settings={OrbitKV's})`."""
    with ExitStack() as stack:
        count = 0

        def start(
            agent: AgentProcess | Path | None,
            *,
            model: Path | None = None,
            settings: dict[str, Any] | None = None,
            connector: dict[str, Any] | None = None,
            environment: dict[str, str] | None = None,
            patient: bool = True,
            wait: bool = True,
            **arguments: Any,
        ) -> EngineProcess:
            nonlocal count
            count += 1
            if agent is not None:
                path = agent if isinstance(agent, Path) else agent.socket_path
                chosen = {**(PATIENT_SETTINGS if patient else {}), **(settings or {})}
                connector = {**orbitkv_connector(path, **chosen), **(connector or {})}
            spec = EngineSpec(
                model or models.llama, connector, arguments, {**(PATIENT if patient else {}), **(environment or {})}
            )
            name = f"{request.node.name.partition('[')[0][-40:]}-{count}"
            engine = stack.enter_context(EngineProcess(folder, spec, name, nursery))
            return engine.ready() if wait else engine

        yield start


@pytest.fixture
def start_agent(folder: Path, request: pytest.FixtureRequest) -> Iterator[AgentMaker]:
    """Starts an agent for one test, with the agent's settings as arguments."""
    with ExitStack() as stack:
        count = 0

        def start(name: str = "", **settings: Any) -> AgentProcess:
            nonlocal count
            count += 1
            chosen = name or f"{request.node.name.partition('[')[0][-30:]}-agent-{count}"
            return stack.enter_context(AgentProcess(folder, chosen, **settings))

        yield start
