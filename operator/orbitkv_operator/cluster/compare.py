"""Whether an object has all that we applied: then there is nothing to write."""

from __future__ import annotations

from typing import Any, Final

from orbitkv_crds.quantity import parse_quantity

_QUANTITIES: Final = frozenset({"limits", "requests", "sizeLimit", "hugepages"})


def covers(live: Any, wanted: Any, field: str = "") -> bool:
    """Return whether `live` has everything that is in `wanted`; what it has beyond that may be anybody's.

    Lists of named things are compared by name, others item by item; quantities by their value, as the apiserver
    writes them in its own way.
    """
    if isinstance(wanted, dict):
        quantities = field in _QUANTITIES
        return isinstance(live, dict) and all(
            value in ([], {}) if key not in live else covers(live[key], value, "sizeLimit" if quantities else key)
            for key, value in wanted.items()
        )
    if isinstance(wanted, list):
        if not isinstance(live, list):
            return False
        if wanted and all(isinstance(item, dict) and "name" in item for item in wanted):
            by_name = {item.get("name"): item for item in live}
            return all(item["name"] in by_name and covers(by_name[item["name"]], item) for item in wanted)
        return len(live) == len(wanted) and all(covers(*pair) for pair in zip(live, wanted, strict=True))
    if field in _QUANTITIES and live != wanted:
        try:
            return parse_quantity(live) == parse_quantity(wanted)
        except ValueError:
            return False
    return bool(live == wanted)
