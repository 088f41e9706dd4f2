"""What the page on Kubernetes says about conditions is what the programs write."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from orbitkv_crds.guarantees import Reason

ROOT = Path(__file__).resolve().parents[2]
OPERATOR = ROOT / "operator" / "orbitkv_operator"
AGENT = ROOT / "node_agent" / "orbitkv_agent" / "cluster"
PAGE = (ROOT / "docs" / "kubernetes.md").read_text()
ALL_IS_WELL = {"Accepted", "AgentsReady", "Complete", "EnginesAttached", "NotNeeded", "PoolAvailable", "Ready", "Valid"}
BY_KUBERNETES = {"Evicted", "ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName"}


def explained() -> set[str]:
    """The reasons in the first columns of the page's tables."""
    tables = PAGE[PAGE.index("## When something is wrong") :].split("\n## ")[0]
    cells = [line.split("|")[1] for line in tables.splitlines() if line.startswith("| `")]
    return {reason for cell in cells for reason in re.findall(r"`([A-Z]\w+)`", cell)} - {"InUse"}


def constants(node: ast.AST) -> Iterator[str]:
    """The reasons in a piece of code: the second of three values of a condition, and what a problem is called."""
    for each in ast.walk(node):
        if isinstance(each, ast.Tuple) and len(each.elts) == 3 and is_status(each.elts[0]):
            yield from text(each.elts[1])
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Name):
            if each.func.id in ("Problem", "Obstacle"):
                yield from text(each.args[0])
            if each.func.id == "Blocked":
                yield from text(each.args[1])
            for keyword in each.keywords:
                if each.func.id == "UnhealthyNode" and keyword.arg == "reason":
                    yield from text(keyword.value)


def is_status(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value in (True, False, None)


def text(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value


def written() -> set[str]:
    """The reasons that the operator writes."""
    files = [*(OPERATOR / f"{name}.py" for name in ("health", "gpu", "dra")), *(OPERATOR / "reconcile").glob("*.py")]
    found = {reason for path in files for reason in constants(ast.parse(path.read_text()))}
    assert len(found) > 20, "the operator's code has another form now: this test finds no reasons in it"
    return found | set(get_args(Reason))


def reported() -> set[str]:
    """What agents report of themselves: two values, the first of which is one word."""
    pairs = [
        each
        for path in AGENT.glob("*.py")
        for each in ast.walk(ast.parse(path.read_text()))
        if isinstance(each, ast.Tuple) and len(each.elts) == 2
    ]
    found = {word for pair in pairs for word in text(pair.elts[0]) if re.fullmatch(r"[A-Z][a-z]\w+", word)}
    assert len(found) > 3, "the agent's code has another form now: this test finds no reasons in it"
    return found


def test_every_reason_that_asks_for_something_is_explained() -> None:
    assert not (written() | reported()) - ALL_IS_WELL - explained()


def test_every_reason_that_is_explained_is_written() -> None:
    assert not explained() - written() - reported() - BY_KUBERNETES


def test_pages_that_are_named_exist() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for link in re.findall(r"\]\(([^)#:]+?)(?:#[\w-]+)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} names {link}"
