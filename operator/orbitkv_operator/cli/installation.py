"""Checks of what is installed: the cluster's version, the kinds, operator, webhook and their certificates."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import cache
from importlib.metadata import version
from typing import Any, Final

from orbitkv_crds import names
from orbitkv_crds.schema import crds
from orbitkv_operator.certificates import CertificateError, read
from orbitkv_operator.cli.cluster import Cluster
from orbitkv_operator.cli.findings import Finding, info, ok, problem, sentence, warning
from orbitkv_operator.cluster.api import (
    CACHES,
    CRDS,
    DAEMON_SETS,
    DEPLOYMENTS,
    LEASES,
    NAMESPACES,
    POOLS,
    SECRETS,
    WEBHOOKS,
    ApiError,
    Manifest,
    Resource,
)
from orbitkv_operator.engines.probe import answers

OLDEST: Final = (1, 31)
SOON: Final = timedelta(days=7)
ENFORCE: Final = "pod-security.kubernetes.io/enforce"
_INSTALL: Final = "`helm upgrade --install orbitkv charts/orbitkv --namespace orbitkv-system`"


def kubernetes(cluster: Cluster) -> Iterator[Finding]:
    """Is the cluster's version one that this release runs on?"""
    major, minor = cluster.api.server_version()
    if (major, minor) < OLDEST:
        yield problem(
            "Kubernetes",
            f"Version {major}.{minor} is older than {OLDEST[0]}.{OLDEST[1]}.",
            "Upgrade the cluster: fields and rules of OrbitKV's kinds need it.",
        )
    else:
        yield ok("Kubernetes", f"Version {major}.{minor}.")


def definitions(cluster: Cluster) -> Iterator[Finding]:
    """Are both kinds there, and of this release?"""
    for kind in (POOLS, CACHES):
        if not cluster.api.serves(kind):
            yield problem(kind.kind, "The cluster does not have this kind.", f"{_INSTALL} (with crds.install).")
            continue
        name = f"{kind.plural}.{kind.group}"
        found = cluster.get(CRDS, None, name)
        lacks = _lacks(found, kind) if found else ""
        if lacks:
            yield warning(
                f"CustomResourceDefinition {name}",
                f"It is older than this command: it lacks {lacks}.",
                "Upgrade the chart with crds.install, or apply crds/*.yaml.",
            )
        else:
            yield ok(f"CustomResourceDefinition {name}", "It is there.")


