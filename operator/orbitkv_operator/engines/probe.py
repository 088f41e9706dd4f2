"""Whether the webhook answers: each minute a pod that asks for a cache is made in a dry run.

The webhook's failures are ignored, so that it keeps no pod from starting; this is how its absence is noticed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from orbitkv_crds import names
from orbitkv_crds.stamps import is_stamped
from orbitkv_operator.cluster.api import PODS, Api, Manifest

logger = logging.getLogger(__name__)

PROBE_NAME: Final = "orbitkv-webhook-probe"


def probe_pod(image: str, namespace: str) -> Manifest:
    """Return a pod for dry runs that meets every Pod Security standard."""
    security = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "runAsNonRoot": True,
        "runAsUser": 10001,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    metadata = {
        "name": PROBE_NAME,
        "namespace": namespace,
        "labels": {names.LABEL_PROBE: "true"},
        "annotations": {names.ANNOTATION_CACHE_NAMESPACE: PROBE_NAME},
    }
    container = {"name": "engine", "image": image, "securityContext": security}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container]}}


def answers(api: Api, image: str, namespace: str) -> bool:
    """Return whether the webhook saw a pod that was made in a dry run. Injected or skipped, it leaves its label.

    Raises:
        ApiError: the dry run itself was refused.
    """
    made = api.create(PODS, namespace, probe_pod(image, namespace), dry_run=True)
    return is_stamped(made["metadata"].get("labels") or {})


@dataclass
class Probe:
    """Asks whenever it is called, and remembers the last answer."""

    api: Api
    namespace: str
    """The release namespace."""
    image: str
    told: Callable[[bool], None]
    """Called with each answer."""
    _last: bool = True

    def run(self) -> None:
        """Ask once.

        Raises:
            ApiError: the dry run itself was refused: that says nothing about the webhook.
        """
        answer = answers(self.api, self.image, self.namespace)
        if answer != self._last:
            if answer:
                logger.info("the webhook answers again")
            else:
                logger.error(
                    "the webhook does not answer: pods that ask for a cache start without it",
                    extra={"look_at": f"kubectl -n {self.namespace} get pods -l app.kubernetes.io/component=webhook"},
                )
        self._last = answer
        self.told(answer)
