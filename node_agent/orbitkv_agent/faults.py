"""Named points at which a test makes something go wrong. Nothing is set outside tests.

A point is a plain call (`faults.hit("save-commit")`), and costs one look into an empty dict.
"""

from __future__ import annotations

from collections.abc import Callable

_hooks: dict[str, Callable[[], None]] = {}


def hit(point: str) -> None:
    """Run what a test has set for `point`; it may raise."""
    if _hooks:
        hook = _hooks.get(point)
        if hook is not None:
            hook()


def install(point: str, hook: Callable[[], None]) -> None:
    """Set the hook of a point."""
    _hooks[point] = hook


def clear() -> None:
    """Remove all hooks."""
    _hooks.clear()
