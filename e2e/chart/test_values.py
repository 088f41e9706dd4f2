"""The values of the chart: what is refused, and by which words."""

import json
from typing import Any

import pytest
import yaml

from e2e.chart.helm import CHART, EVERYTHING, NAMESPACE, Helm, HelmError
from tools.chart.values import Values


def test_defaults_in_the_file_are_those_of_the_model() -> None:
    assert Values.model_validate(yaml.safe_load((CHART / "values.yaml").read_text())) == Values()


def test_every_value_is_described_in_the_schema() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    for name, part in {"": schema, **schema["$defs"]}.items():
        if part.get("type") == "object" and "properties" in part:
            assert part["additionalProperties"] is False, name
            for key, value in part["properties"].items():
                described = value.get("description") or "$ref" in value or name == "SecretName"
                assert described, f"{name}.{key}"


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"image": {"tag": "1"}}, "image"),
        ({"images": {"agent": {"tagg": "1"}}}, "tagg"),
        ({"operator": {"replica": 1}}, "replica"),
        ({"operator": {"replicas": "two"}}, "replicas"),
        ({"operator": {"logLevel": "verbose"}}, "logLevel"),
        ({"operator": {"resources": {"limit": {}}}}, "limit"),
        ({"images": {"operator": {"digest": "sha256:12"}}}, "digest"),
        ({"images": {"operator": {"repository": "Not/Valid"}}}, "repository"),
        ({"images": {"pullSecrets": ["name"]}}, "pullSecrets"),
        ({"certificates": {"provider": "vault"}}, "provider"),
        ({"monitoring": {"rules": {"enable": True}}}, "enable"),
        ({"networkPolicy": {"enabled": "yes"}}, "enabled"),
        ({"injection": {"socketVolume": "nfs"}}, "socketVolume"),
        ({"injection": {"csi": {"kubeletDirectory": "var/lib/kubelet"}}}, "kubeletDirectory"),
        ({"injection": {"csi": {"kubeletDirectory": "/var/lib/kubelet/"}}}, "kubeletDirectory"),
        ({"agentPriority": {"value": 2_000_000_000}}, "value"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(each_helm: Helm, values: dict[str, Any], named: str) -> None:
    with pytest.raises(HelmError) as refused:
        each_helm.text(values)
    assert "values don't meet the specifications of the schema" in str(refused.value)
    assert named in str(refused.value)


def test_a_parent_chart_may_set_global_values(helm: Helm) -> None:
    assert helm.render({"global": {"anything": 1}}).names("Deployment") == ["orbitkv-operator", "orbitkv-webhook"]


def test_lint_finds_nothing(each_helm: Helm) -> None:
    each_helm.run("lint", str(CHART), "--strict", "--namespace", NAMESPACE)
    each_helm.run(
        "lint", str(CHART), "--strict", "--namespace", NAMESPACE, "--values", "-", stdin=yaml.safe_dump(EVERYTHING)
    )
