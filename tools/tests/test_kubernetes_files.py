"""Files made from the Kubernetes models: every field is on the page, and a broken .proto is an error that says so."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orbitkv_crds.schema import KINDS, structural
from tools import kubernetes_files
from tools.kubernetes_reference import LIKE_A_POD, reference_page

REPORTS = kubernetes_files.PROTOS[0]


def fields(node: dict[str, Any], path: str) -> Iterator[str]:
    """The paths of all fields that are described on the page each for itself."""
    for name, part in node["properties"].items():
        if "properties" in part and name not in (*LIKE_A_POD, "selector"):
            yield from fields(part, f"{path}{name}.")
        else:
            yield f"{path}{name}"


def test_every_field_is_on_the_page() -> None:
    page = reference_page()
    for kind in KINDS:
        schema = structural(kind.model)["properties"]
        for part in ("spec", "status"):
            for field in fields(schema[part], ""):
                assert f"| `{field}` | " in page, field


def test_page_tells_what_a_change_does_and_what_is_required() -> None:
    page = reference_page()
    assert "| `memory.pool` | size of at least 1Mi | **required** | replace | Memory for pages on each node" in page
    assert "| `metrics.port` | 1 to 65535 | `9091` | replace |" in page
    assert "| `nodeSelector` | up to 32 names and texts |  | placement |" in page
    assert "| `poolRef.name` | text of at most 50 characters | **required** | refused |" in page
    assert "A change " not in page.replace("| A change is |", "")


def test_broken_proto_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "crds/orbitkv_crds/agent_api"
    folder.mkdir(parents=True)
    (folder / "reports.proto").write_text('syntax = "proto3";\nmessage Report { strin pool = 1; }\n')
    monkeypatch.setattr(kubernetes_files, "ROOT", tmp_path)
    with pytest.raises(kubernetes_files.CompileError, match=r"reports\.proto cannot be compiled"):
        kubernetes_files.proto_code(*REPORTS)


def test_types_of_a_service_are_made_for_every_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "crds/orbitkv_crds/agent_api"
    folder.mkdir(parents=True)
    (folder / "reports.proto").write_text(
        'syntax = "proto3";\npackage p;\nmessage A {}\nmessage B {}\n'
        "service S { rpc One(A) returns (B); rpc Two(B) returns (A); }\n"
    )
    monkeypatch.setattr(kubernetes_files, "ROOT", tmp_path)
    made = kubernetes_files.proto_code(*REPORTS)
    types = made["crds/orbitkv_crds/agent_api/reports_pb2_grpc.pyi"]
    assert "    One: grpc.UnaryUnaryMultiCallable[reports_pb2.A, reports_pb2.B]\n" in types
    assert "    def Two(self, request: reports_pb2.B, context: grpc.ServicerContext) -> reports_pb2.A: ...\n" in types
    assert {Path(path).name for path in made} == {
        "reports_pb2.py",
        "reports_pb2.pyi",
        "reports_pb2_grpc.py",
        "reports_pb2_grpc.pyi",
    }
