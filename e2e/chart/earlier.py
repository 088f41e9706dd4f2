"""A chart as an earlier version would have had it: with a version of its own, and without one field."""

import re
import shutil
from pathlib import Path

from e2e.support.helm import CHART

VERSION = "0.0.9"
FIELD = ("cachenamespaces.orbitkv.io", ("spec", "saveDecode"))
"""The field that it lacks: its CustomResourceDefinition, and the path in the schema."""


def earlier_chart(folder: Path) -> Path:
    """Makes the earlier chart in a folder and returns its path. The programs are the same."""
    chart = folder / "orbitkv"
    shutil.copytree(CHART, chart, ignore=shutil.ignore_patterns("__pycache__"))
    description = chart / "Chart.yaml"
    description.write_text(re.sub(r"(?m)^version: .*$", f"version: {VERSION}", description.read_text()))
    kind, path = FIELD
    template = chart / "templates" / "crds" / f"{kind.split('.')[0]}.yaml"
    template.write_text(without_property(template.read_text(), path))
    return chart


def without_property(text: str, path: tuple[str, ...]) -> str:
    """Returns a template of a CustomResourceDefinition without the property at `path`.

    By lines, because the text is a template: a property is a line `NAME:` below `properties:`, with all lines that are
    indented further.
    """
    lines = text.split("\n")
    begin = next(index for index, line in enumerate(lines) if line.strip() == "openAPIV3Schema:")
    end = len(lines)
    for name in path:
        inside = [index for index in range(begin + 1, end) if lines[index].strip() == f"{name}:"]
        shallow = min(inside, key=lambda index: (indent(lines[index]), index))
        begin, end = shallow, block_end(lines, shallow)
    return "\n".join(lines[:begin] + lines[end:])


def indent(line: str) -> int:
    """The number of spaces before a line."""
    return len(line) - len(line.lstrip(" "))


def block_end(lines: list[str], begin: int) -> int:
    """The index after the last line that belongs to the one at `begin`: lists may stand as far left as their name."""
    depth = indent(lines[begin])
    for index in range(begin + 1, len(lines)):
        line = lines[index]
        if line.strip() and (indent(line) < depth or (indent(line) == depth and not line.lstrip().startswith("- "))):
            return index
    return len(lines)
