"""What an injected pod gets, part by part."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from orbitkv_crds import names, stamps
from orbitkv_operator.admission.decide import Inject, Rules, decide
from orbitkv_operator.admission.patch import SAFE_TO_EVICT, make_patch
from orbitkv_operator.admission.tests.pods import NAMESPACE, RULES, FakeWorld, make_pod, patched

Object = dict[str, Any]
FOLDER = "/opt/orbitkv/payload"
CSI = replace(RULES, socket_volume="csi")


def inject(pod: Object, rules: Rules = RULES) -> Object:
    """The pod after injection, twice: the second look must change nothing."""
    decision = decide(pod, NAMESPACE, FakeWorld(), rules)
    assert isinstance(decision, Inject), decision
    after = patched(pod, make_patch(pod, decision, rules))
    assert make_patch(after, decide(after, NAMESPACE, FakeWorld(), rules), rules) == []
    return after


def engine(**fields: Any) -> Object:
    return {"name": "engine", "image": "vllm/vllm-openai:v0.11.0", "args": ["--model", "a/b"], **fields}


def asking(*containers: Object, ask: dict[str, str] | None = None, **spec: Any) -> Object:
    annotations = {f"orbitkv.io/{key}": value for key, value in ({"cache-namespace": "chat"} | (ask or {})).items()}
    return make_pod(list(containers), annotations, **spec)


def env(pod: Object) -> dict[str, Any]:
    (found,) = (each for each in pod["spec"]["containers"] if each["name"] == "engine")
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in found["env"]}


def test_plain_pod_gets_exactly_this() -> None:
    after = inject(asking(engine()))
    stamp = stamps.read_injected(after["metadata"]["annotations"])
    assert stamp is not None
    assert (stamp.version, stamp.namespace, stamp.container, stamp.engine, stamp.payload) == (
        "0.1.0",
        "team/chat",
        "engine",
        "vllm",
        "init",
    )
    assert after["metadata"]["labels"] == {"app": "engine", "orbitkv.io/cache": "true"}
    assert after["metadata"]["annotations"][SAFE_TO_EVICT] == "orbitkv-socket,orbitkv-payload"
    token = {"audience": "orbitkv.io/uid-of-cluster", "expirationSeconds": 3600, "path": "token"}
    assert after["spec"] == {
        "serviceAccountName": "default",
        "volumes": [
            {"name": "orbitkv-socket", "hostPath": {"path": "/run/orbitkv", "type": "DirectoryOrCreate"}},
            {"name": "orbitkv-token", "projected": {"sources": [{"serviceAccountToken": token}]}},
            {"name": "orbitkv-payload", "emptyDir": {}},
        ],
        "initContainers": [
            {
                "name": "orbitkv-payload",
                "image": "registry/payload:1",
                "imagePullPolicy": "IfNotPresent",
                "command": ["/orbitkv-copy", FOLDER],
                "resources": {},
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "capabilities": {"drop": ["ALL"]},
                    "readOnlyRootFilesystem": True,
                    "runAsNonRoot": True,
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                "terminationMessagePolicy": "FallbackToLogsOnError",
                "volumeMounts": [{"name": "orbitkv-payload", "mountPath": FOLDER}],
            }
        ],
        "containers": [
            engine(
                env=[
                    {"name": "PYTHONPATH", "value": FOLDER},
                    {"name": "ORBITKV_CACHE_NAMESPACE", "value": "team/chat"},
                    {"name": "ORBITKV_BOOTSTRAP_SOCKET", "value": "/run/orbitkv/agent.sock"},
                    {"name": "ORBITKV_TOKEN_PATH", "value": "/var/run/secrets/orbitkv.io/token"},
                    {"name": "ORBITKV_ON_MISSING", "value": "run"},
                    {"name": "ORBITKV_INJECTED", "value": "0.1.0"},
                ],
                volumeMounts=[
                    {"name": "orbitkv-socket", "mountPath": "/run/orbitkv", "readOnly": True},
                    {"name": "orbitkv-token", "mountPath": "/var/run/secrets/orbitkv.io", "readOnly": True},
                    {"name": "orbitkv-payload", "mountPath": FOLDER, "readOnly": True},
                ],
            )
        ],
    }


def test_nothing_that_gives_power_is_added() -> None:
    text = str(inject(asking(engine())))
    for word in ("hostIPC", "hostPID", "hostNetwork", "privileged", "/dev/shm", "'add':"):
        assert word not in text


def test_what_is_asked_for_reaches_the_engine() -> None:
    found = env(inject(asking(engine(), ask={"mode": "save_only", "multi-connector": "true"})))
    assert (found["ORBITKV_MODE"], found["ORBITKV_MULTI_CONNECTOR"]) == ("save_only", "true")


def test_settings_given_by_hand_stay_where_the_annotation_says_nothing() -> None:
    by_hand = [{"name": "ORBITKV_MODE", "value": "save_only"}, {"name": "ORBITKV_ON_MISSING", "value": "fail"}]
    found = env(inject(asking(engine(env=by_hand))))
    assert (found["ORBITKV_MODE"], found["ORBITKV_ON_MISSING"]) == ("save_only", "run")


# ------------------------------------------------------------------------------------------------- PYTHONPATH, plugins


@pytest.mark.parametrize(
    ("variables", "ask", "value"),
    [
        ([], {}, FOLDER),
        ([], {"pythonpath": "/app:/lib"}, f"{FOLDER}:/app:/lib"),
        ([{"name": "PYTHONPATH", "value": "/app"}], {}, f"{FOLDER}:/app"),
        ([{"name": "PYTHONPATH", "value": "/app"}], {"pythonpath": "/lib"}, f"{FOLDER}:/app"),
        ([{"name": "PYTHONPATH"}], {}, FOLDER),
        ([{"name": "PYTHONPATH", "value": "$(HOME)/lib"}], {}, f"{FOLDER}:$(HOME)/lib"),
        ([{"name": "PYTHONPATH", "value": "/a"}, {"name": "PYTHONPATH", "value": "/b"}], {}, f"{FOLDER}:/b"),
        ([{"name": "PYTHONPATH", "value": f"{FOLDER}:/app"}], {}, f"{FOLDER}:/app"),
    ],
)
def test_path_is_ours_and_then_the_pods(variables: list[Object], ask: dict[str, str], value: str) -> None:
    assert env(inject(asking(engine(env=variables), ask=ask)))["PYTHONPATH"] == value


def test_path_from_a_config_map_is_moved_and_expanded_in_its_place() -> None:
    source = {"configMapKeyRef": {"name": "c", "key": "k", "optional": True}}
    variables = [{"name": "A", "value": "a"}, {"name": "PYTHONPATH", "valueFrom": source}, {"name": "B", "value": "b"}]
    (container,) = inject(asking(engine(env=variables)))["spec"]["containers"]
    assert container["env"][:4] == [
        {"name": "A", "value": "a"},
        {"name": "ORBITKV_PYTHONPATH", "valueFrom": source},
        {"name": "PYTHONPATH", "value": f"{FOLDER}:$(ORBITKV_PYTHONPATH)"},
        {"name": "B", "value": "b"},
    ]


def test_path_that_may_come_with_a_whole_config_map_is_expanded() -> None:
    sources = [{"configMapRef": {"name": "c"}}]
    assert env(inject(asking(engine(envFrom=sources))))["PYTHONPATH"] == f"{FOLDER}:$(PYTHONPATH)"


@pytest.mark.parametrize("name", ["VLLM_PLUGINS", "SGLANG_PLUGINS"])
@pytest.mark.parametrize(("value", "after"), [("lora", "lora,orbitkv"), ("", "orbitkv"), ("orbitkv,a", "orbitkv,a")])
def test_plugins_are_joined_where_the_pod_limits_them(name: str, value: str, after: str) -> None:
    assert env(inject(asking(engine(env=[{"name": name, "value": value}]))))[name] == after
    assert name not in env(inject(asking(engine())))


def test_plugins_from_a_secret_are_moved_and_expanded() -> None:
    source = {"secretKeyRef": {"name": "s", "key": "k"}}
    found = env(inject(asking(engine(env=[{"name": "VLLM_PLUGINS", "valueFrom": source}]))))
    assert found["ORBITKV_VLLM_PLUGINS"] == source
    assert found["VLLM_PLUGINS"] == "$(ORBITKV_VLLM_PLUGINS),orbitkv"


# ------------------------------------------------------------------------------------------------------ init container


def init_container(pod: Object, rules: Rules = RULES) -> Object:
    found: Object = inject(pod, rules)["spec"]["initContainers"][0]
    return found


def test_copying_comes_first_and_the_order_of_the_others_stays() -> None:
    others = [{"name": "a", "image": "a"}, {"name": "b", "image": "b", "restartPolicy": "Always"}]
    found = inject(asking(engine(), initContainers=others))["spec"]["initContainers"]
    assert [each["name"] for each in found] == ["orbitkv-payload", "a", "b"]


def test_copying_takes_what_the_engine_takes_and_no_device() -> None:
    resources = {
        "limits": {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "1", "hugepages-2Mi": "1Gi"},
        "requests": {"cpu": "4", "memory": "64Gi", "ephemeral-storage": "1Gi", "nvidia.com/gpu": "1"},
        "claims": [{"name": "gpu"}],
    }
    assert init_container(asking(engine(resources=resources)))["resources"] == {
        "requests": {"cpu": "4", "memory": "64Gi", "ephemeral-storage": "1Gi"},
        "limits": {"cpu": "8", "memory": "64Gi"},
    }


def test_copying_has_the_token_of_the_account_as_the_apiserver_would_give_it_and_no_other_mount() -> None:
    token = {
        "name": "kube-api-access-x",
        "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount",
        "readOnly": True,
    }
    own = {"name": "models", "mountPath": "/models"}
    pod = asking(engine(volumeMounts=[own, token]))
    copied = {"name": "orbitkv-payload", "mountPath": FOLDER}
    assert init_container(pod)["volumeMounts"] == [copied, token]
    after = inject(pod)
    assert make_patch(after, decide(after, NAMESPACE, FakeWorld(), RULES), RULES) == []


@pytest.mark.parametrize(
    ("of_pod", "of_container", "user"),
    [
        ({}, {}, None),
        ({"runAsUser": 1000}, {}, None),
        ({}, {"runAsUser": 1000}, 1000),
        ({"runAsUser": 0}, {}, 65532),
        ({"runAsUser": 1000}, {"runAsUser": 0}, 65532),
        ({"runAsUser": 0}, {"runAsUser": 1000}, 1000),
    ],
)
def test_copying_runs_as_the_engines_user_but_never_as_root(
    of_pod: Object, of_container: Object, user: int | None
) -> None:
    pod = asking(engine(securityContext=of_container), securityContext=of_pod)
    context = init_container(pod)["securityContext"]
    assert context.get("runAsUser") == user
    assert context["runAsNonRoot"] is True


def test_pull_secrets_are_added_once() -> None:
    rules = replace(RULES, pull_secrets=("mine", "ours"))
    found = inject(asking(engine(), imagePullSecrets=[{"name": "mine"}]), rules)
    assert found["spec"]["imagePullSecrets"] == [{"name": "mine"}, {"name": "ours"}]


def test_image_volume_needs_no_init_container() -> None:
    rules = replace(RULES, payload_mode="imageVolume", image_volumes=True, pull_policy="Always")
    found = inject(asking(engine()), rules)
    assert found["spec"].get("initContainers", []) == []
    assert {"name": "orbitkv-payload", "image": {"reference": "registry/payload:1", "pullPolicy": "Always"}} in found[
        "spec"
    ]["volumes"]
    assert env(found)["PYTHONPATH"] == f"{FOLDER}/payload"
    assert found["metadata"]["annotations"][SAFE_TO_EVICT] == "orbitkv-socket"


def test_csi_driver_brings_the_socket_in_place_of_the_pod() -> None:
    found = inject(asking(engine()), CSI)
    plain = inject(asking(engine()))
    assert found["spec"]["volumes"][0] == {
        "name": "orbitkv-socket",
        "csi": {"driver": "csi.orbitkv.io", "readOnly": True},
    }
    assert found["spec"]["containers"] == plain["spec"]["containers"]
    assert not [each for each in found["spec"]["volumes"] if "hostPath" in each]
    # the autoscaler takes no offence at volumes of a driver
    assert found["metadata"]["annotations"][SAFE_TO_EVICT] == "orbitkv-payload"
    without = inject(asking(engine()), replace(CSI, payload_mode="imageVolume", image_volumes=True))
    assert SAFE_TO_EVICT not in without["metadata"]["annotations"]


# --------------------------------------------------------------------------------------------------- others that mutate


def test_safe_to_evict_volumes_are_joined() -> None:
    pod = asking(engine())
    pod["metadata"]["annotations"][SAFE_TO_EVICT] = "cache"
    assert inject(pod)["metadata"]["annotations"][SAFE_TO_EVICT] == "cache,orbitkv-socket,orbitkv-payload"


def test_sidecar_that_comes_between_two_looks_changes_nothing() -> None:
    """A mesh puts its container into a pod that is looked at again: the engine's is still the one that was injected."""
    after = inject(asking({"name": "main", "image": "acme/llm:1"}))
    after["spec"]["containers"].insert(0, {"name": "stranger", "image": "acme/proxy:1"})
    again = decide(after, NAMESPACE, FakeWorld(), RULES)
    assert isinstance(again, Inject)
    assert again.target.name == "main"
    assert make_patch(after, again, RULES) == []


