"""What an engine's settings accept, from where, and what they say when they refuse."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import pytest

from orbitkv.config import LIVE_SETTINGS, NOT_THERE_YET, SETTINGS, ConfigError, PluginConfig, check_namespace_options


def test_without_any_setting_the_defaults_are_in_force() -> None:
    config = PluginConfig.load({}, {})

    assert config == PluginConfig()
    assert config.socket_path == "/tmp/orbitkv-50055.sock"
    assert (config.on_missing, config.timeout_ms, config.max_wait_ms) == ("fail", 5000, 2000)
    assert config.save_decode and not config.wait_for_full_prefix


def test_socket_path_follows_the_port_unless_it_is_given() -> None:
    assert PluginConfig.load({"orbitkv.port": 50056}, {}).socket_path == "/tmp/orbitkv-50056.sock"
    both = {"orbitkv.port": 50056, "orbitkv.bootstrap_socket": "/run/orbitkv/agent.sock"}
    assert PluginConfig.load(both, {}).socket_path == "/run/orbitkv/agent.sock"


def test_key_wins_over_variable_and_namespace_wins_over_key() -> None:
    variable = {"ORBITKV_MAX_WAIT_MS": "100"}
    key = {"orbitkv.max_wait_ms": 200}

    assert PluginConfig.load({}, variable).max_wait_ms == 100
    assert PluginConfig.load(key, variable).max_wait_ms == 200
    assert PluginConfig.load(key, variable, namespace_options={"max_wait_ms": 300}).max_wait_ms == 300


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_can_be_given_by_key_and_by_variable(name: str) -> None:
    other: dict[str, Any] = {"mode": "save_only", "on_missing": "run", "kv_layout": "engine", "queue_warmup": False}
    other |= {"scheduler": "engine", "overlap": "on"}
    default = SETTINGS[name].default
    value = other.get(
        name, not default if isinstance(default, bool) else 77 if isinstance(default, int) else "some-text"
    )

    assert getattr(PluginConfig.load({f"orbitkv.{name}": value}, {}), name) == value
    assert getattr(PluginConfig.load({}, {f"ORBITKV_{name.upper()}": str(value)}), name) == value


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("port", 0, "a whole number from 1 to 65535"),
        ("port", "high", "a whole number from 1 to 65535"),
        ("timeout_ms", -1, "a whole number from 1 to 600000"),
        ("mode", "write", "one of read_write, save_only"),
        ("save_decode", "perhaps", "true or false"),
        ("model_fingerprint", "x" * 257, "text of at most 256 characters"),
        ("cache_namespace", None, "text of at most 317 characters"),
    ],
)
def test_wrong_value_is_refused_with_key_value_and_rule(key: str, value: Any, rule: str) -> None:
    with pytest.raises(ConfigError) as refused:
        PluginConfig.load({f"orbitkv.{key}": value}, {})

    assert str(refused.value) == f"orbitkv.{key} is {value!r}; it must be {rule}"


def test_wrong_variable_is_refused_by_its_own_name() -> None:
    with pytest.raises(ConfigError, match=r"^ORBITKV_PORT is 'abc'; it must be a whole number from 1 to 65535$"):
        PluginConfig.load({}, {"ORBITKV_PORT": "abc"})


def test_unknown_key_given_by_hand_is_an_error_that_lists_the_known_ones_nearest_first() -> None:
    with pytest.raises(ConfigError) as refused:
        PluginConfig.load({"orbitkv.max_wait": 5}, {})

    message = str(refused.value)
    assert message.startswith("orbitkv.max_wait: there is no such setting.")
    assert "(nearest first): orbitkv.max_wait_ms, " in message
    assert all(setting.key in message for setting in SETTINGS.values())


def test_unknown_key_that_was_injected_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = PluginConfig.load({"orbitkv.from_the_future": 5, "orbitkv.port": 7}, {}, injected=True)

    assert config.port == 7
    assert "orbitkv.from_the_future was ignored" in caplog.text


@pytest.mark.parametrize("name", NOT_THERE_YET)
def test_announced_setting_is_refused_as_not_there_yet(name: str) -> None:
    with pytest.raises(ConfigError, match=f"orbitkv.{name} .*not there yet"):
        PluginConfig.load({f"orbitkv.{name}": "x"}, {})
    with pytest.raises(ConfigError, match=f"ORBITKV_{name.upper()} .*not there yet"):
        PluginConfig.load({}, {f"ORBITKV_{name.upper()}": "x"})


@pytest.mark.parametrize("name", NOT_THERE_YET)
def test_a_newer_operators_setting_never_keeps_an_engine_from_starting(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = PluginConfig.load({f"orbitkv.{name}": "x"}, {f"ORBITKV_{name.upper()}": "x"}, injected=True)
    assert found == PluginConfig(on_missing="run")
    assert f"orbitkv.{name} was ignored" in caplog.text
    assert f"ORBITKV_{name.upper()} was ignored" in caplog.text


def test_an_injected_engine_starts_without_an_agent_unless_told_otherwise() -> None:
    assert PluginConfig.load({}, {}, injected=True).on_missing == "run"
    assert PluginConfig.load({}, {"ORBITKV_ON_MISSING": "fail"}, injected=True).on_missing == "fail"


def test_queue_warmup_may_only_be_off() -> None:
    assert PluginConfig.load({"orbitkv.queue_warmup": False}, {}).queue_warmup is False
    with pytest.raises(ConfigError, match="ORBITKV_QUEUE_WARMUP = true is announced, but not there yet"):
        PluginConfig.load({}, {"ORBITKV_QUEUE_WARMUP": "true"})


def test_keys_and_variables_of_others_are_left_alone() -> None:
    extra = {"spec_name": "other", "port": "not ours", "lmcache.mp.port": 1}
    environ = {"ORBITKV_CACHE": "/cache", "ORBITKV_AGENT_PORT": "1", "PORT": "x"}

    assert PluginConfig.load(extra, environ) == PluginConfig()


def test_variable_that_kubernetes_makes_for_a_service_named_orbitkv_is_no_port() -> None:
    assert PluginConfig.load({}, {"ORBITKV_PORT": "tcp://10.96.0.7:443"}).port == 50055


def test_namespace_cannot_change_where_the_engine_connects(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = PluginConfig.load(
            {}, {}, namespace_options={"bootstrap_socket": "/tmp/evil.sock", "mode": "save_only"}
        )

    assert config == PluginConfig(mode="save_only")
    assert "bootstrap_socket was ignored" in caplog.text


def test_namespace_options_are_checked_where_they_are_configured() -> None:
    assert check_namespace_options({"max_wait_ms": "50"}) == {"max_wait_ms": 50}
    with pytest.raises(ConfigError, match="max_wait_ms is -1; it must be a whole number from 0"):
        check_namespace_options({"max_wait_ms": -1})
    with pytest.raises(ConfigError, match="port: is set on the engine's side only"):
        check_namespace_options({"port": 1})
    with pytest.raises(ConfigError, match=r"save_decod: is no setting of the engine plugins.*first\): save_decode, "):
        check_namespace_options({"save_decod": True})


def test_settings_of_a_namespace_are_described_like_all_others() -> None:
    assert set(LIVE_SETTINGS) < set(SETTINGS)
    for setting in SETTINGS.values():
        assert setting.description.endswith(".")
        assert setting.check(setting.default, setting.key) == setting.default


def test_the_model_needs_no_engine() -> None:
    """The agent and the documentation read it where no engine is installed."""
    check = "import sys, orbitkv.config; sys.exit(bool({'torch', 'vllm', 'numpy', 'pydantic'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", check], check=False, timeout=30).returncode == 0
