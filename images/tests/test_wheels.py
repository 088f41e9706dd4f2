"""What goes into the images."""

import hashlib
import re
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from images import build, wheels
from tools.cache import SetUpError


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

    assert {"kopf", "cryptography", "msgspec"} <= names("operator")
    assert "numpy" not in names("operator")
    assert {"numpy", "msgspec", "kubernetes"} <= names("agent")


EXTRAS = [image.extra for image in build.IMAGES if image.extra is not None]


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_all_that_an_image_needs_is_locked_at_one_version_that_fits(extra: str, python: str) -> None:
    """After a change of pyproject.toml: `python -m images.lock`."""
    locked = {each.name: each for each in wheels.locked(extra, python)}
    assert len(locked) == len(wheels.locked(extra, python))
    for line in wheels.dependencies(extra):
        wanted = Requirement(line)
        (version,) = locked[canonicalize_name(wanted.name)].specifier
        assert version.operator == "==" and wanted.specifier.contains(version.version), line


@pytest.mark.parametrize("extra", EXTRAS)
def test_every_locked_package_has_digests_and_one_line_for_a_python(extra: str) -> None:
    text = wheels.requirements(extra, "3.12")
    entries = re.split(r"(?m)^(?=\w)", text)[1:]
    assert len(entries) == len(wheels.locked(extra, "3.12"))
    for entry in entries:
        assert re.fullmatch(r"[\w.-]+==\S+ \\\n( +--hash=sha256:[0-9a-f]{64}( \\)?\n)+", entry), entry


def test_a_file_with_another_digest_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = wheels.build_wheel(tmp_path / "index")
    name, version = wheel.name.split("-")[:2]
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(wheels, "LOCKS", tmp_path)
    monkeypatch.setenv("ORBITKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    (tmp_path / "x.lock").write_text(f"{name}=={version} \\\n    --hash=sha256:{digest}\n")
    assert (wheels.download("x", "3.12") / wheel.name).exists()
    (tmp_path / "x.lock").write_text(f"{name}=={version} \\\n    --hash=sha256:{'0' * 64}\n")
    with pytest.raises(SetUpError, match="HASH"):
        wheels.download("x", "3.12")


def test_sources_are_those_of_the_wheel() -> None:
    paths = {str(path.relative_to(wheels.ROOT)) for path in wheels.sources()}
    assert "node_agent/orbitkv_agent/cli.py" in paths
    assert not any("/tests/" in path or "__pycache__" in path for path in paths)
