"""What goes into the images."""

import zipfile
from pathlib import Path

from images import wheels


def test_the_same_sources_give_the_same_wheel(tmp_path: Path) -> None:
    first = wheels.build_wheel(tmp_path / "first").read_bytes()
    assert wheels.build_wheel(tmp_path / "second").read_bytes() == first


def test_a_wheel_has_the_programs_and_no_tests(tmp_path: Path) -> None:
    names = zipfile.ZipFile(wheels.build_wheel(tmp_path / "wheel")).namelist()
    assert "orbitkv/protocol/messages.py" in names
    assert "orbitkv_operator/main.py" in names
    assert [name for name in names if "/tests/" in name] == []


def test_the_operator_carries_nothing_that_only_moves_pages() -> None:
    def names(extra: str) -> set[str]:
        return {requirement.split(">")[0].split("[")[0] for requirement in wheels.dependencies(extra)}

    assert {"kopf", "cryptography"} <= names("operator")
    assert not names("operator") & {"numpy", "msgspec"}
    assert {"numpy", "msgspec", "kubernetes"} <= names("agent")


def test_a_requirement_names_one_version() -> None:
    assert wheels.requirement(Path("Prometheus_Client-0.20.0-py3-none-any.whl")) == "prometheus-client==0.20.0"


def test_sources_are_those_of_the_wheel() -> None:
    paths = {str(path.relative_to(wheels.ROOT)) for path in wheels.sources()}
    assert "node_agent/orbitkv_agent/cli.py" in paths
    assert not any("/tests/" in path or "__pycache__" in path for path in paths)
