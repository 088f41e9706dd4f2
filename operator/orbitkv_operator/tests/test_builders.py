"""What a pool becomes, and what changes of it replace."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from orbitkv_crds import names
from orbitkv_crds.agent_memory import agent_memory
from orbitkv_crds.quantity import parse_quantity
from orbitkv_operator.builders import agents
from orbitkv_operator.builders.agents import Context
from orbitkv_operator.builders.children import CHILD_KINDS, children
from orbitkv_operator.cluster.api import DAEMON_SETS, NETWORK_POLICIES, POD_MONITORS
from orbitkv_operator.tests.fakes import SETTINGS, pool

GOLDEN = Path(__file__).parent / "golden"
CONTEXT = Context(SETTINGS, "the CA")
RICH: dict[str, Any] = {
    "image": "registry/agent:2",
    "imagePullSecrets": [{"name": "login"}],
    "priorityClassName": "high",
    "podAnnotations": {"team": "caching"},
    "podLabels": {"cost": "shared"},
    "env": [{"name": "LEVEL", "value": "3"}, {"name": "NODE_NAME", "value": "forged"}],
    "extraArgs": ["--max-queries", "64"],
    "resources": {"limits": {"cpu": "2"}, "requests": {"cpu": "500m"}},
    "nodeSelector": {"disk": "fast"},
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]
            }
        }
    },
    "tolerations": [{"key": "dedicated", "operator": "Exists"}],
    "memory": {"pool": "16Gi", "queryBudgetPercent": 50, "instanceBudget": "2Gi"},
    "allowedNamespaces": {"from": "Selector", "selector": {"matchLabels": {"cache": "yes"}}},
    "maxQuotaPerNamespace": {"dram": "4Gi"},
    "metrics": {"port": 9191, "podMonitor": {"labels": {"release": "prometheus"}}},
    "logging": {"level": "debug"},
}


@pytest.mark.parametrize(("name", "spec"), [("plain", {}), ("rich", RICH)])
def test_manifests_are_as_written_down(name: str, spec: dict[str, Any]) -> None:
    """ORBITKV_WRITE_GOLDEN=1 writes them down anew; read the difference before committing it."""
    found = children(pool(**spec), CONTEXT, set(CHILD_KINDS), agents.placement_for(pool(**spec)))
    text = yaml.safe_dump_all([child.manifest for child in found], sort_keys=True)
    path = GOLDEN / f"{name}.yaml"
    if os.environ.get("ORBITKV_WRITE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


PLACEMENT = (
    {"nodeSelector": {"zone": "a"}},
    {"tolerations": [{"key": "dedicated", "operator": "Exists"}]},
    {"affinity": RICH["affinity"]},
)
LIVE: tuple[dict[str, Any], ...] = (
    {"updateStrategy": {"maxUnavailable": 3, "paused": True}},
    {"memory": {"pool": "1Gi", "queryBudgetPercent": 50}},
    {"memory": {"pool": "1Gi", "instanceBudget": "1Mi"}},
    {"logging": {"level": "debug"}},
    {"maxQuotaPerNamespace": {"dram": "1Gi"}},
    {"allowedNamespaces": {"from": "Selector", "selector": {}}},
    {"metrics": {"podMonitor": {"enabled": False}}},
)
REPLACED: tuple[dict[str, Any], ...] = (
    {"image": "other"},
    {"imagePullSecrets": [{"name": "login"}]},
    {"priorityClassName": "high"},
    {"podAnnotations": {"a": "b"}},
    {"podLabels": {"a": "b"}},
    {"env": [{"name": "A", "value": "b"}]},
    {"extraArgs": ["--x"]},
    {"resources": {"limits": {"memory": "4Gi"}}},
    {"memory": {"pool": "2Gi"}},
    {"metrics": {"port": 9999}},
)


@pytest.mark.parametrize("spec", [*PLACEMENT, *LIVE], ids=str)
def test_placement_and_live_changes_replace_no_agent(spec: dict[str, Any]) -> None:
    assert agents.template_hash(pool(**spec), CONTEXT) == agents.template_hash(pool(), CONTEXT)


@pytest.mark.parametrize("spec", REPLACED, ids=str)
def test_other_changes_replace_agents(spec: dict[str, Any]) -> None:
    assert agents.template_hash(pool(**spec), CONTEXT) != agents.template_hash(pool(), CONTEXT)


@pytest.mark.parametrize("spec", LIVE[1:6], ids=str)
def test_live_settings_reach_the_file_that_agents_read_again(spec: dict[str, Any]) -> None:
    assert agents.config_map(pool(**spec), CONTEXT)["data"] != agents.config_map(pool(), CONTEXT)["data"]


def test_rotated_certificates_replace_no_agent() -> None:
    assert agents.template_hash(pool(), Context(SETTINGS, "old")) == agents.template_hash(
        pool(), Context(SETTINGS, "new")
    )


def test_daemon_set_never_replaces_by_itself() -> None:
    assert agents.daemon_set(pool(), CONTEXT)["spec"]["updateStrategy"] == {"type": "OnDelete"}


def test_a_node_gets_one_agent_whatever_affinity_the_user_gives() -> None:
    term = {"topologyKey": "zone", "labelSelector": {"matchLabels": {"app": "noisy"}}}
    spec: dict[str, Any] = {"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}}
    apart = agents.placement_for(pool(**spec))["affinity"]["podAntiAffinity"]
    own, users = apart["requiredDuringSchedulingIgnoredDuringExecution"]
    assert own["topologyKey"] == "kubernetes.io/hostname"
    assert own["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == "agent"
    assert users == term


def test_agents_memory_is_the_pool_and_what_they_need_themselves() -> None:
    found = agents.resources(pool(memory={"pool": "100Gi"}))
    assert found["limits"]["memory"] == found["requests"]["memory"]
    assert parse_quantity(found["limits"]["memory"]) >= agent_memory(100 << 30)


def test_given_memory_limit_is_also_requested() -> None:
    found = agents.resources(pool(resources={"limits": {"memory": "5Gi"}}))
    assert found == {"limits": {"memory": "5Gi"}, "requests": {"cpu": "200m", "memory": "5Gi"}}


def test_cpu_request_stays_below_a_small_limit() -> None:
    assert agents.resources(pool(resources={"limits": {"cpu": "100m"}}))["requests"]["cpu"] == "100m"


def test_variables_of_the_operator_win() -> None:
    container = agents.daemon_set(pool(**RICH), CONTEXT)["spec"]["template"]["spec"]["containers"][0]
    assert [it for it in container["env"] if it["name"] == "NODE_NAME"] == [
        {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    ]


def test_agents_hold_no_gpu_and_no_capability() -> None:
    spec = agents.daemon_set(pool(), CONTEXT)["spec"]["template"]["spec"]
    container = spec["containers"][0]
    assert not [name for part in container["resources"].values() for name in part if name not in ("cpu", "memory")]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    assert not {"hostIPC", "hostPID", "hostNetwork"} & spec.keys()


def test_kinds_that_the_cluster_lacks_are_left_out() -> None:
    found = children(pool(), CONTEXT, set(CHILD_KINDS) - {POD_MONITORS}, {})
    assert POD_MONITORS not in {child.resource for child in found}


def test_switched_off_children_are_wanted_gone() -> None:
    quiet = SETTINGS.model_copy(update={"network_policy": False})
    spec: dict[str, Any] = {"metrics": {"podMonitor": {"enabled": False}}}
    found = {it.resource: it.manifest for it in children(pool(**spec), Context(quiet, ""), set(CHILD_KINDS), {})}
    assert found[POD_MONITORS] is None and found[NETWORK_POLICIES] is None


def test_without_a_place_there_is_no_daemon_set_to_make() -> None:
    assert DAEMON_SETS not in {child.resource for child in children(pool(), CONTEXT, set(CHILD_KINDS), None)}


def test_longest_name_fits_into_labels_and_objects() -> None:
    name = "p" * names.POOL_NAME_LENGTH
    for child in children(pool(name), CONTEXT, set(CHILD_KINDS), {}):
        assert child.manifest is not None
        metadata = child.manifest["metadata"]
        # of a longer one Kubernetes would cut more than a dash when it makes pods' names, which have at most 63
        assert len(metadata["name"]) <= 58
        assert all(len(value) <= 63 for value in metadata["labels"].values())


def test_digest_of_a_child_shows_what_is_no_longer_applied() -> None:
    with_note = agents.with_digest(agents.daemon_set(pool(podAnnotations={"a": "b"}), CONTEXT))
    without = agents.with_digest(agents.daemon_set(pool(), CONTEXT))
    assert with_note["metadata"]["annotations"] != without["metadata"]["annotations"]
