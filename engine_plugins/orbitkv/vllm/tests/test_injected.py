"""The connector is set where an operator asks for it, and nowhere else; whatever is wrong, the engine starts."""

from __future__ import annotations

import builtins
import importlib
import importlib.metadata
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.import_utils import resolve_obj_by_qualname

from orbitkv import injection
from orbitkv.injection import StayOff
from orbitkv.protocol.reasons import OffReason
from orbitkv.vllm import connector, injected, plugin
from orbitkv.vllm.connector import OrbitKVConnector
from orbitkv.vllm.early import EarlyScheduler

ENGINE = "vllm 0.32.0"
THEIRS = {"kv_connector": "ExampleConnector", "kv_role": "kv_producer", "kv_connector_extra_config": {"path": "/x"}}


@dataclass
class Args:
    """Arguments of an engine, and the KV connector that each configuration made of them had."""

    kv_transfer_config: Any = None
    kv_offloading_size: float | None = None
    made: list[Any] = field(default_factory=list)
    refuses: bool = False
    broken: bool = False
    result: Any = "the configuration"

    def create(self) -> Any:
        self.made.append(self.kv_transfer_config)
        if self.broken or (self.refuses and self.kv_transfer_config is not None):
            raise ValueError("1 validation error for VllmConfig\n  not with a connector")
        return self.result

    @property
    def connectors(self) -> list[str | None]:
        return [each and each.kv_connector for each in self.made]


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What the agent is told: reason and message."""
    found: list[tuple[str, str]] = []

    def tell(engine: str, off: StayOff, config: object = None) -> str:
        assert engine.startswith("vllm")
        found.append((off.reason, str(off)))
        return ""

    monkeypatch.setattr(injection, "tell_agent", tell)
    monkeypatch.setenv("ORBITKV_INJECTED", "0.1.0")
    return found


def create(args: Args) -> Any:
    return injected.with_connector(args, args.create)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# ------------------------------------------------------------------------------------------- nothing speaks against it


def test_the_connector_is_set_where_the_user_chose_none(told: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    args = Args()
    assert create(args) == "the configuration"
    (made,) = args.made
    assert (made.kv_connector, made.kv_connector_module_path) == ("OrbitKVConnector", "orbitkv.vllm")
    assert (made.kv_role, made.kv_load_failure_policy) == ("kv_both", "recompute")
    assert not told
    assert not warnings(caplog)


def configuration(chosen: str | None = None, workers: int = 1, executor: str = "uni") -> SimpleNamespace:
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(scheduler_cls=chosen),
        parallel_config=SimpleNamespace(world_size=workers, distributed_executor_backend=executor),
    )


def test_the_scheduler_class_is_set_with_the_connector() -> None:
    made = create(Args(result=configuration()))
    assert resolve_obj_by_qualname(made.scheduler_config.scheduler_cls) is EarlyScheduler


@pytest.mark.parametrize(
    "given", [configuration("their.Scheduler"), configuration(workers=2, executor="mp"), configuration(executor="mp")]
)
def test_the_scheduler_class_is_left_alone_where_it_is_of_no_use_or_the_users(given: SimpleNamespace) -> None:
    chosen = given.scheduler_config.scheduler_cls
    assert create(Args(result=given)).scheduler_config.scheduler_cls == chosen


def test_the_scheduler_class_is_left_alone_by_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORBITKV_SCHEDULER", "engine")
    assert create(Args(result=configuration())).scheduler_config.scheduler_cls is None


def test_the_scheduler_class_is_left_alone_beside_a_connector_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORBITKV_MULTI_CONNECTOR", "true")
    args = Args(kv_transfer_config=THEIRS, result=configuration())
    assert create(args).scheduler_config.scheduler_cls is None
    assert args.connectors == ["MultiConnector"]


def test_the_scheduler_class_is_left_alone_where_it_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "orbitkv.vllm.early", None)
    monkeypatch.delattr("orbitkv.vllm.early", raising=False)
    with caplog.at_level(logging.INFO):
        assert create(Args(result=configuration())).scheduler_config.scheduler_cls is None
    assert "the scheduler is vLLM's own" in caplog.text
    assert not warnings(caplog)


def test_arguments_are_left_as_they_were_and_can_be_used_again() -> None:
    args = Args()
    for _ in range(2):
        create(args)
        assert args.kv_transfer_config is None
    assert args.connectors == ["OrbitKVConnector"] * 2


@pytest.mark.parametrize(
    "given",
    [
        {"kv_connector": "OrbitKVConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"},
        {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": [THEIRS, {"kv_connector": "OrbitKVConnector"}]},
        },
    ],
)
def test_a_user_who_configured_orbitkv_is_left_alone(given: dict[str, Any], told: list[Any]) -> None:
    args = Args(KVTransferConfig(**given))
    create(args)
    assert args.made == [args.kv_transfer_config]
    assert not told


def test_a_given_connector_is_joined_where_both_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORBITKV_MULTI_CONNECTOR", "true")
    args = Args(KVTransferConfig(engine_id="mine", **THEIRS))
    create(args)
    (made,) = args.made
    assert (made.kv_connector, made.kv_role, made.engine_id) == ("MultiConnector", "kv_producer", "mine")
    assert made.kv_load_failure_policy == "recompute"
    theirs, ours = made.kv_connector_extra_config["connectors"]
    assert theirs.items() >= THEIRS.items()
    assert "engine_id" not in theirs  # vLLM passes it beside these
    assert ours["kv_connector"] == "OrbitKVConnector"
    assert args.kv_transfer_config.kv_connector == "ExampleConnector"


def test_a_given_multi_connector_gets_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORBITKV_MULTI_CONNECTOR", "true")
    extra = {"connectors": [THEIRS], "other": 1}
    args = Args({"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra})
    create(args)
    made = args.made[0].kv_connector_extra_config
    assert [each["kv_connector"] for each in made["connectors"]] == ["ExampleConnector", "OrbitKVConnector"]
    assert made["other"] == 1
    assert extra["connectors"] == [THEIRS]


# ------------------------------------------------------------------------------------------------ reasons to stay off


def stays_off(args: Args, reason: OffReason, words: str, told: list[tuple[str, str]], log: list[str]) -> None:
    """The engine got what it would have without us; the log has one line, and the agent heard the same."""
    given = args.kv_transfer_config
    assert create(args) == "the configuration"
    assert args.made[-1] is given
    assert [each for each, _ in told] == [reason]
    assert words in told[0][1]
    assert len(log) == 1
    assert reason in log[0]
    assert words in log[0]


@pytest.mark.parametrize(
    ("args", "reason", "words"),
    [
        (Args(KVTransferConfig(**THEIRS)), OffReason.KV_TRANSFER_CONFIG_PRESENT, "(ExampleConnector)"),
        (Args(dict(THEIRS)), OffReason.KV_TRANSFER_CONFIG_PRESENT, "orbitkv.io/multi-connector"),
        (Args(kv_offloading_size=4.0), OffReason.KV_TRANSFER_CONFIG_PRESENT, "--kv-offloading-size"),
        (Args(refuses=True), OffReason.ENGINE_REFUSED, "not with a connector"),
        (Args("no configuration"), OffReason.PLUGIN_ERROR, "please report it"),
    ],
)
def test_the_engine_starts_without_the_cache_and_says_why(
    args: Args, reason: OffReason, words: str, told: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    args.made.clear()
    stays_off(args, reason, words, told, LazyWarnings(caplog))


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0.0", "dev", "0.1.dev1+g123"])
def test_an_engine_of_another_version_is_left_as_it_is(
    version: str, told: list[Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(injected, "engine_name", lambda: f"vllm {version}")
    stays_off(Args(), OffReason.ENGINE_VERSION_UNSUPPORTED, f"vLLM {version}", told, LazyWarnings(caplog))


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0", "0.33.1rc1", "0.32.0+cpu", "0.33.2.dev5+g123"])
def test_versions_that_are_served(version: str) -> None:
    injected.check_engine(f"vllm {version}")


@pytest.mark.parametrize("name", ["msgspec", "numpy"])
def test_a_missing_package_is_named(
    name: str, told: list[Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = importlib.import_module

    def import_module(asked: str) -> Any:
        if asked == name:
            raise ModuleNotFoundError(f"No module named '{name}'")
        return original(asked)

    monkeypatch.setattr(importlib, "import_module", import_module)
    stays_off(Args(), OffReason.PACKAGES_MISSING, f"cannot import {name}", told, LazyWarnings(caplog))


def test_files_of_two_releases_are_named(
    told: list[Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0.9")
    stays_off(Args(), OffReason.PAYLOAD_MIXED, "of release 0.0.9", told, LazyWarnings(caplog))


def test_a_setting_that_this_release_does_not_take_is_named(
    told: list[Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORBITKV_MODE", "from-the-future")
    stays_off(Args(), OffReason.SETTING_INVALID, "ORBITKV_MODE is 'from-the-future'", told, LazyWarnings(caplog))


def test_an_error_of_the_users_own_is_raised_as_it_would_be_without_us(told: list[Any]) -> None:
    args = Args(broken=True)
    with pytest.raises(ValueError, match="1 validation error"):
        create(args)
    assert args.connectors == ["OrbitKVConnector", None]
    assert not told


class LazyWarnings(list[str]):
    """The log's warnings at the time they are looked at."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        super().__init__()
        self._caplog = caplog

    def __len__(self) -> int:
        return len(warnings(self._caplog))

    def __getitem__(self, index: Any) -> Any:
        return warnings(self._caplog)[index]


