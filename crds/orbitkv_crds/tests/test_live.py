"""The file with what agents take on while they run."""

from __future__ import annotations

import pytest

from orbitkv_crds.live import LiveSettings
from orbitkv_crds.managerpool import ManagerPoolSpec

SPEC = ManagerPoolSpec.model_validate(
    {
        "memory": {"pool": "8Gi", "queryBudgetPercent": 50, "instanceBudget": "1.5Gi"},
        "maxQuotaPerNamespace": {"dram": "4Gi"},
        "allowedNamespaces": {"from": "Selector", "selector": {"matchLabels": {"team": "a"}}},
        "logging": {"level": "debug"},
    }
)


def test_settings_of_a_spec_survive_the_file() -> None:
    settings = LiveSettings.of(SPEC)
    assert settings.instance_budget == 1536 << 20
    assert settings.max_quota_dram == 4 << 30
    assert LiveSettings.read(settings.write()) == settings


def test_settings_that_are_not_given_survive_the_file() -> None:
    settings = LiveSettings.of(ManagerPoolSpec.model_validate({"memory": {"pool": "8Gi"}}))
    assert settings == LiveSettings()
    assert LiveSettings.read(settings.write()) == settings
    assert LiveSettings.read("") == settings


def test_same_settings_are_the_same_text() -> None:
    assert LiveSettings.of(SPEC).write() == LiveSettings.of(SPEC.model_copy(deep=True)).write()


def test_setting_of_a_newer_operator_is_passed_over() -> None:
    assert LiveSettings.read("queue_warmup: true\nlog_level: debug\n").log_level == "debug"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("log_level: loud", "log_level: Input should be"),
        ("query_budget_percent: 101", "query_budget_percent: "),
        ("allowed_namespaces: {from: Selector}", "allowed_namespaces.selector: selector must be given"),
        ("a: [", "not YAML"),
        ("just words", "Input should be"),
    ],
)
def test_broken_file_is_refused_by_name(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        LiveSettings.read(text)
