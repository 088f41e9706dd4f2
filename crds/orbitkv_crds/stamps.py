"""What the admission webhook writes on pods, and the annotations by which people ask for it.

Stamps are for people and for reports. Nobody may trust one: a pod can be made with any annotation while the webhook is
away, and who may attach is decided by the agent, by the pod's token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from orbitkv_crds.names import ANNOTATION_CACHE_NAMESPACE, GROUP, LABEL_CACHE

# ------------------------------------------------------------------------------------------------------ what people ask

PREFIX: Final = f"{GROUP}/"
ANNOTATION_INJECT: Final = f"{GROUP}/inject"
"""On a pod: "false" leaves it alone. As a label of a Namespace: "true" makes its annotations a default for its pods."""
ANNOTATION_ENGINE: Final = f"{GROUP}/engine"
ANNOTATION_CONTAINER: Final = f"{GROUP}/container"
ANNOTATION_MODE: Final = f"{GROUP}/mode"
ANNOTATION_MULTI_CONNECTOR: Final = f"{GROUP}/multi-connector"
ANNOTATION_INJECT_VIA: Final = f"{GROUP}/inject-via"
ANNOTATION_PYTHONPATH: Final = f"{GROUP}/pythonpath"

ASKS: Final = (
    ANNOTATION_CACHE_NAMESPACE,
    ANNOTATION_INJECT,
    ANNOTATION_ENGINE,
    ANNOTATION_CONTAINER,
    ANNOTATION_MODE,
    ANNOTATION_MULTI_CONNECTOR,
    ANNOTATION_INJECT_VIA,
    ANNOTATION_PYTHONPATH,
)
"""Annotations that people set, on pods, their templates, owners and Namespaces."""

ANNOTATION_FROM: Final = f"{GROUP}/from"
"""On a pod's template: "owner" says that its annotations are copies of its owner's, and go with them."""
FROM_OWNER: Final = "owner"

# --------------------------------------------------------------------------------------------------------------- stamps

ANNOTATION_INJECTED: Final = f"{GROUP}/injected"
ANNOTATION_SKIP_REASON: Final = f"{GROUP}/skip-reason"
STAMPS: Final = (ANNOTATION_INJECTED, ANNOTATION_SKIP_REASON)
"""Annotations that only the webhook writes; with them goes the label `LABEL_CACHE`."""
LABEL_VALUE: Final = "true"

PayloadMode = Literal["init", "imageVolume"]

SKIP_REASONS: Final[Mapping[str, str]] = {
    "unknown-annotation": "an annotation under `orbitkv.io/` that this release does not know; the message names it",
    "invalid-annotation": "an annotation has a value that cannot be used; the message says what can",
    "target-container-not-found": "it is not clear which container is the engine's: name it in `orbitkv.io/container`",
    "engine-unknown": "`orbitkv.io/engine` names an engine that this release does not know, or `inject-via: args` is "
    "asked for and the engine cannot be told",
    "args-unreadable": "`inject-via: args` is asked for, and the container's arguments are not plainly the engine's",
    "kv-transfer-config-present": "`inject-via: args` is asked for, and the arguments have a `--kv-transfer-config`",
    "runtime-isolated": "the pod runs in a sandbox (Kata, gVisor) or on Windows, out of reach of the agent",
    "pod-security-forbids-hostpath": "Pod Security of its namespace forbids the folder that the agent's socket is in",
    "payload-pull-failing": "no node could pull the payload's image, so the pod would not start with it",
    "name-taken": "the pod itself has a volume, container or mount under a name that injection needs",
    "internal-error": "the webhook met an error of its own; its log has more",
}
"""Why a pod that asked is left as it is, and what that means."""

INFORMATION: Final[Mapping[str, str]] = {
    "cache-namespace-not-found": "there was no such CacheNamespace when the pod was made; it attaches once there is",
    "access-denied": "the CacheNamespace did not let the pod in when it was made; its agent decides when it attaches",
    "pool-not-ready": "the pool was not ready when the pod was made; it attaches once an agent is there",
    "image-volume-unavailable": "the cluster keeps no image volumes, so the payload comes by an init container",
}
"""What an injected pod is told: nothing of it stops injection."""

LONGEST_MESSAGE: Final = 1000


@dataclass(frozen=True)
class Note:
    """A reason in one word, and words for a person that say what to do."""

    reason: str
    message: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


@dataclass(frozen=True)
class Injected:
    """What the annotation `injected` says: the pod got what its engine needs."""

    version: str
    """Release of the webhook."""
    namespace: str
    """The CacheNamespace, as `namespace/name`."""
    container: str
    engine: str
    """`vllm`, `sglang`, or empty: not recognised."""
    payload: PayloadMode
    info: tuple[Note, ...] = field(default=())

    def write(self) -> str:
        """Return the annotation's value; the same injection is always the same text."""
        body = {
            "version": self.version,
            "namespace": self.namespace,
            "container": self.container,
            "engine": self.engine,
            "payload": self.payload,
            "info": [{"reason": note.reason, "message": note.message} for note in self.info],
        }
        return json.dumps(body, separators=(",", ":"))


def read_injected(annotations: Mapping[str, Any]) -> Injected | None:
    """Return what the annotation `injected` says; None: it is not there, or is not the webhook's writing."""
    try:
        body = json.loads(annotations.get(ANNOTATION_INJECTED) or "")
        payload: PayloadMode = "imageVolume" if body["payload"] == "imageVolume" else "init"
        texts = [body[name] for name in ("version", "namespace", "container", "engine")]
        notes = tuple(Note(str(each["reason"]), str(each["message"])[:LONGEST_MESSAGE]) for each in body["info"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if not all(isinstance(text, str) for text in texts):
        return None
    version, namespace, container, engine = texts
    return Injected(version, namespace, container, engine, payload, notes)


def skip_reason(note: Note) -> str:
    """Return the value of the annotation `skip-reason`."""
    return str(note)[:LONGEST_MESSAGE]


def read_skip(annotations: Mapping[str, Any]) -> Note | None:
    """Return why the webhook left a pod as it is; None: it does not say, or not in the webhook's words."""
    reason, colon, message = str(annotations.get(ANNOTATION_SKIP_REASON) or "").partition(":")
    if not colon or reason not in SKIP_REASONS:
        return None
    return Note(reason, message.strip()[:LONGEST_MESSAGE])


def is_stamped(labels: Mapping[str, Any]) -> bool:
    """Whether a pod has the webhook's label."""
    return labels.get(LABEL_CACHE) == LABEL_VALUE


def asked(annotations: Mapping[str, Any]) -> Sequence[str]:
    """Return the annotations under `orbitkv.io/` that a person has set, sorted: no stamps, no mark of a copy."""
    return sorted(key for key in annotations if key.startswith(PREFIX) and key not in (*STAMPS, ANNOTATION_FROM))
