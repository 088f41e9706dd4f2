"""What the chart renders, with Helm 3 and Helm 4."""

import json
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.chart.helm import CHART, EVERYTHING, NAMESPACE, Helm, Objects
from orbitkv_agent.csi.service import Folders
from orbitkv_crds import names
from orbitkv_operator.admission.server import PATH
from orbitkv_operator.admission.settings import load_settings as load_webhook_settings
from orbitkv_operator.rights import (
    CLUSTER_RULES,
    NAMESPACE_RULES,
    WEBHOOK_CLUSTER_RULES,
    WEBHOOK_NAMESPACE_RULES,
)
from orbitkv_operator.settings import load_settings

ROOT = CHART.parents[1]
VALUES: list[dict[str, Any]] = [{}, EVERYTHING]
CLUSTER_SCOPED = {
    "CSIDriver",
    "ClusterRole",
    "ClusterRoleBinding",
    "CustomResourceDefinition",
    "MutatingWebhookConfiguration",
    "PriorityClass",
    "SecurityContextConstraints",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
}


@pytest.mark.parametrize("values", VALUES, ids=["defaults", "everything"])
def test_rendering_is_the_same_each_time_and_with_each_helm(values: dict[str, Any], helm: Helm, helm4: Helm) -> None:
    assert helm.text(values, cached=False) == helm.text(values)
    assert helm4.text(values, cached=False) == helm4.text(values)
    three, four = (
        sorted(each.render(values).all, key=lambda it: (it["kind"], it["metadata"]["name"])) for each in (helm, helm4)
    )  # the two differ in the order of kinds
    assert four == three


def test_nothing_that_is_rendered_depends_on_the_cluster_or_on_chance() -> None:
    changing = r"\b(lookup|rand\w*|gen[A-Z]\w+|now|date\w*|uuidv4|Capabilities)\b"
    for path in sorted((CHART / "templates").rglob("*.yaml")):
        for action in re.findall(r"\{\{.*?\}\}", path.read_text(), re.DOTALL):
            assert not re.search(changing, action), f"{path}: {action}"


@pytest.mark.parametrize("values", VALUES, ids=["defaults", "everything"])
def test_names_do_not_depend_on_the_release(helm: Helm, values: dict[str, Any]) -> None:
    def rendered(release: str) -> list[tuple[str, str]]:
        return [(each["kind"], each["metadata"]["name"]) for each in helm.render(values, release=release).all]

    assert rendered("orbitkv") == rendered("another")


@pytest.mark.parametrize("component", ["operator", "webhook"])
def test_selectors_do_not_depend_on_release_or_version(helm: Helm, component: str) -> None:
    """A selector cannot be changed: an upgrade, or another release that takes over, would fail."""
    deployment = helm.render().one("Deployment", f"orbitkv-{component}")
    assert deployment["spec"]["selector"]["matchLabels"] == {
        "app.kubernetes.io/name": "orbitkv",
        "app.kubernetes.io/component": component,
    }


@pytest.mark.parametrize("values", VALUES, ids=["defaults", "everything"])
def test_every_object_says_where_it_belongs(helm: Helm, values: dict[str, Any]) -> None:
    for each in helm.render(values).all:
        labels = each["metadata"]["labels"]
        name = f"{each['kind']} {each['metadata']['name']}"
        assert labels["app.kubernetes.io/managed-by"] == "Helm", name
        assert labels["app.kubernetes.io/instance"] == "orbitkv", name
        assert labels["helm.sh/chart"].startswith("orbitkv-"), name
        assert ("namespace" in each["metadata"]) == (each["kind"] not in CLUSTER_SCOPED), name
        assert each["metadata"].get("namespace", NAMESPACE) == NAMESPACE, name


def test_everything_renders_each_template(helm: Helm) -> None:
    rendered = helm.text(EVERYTHING)
    for path in (CHART / "templates").rglob("*.yaml"):
        assert f"# Source: orbitkv/{path.relative_to(CHART)}\n" in rendered, path


