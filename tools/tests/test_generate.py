"""The generated documentation: complete, and never unnoticed when it drifts."""

from pathlib import Path

import pytest

from orbitkv.config import SETTINGS
from orbitkv.vllm.served import FEATURES
from orbitkv_agent.config import AgentConfig, NamespaceSettings
from orbitkv_agent.observe.metrics import METRICS
from tools.generate import PAGES_WITH_SECTIONS, ROOT, SECTIONS, main

PAGE = """# Settings

Written by hand.

<!-- generated: plugin-settings -->
old
<!-- end: plugin-settings -->

The end.
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/configuration.md").write_text(PAGE)
    for page in PAGES_WITH_SECTIONS[1:]:
        (tmp_path / page).write_text("No table here.\n")
    return tmp_path


def test_pages_in_the_tree_are_what_the_code_says() -> None:
    assert main(["--check"]) == 0


def test_every_setting_and_metric_is_documented() -> None:
    configuration = (ROOT / "docs/configuration.md").read_text()
    metrics, vllm = (ROOT / "docs/metrics.md").read_text(), (ROOT / "docs/vllm.md").read_text()

    written = "".join((ROOT / page).read_text() for page in PAGES_WITH_SECTIONS)
    assert all(f"<!-- generated: {name} -->" in written for name in SECTIONS)
    assert all(f"| {feature.title} |" in vllm for feature in FEATURES)
    assert all(
        f"| `{name}` |" in configuration for name in (*AgentConfig.model_fields, *NamespaceSettings.model_fields)
    )
    assert all(f"`{setting.key}` | `{setting.variable}`" in configuration for setting in SETTINGS.values())
    assert all(f"`orbitkv_{row.name}`" in metrics for row in METRICS)


def test_writing_fills_the_sections_and_leaves_the_text(tree: Path) -> None:
    assert main([], tree) == 0
    page = (tree / "docs/configuration.md").read_text()

    assert page.startswith("# Settings\n\nWritten by hand.\n\n<!-- generated: plugin-settings -->\n| Key |")
    assert page.endswith(" |\n<!-- end: plugin-settings -->\n\nThe end.\n")
    assert (tree / "docs/metrics.md").exists()
    assert main(["--check"], tree) == 0


def test_drift_is_found_shown_and_not_written(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([], tree)
    page = tree / "docs/configuration.md"
    drifted = page.read_text().replace("`5000`", "`4000`", 1)
    page.write_text(drifted)
    capsys.readouterr()

    assert main(["--check"], tree) == 1
    shown = capsys.readouterr().err
    assert "-| `orbitkv.timeout_ms` | `ORBITKV_TIMEOUT_MS` | `4000`" in shown
    assert "+| `orbitkv.timeout_ms` | `ORBITKV_TIMEOUT_MS` | `5000`" in shown
    assert "make generate" in shown
    assert page.read_text() == drifted


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "docs/configuration.md is missing"),
        ("<!-- generated: plugin-settings -->\n", "needs its `<!-- end: NAME -->`"),
        ("<!-- end: plugin-settings -->\n", "needs its `<!-- end: NAME -->`"),
        ("<!-- generated: nonsense -->\n\n<!-- end: nonsense -->\n", "there is no section nonsense"),
    ],
)
def test_wrong_markers_are_an_error(
    tree: Path, text: str | None, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tree / "docs/configuration.md"
    page.unlink() if text is None else page.write_text(text)

    assert main([], tree) == 1
    assert words in capsys.readouterr().err
