"""CustomResourceDefinitions, made from the models.

What pydantic makes is not what the apiserver takes ("structural"): references are put in place, "or null" goes (what is
not required can be left out), and rules between fields become CEL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import yaml

from orbitkv_crds import cachenamespace, managerpool
from orbitkv_crds.model import Model
from orbitkv_crds.names import GROUP, VERSION
from orbitkv_crds.types import CHANGE_KEY, Change

Node = dict[str, Any]

_LARGEST_INT32: Final = 2**31 - 1
_FIRST: Final = ("description", "type", "format", "enum", "default", "required", "properties")
_ABOUT_METADATA: Final[dict[str, Node]] = {
    "apiVersion": {"type": "string", "description": f"Version of this kind of object: {GROUP}/{VERSION}."},
    "kind": {"type": "string", "description": "Kind of the object."},
    "metadata": {"type": "object"},
}


@dataclass(frozen=True)
class Column:
    """A column of `kubectl get`; `wide`: only with `-o wide`."""

    name: str
    path: str
    description: str
    kind: str = "string"
    wide: bool = False


def _condition(kind: str, field: str) -> str:
    return f'.status.conditions[?(@.type=="{kind}")].{field}'


_AGE: Final = Column("Age", ".metadata.creationTimestamp", "Time since it was made.", "date")


@dataclass(frozen=True)
class Kind:
    """What a CustomResourceDefinition needs beside the schema."""

    model: type[Model]
    kind: str
    plural: str
    short: str
    scope: str
    columns: tuple[Column, ...]
    selectable: tuple[str, ...] = ()


KINDS: Final = (
    Kind(
        model=managerpool.ManagerPool,
        kind=managerpool.KIND,
        plural=managerpool.PLURAL,
        short="mpool",
        scope="Cluster",
        columns=(
            Column("Nodes", ".status.nodes.desired", "Nodes that are to have an agent.", "integer"),
            Column("Ready", ".status.nodes.ready", "Nodes whose agent is ready.", "integer"),
            Column("Capacity", ".status.tiers.dram.capacity", "Memory for pages, all nodes together."),
            Column("Used", ".status.tiers.dram.used", "What pages take of it."),
            Column("Route", ".status.gpuRoute", "The way to the GPUs."),
            Column("Status", _condition("Ready", "reason"), "Why it is ready, or not."),
            Column("Updated", ".status.nodes.updated", "Nodes whose agent is as the spec says.", "integer", wide=True),
            Column("Namespaces", ".status.cacheNamespaces", "CacheNamespaces that refer to it.", "integer", wide=True),
            _AGE,
        ),
    ),
    Kind(
        model=cachenamespace.CacheNamespace,
        kind=cachenamespace.KIND,
        plural=cachenamespace.PLURAL,
        short="cns",
        scope="Namespaced",
        columns=(
            Column("Pool", ".spec.poolRef.name", "The pool that keeps it."),
            Column("Ready", _condition("Ready", "status"), "Whether engines can use it."),
            Column("In use", _condition("InUse", "status"), "Whether an engine is attached."),
            Column("Used", ".status.tiers.dram.used", "What its pages take, all nodes together."),
            Column("Hit rate", ".status.lastHour.hitRate", "Share of prompt tokens from the cache in the last hour."),
            Column("Reason", _condition("Ready", "reason"), "Why it is ready, or not.", wide=True),
            Column("Pods", ".status.attached.pods", "Pods that are attached.", "integer", wide=True),
            Column("Without", ".status.attached.without", "Pods that run without it.", "integer", wide=True),
            Column("Asked", ".status.lastHour.requestedTokens", "Tokens asked for in an hour.", "integer", wide=True),
            Column("Found", ".status.lastHour.hitTokens", "Tokens of them from the cache.", "integer", wide=True),
            _AGE,
        ),
        selectable=(".spec.poolRef.name",),
    ),
)


def crds() -> list[Node]:
    """Return the CustomResourceDefinitions, as objects for the API."""
    return [crd(kind) for kind in KINDS]


def crd(kind: Kind) -> Node:
    """Return one CustomResourceDefinition."""
    version: Node = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": structural(kind.model)},
        "subresources": {"status": {}},
        "additionalPrinterColumns": [_printer_column(column) for column in kind.columns],
    }
    if kind.selectable:
        version["selectableFields"] = [{"jsonPath": path} for path in kind.selectable]
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": {
                "kind": kind.kind,
                "listKind": f"{kind.kind}List",
                "plural": kind.plural,
                "singular": kind.kind.lower(),
                "shortNames": [kind.short],
                "categories": ["orbitkv"],
            },
            "scope": kind.scope,
            "versions": [version],
        },
    }


def crd_file(definition: Node) -> str:
    """Return a CustomResourceDefinition as YAML."""
    return yaml.safe_dump(definition, sort_keys=False, width=110, allow_unicode=True)


def structural(model: type[Model]) -> Node:
    """Return the schema of a kind as the apiserver takes it."""
    raw = model.model_json_schema(by_alias=True, mode="validation")
    schema = _simplify(raw, raw.get("$defs", {}))
    schema["properties"] |= _ABOUT_METADATA
    # Not what the apiserver has decided already.
    schema["required"] = [name for name in schema["required"] if name != "metadata"]
    schema["properties"]["status"].pop("default", None)
    return schema


def _printer_column(column: Column) -> Node:
    return {
        "name": column.name,
        "type": column.kind,
        "jsonPath": column.path,
        "description": column.description,
        **({"priority": 1} if column.wide else {}),
    }


def _simplify(node: Node, definitions: dict[str, Node]) -> Node:
    """Return a schema without references, alternatives with null, and what says nothing to the apiserver."""
    node = {key: value for key, value in node.items() if key not in ("$defs", "title", "additionalProperties")} | {
        key: value for key, value in node.items() if key == "additionalProperties" and isinstance(value, dict)
    }
    if "$ref" in node:
        target = definitions[node.pop("$ref").removeprefix("#/$defs/")]
        return _simplify(target | node, definitions)
    if any(choice.get("type") == "null" for choice in node.get("anyOf", ())):
        (choice,) = (each for each in node.pop("anyOf") if each.get("type") != "null")
        return _simplify(choice | node, definitions)
    if "const" in node:
        node["enum"] = [node.pop("const")]
    if "properties" in node:
        node["properties"] = {name: _simplify(each, definitions) for name, each in node["properties"].items()}
    for key in ("items", "additionalProperties"):
        if key in node:
            node[key] = _simplify(node[key], definitions)
    if node.get("type") == "integer":
        small = node.get("maximum", _LARGEST_INT32 + 1) <= _LARGEST_INT32
        node["format"] = "int32" if small else "int64"
    if "default" in node:
        if node["default"] is None:
            del node["default"]
        else:
            node["default"] = _without_null(node["default"])
    if change := node.pop(CHANGE_KEY, None):
        node["description"] = f"{node['description']} {Change[change].value}"
    return {key: node[key] for key in sorted(node, key=_order)}


def _without_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_null(each) for key, each in value.items() if each is not None}
    return value


def _order(key: str) -> tuple[int, str]:
    """Where a key stands in a schema: what people read comes first."""
    return (_FIRST.index(key) if key in _FIRST else len(_FIRST), key)