# --------------------------------------------------------------------------------------------------------------- rights


def test_rights_of_agents_are_these_and_no_more(helm: Helm) -> None:
    rules = helm.render().one("ClusterRole", "orbitkv-agent")["rules"]
    granted = {
        (group, kind, verb) for r in rules for group in r["apiGroups"] for kind in r["resources"] for verb in r["verbs"]
    }
    assert granted == {
        ("authentication.k8s.io", "tokenreviews", "create"),
        ("authorization.k8s.io", "subjectaccessreviews", "create"),
        ("orbitkv.io", "cachenamespaces", "get"),
        ("orbitkv.io", "cachenamespaces", "list"),
        ("orbitkv.io", "cachenamespaces", "watch"),
        ("", "namespaces", "get"),
        ("", "namespaces", "list"),
        ("", "namespaces", "watch"),
    }
    assert all(set(rule) == {"apiGroups", "resources", "verbs"} for rule in rules)


def test_rights_of_the_operator_are_what_its_code_lists(helm: Helm) -> None:
    objects = helm.render()
    assert objects.one("ClusterRole", "orbitkv-operator")["rules"] == [r.as_policy_rule() for r in CLUSTER_RULES]
    assert objects.one("Role", "orbitkv-operator")["rules"] == [r.as_policy_rule() for r in NAMESPACE_RULES]


def test_rights_of_the_webhook_are_what_its_code_lists_and_write_nothing(helm: Helm) -> None:
    objects = helm.render()
    in_cluster, here = (objects.one(kind, "orbitkv-webhook")["rules"] for kind in ("ClusterRole", "Role"))
    assert in_cluster == [r.as_policy_rule() for r in WEBHOOK_CLUSTER_RULES]
    assert here == [r.as_policy_rule() for r in WEBHOOK_NAMESPACE_RULES]
    assert {
        (kind, verb)
        for rule in (*in_cluster, *here)
        for kind in rule["resources"]
        for verb in set(rule["verbs"]) - {"get", "list", "watch"}
    } == {("tokenreviews", "create"), ("subjectaccessreviews", "create")}


@pytest.mark.parametrize("values", VALUES, ids=["defaults", "everything"])
def test_no_role_has_a_wildcard_or_can_grant_rights(helm: Helm, values: dict[str, Any]) -> None:
    objects = helm.render(values)
    for role in [*objects.of("ClusterRole"), *objects.of("Role")]:
        for rule in role["rules"]:
            assert "*" not in [word for words in rule.values() for word in words], role["metadata"]["name"]
            assert "rbac.authorization.k8s.io" not in rule.get("apiGroups", [])
            assert not {"bind", "escalate", "impersonate"} & set(rule["verbs"])


def test_people_get_cache_namespaces_through_the_roles_that_they_have(helm: Helm) -> None:
    def aggregated(values: dict[str, Any]) -> dict[str, set[str]]:
        prefix = "rbac.authorization.k8s.io/aggregate-to-"
        return {
            role["metadata"]["name"]: {
                key.removeprefix(prefix) for key in role["metadata"]["labels"] if key.startswith(prefix)
            }
            for role in helm.render(values).of("ClusterRole")
        }

    roles = aggregated({})
    assert roles["orbitkv-cachenamespaces-edit"] == {"admin", "edit"}
    assert roles["orbitkv-view"] == {"view"}
    assert roles["orbitkv-managerpools-admin"] == set(), "a pool takes memory of the nodes: not for every tenant"
    assert not any(aggregated({"rbac": {"aggregate": False}}).values())


# ------------------------------------------------------------------------------------------------------------- operator