def test_what_another_webhook_took_away_is_put_back() -> None:
    after = inject(asking(engine()))
    after["spec"]["containers"][0]["env"] = [
        each for each in after["spec"]["containers"][0]["env"] if each["name"] != "ORBITKV_TOKEN_PATH"
    ]
    again = patched(after, make_patch(after, decide(after, NAMESPACE, FakeWorld(), RULES), RULES))
    assert env(again)["ORBITKV_TOKEN_PATH"] == names.ENGINE_TOKEN_PATH


def mirrored(pod: Object) -> Object:
    """The pod after a policy that has all images come from a mirror, and gives every container a variable, a mount and
    a limit."""
    for each in (*pod["spec"]["initContainers"], *pod["spec"]["containers"]):
        each["image"] = f"mirror.example.com/{each['image']}"
        each["imagePullPolicy"] = "Always"
        each["env"] = [*each.get("env", ()), {"name": "POLICY", "value": "1"}]
        each["volumeMounts"] = [{"name": "certificates", "mountPath": "/etc/ssl/certs"}, *each.get("volumeMounts", ())]
        each.setdefault("resources", {}).setdefault("limits", {})["memory"] = "8Gi"
    pod["spec"]["volumes"].insert(0, {"name": "certificates", "configMap": {"name": "certificates"}})
    pod["metadata"]["annotations"]["policies.example.com/applied"] = "mirror"
    return pod


