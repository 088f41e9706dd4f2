"""KV events, metrics, the entry point and what the class says about itself."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from orbitkv.config import ConfigError
from orbitkv.vllm import plugin
from orbitkv.vllm.connector import OrbitKVConnector, drains_restored_first
from orbitkv.vllm.early import EarlyScheduler
from orbitkv.vllm.stats import METRICS, OrbitKVPromMetrics, OrbitKVStats
from orbitkv.vllm.tests.scheduling import BLOCK, Engine

PROMPT = [(i * 7) % 250 + 3 for i in range(70)]


Published = list[Any]


@pytest.fixture
def publishing(start: Callable[..., Engine]) -> tuple[Engine, Published]:
    """An engine that publishes KV events, and those of OrbitKV among them."""
    engine = start(events=True)
    published: Published = []
    engine.scheduler.kv_event_publisher = SimpleNamespace(
        publish=lambda batch: published.extend(
            event for event in batch.events if getattr(event, "medium", "") == "CPU"
        ),
        shutdown=lambda: None,
    )
    return engine, published


def names(hashes: list[Any]) -> list[Any]:
    return [maybe_convert_block_hash(block_hash) for block_hash in hashes]


def removed(published: Published) -> list[Any]:
    return [name for event in published if isinstance(event, BlockRemoved) for name in event.block_hashes]


def test_events_tell_what_is_kept(publishing: tuple[Engine, Published]) -> None:
    engine, published = publishing
    request = engine.serve("first", PROMPT, cache_salt="mine")
    known = names(request.block_hashes[:4])
    assert all(isinstance(event, BlockStored) for event in published)
    assert [event.block_hashes[0] for event in published] == known
    assert [event.parent_block_hash for event in published] == [None, *known[:3]]
    assert [token for event in published for token in event.token_ids] == PROMPT[: 4 * BLOCK]
    assert [event.extra_keys for event in published] == [[("mine",)], None, None, None]
    engine.serve("again", PROMPT, cache_salt="mine")
    assert len(published) == 4, "what was announced is not announced again"


def test_a_page_is_announced_only_once_it_is_visible_on_every_worker(publishing: tuple[Engine, Published]) -> None:
    engine, published = publishing
    engine.workers.hold_saves = True
    engine.add("first", PROMPT)
    for _ in range(5):
        engine.step()
    assert not published
    engine.workers.hold_saves = False
    engine.run()
    assert len(published) == 4


def test_events_tell_what_left(publishing: tuple[Engine, Published]) -> None:
    engine, published = publishing
    request = engine.serve("first", PROMPT)
    engine.agent.removed = [request.block_hashes[1], b"never announced, 32 bytes long.."]
    engine.serve("other", PROMPT[:5])
    assert removed(published) == names([request.block_hashes[1]])


def test_a_reset_takes_back_everything_that_was_announced(publishing: tuple[Engine, Published]) -> None:
    engine, published = publishing
    request = engine.serve("first", PROMPT)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.serve("other", PROMPT[:5])
    assert set(removed(published)) == set(names(request.block_hashes[:4]))


def test_a_lost_agent_takes_back_everything_that_was_announced(publishing: tuple[Engine, Published]) -> None:
    engine, published = publishing
    request = engine.serve("first", PROMPT)
    engine.agent.gone = True
    engine.reset_hbm()
    engine.serve("other", PROMPT)
    assert set(removed(published)) == set(names(request.block_hashes[:4]))


def test_no_events_are_made_when_the_engine_publishes_none(start: Callable[..., Engine]) -> None:
    engine = start()
    engine.serve("first", PROMPT)
    assert engine.half.take_events() == []


def test_counters_add_up_and_levels_are_taken_over() -> None:
    first = OrbitKVStats(data={"queries": 2, "pending_saves": 5})
    first.aggregate(OrbitKVStats(data={"queries": 3, "pending_saves": 1}))
    assert first.data == {"queries": 5, "pending_saves": 1}
    assert first.reduce() == {"queries": 5, "pending_saves": 1}
    assert not first.is_empty()
    first.reset()
    assert first.is_empty()


def test_every_number_reaches_prometheus() -> None:
    registry = prometheus_client.CollectorRegistry()

    def in_registry(kind: Any) -> Any:
        return lambda **options: kind(registry=registry, **options)

    kinds = {
        prometheus_client.Gauge: in_registry(prometheus_client.Gauge),
        prometheus_client.Counter: in_registry(prometheus_client.Counter),
        prometheus_client.Histogram: in_registry(prometheus_client.Histogram),
    }
    metrics = OrbitKVPromMetrics(SimpleNamespace(kv_transfer_config=None), kinds, ["engine"], {0: ["0"]})
    metrics.observe({metric.name: 3 for metric in METRICS} | {"from a newer release": 1})
    metrics.observe({metric.name: 4 for metric in METRICS})
    for metric in METRICS:
        assert registry.get_sample_value(metric.exported, {"engine": "0"}) == (4 if metric.gauge else 7)


def test_the_entry_point_makes_the_connector_known_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVConnectorFactory, "_registry", dict(KVConnectorFactory._registry))
    monkeypatch.setattr(plugin, "_registered", False)
    plugin.register()
    plugin.register()
    assert KVConnectorFactory.get_connector_class_by_name("OrbitKVConnector") is OrbitKVConnector


def test_importing_the_package_asks_for_neither_vllm_nor_torch() -> None:
    code = "import sys, orbitkv.vllm, orbitkv.vllm.plugin; sys.exit('vllm' in sys.modules or 'torch' in sys.modules)"
    root = Path(__file__).parents[3]
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(root)}, check=False).returncode == 0


def test_only_the_half_of_its_role_is_imported() -> None:
    module = ast.parse((Path(__file__).parents[1] / "connector.py").read_text())
    at_import = {node.module for node in module.body if isinstance(node, ast.ImportFrom) and node.level}
    assert at_import == {"injected", "metadata", "plugin", "served", "stats"}


def test_the_admission_rule_follows_the_schedulers_queues(start: Callable[..., Engine]) -> None:
    class Earlier:
        def schedule(self) -> None:
            return self.waiting  # type: ignore[attr-defined]

    engine = start()
    assert drains_restored_first(type(engine.scheduler))
    assert drains_restored_first(EarlyScheduler)
    assert not drains_restored_first(Earlier)
    assert not drains_restored_first(object)


def test_the_layout_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import platforms

    def ask(on_gpu: bool, **extra: Any) -> str | None:
        monkeypatch.setattr(platforms, "current_platform", SimpleNamespace(is_cuda=lambda: on_gpu))
        settings = {f"orbitkv.{name}": value for name, value in extra.items()}
        transfer = SimpleNamespace(kv_connector_extra_config=settings)
        return OrbitKVConnector.get_required_kvcache_layout(SimpleNamespace(kv_transfer_config=transfer))

    assert ask(True) == "BLNHC"
    assert ask(False) is None
    assert ask(True, kv_layout="engine") is None
    assert ask(True, mode="save_only") is None


def test_a_wrong_setting_ends_the_start_and_names_the_right_one(start: Callable[..., Engine]) -> None:
    with pytest.raises(ConfigError, match=r"orbitkv\.max_wait_ms"):
        start(extra={"orbitkv.max_wait_msec": 5})


def test_a_policy_that_fails_requests_is_pointed_out(
    start: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    start(
        transfer={
            "kv_connector": "OrbitKVConnector",
            "kv_connector_module_path": "orbitkv.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"orbitkv.bootstrap_socket": "/nowhere.sock"},
        }
    )
    assert "kv_load_failure_policy is 'fail'" in caplog.text
