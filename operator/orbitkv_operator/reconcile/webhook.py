"""What the operator does for the webhook: its certificate, the CA that the apiserver trusts, and what it cannot find
out by itself (a ConfigMap)."""

from __future__ import annotations

import base64
import logging
from dataclasses import dataclass
from typing import Any, Final

from orbitkv_crds import names
from orbitkv_operator.admission.findings import Findings
from orbitkv_operator.certificates import CertificateError, read
from orbitkv_operator.cluster.api import CONFIG_MAPS, PODS, SECRETS, WEBHOOKS, Api, ApiError, Manifest
from orbitkv_operator.cluster.compare import covers
from orbitkv_operator.queue import Key
from orbitkv_operator.reconcile.payload import PayloadPulls
from orbitkv_operator.reconcile.system import Owner, renew_secret
from orbitkv_operator.settings import Settings

logger = logging.getLogger(__name__)

WEBHOOK: Final = Key("Webhook", "webhook")


@dataclass
class WebhookReconciler:
    """Brings all three up to date, again and again."""

    api: Api
    settings: Settings
    owner: Owner
    payloads: PayloadPulls

    def reconcile(self, key: Key) -> float:
        """Look after the webhook; return in how many seconds to look again.

        Raises:
            ApiError: a request failed.
        """
        self._certificate()
        self._findings()
        return self.settings.check_seconds

    def _certificate(self) -> None:
        """Keep certificate and CA; with cert-manager, it and its injector of CAs do."""
        if self.settings.certificates != "self-managed":
            return
        server = names.webhook_server_name(self.settings.namespace)
        dns = (server, f"{server}.cluster.local", names.WEBHOOK)
        secret = self.api.get(SECRETS, self.settings.namespace, names.WEBHOOK)
        secret = renew_secret(self.api, self.settings.namespace, names.WEBHOOK, secret, dns, self.owner)
        try:
            bundle = base64.b64encode(read((secret or {}).get("data")).bundle).decode()
        except CertificateError as error:
            raise ApiError(
                404, f"Secret {names.WEBHOOK} is not usable ({error}): delete it, and it is made anew"
            ) from None
        live = self.api.get(WEBHOOKS, None, names.WEBHOOK)
        if live is None:
            return  # the chart makes it; without it nobody asks the webhook
        wanted = {
            "apiVersion": WEBHOOKS.api_version,
            "kind": WEBHOOKS.kind,
            "metadata": {"name": names.WEBHOOK},
            "webhooks": [
                {"name": each["name"], "clientConfig": {"caBundle": bundle}} for each in live.get("webhooks") or ()
            ],
        }
        if not covers(live, wanted):
            self.api.apply(WEBHOOKS, wanted)
            logger.info("the apiserver trusts the webhook's CA from now on")

    def _findings(self) -> None:
        image = self.settings.payload_image
        found = Findings(image, self._image_volumes(), self.payloads.failing(image))
        if found.pull_failing:
            logger.warning("no node can pull the payload", extra={"problem": found.pull_failing})
        wanted = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": names.WEBHOOK,
                "namespace": self.settings.namespace,
                "labels": {"app.kubernetes.io/managed-by": names.MANAGED_BY, "app.kubernetes.io/part-of": "orbitkv"},
                "ownerReferences": self.owner.references(),
            },
            "data": found.write(),
        }
        if not covers(self.api.get(CONFIG_MAPS, self.settings.namespace, names.WEBHOOK), wanted):
            self.api.apply(CONFIG_MAPS, wanted)

    def _image_volumes(self) -> bool:
        """Whether the apiserver keeps image volumes: where the feature is off it drops them, and the pod passes."""
        if self.settings.payload_mode != "imageVolume":
            return False
        try:
            made = self.api.create(PODS, self.settings.namespace, _trial(self.settings), dry_run=True)
        except ApiError as error:
            if error.status in (400, 422):  # it keeps the field and refuses what is in it, or is too old to know it
                return False
            raise
        return any("image" in volume for volume in made["spec"].get("volumes") or ())


def _trial(settings: Settings) -> Manifest:
    """Return a pod with an image volume; it is never made."""
    volume: dict[str, Any] = {"name": "trial", "image": {"reference": settings.payload_image}}
    container = {
        "name": "trial",
        "image": settings.payload_image,
        "volumeMounts": [{"name": "trial", "mountPath": "/trial"}],
        "resources": {"requests": {"cpu": "1m", "memory": "1Mi"}, "limits": {"cpu": "1m", "memory": "1Mi"}},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"{names.WEBHOOK}-image-volume", "namespace": settings.namespace},
        "spec": {"containers": [container], "volumes": [volume], "restartPolicy": "Never"},
    }
