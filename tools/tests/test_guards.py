"""The guard runner, on a scratch folder of tests in this tree."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tools import environments, guards
from tools.environments import Selection

HEADER = "import os, pytest\ndef off():\n    return os.environ.get('ORBITKV_TEST_GUARD_OFF')\n"
WATCHING = "@pytest.mark.guard('one')\ndef test_watching():\n    assert off() != 'one'\n"


@pytest.fixture
def scratch() -> Iterator[Path]:
    # inside the tree, as pytest takes its configuration from there
    with TemporaryDirectory(prefix=".test-guards-", dir=environments.ROOT) as folder:
        yield Path(folder)


def check(folder: Path, *tests: str) -> bool:
    (folder / "test_example.py").write_text(HEADER + "".join(tests))
    return guards.check([Selection("dev", str(folder.relative_to(environments.ROOT)))])


def test_a_test_that_fails_without_its_guard_is_accepted(scratch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark = "@pytest.mark.guard('two')\n@pytest.mark.parametrize('x', [1, 2])\n"
    other = mark + "def test_more(x):\n    assert off() != 'two'\n"
    assert check(scratch, WATCHING, other, "def test_unmarked():\n    assert off() is None\n")
    rows = [line.split()[:3] for line in capsys.readouterr().out.splitlines()]
    assert ["one", "1", "yes"] in rows
    assert ["two", "2", "yes"] in rows


def test_anything_but_a_failure_is_reported(scratch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    passes = "@pytest.mark.guard('one')\ndef test_passes():\n    pass\n"
    skipped = "@pytest.mark.guard('one')\ndef test_skipped():\n    pytest.skip('not here')\n"
    set_up = "@pytest.fixture\ndef broken():\n    assert off() is None\n"
    broken = "@pytest.mark.guard('one')\ndef test_set_up(broken):\n    pass\n"
    assert not check(scratch, WATCHING, passes, skipped, set_up, broken)
    output = capsys.readouterr().out
    assert ["one", "4", "NO"] in [line.split()[:3] for line in output.splitlines()]
    assert "::test_passes: passed" in output
    assert "::test_skipped: skipped" in output
    assert "::test_set_up: error" in output
    assert "::test_watching:" not in output


def test_a_test_that_ends_pytest_is_reported(scratch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not check(scratch, "@pytest.mark.guard('one')\ndef test_bad():\n    os._exit(1)\n")
    assert "::test_bad: did not run" in capsys.readouterr().out


def test_a_selection_without_guards_is_not_accepted(scratch: Path) -> None:
    assert not check(scratch, "def test_unmarked():\n    pass\n")


def test_a_misspelt_mark_is_refused(scratch: Path) -> None:
    with pytest.raises(SystemExit, match="write the mark as"):
        check(scratch, "@pytest.mark.guard\ndef test_bad():\n    pass\n")