# ------------------------------------------------------------------------------------------------------ the entry point


@pytest.fixture
def unregistered(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mapping[str, Any]]:
    """A process in which no entry point was loaded."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    registry = {key: it for key, it in KVConnectorFactory._registry.items() if key != "OrbitKVConnector"}
    monkeypatch.setattr(KVConnectorFactory, "_registry", registry)
    monkeypatch.setattr(plugin, "_registered", False)
    monkeypatch.setattr(EngineArgs, "create_engine_config", EngineArgs.create_engine_config)
    yield registry


def test_the_entry_point_wraps_once_however_often_it_is_loaded(
    unregistered: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = EngineArgs.create_engine_config
    plugin.register()
    wrapped = EngineArgs.create_engine_config
    assert wrapped is not before
    monkeypatch.setattr(plugin, "_registered", False)
    plugin.register()
    assert EngineArgs.create_engine_config is wrapped
    assert "OrbitKVConnector" in unregistered


def test_without_an_operator_nothing_is_wrapped(
    unregistered: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ORBITKV_INJECTED")
    monkeypatch.setenv("ORBITKV_CACHE_NAMESPACE", "team-a/qwen")
    before = EngineArgs.create_engine_config
    plugin.register()
    assert EngineArgs.create_engine_config is before


def test_a_connector_of_the_same_name_never_ends_the_engine(
    unregistered: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    unregistered["OrbitKVConnector"] = object
    plugin.register()
    assert "already registered" in caplog.text


@pytest.mark.parametrize("child", [False, True])
def test_an_engine_without_the_interface_is_left_as_it_is_and_says_so_once(
    unregistered: object,
    child: bool,
    told: list[Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "vllm.engine.arg_utils":
            raise ImportError("no module named vllm.engine.arg_utils")
        return original(name, *args, **kwargs)

    monkeypatch.setattr(plugin, "in_child", lambda: child)
    monkeypatch.setattr(builtins, "__import__", without)
    plugin.register()
    assert [reason for reason, _ in told] == ([] if child else [OffReason.ENGINE_VERSION_UNSUPPORTED])


# --------------------------------------------------------------------------------- the connector in an injected engine


def test_a_connector_that_fails_to_start_leaves_the_engine_running(
    told: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> list[str]:
        raise AttributeError("'ParallelConfig' object has no attribute 'new'")

    monkeypatch.setattr(connector, "off_reasons", fail)
    monkeypatch.setattr(KVConnectorBase_V1, "__init__", lambda self, **_: None)
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}, engine_id="e"), instance_id="i"
    )
    made = OrbitKVConnector(config, KVConnectorRole.SCHEDULER, SimpleNamespace())
    assert made.get_num_new_matched_tokens(SimpleNamespace(request_id="r"), 0) == (0, False)
    assert [reason for reason, _ in told] == [OffReason.PLUGIN_ERROR]
    monkeypatch.delenv("ORBITKV_INJECTED")
    with pytest.raises(AttributeError):
        OrbitKVConnector(config, KVConnectorRole.SCHEDULER, SimpleNamespace())


@pytest.mark.parametrize(("role", "says"), [("SCHEDULER", True), ("WORKER", False)])
def test_a_feature_that_is_not_served_is_told_once(
    role: str, says: bool, told: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connector, "off_reasons", lambda *_: ["Sleep mode: the KV memory moves while it sleeps"])
    monkeypatch.setattr(KVConnectorBase_V1, "__init__", lambda self, **_: None)
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}, engine_id="e"))
    OrbitKVConnector(config, KVConnectorRole[role], SimpleNamespace())
    assert [reason for reason, _ in told] == ([OffReason.FEATURE_NOT_SERVED] if says else [])
