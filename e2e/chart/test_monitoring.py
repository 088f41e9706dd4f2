"""Alerts and dashboard: they parse, and what they read exists."""

import json
import re
from collections.abc import Iterator
from typing import Any

import promql_parser
import pytest
import yaml

from e2e.chart.helm import CHART, Helm
from orbitkv_agent.observe.metrics import METRICS, PREFIX
from orbitkv_operator.admission.metrics import METRICS as WEBHOOK_METRICS
from orbitkv_operator.metrics import METRICS as OPERATOR_METRICS

ELSEWHERE = {
    "up": {"job", "pod", "container", "namespace"},  # Prometheus itself
    "kube_daemonset_status_desired_number_scheduled": {"daemonset"},  # kube-state-metrics
    "kube_daemonset_status_number_ready": {"daemonset"},
}
TARGET_LABELS = {"pod", "namespace", "job", "container", "instance"}
"""Labels that Prometheus gives to every series by where it was read."""
QUANTILE_PARTS = {"histogram": {"_bucket": {"le"}, "_count": set[str](), "_sum": set[str]()}}


def known() -> dict[str, set[str]]:
    """Every series that agent and operator have, with its labels."""
    found = dict(ELSEWHERE)
    rows = [(row.kind, row.name, row.labels) for row in METRICS]
    rows += [(row.kind, row.name, row.labels) for row in (*OPERATOR_METRICS, *WEBHOOK_METRICS)]
    for kind, bare, own in rows:
        name, labels = PREFIX + bare, {*own, *TARGET_LABELS}
        if kind == "histogram":
            found |= {name + suffix: labels | more for suffix, more in QUANTILE_PARTS["histogram"].items()}
        else:
            found[name] = labels
    return found


KNOWN = known()


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CHART / "files" / "dashboard.json").read_text())
    return found


def queries() -> list[tuple[str, str]]:
    """The title and expression of every query of the dashboard, with Grafana's variables filled in."""
    found = []
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            text = target["expr"].replace("$__rate_interval", "5m").replace("$__range", "3h").replace("$pod", ".*")
            found.append((panel["title"], text))
    return found


EXPRESSIONS = [(rule["alert"], rule["expr"]) for rule in alerts()] + queries()


def parts(node: Any) -> Iterator[Any]:
    """Yield a parsed expression and all within it."""
    yield node
    for name in ("expr", "lhs", "rhs", "param", "vector_selector"):
        child = getattr(node, name, None)
        if child is not None and not isinstance(child, str):
            yield from parts(child)
    for child in getattr(node, "args", None) or []:
        yield from parts(child)


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS, ids=[where for where, _ in EXPRESSIONS])
def test_series_and_labels_exist(where: str, expression: str) -> None:
    read = 0
    for node in parts(promql_parser.parse(expression)):
        if isinstance(node, promql_parser.VectorSelector):
            assert node.name in KNOWN, f"{where} reads {node.name}, which neither agent nor operator has"
            for matcher in node.matchers.matchers:
                assert matcher.name in {*KNOWN[node.name], "__name__"}, (
                    f"{where}: {node.name} has no label {matcher.name}"
                )
            read += 1
    assert read, f"{where} reads nothing"
    assert read == len(set(re.findall(r"(?:orbitkv_|kube_)\w+|\bup\b", expression))) or read > 1


def test_alerts_say_what_to_do() -> None:
    names = [rule["alert"] for rule in alerts()]
    assert len(names) == len(set(names))
    for rule in alerts():
        assert rule["labels"]["severity"] in ("warning", "critical"), rule["alert"]
        assert rule["annotations"]["summary"].endswith("."), rule["alert"]
        assert rule["annotations"]["description"].endswith((".", "}}", "cert-manager).")), rule["alert"]


@pytest.mark.parametrize(
    "name",
    [
        "OrbitKVPublishStalled",
        "OrbitKVCertificateExpired",
        "OrbitKVAgentDown",
        "OrbitKVPoolFull",
        "OrbitKVPoolNotReady",
        "OrbitKVWebhookDoesNotAnswer",
        "OrbitKVPodsWithoutCache",
    ],
)
def test_there_is_an_alert_for_each_failure_that_people_miss(name: str) -> None:
    assert name in [rule["alert"] for rule in alerts()]


def test_labels_in_texts_of_alerts_survive_their_expression() -> None:
    """An aggregation keeps only the labels that it names; a text with another one would be empty there."""
    for rule in alerts():
        used = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        kept = re.search(r"\bby \(([^)]*)\)", rule["expr"])
        if kept:
            assert used <= {name.strip() for name in kept[1].split(",")}, rule["alert"]
        if rule["expr"].startswith("absent("):
            assert not used, rule["alert"]


def test_panels_do_not_overlap_and_have_a_data_source() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
        assert panel["type"] == "row" or panel["datasource"]["uid"] == "${datasource}"
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(ids) == len(set(ids))


def test_rules_and_dashboard_arrive_as_they_are(helm: Helm) -> None:
    """Their own braces are no instructions to Helm."""
    on = {"monitoring": {"rules": {"enabled": True}, "dashboard": {"enabled": True}, "labels": {"release": "prom"}}}
    objects = helm.render(on)
    rule = objects.one("PrometheusRule", "orbitkv")
    assert rule["spec"] == yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())
    assert rule["metadata"]["labels"]["release"] == "prom"
    config = objects.one("ConfigMap", "orbitkv-dashboard")
    assert json.loads(config["data"]["orbitkv.json"]) == dashboard()
    assert config["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_prometheus_presents_the_readers_token(helm: Helm) -> None:
    objects = helm.render({"monitoring": {"reader": True, "serviceMonitor": {"enabled": True}}})
    (endpoint,) = objects.one("ServiceMonitor", "orbitkv-operator")["spec"]["endpoints"]
    credentials = endpoint["authorization"]["credentials"]
    secret = objects.one("Secret", credentials["name"])
    assert secret["type"] == "kubernetes.io/service-account-token"
    assert credentials["key"] == "token"
    account = secret["metadata"]["annotations"]["kubernetes.io/service-account.name"]
    (subject,) = objects.one("ClusterRoleBinding", "orbitkv-metrics-reader")["subjects"]
    assert subject["name"] == account == "orbitkv-metrics-reader"
    assert objects.one("ClusterRole", "orbitkv-metrics-reader")["rules"] == [
        {"nonResourceURLs": ["/metrics"], "verbs": ["get"]}
    ]
