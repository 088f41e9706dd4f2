"""What annotations ask for: read once, checked once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from orbitkv_crds import stamps
from orbitkv_crds.names import ANNOTATION_CACHE_NAMESPACE
from orbitkv_crds.stamps import Note

ENGINES: Final = ("vllm", "sglang")
MODES: Final = ("read_write", "save_only")
_LABEL: Final = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_FULL_NAME: Final = re.compile(rf"({_LABEL}/)?{_LABEL}(\.{_LABEL})*")
_LONGEST_NAME: Final = 253

LMCACHE_LABEL: Final = "lmcache.ai/lmcache-inject"
LMCACHE_ENGINE: Final = "lmcache.ai/lmcache-engine"
LMCACHE_CONTAINER: Final = "lmcache.ai/lmcache-container"
LMCACHE_PULL_SECRETS: Final = "lmcache.ai/lmcache-image-pull-secrets"


@dataclass(frozen=True)
class Ask:
    """What a pod wants. Empty: not said."""

    cache: str
    """The CacheNamespace, as `namespace/name`."""
    container: str = ""
    engine: str = ""
    mode: str = ""
    multi_connector: bool = False
    via_args: bool = False
    pythonpath: str = ""
    pull_secrets: tuple[str, ...] = ()
    by_default: bool = False
    """Nobody asked for this pod itself: its namespace has a default."""


def read(
    annotations: Mapping[str, str],
    namespace: str,
    default: Mapping[str, str] | None = None,
) -> Ask | Note | None:
    """Return what a pod asks for; None: nothing. A Note says why the ask cannot be met.

    Args:
        annotations: the pod's.
        namespace: the one that the pod is made in.
        default: annotations of that Namespace, if it is labelled for it. Those of the pod win, each for itself.
    """
    if annotations.get(stamps.ANNOTATION_INJECT) == "false":
        return None
    own = {key: annotations[key] for key in stamps.asked(annotations)}
    given = {} if default is None else {key: default[key] for key in stamps.asked(default)}
    by_default = not own
    if not own and default is None:
        return None
    found = given | own
    unknown = [key for key in found if key not in stamps.ASKS]
    if unknown:
        return Note(
            "unknown-annotation",
            f"This release does not know {', '.join(unknown)}. It knows {', '.join(stamps.ASKS)}.",
        )
    problem = _problem(found)
    if problem:
        where = f" These are annotations of Namespace {namespace}, which is labelled {stamps.ANNOTATION_INJECT}."
        return Note("invalid-annotation", problem + (where if by_default else ""))
    if found.get(stamps.ANNOTATION_ENGINE, ENGINES[0]) not in ENGINES:
        return Note(
            "engine-unknown",
            f"{stamps.ANNOTATION_ENGINE} is {_shown(found[stamps.ANNOTATION_ENGINE])}; this release serves "
            f"{' and '.join(ENGINES)}.",
        )
    cache = found[ANNOTATION_CACHE_NAMESPACE]
    return Ask(
        cache=cache if "/" in cache else f"{namespace}/{cache}",
        container=found.get(stamps.ANNOTATION_CONTAINER, ""),
        engine=found.get(stamps.ANNOTATION_ENGINE, ""),
        mode=found.get(stamps.ANNOTATION_MODE, ""),
        multi_connector=found.get(stamps.ANNOTATION_MULTI_CONNECTOR) == "true",
        via_args=found.get(stamps.ANNOTATION_INJECT_VIA) == "args",
        pythonpath=found.get(stamps.ANNOTATION_PYTHONPATH, ""),
        by_default=by_default,
    )


def _problem(found: Mapping[str, str]) -> str:
    """Return which value cannot be used and what could, or nothing."""
    choices = {
        stamps.ANNOTATION_INJECT: ("true", "false"),
        stamps.ANNOTATION_MODE: MODES,
        stamps.ANNOTATION_MULTI_CONNECTOR: ("true", "false"),
        stamps.ANNOTATION_INJECT_VIA: ("plugin", "args"),
    }
    for key, words in choices.items():
        if key in found and found[key] not in words:
            return f"{key} is {_shown(found[key])}; it can be {' or '.join(words)}."
    cache = found.get(ANNOTATION_CACHE_NAMESPACE)
    if cache is None:
        beside = f" beside {', '.join(found)}" if found else ""
        return f"{ANNOTATION_CACHE_NAMESPACE}, which names the cache, is missing{beside}."
    if not _FULL_NAME.fullmatch(cache) or len(cache.rpartition("/")[2]) > _LONGEST_NAME:
        return f"{ANNOTATION_CACHE_NAMESPACE} is {_shown(cache)}; it can be NAME or NAMESPACE/NAME of a CacheNamespace."
    return ""


def _shown(value: str) -> str:
    return repr(value if len(value) <= 60 else value[:57] + "...")


def from_lmcache(labels: Mapping[str, str], annotations: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the annotations of a pod with those of LMCache's operator put into ours, and its secrets for pulling.

    Ours win where both are there. Without LMCache's label nothing is added.
    """
    if labels.get(LMCACHE_LABEL, "false") == "false":
        return dict(annotations), ()
    names = {ANNOTATION_CACHE_NAMESPACE: LMCACHE_ENGINE, stamps.ANNOTATION_CONTAINER: LMCACHE_CONTAINER}
    theirs = {ours: annotations[name].strip() for ours, name in names.items() if annotations.get(name, "").strip()}
    if ANNOTATION_CACHE_NAMESPACE not in {**theirs, **annotations}:
        theirs[stamps.ANNOTATION_INJECT] = "true"  # asked for, but not with which cache: that is said
    secrets = annotations.get(LMCACHE_PULL_SECRETS, "").split(",")
    return theirs | dict(annotations), tuple(secret.strip() for secret in secrets if secret.strip())
