"""Workloads: what is asked for on a Deployment, StatefulSet or LeaderWorkerSet is copied to the templates of its pods.

The copy comes in the same request as the change that it follows, so there is one rollout and not two. It carries a mark
and goes when the owner's annotations go; what a person has written on a template is never touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from orbitkv_crds import stamps
from orbitkv_crds.stamps import ANNOTATION_FROM, FROM_OWNER
from orbitkv_operator.admission.patch import Patch

Object = Mapping[str, Any]

TEMPLATES: Final[Mapping[str, tuple[tuple[str, ...], ...]]] = {
    "Deployment": (("spec", "template"),),
    "StatefulSet": (("spec", "template"),),
    "LeaderWorkerSet": (
        ("spec", "leaderWorkerTemplate", "leaderTemplate"),
        ("spec", "leaderWorkerTemplate", "workerTemplate"),
    ),
}
"""Where each kind has the templates of its pods; one that is not there (a leader's of its own) is passed over."""


def copy_to_templates(kind: str, owner: Object) -> Patch:
    """Return what has to change about an owner's templates."""
    metadata = owner.get("metadata") or {}
    annotations = metadata.get("annotations") or {}
    wanted = {key: annotations[key] for key in stamps.asked(annotations)}
    controlled = any(each.get("controller") for each in metadata.get("ownerReferences") or ())
    if controlled and not wanted:
        return []  # its templates are another object's, copies included
    patch: Patch = []
    for path in TEMPLATES[kind]:
        template = _at(owner, path)
        if template is None:
            continue
        metadata_of_pods = template.get("metadata")
        before = (metadata_of_pods or {}).get("annotations") or {}
        after = _annotations(before, wanted)
        if after == before:
            continue
        where = "/" + "/".join(path) + "/metadata"
        if metadata_of_pods is None:
            patch.append({"op": "add", "path": where, "value": {"annotations": after}})
        else:
            patch.append({"op": "add", "path": f"{where}/annotations", "value": after})
    return patch


def unknown(owner: Object) -> list[str]:
    """Return annotations of the owner that this release does not know."""
    annotations = (owner.get("metadata") or {}).get("annotations") or {}
    return [key for key in stamps.asked(annotations) if key not in stamps.ASKS]


def _annotations(before: Mapping[str, str], wanted: Mapping[str, str]) -> Mapping[str, str]:
    """Return what a template's annotations are to be."""
    own = stamps.asked(before)
    copied = before.get(ANNOTATION_FROM) == FROM_OWNER
    if own and not copied:
        return before  # written by a person: it counts more than the owner's
    others = {key: value for key, value in before.items() if key not in own and key != ANNOTATION_FROM}
    if not wanted:
        return others if copied else before
    return {**others, **wanted, ANNOTATION_FROM: FROM_OWNER}


def _at(thing: Object, path: tuple[str, ...]) -> Object | None:
    for part in path:
        found = thing.get(part)
        if not isinstance(found, Mapping):
            return None
        thing = found
    return thing
