"""Where the agent's settings come from, and what it says about wrong ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from orbitkv_agent.config import AgentConfig, NamespaceSettings, describe_default
from orbitkv_agent.config_sources import ConfigError, load_config
from orbitkv_agent.host_memory import memory_allowance

GIB = 1 << 30
MIB = 1 << 20


def problems(flags: dict[str, str], environ: dict[str, str] | None = None, file: Path | None = None) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        load_config(flags, environ or {}, None if file is None else str(file))
    assert all("\n" not in problem for problem in refused.value.problems)
    return refused.value.problems


@pytest.fixture
def yaml_file(tmp_path: Path) -> Path:
    return tmp_path / "agent.yaml"


def test_defaults_serve_a_single_machine() -> None:
    loaded = load_config({}, {})
    config = loaded.config

    assert config.socket_path == "/tmp/orbitkv-50055.sock"
    assert config.pool_bytes == memory_allowance().size // 2
    assert config.query_budget_bytes == config.pool_bytes * 75 // 100 == config.instance_budget_bytes
    assert config.arena_bytes is None
    assert set(config.allowed_uids) == {0, os.getuid()}
    assert config.metrics_endpoint == ("127.0.0.1", 9091)
    assert loaded.sources["port"] == "default"
    assert loaded.sources["pool"].startswith("default: half of ")


def test_flag_wins_over_environment_and_environment_over_file(yaml_file: Path) -> None:
    yaml_file.write_text("port: 1\nmax_queries: 1\nreply_ttl_ms: 1\n")
    environ = {"ORBITKV_AGENT_PORT": "2", "ORBITKV_AGENT_MAX_QUERIES": "2", "PATH": "/bin"}
    loaded = load_config({"port": "3"}, environ, str(yaml_file))
    config, sources = loaded.config, loaded.sources

    assert (config.port, config.max_queries, config.reply_ttl_ms) == (3, 2, 1)
    assert sources["port"] == "flag --port"
    assert sources["max_queries"] == "environment ORBITKV_AGENT_MAX_QUERIES"
    assert sources["reply_ttl_ms"] == f"file {yaml_file}"


def test_file_can_be_named_by_the_environment(yaml_file: Path) -> None:
    yaml_file.write_text("port: 7\n")
    config = load_config({}, {"ORBITKV_AGENT_CONFIG": str(yaml_file)}).config
    assert (config.port, config.socket_path) == (7, "/tmp/orbitkv-7.sock")


def test_empty_file_changes_nothing(yaml_file: Path) -> None:
    yaml_file.write_text("# nothing\n")
    assert load_config({}, {}, str(yaml_file)).config == load_config({}, {}).config


def test_every_setting_can_be_given_as_text(yaml_file: Path) -> None:
    """Flags and environment variables are text, whatever type a setting has."""
    text = {
        "socket_path": "/run/orbitkv.sock",
        "pool": "64MiB",
        "arena": "8MiB",
        "prefault": "false",
        "instance_budget": "32MiB",
        "allowed_uids": "0, 1000",
        "metrics_address": "[::1]:0",
        "log_level": "debug",
        "log_format": "json",
        "mode": "host",
        "cache_namespaces": '{"team-a": {"quota": "16MiB", "options": {"max_wait_ms": 5}}}',
    }
    given = {name: text.get(name, "77") for name in AgentConfig.model_fields if name != "cluster"}
    config = load_config(given, {}).config

    assert (config.pool_bytes, config.arena_bytes, config.instance_budget_bytes) == (64 * MIB, 8 * MIB, 32 * MIB)
    assert config.query_budget_bytes == 64 * MIB * 77 // 100
    assert config.prefault is False
    assert config.allowed_uids == (0, 1000)
    assert config.metrics_endpoint == ("::1", 0)
    assert config.cache_namespaces == {"team-a": NamespaceSettings(quota="16MiB", options={"max_wait_ms": 5})}
    assert config.cache_namespaces["team-a"].quota_bytes == 16 * MIB
    assert load_config({}, {f"ORBITKV_AGENT_{name.upper()}": value for name, value in given.items()}).config == config


def test_file_holds_namespaces_as_mappings(yaml_file: Path) -> None:
    yaml_file.write_text("""
pool: 4GiB
allowed_uids: [0, 5]
cache_namespaces:
  "": {guaranteed: 1GiB}
  prod/team-a: {quota: 2GiB, insert_class: retained, reset_generation: 3, options: {mode: save_only}}
