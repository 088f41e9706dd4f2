"""AdmissionReviews in and out. Whatever happens in here, the answer lets the object pass."""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from orbitkv_crds.stamps import Note
from orbitkv_operator.admission import owners
from orbitkv_operator.admission.decide import Inject, Rules, Skip, World, decide
from orbitkv_operator.admission.patch import Patch, make_patch

logger = logging.getLogger(__name__)

Object = Mapping[str, Any]
Outcome = Literal["injected", "skipped", "left", "copied", "failed"]
_MOST_VALUES: Final = 500_000
"""A value takes up to a hundred bytes of memory, and three bytes of a body are enough for one."""
_LONGEST_WARNING: Final = 250
"""Longer ones the apiserver cuts off."""


class ReviewError(ValueError):
    """What came is no AdmissionReview; the message says why."""


@dataclass(frozen=True)
class Answer:
    """What the apiserver is told, and what there is to count."""

    body: dict[str, Any]
    outcome: Outcome
    reason: str = ""
    """Of a skipped pod."""


@dataclass(frozen=True)
class Reviewer:
    """Answers reviews from what is known; nothing is asked of anybody."""

    world: World
    rules: Callable[[], Rules]
    """The rules at present."""

    def waits_for(self, review: Object) -> str:
        """Return the namespace of a pod that is too new to be known: the watches show it in a moment. Else nothing."""
        request: Object = review["request"]
        namespace = request.get("namespace")
        if request["kind"]["kind"] != "Pod" or not isinstance(namespace, str):
            return ""
        return namespace if self.world.namespace_labels(namespace) is None else ""

    def answer(self, review: Object) -> Answer:
        """Return the answer to a review."""
        request: Object = review["request"]
        try:
            outcome, patch, note = self._decide(request)
        except Exception:
            logger.exception("a review failed; the object passes as it is", extra=_about(request))
            patch, note = _stamp_of_failure(request, self.rules)
            outcome = "failed"
        return Answer(_body(review, patch, note), outcome, note.reason if note else "")

    def _decide(self, request: Object) -> tuple[Outcome, Patch, Note | None]:
        kind, thing = request["kind"]["kind"], request["object"]
        if kind in owners.TEMPLATES:
            patch = owners.copy_to_templates(kind, thing)
            return ("copied" if patch else "left"), patch, _warning(thing)
        if kind != "Pod" or request.get("subResource"):
            return "left", [], None
        rules = self.rules()
        decision = decide(thing, request["namespace"], self.world, rules)
        patch = make_patch(thing, decision, rules)
        if isinstance(decision, Skip):
            logger.info("skipped", extra=_about(request) | {"reason": decision.note.reason})
            return "skipped", patch, decision.note
        if isinstance(decision, Inject):
            about = {"cache_namespace": decision.stamp.namespace, "container": decision.target.name}
            logger.debug("injected", extra=_about(request) | about)
            return "injected", patch, None
        return "left", patch, None


def read(body: bytes | bytearray) -> dict[str, Any]:
    """Return the review that a request's body holds.

    Raises:
        ReviewError: it is not an AdmissionReview of a CREATE or UPDATE.
    """
    if sum(map(body.count, (b",", b"[", b"{"))) > _MOST_VALUES:
        raise ReviewError(f"not an AdmissionReview (more than {_MOST_VALUES} values)")
    try:
        review = msgspec.json.decode(body)
        request = review["request"]
        if review["kind"] != "AdmissionReview" or review["apiVersion"] != "admission.k8s.io/v1":
            raise ReviewError(f"{review['apiVersion']} {review['kind']} is not served here")
        if not isinstance(request["uid"], str) or not isinstance(request["kind"]["kind"], str):
            raise ReviewError("uid and kind must be strings")
        if not isinstance(request.get("object"), dict):
            raise ReviewError("there is no object in it")
    except (msgspec.MsgspecError, ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, ReviewError):
            raise
        raise ReviewError(f"not an AdmissionReview ({type(error).__name__})") from None
    found: dict[str, Any] = review
    return found


def _body(review: Object, patch: Patch, note: Note | None) -> dict[str, Any]:
    response: dict[str, Any] = {"uid": review["request"]["uid"], "allowed": True}
    if patch:
        encoded = base64.b64encode(msgspec.json.encode(patch)).decode()
        response |= {"patchType": "JSONPatch", "patch": encoded}
    if note is not None:
        response["warnings"] = [f"OrbitKV: {note}"[:_LONGEST_WARNING]]
    return {"apiVersion": review["apiVersion"], "kind": review["kind"], "response": response}


def _warning(owner: Object) -> Note | None:
    """Whoever writes a workload learns of a misspelt key now; its pods say it later."""
    keys = owners.unknown(owner)
    if not keys:
        return None
    return Note("unknown-annotation", f"this release does not know {', '.join(keys)}: the pods start without the cache")


def _stamp_of_failure(request: Object, rules: Callable[[], Rules]) -> tuple[Patch, Note | None]:
    """Return the stamp of a pod on which a decision failed, and what it says; nothing, if that fails too."""
    note = Note(
        "internal-error", "The webhook failed on this pod: see the log of orbitkv-webhook. Making it anew may help."
    )
    try:
        if request["kind"]["kind"] == "Pod":
            return make_patch(request["object"], Skip(note), rules()), note
    except Exception:
        logger.debug("the pod cannot be stamped either", exc_info=True)
    return [], None


def _about(request: Object) -> dict[str, str]:
    metadata = request.get("object", {}).get("metadata")
    found = metadata if isinstance(metadata, dict) else {}
    name = found.get("name") or f"{found.get('generateName', '')}..."
    return {"kind": str(request["kind"]["kind"]), "object": f"{request.get('namespace')}/{name}"}
