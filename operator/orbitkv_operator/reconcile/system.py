"""What the operator keeps for itself: the report server's certificate, and the address that agents reach it at."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from orbitkv_crds import names
from orbitkv_operator.certificates import CertificateError, Serving, read, renewed
from orbitkv_operator.cluster.api import DEPLOYMENTS, ENDPOINT_SLICES, SECRETS, Api, ApiError, Manifest
from orbitkv_operator.cluster.compare import covers
from orbitkv_operator.queue import Key
from orbitkv_operator.settings import Settings

logger = logging.getLogger(__name__)

CERTIFICATES: Final = Key("System", "certificates")
ENDPOINTS: Final = Key("System", "endpoints")
KEYS: Final = (CERTIFICATES, ENDPOINTS)


@dataclass
class Owner:
    """What ends together with the installation belongs to the operator's Deployment."""

    api: Api
    namespace: str
    _known: list[Manifest] | None = None

    def references(self) -> list[Manifest]:
        """Return owner references; none if there is no Deployment (then the operator runs outside of the cluster).

        Raises:
            ApiError: it could not be looked up.
        """
        if self._known is None:
            found = self.api.get(DEPLOYMENTS, self.namespace, names.OPERATOR)
            owner = {"apiVersion": "apps/v1", "kind": "Deployment", "name": names.OPERATOR}
            self._known = [owner | {"uid": found["metadata"]["uid"]}] if found else []
        return self._known


@dataclass
class SystemReconciler:
    """Brings both up to date, again and again."""

    api: Api
    settings: Settings
    owner: Owner
    serving: Callable[[Serving], None]
    """Called with the certificate whenever it was read."""
    port: Callable[[], int]
    """The port that reports are taken at; 0: none yet."""

    def reconcile(self, key: Key) -> float:
        """Look after one of the two; return in how many seconds to look again.

        Raises:
            ApiError: a request failed.
        """
        if key == CERTIFICATES:
            self._certificates()
        else:
            self._endpoints()
        return self.settings.check_seconds

    def _certificates(self) -> None:
        namespace = self.settings.namespace
        secret = self.api.get(SECRETS, namespace, names.CERTIFICATES_SECRET)
        if self.settings.certificates == "self-managed":
            secret = self._renew(secret)
        try:
            found = read((secret or {}).get("data"))
        except CertificateError as error:
            maker = "cert-manager" if self.settings.certificates == "cert-manager" else "the operator"
            raise ApiError(
                404,
                f"Secret {names.CERTIFICATES_SECRET} is not usable yet ({error}); {maker} makes it. Until then agents "
                "cannot report.",
            ) from None
        self.serving(found)

    def _renew(self, secret: Manifest | None) -> Manifest | None:
        namespace = self.settings.namespace
        server = names.reports_server_name(namespace)
        dns = (server, f"{server}.cluster.local", names.REPORTS_SERVICE)
        return renew_secret(self.api, namespace, names.CERTIFICATES_SECRET, secret, dns, self.owner)

    def _endpoints(self) -> None:
        port = self.port()
        if not port:
            return
        address = self.settings.pod_ip or _own_address()
        wanted = {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": names.REPORTS_SERVICE,
                "namespace": self.settings.namespace,
                "labels": {
                    "kubernetes.io/service-name": names.REPORTS_SERVICE,
                    "endpointslice.kubernetes.io/managed-by": names.MANAGED_BY,
                    "app.kubernetes.io/part-of": "orbitkv",
                },
                "ownerReferences": self.owner.references(),
            },
            "addressType": "IPv6" if ":" in address else "IPv4",
            "endpoints": [{"addresses": [address], "conditions": {"ready": True}}],
            "ports": [{"name": "reports", "port": port, "protocol": "TCP"}],
        }
        live = self.api.get(ENDPOINT_SLICES, self.settings.namespace, names.REPORTS_SERVICE)
        if live is not None and live.get("addressType") != wanted["addressType"]:
            self.api.delete(
                ENDPOINT_SLICES, self.settings.namespace, names.REPORTS_SERVICE, uid=live["metadata"]["uid"]
            )
            live = None
        if not covers(live, wanted):
            self.api.apply(ENDPOINT_SLICES, wanted)
            logger.info("agents report here", extra={"address": address, "port": port})


def renew_secret(
    api: Api, namespace: str, name: str, secret: Manifest | None, dns: Sequence[str], owner: Owner
) -> Manifest | None:
    """Make or renew a certificate for `dns` where it is time to; return the Secret `name` as it is then.

    Args:
        secret: the Secret as it is; None: there is none.

    Raises:
        ApiError: a request failed.
    """
    data = renewed((secret or {}).get("data"), dns)
    if data is None:
        return secret
    logger.info("making a certificate", extra={"secret_name": name})
    metadata = {
        "name": name,
        "namespace": namespace,
        "labels": {"app.kubernetes.io/managed-by": names.MANAGED_BY, "app.kubernetes.io/part-of": "orbitkv"},
        "ownerReferences": owner.references(),
    }
    body = {"apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls", "metadata": metadata, "data": data}
    if secret is None:
        return api.create(SECRETS, namespace, body)
    metadata["resourceVersion"] = secret["metadata"]["resourceVersion"]  # another replica may have been quicker
    body["type"] = secret.get("type", "Opaque")
    return api.replace(SECRETS, namespace, body)


def _own_address() -> str:
    """Return the address from which this machine would reach others; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])