@pytest.mark.parametrize("rules", [RULES, CSI], ids=["hostPath", "csi"])
def test_what_a_policy_changes_on_all_containers_stays_on_ours(rules: Rules) -> None:
    """Put back, two webhooks would undo each other's work, and a cluster that has only its mirror would wait for
    an image."""
    after = mirrored(inject(asking(engine()), rules))
    assert make_patch(after, decide(after, NAMESPACE, FakeWorld(), rules), rules) == []
    again = mirrored(after)
    assert make_patch(again, decide(again, NAMESPACE, FakeWorld(), rules), rules) == []


def test_init_container_that_copies_no_more_is_put_back() -> None:
    after = inject(asking(engine()))
    (copying,) = after["spec"]["initContainers"]
    for field, value in (("command", ["true"]), ("volumeMounts", [])):
        broken = {**after, "spec": {**after["spec"], "initContainers": [{**copying, field: value}]}}
        again = patched(broken, make_patch(broken, decide(broken, NAMESPACE, FakeWorld(), RULES), RULES))
        assert again["spec"]["initContainers"] == [copying]


def test_defaults_and_what_others_add_to_our_parts_are_kept() -> None:
    after = inject(asking(engine()))
    spec = after["spec"]
    spec["volumes"][1]["projected"]["defaultMode"] = 420
    spec["initContainers"][0] |= {"terminationMessagePath": "/dev/termination-log"}
    spec["initContainers"][0]["resources"] = {"limits": {"memory": "1Gi"}}
    spec["containers"][0]["volumeMounts"][0]["recursiveReadOnly"] = "Disabled"
    assert make_patch(after, decide(after, NAMESPACE, FakeWorld(), RULES), RULES) == []


