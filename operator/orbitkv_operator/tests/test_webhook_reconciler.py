"""What the operator does for the webhook, and what agents' pods show of the payload."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from orbitkv_crds import names
from orbitkv_operator.admission.findings import Findings
from orbitkv_operator.builders import agents
from orbitkv_operator.builders.agents import Context
from orbitkv_operator.certificates import read
from orbitkv_operator.cluster.api import CONFIG_MAPS, PODS, SECRETS, WEBHOOKS, ApiError, Manifest, Resource
from orbitkv_operator.health import read_agent
from orbitkv_operator.names import PAYLOAD_CONTAINER
from orbitkv_operator.reconcile.payload import PayloadPulls, Pulls, pulls, with_image
from orbitkv_operator.reconcile.system import Owner
from orbitkv_operator.reconcile.webhook import WEBHOOK, WebhookReconciler
from orbitkv_operator.rollout import Health
from orbitkv_operator.tests.fakes import RELEASE, SETTINGS, FakeApi, pod_of, pool

IMAGE = "registry/payload:1"
INJECTING = SETTINGS.model_copy(update={"webhook": True, "payload_image": IMAGE})


class World:
    def __init__(self, **settings: Any) -> None:
        self.api, self.payloads = FakeApi(), PayloadPulls()
        found = INJECTING.model_copy(update=settings)
        self.reconciler = WebhookReconciler(self.api, found, Owner(self.api, RELEASE), self.payloads)

    def reconcile(self) -> None:
        self.reconciler.reconcile(WEBHOOK)

    def get(self, resource: Resource, namespace: str = RELEASE) -> Manifest:
        return self.api.objects[resource, namespace, names.WEBHOOK]

    def findings(self) -> Findings:
        return Findings.read(self.get(CONFIG_MAPS)["data"])


def configuration() -> Manifest:
    service = {"name": names.WEBHOOK, "namespace": RELEASE}
    webhooks = [{"name": f"{name}.orbitkv.io", "clientConfig": {"service": service}} for name in ("pods", "owners")]
    return {"metadata": {"name": names.WEBHOOK}, "webhooks": webhooks}


def test_certificate_is_made_for_the_service_and_its_ca_is_told() -> None:
    world = World()
    world.api.add(WEBHOOKS, configuration())
    world.reconcile()
    bundle = read(world.get(SECRETS)["data"]).bundle
    for each in world.get(WEBHOOKS, "")["webhooks"]:
        assert base64.b64decode(each["clientConfig"]["caBundle"]) == bundle


def test_second_look_writes_nothing() -> None:
    world = World()
    world.reconcile()
    written = len(world.api.writes)
    world.reconcile()
    assert len(world.api.writes) == written


def test_without_a_configuration_there_is_nothing_to_tell() -> None:
    world = World()
    world.reconcile()
    assert world.get(SECRETS)["type"] == "kubernetes.io/tls"
    assert (WEBHOOKS, "", names.WEBHOOK) not in world.api.objects


def test_cert_manager_is_left_to_its_work() -> None:
    world = World(certificates="cert-manager")
    world.api.add(WEBHOOKS, configuration())
    world.reconcile()
    assert [kind for _, kind, _ in world.api.writes] == ["ConfigMap"]


@pytest.mark.parametrize("kept", [True, False])
def test_image_volumes_are_believed_when_they_come_back(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(payload_mode="imageVolume")

    def create(resource: Resource, namespace: str | None, manifest: Manifest, *, dry_run: bool = False) -> Manifest:
        if resource is not PODS:
            return FakeApi.create(world.api, resource, namespace, manifest, dry_run=dry_run)
        assert dry_run
        return manifest if kept else manifest | {"spec": {"volumes": [{"name": "trial", "emptyDir": {}}]}}

    monkeypatch.setattr(world.api, "create", create)
    world.reconcile()
    assert world.findings().image_volumes is kept


def test_apiserver_that_refuses_image_volumes_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(payload_mode="imageVolume")

    def before(verb: str, resource: Resource) -> None:
        if resource is PODS:
            raise ApiError(422, "unknown volume")

    world.api.before = before
    world.reconcile()
    assert world.findings() == Findings(IMAGE)


# -------------------------------------------------------------------------------------------------------------- payload


def agent_pod(reason: str = "", *, image: str = IMAGE, pulled: bool = False, ready: bool = True) -> Manifest:
    context = Context(INJECTING.model_copy(update={"payload_image": image}), "")
    daemon_set = agents.daemon_set(pool(), context)
    daemon_set["metadata"]["uid"] = "u"
    pod = pod_of(daemon_set, "node-a", ready)
    pod["metadata"]["uid"] = "uid-of-pod"
    pod["status"]["containerStatuses"][0]["ready"] = ready
    state: Manifest = {"running": {}} if pulled else {"waiting": {"reason": reason, "message": "back-off: not found"}}
    waiting = {"name": PAYLOAD_CONTAINER, "ready": pulled, "imageID": "sha256:1" if pulled else "", "state": state}
    pod["status"]["containerStatuses"].append(waiting)
    if not pulled:
        pod["status"]["conditions"][1]["status"] = "False"
    return pod


def test_nodes_that_have_the_image_or_fail_are_counted_and_the_others_not() -> None:
    pods = [
        agent_pod(pulled=True),
        agent_pod("ImagePullBackOff"),
        agent_pod("ContainerCreating"),
        agent_pod("ErrImagePull", image="registry/payload:0"),
    ]
    assert pulls(pods, IMAGE) == Pulls(1, 1, "back-off: not found")
    assert pulls([], IMAGE) == Pulls()


def test_injection_stops_only_while_every_node_that_tried_fails() -> None:
    found = PayloadPulls()
    assert found.failing(IMAGE) == ""
    found.note("a", Pulls(0, 2, "not found"))
    assert IMAGE in found.failing(IMAGE) and "not found" in found.failing(IMAGE)
    found.note("b", Pulls(1, 0))
    assert found.failing(IMAGE) == ""
    found.forget("b")
    assert found.failing(IMAGE) != ""
    found.note("a", Pulls())
    assert found.failing(IMAGE) == ""


def test_pods_that_pull_another_image_are_told_and_their_agents_run_on() -> None:
    pods = [agent_pod(image="registry/payload:0"), agent_pod(pulled=True)]
    gone = agent_pod(image="registry/payload:0")
    gone["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    (told,) = with_image([*pods, gone], IMAGE)
    assert told["metadata"]["name"] == pods[0]["metadata"]["name"]
    assert told["spec"] == {"containers": [{"name": PAYLOAD_CONTAINER, "image": IMAGE}]}
    assert with_image(pods, "") == []


def test_change_is_told_at_once_and_only_a_change() -> None:
    told: list[str] = []
    found = PayloadPulls(lambda: told.append("changed"))
    found.note("a", Pulls())
    assert told == []
    found.note("a", Pulls(0, 1, "not found"))
    found.note("a", Pulls(0, 2, "not found"))
    assert len(told) == 1
    found.note("a", Pulls(1, 1))
    found.forget("a")
    found.forget("a")
    assert len(told) == 3


def test_webhook_is_told_of_it_and_of_the_image_that_it_is_about() -> None:
    world = World()
    world.payloads.note("a", Pulls(0, 1, "not found"))
    world.reconcile()
    assert world.findings().payload_image == IMAGE
    assert "not found" in world.findings().pull_failing
    world.payloads.note("a", Pulls(1, 0))
    world.reconcile()
    assert world.findings() == Findings(IMAGE)


def test_agent_serves_whatever_becomes_of_the_payload() -> None:
    assert read_agent(agent_pod("ImagePullBackOff")).health is Health.READY
    assert read_agent(agent_pod("ImagePullBackOff", ready=False)).health is Health.NOT_READY


def test_no_agent_is_replaced_for_another_payload() -> None:
    contexts = [Context(SETTINGS, ""), Context(INJECTING, "")]
    hashes = {agents.template_hash(pool(), context) for context in contexts}
    assert len(hashes) == 1
    specs = [agents.daemon_set(pool(), context)["spec"]["template"]["spec"] for context in contexts]
    assert [len(spec["containers"]) for spec in specs] == [1, 2]
    (agent, payload) = specs[1]["containers"]
    assert (agent["name"], payload["image"]) == (names.AGENT_CONTAINER, IMAGE)
    assert payload["command"] == [names.PAYLOAD_COPY, "--wait"]