def _lacks(found: Manifest, kind: Resource) -> str:
    """Return a field of this release's schema that a definition lacks, or ""."""
    ours = next(it for it in _definitions() if it["spec"]["names"]["kind"] == kind.kind)
    mine = ours["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    theirs = found["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    return next((f"{part}.{path}" for part in ("spec", "status") for path in _missing(mine[part], theirs[part])), "")


@cache
def _definitions() -> list[dict[str, Any]]:
    return crds()


def _missing(mine: dict[str, Any], theirs: dict[str, Any]) -> Iterator[str]:
    for name, node in (mine.get("properties") or {}).items():
        other = (theirs.get("properties") or {}).get(name)
        if other is None:
            yield name
        else:
            yield from (f"{name}.{deeper}" for deeper in _missing(node, other))


def operator(cluster: Cluster) -> Iterator[Finding]:
    """Does an operator act, and is it of this release?"""
    system = cluster.system()
    if not system:
        yield problem(
            "Operator",
            "OrbitKV is not installed: there is no Deployment orbitkv-operator in any namespace.",
            f"{_INSTALL}; or name its namespace with --system-namespace.",
        )
        return
    found = cluster.get(DEPLOYMENTS, system, names.OPERATOR)
    if found is None:
        yield problem("Operator", f"There is no Deployment {names.OPERATOR} in namespace {system}.", f"{_INSTALL}.")
        return
    yield _deployment("Operator", found)
    release = (found["metadata"].get("labels") or {}).get("app.kubernetes.io/version", "")
    if release and release != version("orbitkv"):
        yield info("Operator", f"It is of release {release}; this command is of {version('orbitkv')}.")
    lease = cluster.get(LEASES, system, names.OPERATOR)
    spec = (lease or {}).get("spec") or {}
    renewed = spec.get("renewTime")
    age = (datetime.now(UTC) - datetime.fromisoformat(renewed)).total_seconds() if renewed else float("inf")
    if not spec.get("holderIdentity") or age > 4 * (spec.get("leaseDurationSeconds") or 15):
        yield problem(
            "Operator",
            "None of its replicas acts: nobody holds the Lease orbitkv-operator.",
            f"`kubectl -n {system} logs -l app.kubernetes.io/component=operator` says why.",
        )
    else:
        yield ok("Operator", f"{spec['holderIdentity']} acts.")


def _deployment(about: str, found: Manifest) -> Finding:
    metadata, status = found["metadata"], found.get("status") or {}
    wanted, ready = found["spec"].get("replicas", 1), status.get("readyReplicas") or 0
    where = f"Deployment {metadata['name']} in namespace {metadata['namespace']}"
    fix = f"`kubectl -n {metadata['namespace']} describe pods -l app.kubernetes.io/component={about.lower()}` says why."
    if not ready:
        return problem(about, f"{where}: 0 of {wanted} pods ready.", fix)
    if ready < wanted:
        return warning(about, f"{where}: {ready} of {wanted} pods ready.", fix)
    return ok(about, f"{where}: {ready} of {wanted} pods ready.")


def release_namespace(cluster: Cluster) -> Iterator[Finding]:
    """May agents use the folders of their nodes?"""
    system = cluster.system()
    if not system:
        return
    found = cluster.get(NAMESPACES, None, system)
    enforced = ((found or {"metadata": {}})["metadata"].get("labels") or {}).get(ENFORCE, "")
    label = f"`kubectl label namespace {system} {ENFORCE}=privileged --overwrite`"
    if enforced == "privileged":
        yield ok(f"Namespace {system}", "Pod Security lets agents use folders of their nodes.")
    elif enforced:
        yield problem(
            f"Namespace {system}", f"Pod Security enforces {enforced}: agents, which use hostPath, cannot run.", label
        )
    else:
        yield warning(
            f"Namespace {system}",
            "It has no Pod Security label: where the cluster's default forbids it, no agent runs.",
            label,
        )


def pull_secrets(cluster: Cluster) -> Iterator[Finding]:
    """Are the secrets there with which images are pulled?"""
    system = cluster.system()
    if not system:
        return
    wanted: dict[str, str] = {}
    for deployment in cluster.all(DEPLOYMENTS, system):
        if (deployment["metadata"].get("labels") or {}).get("app.kubernetes.io/part-of") == "orbitkv":
            for secret in deployment["spec"]["template"]["spec"].get("imagePullSecrets") or ():
                wanted.setdefault(secret["name"], f"Deployment {deployment['metadata']['name']}")
    for pool in cluster.pools():
        for secret in pool["spec"].get("imagePullSecrets") or ():
            wanted.setdefault(secret["name"], f"ManagerPool {pool['metadata']['name']}")
    for name, who in sorted(wanted.items()):
        if cluster.get(SECRETS, system, name) is None:
            yield problem(
                f"Secret {system}/{name}",
                f"{who} pulls images with it, and it does not exist.",
                f"Make it in namespace {system} (`kubectl create secret docker-registry`), or remove the reference.",
            )
        else:
            yield ok(f"Secret {system}/{name}", f"{who} pulls images with it.")


def certificates(cluster: Cluster) -> Iterator[Finding]:
    """Do the certificates of the report server and of the webhook still hold?"""
    system = cluster.system()
    if not system:
        return
    served = {names.CERTIFICATES_SECRET: "Agents cannot report to the operator"}
    if cluster.get(DEPLOYMENTS, system, names.WEBHOOK) is not None:
        served[names.WEBHOOK] = "The apiserver does not trust the webhook, and pods start without the cache"
    for name, effect in served.items():
        about = f"Secret {system}/{name}"
        fix = f"`kubectl -n {system} logs -l app.kubernetes.io/component=operator` (or cert-manager's) says why."
        found = cluster.get(SECRETS, system, name)
        if found is None:
            yield problem(about, f"It is not there. {effect}.", fix)
            continue
        try:
            expires = read(found.get("data")).expires
        except CertificateError as error:
            yield problem(about, f"It cannot be used: {error}. {effect}.", fix)
            continue
        left = expires - datetime.now(UTC)
        day = expires.strftime("%Y-%m-%d")
        if left < timedelta():
            yield problem(about, f"The certificate has expired on {day}. {effect}.", fix)
        elif left < SOON:
            yield warning(about, f"The certificate expires on {day} and was not renewed.", fix)
        else:
            yield ok(about, f"The certificate holds until {day}.")


def webhook(cluster: Cluster) -> Iterator[Finding]:
    """Is there a webhook, and does it see a pod that asks for a cache?"""
    system = cluster.system()
    if not system:
        return
    found = cluster.get(DEPLOYMENTS, system, names.WEBHOOK)
    if found is None:
        yield info("Webhook", "It is not installed (injection.enabled of the chart): annotations on pods do nothing.")
        return
    yield _deployment("Webhook", found)
    configuration = cluster.get(WEBHOOKS, None, names.WEBHOOK)
    if configuration is None:
        yield problem("Webhook", f"There is no MutatingWebhookConfiguration {names.WEBHOOK}.", f"{_INSTALL}.")
        return
    if not all((it.get("clientConfig") or {}).get("caBundle") for it in configuration.get("webhooks") or ()):
        yield problem(
            "Webhook",
            "Its configuration has no caBundle, so the apiserver cannot trust it.",
            "The operator (or cert-manager) fills it; its log says why it has not: "
            f"`kubectl -n {system} logs -l app.kubernetes.io/component=operator`.",
        )
        return
    image = found["spec"]["template"]["spec"]["containers"][0]["image"]
    try:
        seen = answers(cluster.api, image, system)
    except ApiError as error:
        if error.status in (0, 401, 403):
            raise
        yield warning("Webhook", f"It could not be tried: {sentence(str(error))}", "Correct what the answer names.")
        return
    if seen:
        yield ok("Webhook", "It answers: a pod that was tried in a dry run was seen.")
    else:
        yield problem(
            "Webhook",
            "It does not answer the apiserver: a pod that was tried in a dry run was not seen.",
            f"`kubectl -n {system} logs -l app.kubernetes.io/component=webhook`; where the control plane is elsewhere "
            f"(private clusters), let it reach port {names.WEBHOOK_PORT} of the nodes or pods.",
        )


def csi_driver(cluster: Cluster) -> Iterator[Finding]:
    """Where pods get the agent's folder by the CSI driver: is it on every node that they may come to?"""
    system = cluster.system()
    if not system:
        return
    webhook = cluster.get(DEPLOYMENTS, system, names.WEBHOOK)
    environment = webhook["spec"]["template"]["spec"]["containers"][0].get("env") or () if webhook else ()
    wanted = {"name": "ORBITKV_WEBHOOK_SOCKET_VOLUME", "value": "csi"} in environment
    found = cluster.get(DAEMON_SETS, system, names.CSI)
    where = f"DaemonSet {names.CSI} in namespace {system}"
    if found is None:
        if wanted:
            fix = f"{_INSTALL} makes it (injection.socketVolume: csi)."
            yield problem("CSI driver", f"There is no {where}: pods that ask for a cache cannot start.", fix)
        return
    status = found.get("status") or {}
    nodes, ready = status.get("desiredNumberScheduled") or 0, status.get("numberReady") or 0
    if not nodes:
        waiting = "pods that ask for a cache cannot start" if wanted else "pods with its volumes cannot end"
        fix = "Correct injection.csi.nodeSelector of the chart."
        yield problem("CSI driver", f"{where} is for no node: {waiting}.", fix)
    elif ready < nodes:
        yield problem(
            "CSI driver",
            f"{where} is ready on {ready} of {nodes} nodes: on the others pods with its volumes neither start nor end.",
            f"`kubectl -n {system} describe pods -l app.kubernetes.io/component=csi` says why.",
        )
    else:
        yield ok("CSI driver", f"{where} is ready on all {nodes} of its nodes.")