def test_other_way_of_the_payload_replaces_the_one_before() -> None:
    volumes = replace(RULES, payload_mode="imageVolume", image_volumes=True)
    for first, then in ((volumes, RULES), (RULES, volumes)):
        after = inject(asking(engine()), first)
        decision = decide(after, NAMESPACE, FakeWorld(), then)
        found, plain = patched(after, make_patch(after, decision, then))["spec"], inject(asking(engine()), then)["spec"]
        assert found.get("initContainers", []) == plain.get("initContainers", [])
        assert {each["name"]: each for each in found["volumes"]} == {each["name"]: each for each in plain["volumes"]}


def test_other_way_of_the_socket_replaces_the_one_before() -> None:
    for first, then in ((CSI, RULES), (RULES, CSI)):
        after = inject(asking(engine()), first)
        decision = decide(after, NAMESPACE, FakeWorld(), then)
        assert patched(after, make_patch(after, decision, then))["spec"] == inject(asking(engine()), then)["spec"]


def test_copy_of_an_injected_pod_is_judged_by_its_spec() -> None:
    """`kubectl debug --copy-to` with its annotations, and a container in front."""
    copied = inject(asking(engine()))
    copied["metadata"]["annotations"][stamps.ANNOTATION_INJECTED] = "forged"
    copied["spec"]["containers"].append({"name": "debugger-x", "image": "busybox"})
    decision = decide(copied, NAMESPACE, FakeWorld(), RULES)
    after = patched(copied, make_patch(copied, decision, RULES))
    assert after["spec"] == copied["spec"]
    assert stamps.read_injected(after["metadata"]["annotations"]) is not None
