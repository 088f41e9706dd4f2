"""Whose an object is: nothing is changed or deleted that is not ours."""

from __future__ import annotations

from enum import Enum

from orbitkv_crds import names
from orbitkv_operator.cluster.api import Manifest


class Owner(Enum):
    """Whose an object with the name of a child is."""

    NOBODY = "not there"
    OURS = "this pool's"
    ORPHAN = "this pool's, without its mark: left behind by `--cascade=orphan`, or restored from a backup"
    FORMER = "an earlier pool's of the same name: the garbage collector removes it"
    OTHER = "somebody else's"


def owner_of(live: Manifest | None, pool: str, uid: str) -> Owner:
    """Return whose `live` is, seen from the pool with this name and uid."""
    if live is None:
        return Owner.NOBODY
    metadata = live["metadata"]
    controller = next((it for it in metadata.get("ownerReferences") or () if it.get("controller")), None)
    if controller is not None:
        if controller["uid"] == uid:
            return Owner.OURS
        same_name = controller["kind"] == "ManagerPool" and controller["name"] == pool
        return Owner.FORMER if same_name else Owner.OTHER
    labels = metadata.get("labels") or {}
    marked = labels.get("app.kubernetes.io/managed-by") == names.MANAGED_BY and labels.get(names.LABEL_POOL) == pool
    return Owner.ORPHAN if marked else Owner.OTHER