def app_version() -> str:
    return str(yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"])


def pod_spec(helm: Helm, values: dict[str, Any] | None = None) -> dict[str, Any]:
    spec: dict[str, Any] = helm.render(values).one("Deployment", "orbitkv-operator")["spec"]["template"]["spec"]
    return spec


def container(helm: Helm, values: dict[str, Any] | None = None) -> dict[str, Any]:
    found: dict[str, Any] = pod_spec(helm, values)["containers"][0]
    return found


@pytest.mark.parametrize("values", VALUES, ids=["defaults", "everything"])
def test_operator_understands_what_the_chart_sets(helm: Helm, values: dict[str, Any]) -> None:
    fields = {"metadata.name": "orbitkv-operator-0", "metadata.namespace": NAMESPACE, "status.podIP": "10.0.0.1"}
    environment = {
        each["name"]: each.get(
            "value", fields.get(each.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", ""), "")
        )
        for each in container(helm, values)["env"]
    }
    settings = load_settings([], environment)
    assert settings.namespace == NAMESPACE
    assert settings.pod_name == "orbitkv-operator-0"
    assert settings.certificates == values.get("certificates", {}).get("provider", "self-managed")
    assert list(settings.agent_pull_secrets) == [s["name"] for s in values.get("images", {}).get("pullSecrets", [])]
    assert list(settings.metrics_from) == values.get("networkPolicy", {}).get("metricsFrom", [])
    payload = values.get("injection", {}).get("payload", {})
    assert settings.webhook is True
    assert settings.payload_mode == payload.get("mode", "init")
    assert list(settings.payload_pull_secrets) == [s["name"] for s in payload.get("pullSecrets", [])]
    unknown = {name for name in environment if name.startswith("ORBITKV_OPERATOR_")} - {
        f"ORBITKV_OPERATOR_{name.upper()}" for name in type(settings).model_fields
    }
    assert not unknown, "the operator passes these over"


def test_ports_are_those_that_the_operator_opens(helm: Helm) -> None:
    settings = load_settings([], {"POD_NAMESPACE": NAMESPACE, "ORBITKV_OPERATOR_AGENT_IMAGE": "a"})
    ports = {each["name"]: each["containerPort"] for each in container(helm)["ports"]}
    assert ports == {"metrics": settings.metrics_port, "probes": settings.probes_port, "reports": settings.reports_port}
    reports = helm.render().one("Service", "orbitkv-reports")["spec"]
    assert "selector" not in reports, "only the operator that acts takes reports; it names itself"
    assert reports["ports"][0]["port"] == settings.reports_port


@pytest.mark.parametrize("values", VALUES, ids=["defaults", "everything"])
def test_pods_meet_the_restricted_standard(helm: Helm, values: dict[str, Any]) -> None:
    webhook = helm.render(values).one("Deployment", "orbitkv-webhook")["spec"]["template"]["spec"]
    pods = [pod_spec(helm, values), webhook, helm.render(values).one("Pod", "orbitkv-test")["spec"]]
    for spec in pods:
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == 10001
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert all(set(volume) - {"name"} == {"emptyDir"} for volume in spec["volumes"])
        for each in spec["containers"]:
            assert each["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert each["resources"]["limits"]["memory"]


def test_images_by_registry_tag_and_digest(helm: Helm) -> None:
    def images(values: dict[str, Any]) -> tuple[str, str]:
        found = container(helm, values)
        return found["image"], next(e["value"] for e in found["env"] if e["name"] == "ORBITKV_OPERATOR_AGENT_IMAGE")

    version = app_version()
    assert images({}) == (f"localhost/orbitkv/operator:{version}", f"localhost/orbitkv/node-agent:{version}")
    assert images(EVERYTHING) == (
        "other.example.com/orbitkv/operator@sha256:" + "a" * 64,
        "registry.example.com:5000/cache/orbitkv/node-agent:next",
    )
    assert images({"images": {"registry": ""}})[0] == f"orbitkv/operator:{version}"


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == project
    assert chart["version"] == project


@pytest.mark.parametrize("component", ["operator", "webhook"])
def test_disruption_budget_lets_a_node_with_the_only_replica_be_drained(helm: Helm, component: str) -> None:
    spec = helm.render({component: {"replicas": 1}}).one("PodDisruptionBudget", f"orbitkv-{component}")["spec"]
    assert spec["maxUnavailable"] == 1
    assert "minAvailable" not in spec


@pytest.mark.parametrize("component", ["operator", "webhook"])
def test_labels_of_people_cannot_unhook_the_pods(helm: Helm, component: str) -> None:
    values = {component: {"podLabels": {"app.kubernetes.io/component": "mine", "a": "b"}}}
    template = helm.render(values).one("Deployment", f"orbitkv-{component}")["spec"]["template"]
    assert template["metadata"]["labels"]["app.kubernetes.io/component"] == component
    assert template["metadata"]["labels"]["a"] == "b"


# -------------------------------------------------------------------------------------------------------------- webhook


@pytest.mark.parametrize("values", VALUES, ids=["defaults", "everything"])
def test_webhook_understands_what_the_chart_sets(helm: Helm, values: dict[str, Any]) -> None:
    objects = helm.render(values)
    (container,) = objects.one("Deployment", "orbitkv-webhook")["spec"]["template"]["spec"]["containers"]
    environment = {each["name"]: each.get("value", NAMESPACE) for each in container["env"]}
    settings = load_webhook_settings([], environment)
    injection = values.get("injection", {})
    assert settings.namespace == NAMESPACE
    assert settings.payload_mode == injection.get("payload", {}).get("mode", "init")
    assert settings.pod_security_default == injection.get("podSecurityDefault", "privileged")
    assert settings.socket_volume == injection.get("socketVolume", "hostPath")
    assert settings.lmcache == values.get("compat", {}).get("lmcache", False)
    assert list(settings.payload_pull_secrets) == [
        s["name"] for s in injection.get("payload", {}).get("pullSecrets", [])
    ]
    unknown = {name for name in environment if name.startswith("ORBITKV_WEBHOOK_")} - {
        f"ORBITKV_WEBHOOK_{name.upper()}" for name in type(settings).model_fields
    }
    assert not unknown, "the webhook passes these over"
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports == {"webhook": settings.port, "metrics": settings.metrics_port, "probes": settings.probes_port}


def test_operator_and_webhook_speak_of_the_same_payload(helm: Helm) -> None:
    objects = helm.render(EVERYTHING)
    images = {
        variable["value"]
        for component in ("operator", "webhook")
        for variable in objects.one("Deployment", f"orbitkv-{component}")["spec"]["template"]["spec"]["containers"][0][
            "env"
        ]
        if variable["name"].endswith("_PAYLOAD_IMAGE")
    }
    assert images == {f"registry.example.com:5000/cache/orbitkv/engine-plugin:{app_version()}"}


@pytest.mark.parametrize("values", VALUES, ids=["defaults", "everything"])
def test_webhook_can_hold_up_nothing(helm: Helm, values: dict[str, Any]) -> None:
    """It fails open within two seconds, and neither the cluster's own pods nor OrbitKV's wait for it."""
    webhooks = helm.render(values).one("MutatingWebhookConfiguration", "orbitkv-webhook")["webhooks"]
    for each in webhooks:
        assert (each["failurePolicy"], each["timeoutSeconds"], each["sideEffects"]) == ("Ignore", 2, "None")
        assert each["matchConditions"], "it is asked about what asks only"
        assert "caBundle" not in each["clientConfig"], "who signs is filled in later; a rendered one would be reset"
        service = each["clientConfig"]["service"]
        assert (service["name"], service["namespace"], service["path"]) == (names.WEBHOOK, NAMESPACE, PATH)
        if each["name"] == "probe.orbitkv.io":
            assert each["objectSelector"] == {"matchLabels": {names.LABEL_PROBE: "true"}}
            assert each["matchConditions"] == [{"name": "dry-run", "expression": "request.dryRun"}]
            continue
        (elsewhere, *_) = each["namespaceSelector"]["matchExpressions"]
        assert elsewhere["operator"] == "NotIn"
        assert elsewhere["values"] == ["kube-system", NAMESPACE]


def test_labels_of_lmcache_are_looked_at_only_when_asked_for(helm: Helm) -> None:
    assert "lmcache" not in str(helm.render().one("MutatingWebhookConfiguration", "orbitkv-webhook"))
    found = helm.render({"compat": {"lmcache": True}}).one("MutatingWebhookConfiguration", "orbitkv-webhook")
    conditions = {each["name"]: each["matchConditions"][0]["expression"] for each in found["webhooks"]}
    assert "'lmcache.ai/lmcache-inject' in object.metadata.?labels" in conditions["pods.orbitkv.io"]


def test_injection_can_be_left_out(helm: Helm) -> None:
    objects = helm.render({"injection": {"enabled": False}})
    assert not [each for each in objects.all if "webhook" in each["metadata"]["name"]]
    assert "orbitkv-stamps" not in objects.names("ValidatingAdmissionPolicy")


# ------------------------------------------------------------------------------------------------------------------ csi

CSI: dict[str, Any] = {"injection": {"socketVolume": "csi"}}


def parts_of_csi(helm: Helm, values: dict[str, Any]) -> set[str]:
    return {each["kind"] for each in helm.render(values).all if "csi" in each["metadata"]["name"]}


def test_driver_runs_where_pods_get_its_volumes_and_no_sooner(helm: Helm) -> None:
    all_of_it = {"CSIDriver", "DaemonSet", "NetworkPolicy", "ServiceAccount"}
    assert parts_of_csi(helm, {}) == set()
    assert parts_of_csi(helm, CSI) == all_of_it
    assert parts_of_csi(helm, {"injection": {"socketVolume": "csi", "enabled": False}}) == set()
    assert parts_of_csi(helm, {"injection": {"csi": {"enabled": True}}}) == all_of_it, "for pods that are still there"
    assert parts_of_csi(helm, EVERYTHING) == {*all_of_it, "SecurityContextConstraints"}


def test_driver_has_inline_volumes_only_and_the_kubelet_changes_nothing_in_them(helm: Helm) -> None:
    """Another attribute cannot be changed on a cluster that has the object: an upgrade would fail."""
    driver = helm.render(CSI).one("CSIDriver", names.CSI_DRIVER)
    assert driver["spec"] == {
        "attachRequired": False,
        "podInfoOnMount": True,
        "fsGroupPolicy": "None",
        "volumeLifecycleModes": ["Ephemeral"],
    }
    assert driver["metadata"]["labels"]["security.openshift.io/csi-ephemeral-volume-profile"] == "restricted"


@pytest.mark.parametrize("values", [CSI, EVERYTHING], ids=["csi", "everything"])
def test_driver_finds_its_folders_where_it_is_told(helm: Helm, values: dict[str, Any]) -> None:
    spec = helm.render(values).one("DaemonSet", names.CSI)["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    kubelet = values["injection"].get("csi", {}).get("kubeletDirectory", "/var/lib/kubelet")
    folders = Folders(Path(kubelet))
    assert container["command"] == ["orbitkv-csi"]
    assert f"--kubelet-directory={kubelet}" in container["args"]
    assert container["readinessProbe"]["exec"]["command"] == ["test", "-e", str(folders.registered)]
    on_node = {each["name"]: each["hostPath"]["path"] for each in spec["volumes"]}
    mounts = {each["mountPath"]: each for each in container["volumeMounts"]}
    assert set(mounts) == {
        str(path) for path in (folders.socket, folders.own, folders.registration.parent, folders.pods)
    }
    assert all(on_node[mount["name"]] == path for path, mount in mounts.items()), "the kubelet names paths of the node"
    assert mounts[str(folders.pods)]["mountPropagation"] == "Bidirectional"
    assert mounts[str(folders.socket)]["readOnly"] is True
    assert [path for path, mount in mounts.items() if "mountPropagation" in mount] == [str(folders.pods)]


def test_driver_has_no_rights_in_the_cluster_and_no_network(helm: Helm) -> None:
    objects = helm.render(CSI)
    spec = objects.one("DaemonSet", names.CSI)["spec"]["template"]["spec"]
    assert spec["serviceAccountName"] == names.CSI
    assert spec["automountServiceAccountToken"] is False
    assert objects.one("ServiceAccount", names.CSI)["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
    subjects = [
        subject["name"]
        for kind in ("RoleBinding", "ClusterRoleBinding")
        for binding in objects.of(kind)
        for subject in binding["subjects"]
    ]
    assert names.CSI not in subjects
    policy = objects.one("NetworkPolicy", names.CSI)["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= template_labels(objects, names.CSI).items()
    assert (policy["policyTypes"], set(policy)) == (["Ingress", "Egress"], {"podSelector", "policyTypes"})


def template_labels(objects: Objects, daemonset: str) -> dict[str, str]:
    labels: dict[str, str] = objects.one("DaemonSet", daemonset)["spec"]["template"]["metadata"]["labels"]
    return labels


def test_driver_is_on_every_node_that_a_pod_may_come_to(helm: Helm) -> None:
    spec = helm.render(CSI).one("DaemonSet", names.CSI)["spec"]["template"]["spec"]
    assert spec["tolerations"] == [{"operator": "Exists"}]
    assert spec["nodeSelector"] == {"kubernetes.io/os": "linux"}
    assert spec["priorityClassName"] == names.AGENT_PRIORITY_CLASS
    without = helm.render({**CSI, "agentPriority": {"create": False}}).one("DaemonSet", names.CSI)
    assert "priorityClassName" not in without["spec"]["template"]["spec"]
    given = helm.render(EVERYTHING).one("DaemonSet", names.CSI)["spec"]["template"]["spec"]
    assert given["priorityClassName"] == "system-node-critical"
    assert given["nodeSelector"] == {"kubernetes.io/os": "linux", "nvidia.com/gpu.present": "true"}
    assert given["imagePullSecrets"] == [{"name": "pull-a"}, {"name": "pull-b"}]


def test_only_the_driver_is_privileged_on_openshift(helm: Helm) -> None:
    scc = helm.render(EVERYTHING).one("SecurityContextConstraints", names.CSI)
    assert (scc["users"], scc["groups"]) == ([f"system:serviceaccount:{NAMESPACE}:orbitkv-csi"], [])
    assert (scc["allowPrivilegedContainer"], scc["volumes"]) == (True, ["hostPath"])
    assert helm.render({"openshift": {"scc": True}}).names("SecurityContextConstraints") == ["orbitkv"]


# ---------------------------------------------------------------------------------------------------------- other parts


def test_crds_stay_when_the_chart_goes(helm: Helm) -> None:
    crds = helm.render().of("CustomResourceDefinition")
    assert {crd["metadata"]["name"] for crd in crds} == {"managerpools.orbitkv.io", "cachenamespaces.orbitkv.io"}
    assert all(crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep" for crd in crds)
    assert helm.render({"crds": {"install": False}}).of("CustomResourceDefinition") == []


def test_priority_of_agents_preempts_nothing(helm: Helm) -> None:
    found = helm.render().one("PriorityClass", "orbitkv-agent")
    assert found["preemptionPolicy"] == "Never"
    assert found["globalDefault"] is False
    assert found["value"] == 1_000_000
    assert helm.render({"agentPriority": {"create": False}}).of("PriorityClass") == []


def test_self_managed_certificates_leave_nothing_to_render(helm: Helm) -> None:
    """A rendered Secret would be made anew, or emptied, with every rendering of a GitOps tool."""
    objects = helm.render()
    assert objects.names("Secret") == ["orbitkv-metrics-reader"]
    assert not {"data", "stringData"} & set(objects.one("Secret", "orbitkv-metrics-reader"))
    assert helm.render({"monitoring": {"reader": False}}).of("Secret") == []
    assert not {"Certificate", "Issuer"} & {each["kind"] for each in objects.all}


def test_cert_manager_makes_the_secret_that_the_operator_reads(helm: Helm) -> None:
    objects = helm.render({"certificates": {"provider": "cert-manager"}})
    certificate = objects.one("Certificate", "orbitkv-certificates")["spec"]
    assert certificate["secretName"] == names.CERTIFICATES_SECRET
    assert certificate["dnsNames"][0] == names.reports_server_name(NAMESPACE)
    assert certificate["issuerRef"] == {"group": "cert-manager.io", "kind": "Issuer", "name": "orbitkv-ca"}
    assert objects.names("Issuer") == ["orbitkv-ca-self-signed", "orbitkv-ca"]
    certificate = objects.one("Certificate", "orbitkv-webhook")["spec"]
    assert certificate["secretName"] == names.WEBHOOK
    assert certificate["dnsNames"][0] == names.webhook_server_name(NAMESPACE)
    annotations = objects.one("MutatingWebhookConfiguration", "orbitkv-webhook")["metadata"]["annotations"]
    assert annotations["cert-manager.io/inject-ca-from"] == f"{NAMESPACE}/orbitkv-webhook"


def test_an_issuer_of_the_users_signs_alone(helm: Helm) -> None:
    issuer = {"name": "company", "kind": "ClusterIssuer"}
    objects = helm.render({"certificates": {"provider": "cert-manager", "issuer": issuer}})
    assert objects.names("Certificate") == ["orbitkv-certificates", "orbitkv-webhook"]
    assert objects.of("Issuer") == []
    reference = objects.one("Certificate", "orbitkv-certificates")["spec"]["issuerRef"]
    assert reference == {"group": "cert-manager.io", **issuer}


def test_metrics_are_open_to_those_named(helm: Helm) -> None:
    def metrics(values: dict[str, Any]) -> dict[str, Any]:
        rules = helm.render(values).one("NetworkPolicy", "orbitkv-operator")["spec"]["ingress"]
        return next(rule for rule in rules if rule["ports"] == [{"port": "metrics"}])

    assert "from" not in metrics({})
    assert metrics(EVERYTHING)["from"] == EVERYTHING["networkPolicy"]["metricsFrom"]
    assert helm.render({"networkPolicy": {"enabled": False}}).of("NetworkPolicy") == []


def test_openshift_constraints_allow_what_agents_need_and_no_privilege(helm: Helm) -> None:
    scc = helm.render(EVERYTHING).one("SecurityContextConstraints", "orbitkv")
    assert scc["groups"] == [f"system:serviceaccounts:{NAMESPACE}"]
    assert scc["allowHostDirVolumePlugin"] is True
    assert not any(scc[key] for key in scc if key.startswith("allow") and key != "allowHostDirVolumePlugin")
    assert helm.render().of("SecurityContextConstraints") == []


def test_deletion_guard_can_be_left_out(helm: Helm) -> None:
    assert "orbitkv-pool-deletion" in helm.render().names("ValidatingAdmissionPolicy")
    without = helm.render({"deletionGuard": {"enabled": False}})
    assert "orbitkv-pool-deletion" not in without.names("ValidatingAdmissionPolicy")


def test_package_holds_no_tests_and_no_leftovers(helm: Helm, tmp_path: Path) -> None:
    helm.run("package", str(CHART), "--destination", str(tmp_path))
    (package,) = tmp_path.iterdir()
    listed = subprocess.run(["tar", "-tzf", str(package)], capture_output=True, text=True, check=True).stdout.split()
    assert not [name for name in listed if "__pycache__" in name or "/tests/test_" in name]
    assert "orbitkv/values.schema.json" in listed
    assert json.loads((CHART / "values.schema.json").read_text())["additionalProperties"] is False