""")
    config = load_config({}, {}, str(yaml_file)).config
    team_a = config.cache_namespaces["prod/team-a"]

    assert config.allowed_uids == (0, 5)
    assert config.cache_namespaces[""].guaranteed_bytes == GIB
    assert config.cache_namespaces[""].quota_bytes is None
    assert (team_a.insert_class, team_a.reset_generation, team_a.options) == ("retained", 3, {"mode": "save_only"})


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("port", "x", "must be a valid integer"),
        ("port", "0", "must be greater than or equal to 1"),
        ("pool", "5Gb", "must be a size such as 512MiB, 4GiB or a number of bytes"),
        ("pool", "1k", "must be at least 1 MiB"),
        ("prefault", "perhaps", "must be a valid boolean"),
        ("query_budget_percent", "101", "must be less than or equal to 100"),
        ("mode", "rocm", "must be 'auto', 'host' or 'cuda'"),
        ("log_level", "loud", "must be 'debug', 'info', 'warning' or 'error'"),
        ("metrics_address", "9091", "must be host:port, for example 127.0.0.1:9091, or off"),
        ("metrics_address", "h:99999", "must be host:port, for example 127.0.0.1:9091, or off"),
        ("socket_path", "", "String should have at least 1 character"),
    ],
)
def test_wrong_value_is_refused_with_setting_value_source_and_rule(name: str, value: str, rule: str) -> None:
    flag = "--" + name.replace("_", "-")
    assert problems({name: value}) == [f"{name} is {value!r} (flag {flag}): {rule}"]
    variable = f"ORBITKV_AGENT_{name.upper()}"
    assert problems({}, {variable: value}) == [f"{name} is {value!r} (environment {variable}): {rule}"]


def test_all_problems_are_told_at_once(yaml_file: Path) -> None:
    yaml_file.write_text("por: 1\nprefault: [1]\n")
    found = problems({"pool": "x"}, {"ORBITKV_AGENT_POOLS": "1"}, yaml_file)

    assert found == [
        f"por (file {yaml_file}): there is no such setting; the nearest is port",
        "environment ORBITKV_AGENT_POOLS: there is no such setting; the nearest is ORBITKV_AGENT_POOL",
        "pool is 'x' (flag --pool): must be a size such as 512MiB, 4GiB or a number of bytes",
        f"prefault is [1] (file {yaml_file}): must be a valid boolean",
    ]


def test_unknown_setting_of_a_namespace_is_refused_with_the_nearest(yaml_file: Path) -> None:
    yaml_file.write_text("cache_namespaces: {team-a: {qouta: 1GiB}}")
    assert problems({}, {}, yaml_file) == [
        f"cache_namespaces.team-a.qouta (file {yaml_file}): there is no such setting; the nearest is quota"
    ]


def test_options_of_a_namespace_are_checked_by_the_plugins_model(yaml_file: Path) -> None:
    yaml_file.write_text("cache_namespaces: {team-a: {options: {max_wait_ms: -1}}}")
    (problem,) = problems({}, {}, yaml_file)
    rule = "max_wait_ms is -1; it must be a whole number from 0 to 600000"
    assert problem == f"cache_namespaces.team-a.options (file {yaml_file}): {rule}"
    yaml_file.write_text("cache_namespaces: {team-a: {options: {port: 1}}}")
    assert "port: is set on the engine's side only" in problems({}, {}, yaml_file)[0]


@pytest.mark.parametrize("name", ["a b", "a/b/c", "/a", "a" * 318])
def test_name_of_a_namespace_must_be_one(yaml_file: Path, name: str) -> None:
    yaml_file.write_text(f'cache_namespaces: {{"{name}": {{}}}}')
    assert "a cache namespace is named `name` or `namespace/name`" in problems({}, {}, yaml_file)[0]


def test_rule_about_several_settings_tells_where_each_was_given() -> None:
    assert problems({"pool": "4MiB"}, {"ORBITKV_AGENT_ARENA": "8MiB"}) == [
        "arena (8MiB) must not be larger than pool (4MiB) (pool: flag --pool, arena: environment ORBITKV_AGENT_ARENA)"
    ]


def test_guarantees_must_fit_into_quota_and_pool() -> None:
    (quota,) = problems({"cache_namespaces": "{a: {quota: 1MiB, guaranteed: 2MiB}}"})
    assert "guaranteed (2MiB) must not be larger than quota (1MiB)" in quota
    (pool,) = problems({"pool": "4MiB", "cache_namespaces": "{a: {guaranteed: 3MiB}, b: {guaranteed: 3MiB}}"})
    assert "guaranteed adds up to 6 MiB, more than pool (4MiB)" in pool


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1", "it is not YAML at line 1"),
        ("- 1", "it must be a mapping of settings to values, not a list"),
        ("!!python/object/apply:os.system [true]", "it is not YAML at line 1"),
    ],
)
def test_file_that_is_no_mapping_is_refused(yaml_file: Path, text: str, words: str) -> None:
    yaml_file.write_text(text)
    assert words in problems({}, {}, yaml_file)[0]


def test_file_that_cannot_be_read_is_named_with_who_named_it(tmp_path: Path) -> None:
    (problem,) = problems({}, {}, tmp_path / "absent.yaml")
    assert problem == f"file {tmp_path}/absent.yaml (from --config): it cannot be read: No such file or directory"
    (problem,) = problems({}, {"ORBITKV_AGENT_CONFIG": str(tmp_path)})
    assert problem == f"file {tmp_path} (from ORBITKV_AGENT_CONFIG): it cannot be read: Is a directory"


def test_variables_that_kubernetes_makes_for_a_service_are_no_settings() -> None:
    environ = {
        "ORBITKV_AGENT_PORT": "tcp://10.96.0.1:9091",
        "ORBITKV_AGENT_SERVICE_HOST": "10.96.0.1",
        "ORBITKV_AGENT_SERVICE_PORT": "9091",
        "ORBITKV_AGENT_SERVICE_PORT_METRICS": "9091",
        "ORBITKV_AGENT_PORT_9091_TCP": "tcp://10.96.0.1:9091",
        "ORBITKV_AGENT_PORT_9091_TCP_ADDR": "10.96.0.1",
    }
    assert load_config({}, environ).config.port == 50055


def test_metrics_can_be_switched_off() -> None:
    assert load_config({"metrics_address": "off"}, {}).config.metrics_endpoint is None


def test_configuration_cannot_change_while_the_agent_runs() -> None:
    config = AgentConfig(pool="1MiB")
    with pytest.raises(ValueError, match="frozen"):
        config.port = 1


@pytest.mark.parametrize("model", [AgentConfig, NamespaceSettings])
def test_every_setting_is_described_for_people(model: Any) -> None:
    for name, field in model.model_fields.items():
        assert field.description.endswith(".")
        assert describe_default(model, name)


# ------------------------------------------------------------------------------------------------------ in a cluster

POD = {"NODE_NAME": "node-a", "POD_NAME": "agent-1", "POD_NAMESPACE": "orbitkv-system", "POD_UID": "u-1"}


def test_what_a_pod_is_told_completes_the_cluster_section(yaml_file: Path) -> None:
    yaml_file.write_text("cluster:\n  pool: default\n")
    cluster = load_config({}, POD, str(yaml_file)).config.cluster
    assert cluster is not None
    assert (cluster.node_name, cluster.pod_name, cluster.pod_namespace, cluster.pod_uid) == tuple(POD.values())
    assert cluster.reports_address == "orbitkv-reports.orbitkv-system.svc:9443"
    assert cluster.reports_server_name == "orbitkv-reports.orbitkv-system.svc"


def test_the_file_says_more_than_the_pods_variables(yaml_file: Path) -> None:
    yaml_file.write_text("cluster: {pool: default, node_name: other, reports_address: 'localhost:1'}\n")
    cluster = load_config({}, POD, str(yaml_file)).config.cluster
    assert cluster is not None
    assert (cluster.node_name, cluster.reports_address) == ("other", "localhost:1")


def test_the_cluster_section_can_be_given_as_text() -> None:
    cluster = load_config({"cluster": "{pool: gpu}"}, POD).config.cluster
    assert cluster is not None
    assert cluster.pool == "gpu"


def test_a_variable_that_a_pod_lacks_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"cluster": "{pool: gpu}"}, {"NODE_NAME": "n", "POD_NAME": "p", "POD_NAMESPACE": "ns"})
    assert "cluster.pod_uid (flag --cluster): must be given, here or as the variable POD_UID" in caught.value.problems


@pytest.mark.parametrize(
    ("cluster", "problem"),
    [
        ("{pool: gpu, poool: x}", "cluster.poool (flag --cluster): there is no such setting; the nearest is pool"),
        ("gpu", "cluster is 'gpu' (flag --cluster): must be a mapping of settings to values"),
    ],
)
def test_a_wrong_cluster_section_is_refused_by_name(cluster: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"cluster": cluster}, POD)
    assert caught.value.problems == [problem]


def test_a_cluster_has_no_configured_namespaces() -> None:
    with pytest.raises(ConfigError, match="cache_namespaces must be empty with cluster"):
        load_config({"cluster": "{pool: gpu}", "cache_namespaces": "{a: {}}"}, POD)
