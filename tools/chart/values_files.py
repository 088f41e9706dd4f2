"""Makes `values.yaml`, `values.schema.json` and the table of values from the models in `tools.chart.values`."""

import json
import textwrap
from collections.abc import Iterator
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tools.chart.values import Values, ValuesFile

WIDTH = 110
HEAD = """\
# Made by `make generate` from tools/chart/values.py: change it there.
# The values of the chart, with their defaults. A key that is not here is refused.
"""


def alias(name: str, field: FieldInfo) -> str:
    """Return the key of a field."""
    return field.alias or name


def leaves(model: BaseModel, path: str = "") -> Iterator[tuple[str, FieldInfo, Any]]:
    """Yield path, field and default of each value that is not itself a group of values."""
    for name, field in type(model).model_fields.items():
        default = getattr(model, name)
        here = f"{path}{alias(name, field)}"
        if isinstance(default, BaseModel):
            yield from leaves(default, here + ".")
        else:
            yield here, field, default


def plain(value: Any) -> str:
    """Return a value as one line of YAML."""
    return json.dumps(value) if isinstance(value, str | list | dict | bool | int) else str(value)


def values_yaml() -> str:
    """Return the text of `values.yaml`."""
    text = HEAD + "\n".join(_lines(Values(), "")) + "\n"
    assert yaml.safe_load(text) == Values().model_dump(by_alias=True), "values.yaml is not what the models say"
    return text


def _lines(model: BaseModel, indent: str) -> Iterator[str]:
    for name, field in type(model).model_fields.items():
        default = getattr(model, name)
        if not indent:
            yield ""
        for line in textwrap.wrap(
            (field.description or "").replace("`", ""), WIDTH - len(indent), break_on_hyphens=False
        ):
            yield f"{indent}# {line}"
        if isinstance(default, BaseModel):
            yield f"{indent}{alias(name, field)}:"
            yield from _lines(default, indent + "  ")
        else:
            yield f"{indent}{alias(name, field)}: {plain(default)}"


def values_schema() -> str:
    """Return the text of `values.schema.json`."""
    schema = ValuesFile.model_json_schema(by_alias=True)
    _strip(schema)
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", **schema, "title": "Values of the chart orbitkv"}
    return json.dumps(schema, indent=2) + "\n"


def _strip(node: Any) -> None:
    """Removes the titles and defaults that pydantic adds: Helm reads neither, and `values.yaml` has the defaults."""
    if isinstance(node, dict):
        for key in ("title", "default"):
            if not isinstance(node.get(key), dict) or key == "default":
                node.pop(key, None)
        for child in node.values():
            _strip(child)
    elif isinstance(node, list):
        for child in node:
            _strip(child)


def values_rows() -> Iterator[tuple[str, str, str]]:
    """Yield name, default and meaning of each value, as Markdown."""
    for path, field, default in leaves(Values()):
        yield f"`{path}`", f"`{plain(default)}`", field.description or ""
