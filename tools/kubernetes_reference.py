"""Makes the page on the fields of OrbitKV's Kubernetes objects from their schemas."""

import json
from collections.abc import Iterator
from typing import Any

from orbitkv_crds.names import API_VERSION
from orbitkv_crds.schema import KINDS, Kind, structural
from orbitkv_crds.types import Change
from tools.markdown import code, table

Node = dict[str, Any]

HEAD = f"""\
<!-- Made by tools/kubernetes_reference.py from crds/orbitkv_crds: change it there. -->

# Fields of the Kubernetes objects

All objects are `{API_VERSION}`. On a cluster `kubectl explain` says the same: `kubectl explain mpool.spec.memory`.

What a change of a field does:

| | |
|---|---|
| live | It takes effect without a restart. |
| placement | Agents come and go with the nodes; none is restarted on a node that stays. |
| replace | The agents are replaced, `updateStrategy.maxUnavailable` at a time. |
| refused | It is refused; make another object. |

A **quantity** is a number with or without a suffix, as everywhere in Kubernetes: `8Gi` (8 times 2^30), `500M`, `12e6`,
or a whole number of bytes. An object with a mistake is refused when it is applied, and the answer names the field. A
field that does not exist is refused too by `kubectl apply`; other clients get a warning and the field is dropped."""

CHANGES = {Change.LIVE: "live", Change.PLACEMENT: "placement", Change.REPLACE: "replace", Change.REFUSED: "refused"}
LIKE_A_POD = ("env", "tolerations", "affinity", "resources")
"""Fields that are what they are in the template of a pod, and are described there."""


def reference_page() -> str:
    """Return the page."""
    return "\n\n".join([HEAD, *(part for kind in KINDS for part in _sections(kind))]) + "\n"


def _sections(kind: Kind) -> Iterator[str]:
    schema = structural(kind.model)
    scope = "belongs to a namespace" if kind.scope == "Namespaced" else "belongs to no namespace"
    yield f"## {kind.kind}"
    yield f"{schema['description']} It {scope}; its short name is `{kind.short}`."
    header = ("Field of `spec`", "Value", "Default", "A change is", "Meaning")
    yield table(header, _spec_rows(schema["properties"]["spec"]))
    yield "Rules on names and between fields:\n\n" + "\n".join(f"- {rule}" for rule in _rules(schema))
    yield "`kubectl get` shows these columns; those in italics with `-o wide` only: " + ", ".join(
        f"*{column.name}*" if column.wide else f"**{column.name}**" for column in kind.columns
    )
    yield table(("Field of `status`", "Value", "Meaning"), _status_rows(schema["properties"]["status"]))


def _fields(node: Node, path: str = "") -> Iterator[tuple[str, Node, bool]]:
    """Yield (path, schema, required) of the fields that are described each for itself."""
    for name, part in node["properties"].items():
        inside = f"{path}{name}"
        if part.get("properties") and name not in (*LIKE_A_POD, "selector"):
            yield from _fields(part, f"{inside}.")
        elif part.get("type") == "array" and part["items"].get("properties") and name not in LIKE_A_POD:
            yield inside, part, False
            yield from _fields(part["items"], f"{inside}[].")
        else:
            yield inside, part, name in node.get("required", ())


def _spec_rows(spec: Node) -> Iterator[tuple[str, ...]]:
    for path, part, required in _fields(spec):
        meaning, change = _split(part["description"])
        default = "**required**" if required and "[]" not in path else ""
        if "default" in part:
            default = code(json.dumps(part["default"]).strip('"'))
        yield code(path), _value(path, part), default, change, meaning


def _status_rows(status: Node) -> Iterator[tuple[str, ...]]:
    for path, part, _ in _fields(status):
        yield code(path), _value(path, part), part["description"]


def _split(description: str) -> tuple[str, str]:
    """Return a description without what it says of changes, and that in one word."""
    for change, word in CHANGES.items():
        if description.endswith(change.value):
            return description.removesuffix(change.value).rstrip(), word
    return description, ""


def _value(path: str, part: Node) -> str:
    """Say in a few words what a field takes."""
    name = path.rpartition(".")[2]
    if name in LIKE_A_POD:
        return "as in a pod"
    if name == "selector":
        return "label selector"
    if "x-kubernetes-int-or-string" in part:
        message = part["x-kubernetes-validations"][0]["message"]
        words: str = message.removeprefix("must be a ").partition(", such as")[0].partition(" such as")[0]
        return words
    if "enum" in part:
        return ", ".join(map(code, part["enum"]))
    if part["type"] == "integer":
        least, most = part.get("minimum"), part.get("maximum")
        if least is not None and most is not None and most < 1 << 31:
            return f"{least} to {most}"
        return "whole number" if least is None else f"{least} or more"
    if part["type"] == "boolean":
        return "`true`, `false`"
    if part["type"] == "array":
        return f"up to {part['maxItems']} {'entries' if part['items'].get('properties') else 'texts'}"
    if part["type"] == "object":
        return f"up to {part['maxProperties']} names and texts"
    return f"text of at most {part['maxLength']} characters"


def _rules(schema: Node) -> Iterator[str]:
    """Yield what is demanded of several fields together, in words."""
    for rule in schema.get("x-kubernetes-validations", ()):
        yield f"{rule['message'][0].upper()}{rule['message'][1:]}."
    for path, part in _objects(schema["properties"]["spec"], ""):
        for rule in part.get("x-kubernetes-validations", ()):
            field = (path + rule.get("fieldPath", "")).removeprefix(".")
            yield f"{code(field)}: {rule['message']}."


def _objects(node: Node, path: str) -> Iterator[tuple[str, Node]]:
    if node.get("properties") is None or path.rpartition(".")[2] in (*LIKE_A_POD, "selector"):
        return
    yield path, node
    for name, part in node["properties"].items():
        yield from _objects(part, f"{path}.{name}")
