"""What the apiserver demands of a schema, and we of ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from orbitkv.config import LIVE_SETTINGS, SETTINGS
from orbitkv_crds.cachenamespace import ENGINE_OPTIONS, CacheNamespaceSpec
from orbitkv_crds.schema import KINDS, Kind, crd, crd_file, crds, structural
from orbitkv_crds.types import CHANGE_KEY

Place = tuple[str, dict[str, Any]]
KUBECTL_ANNOTATION_LIMIT = 256 << 10


def places(schema: dict[str, Any], path: str = "") -> Iterator[Place]:
    """Every part of a schema with its path."""
    yield path, schema
    for name, part in schema.get("properties", {}).items():
        yield from places(part, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(part := schema.get(key), dict):
            yield from places(part, f"{path}[]")


@pytest.fixture(params=KINDS, ids=lambda kind: kind.kind)
def kind(request: pytest.FixtureRequest) -> Kind:
    result: Kind = request.param
    return result


def test_schema_says_nothing_that_is_not_structural(kind: Kind) -> None:
    banned = {"$ref", "$defs", "title", "oneOf", "allOf", "const", "exclusiveMinimum", "exclusiveMaximum", CHANGE_KEY}
    for path, part in places(structural(kind.model)):
        assert not banned & set(part), path
        assert ("anyOf" in part) == ("x-kubernetes-int-or-string" in part), path
        assert ("type" in part) != ("anyOf" in part), path
        assert part.get("default", ...) is not None, path


def test_everything_has_a_largest_size(kind: Kind) -> None:
    for path, part in places(structural(kind.model)):
        if path in (".metadata", ".apiVersion", ".kind"):
            continue
        if part.get("type") == "array":
            assert "maxItems" in part, path
        if "additionalProperties" in part:
            assert "maxProperties" in part, path
        if part.get("type") == "string" and "enum" not in part:
            assert "maxLength" in part, path
        if "x-kubernetes-int-or-string" in part:
            assert "maxLength" in part, path


def test_every_field_is_explained(kind: Kind) -> None:
    for path, part in places(structural(kind.model)):
        if path != ".metadata" and not path.endswith("[]"):
            assert part["description"].endswith("."), path


def test_every_field_of_the_spec_says_what_a_change_does(kind: Kind) -> None:
    """Where a field has fields of its own, each of them says it."""
    sentences = ("A change ", "Cannot be changed.")

    def said(part: dict[str, Any]) -> bool:
        if any(sentence in part["description"] for sentence in sentences):
            return True
        return bool(part.get("properties")) and all(said(each) for each in part["properties"].values())

    for name, part in structural(kind.model)["properties"]["spec"]["properties"].items():
        assert said(part), name


def test_lists_whose_items_have_names_are_merged_by_name(kind: Kind) -> None:
    keys = {path: part.get("x-kubernetes-list-map-keys") for path, part in places(crd_schema(kind))}
    assert keys[".status.conditions"] == ["type"]
    if kind.kind == "ManagerPool":
        assert keys[".spec.env"] == ["name"]
        assert keys[".spec.imagePullSecrets"] == ["name"]


def crd_schema(kind: Kind) -> dict[str, Any]:
    schema: dict[str, Any] = crd(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def test_definition_fits_into_what_kubectl_apply_notes_on_it() -> None:
    for definition in crds():
        assert len(crd_file(definition)) < KUBECTL_ANNOTATION_LIMIT


def test_file_says_the_same_as_the_definition() -> None:
    for definition in crds():
        assert yaml.safe_load(crd_file(definition)) == definition


def test_committed_files_are_what_the_models_say() -> None:
    folder = Path(__file__).resolve().parents[2]
    for definition in crds():
        path = folder / f"{definition['metadata']['name']}.yaml"
        assert yaml.safe_load(path.read_text(encoding="utf-8")) == definition


def test_engine_options_are_the_settings_that_engines_take_from_a_cache_namespace() -> None:
    assert sorted(ENGINE_OPTIONS) == sorted(LIVE_SETTINGS)
    properties = structural(KINDS[1].model)["properties"]["spec"]["properties"]
    for name in ENGINE_OPTIONS:
        schema = properties[CacheNamespaceSpec.model_fields[name].alias or ""]
        for value in _edges(schema):
            assert SETTINGS[name].check(value, name) == value
        default = SETTINGS[name].default
        words = str(default).lower() if isinstance(default, bool) else str(default)
        assert f"({words})" in schema["description"] or default == "", name


def _edges(schema: dict[str, Any]) -> list[Any]:
    """The values at the edges of what a schema takes."""
    if "enum" in schema:
        return list(schema["enum"])
    if schema["type"] == "integer":
        return [schema["minimum"], schema["maximum"]]
    return [True, False] if schema["type"] == "boolean" else ["", "x" * schema["maxLength"]]
