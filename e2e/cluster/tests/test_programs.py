"""Which programs are built, from what, and where they are kept."""

from pathlib import Path

import pytest

from e2e.cluster import programs
from tools.cache import SetUpError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ORBITKV_CACHE", str(tmp_path))
    return tmp_path


def a_module(folder: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> programs.Module:
    """A module that builds in a second, made of one file."""
    (folder / "go" / "greeting").mkdir(parents=True)
    (folder / "go" / "greeting" / "go.mod").write_text("module example.com/greeting\n\ngo 1.21\n")
    (folder / "go" / "greeting" / "main.go").write_text(program)
    monkeypatch.setattr(programs, "GO", folder / "go")
    return programs.Module("greeting", "")


GOOD = "package main\n\nfunc main() { println(42) }\n"


def test_every_version_is_the_one_that_go_mod_pins() -> None:
    versions = {module.name: module.version() for module in (*programs.CLUSTER, *programs.OTHER_APISERVERS)}
    assert versions["kubernetes"] == "1.34.4"
    assert versions["containerd"] == "2.2.9"
    assert versions["coredns"] == "1.12.4"
    assert versions["helm3"].startswith("3.")
    assert versions["helm4"].startswith("4.")
    assert versions["apiserver-1.31"] == "1.31.14"
    assert versions["apiserver-1.37"] == "1.37.2"


def test_both_helms_are_found() -> None:
    built = programs.Programs(programs.CLUSTER)
    assert built["helm3"] != built["helm4"]


def test_a_program_is_built_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = a_module(cache, monkeypatch, GOOD)
    built = Path(programs.ensure((module,))["greeting"])
    before = built.stat().st_mtime_ns
    programs.ensure((module,))
    assert built.stat().st_mtime_ns == before
    assert built.is_relative_to(cache)


def test_another_version_has_another_place(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = a_module(cache, monkeypatch, GOOD)
    before = module.place()
    (module.folder / "go.mod").write_text("module example.com/greeting\n\ngo 1.22\n")
    assert module.place() != before


def test_what_cannot_be_built_is_named_and_leaves_nothing_behind(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = a_module(cache, monkeypatch, "package main\n\nfunc main() { nonsense }\n")
    with pytest.raises(SetUpError, match=r"greeting 1 could not be built(.|\n)*nonsense"):
        programs.ensure((module,))
    assert list(module.place().iterdir()) == []


def test_a_leftover_of_an_interrupted_build_is_not_taken_for_the_program(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = a_module(cache, monkeypatch, GOOD)
    module.place().mkdir(parents=True)
    (module.place() / ".greeting.1").write_text("half a program")
    assert Path(programs.ensure((module,))["greeting"]).stat().st_size > 100_000
    assert [path.name for path in module.place().iterdir()] == ["greeting"]


def test_without_go_it_is_said_what_is_missing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = a_module(cache, monkeypatch, GOOD)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SetUpError, match="there is no Go here"):
        programs.ensure((module,))
