"""Objects that the apiserver and the models must judge alike: read from `objects/`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from orbitkv_crds.schema import KINDS, Kind

OBJECTS = Path(__file__).resolve().parent / "objects"


@dataclass(frozen=True)
class Refusal:
    """The field that a refusal names, and a part of what the apiserver says."""

    field: str
    says: str


@dataclass(frozen=True)
class Case:
    """One object, and whether it is refused."""

    kind: Kind
    title: str
    body: dict[str, Any]
    refused: Refusal | None

    def __str__(self) -> str:
        return f"{self.kind.short}: {self.title}"


def _case(kind: Kind, row: dict[str, Any]) -> Case:
    metadata = {"name": row.get("name", "pool" if kind.scope == "Cluster" else "cache")}
    if kind.scope == "Namespaced":
        metadata["namespace"] = "default"
    body = {"apiVersion": "orbitkv.io/v1alpha1", "kind": kind.kind, "metadata": metadata}
    if "spec" in row:
        body["spec"] = row["spec"]
    refused = Refusal(**row["refused"]) if "refused" in row else None
    return Case(kind, row["case"], body, refused)


def cases() -> list[Case]:
    """Return all cases of all kinds."""
    return [
        _case(kind, row)
        for kind in KINDS
        for row in yaml.safe_load((OBJECTS / f"{kind.plural}.yaml").read_text(encoding="utf-8"))
    ]
