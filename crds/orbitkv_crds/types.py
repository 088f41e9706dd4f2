"""Kinds of values in our objects, each with its bounds: names, labels, quantities.

Every text, list and map has a largest size, because the apiserver works out from it what a rule may cost.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BeforeValidator, Field, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError

from orbitkv_crds import quantity
from orbitkv_crds.names import GROUP, POOL_NAME_LENGTH


@dataclass(frozen=True)
class Schema:
    """What a type says to OpenAPI beyond what pydantic does; with `replace`, instead of it."""

    keys: dict[str, Any]
    replace: bool = False

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return dict(self.keys) if self.replace else {**handler(core), **self.keys}

    def __hash__(self) -> int:
        return id(self)


CHANGE_KEY: Final = "x-orbitkv-change"
"""Where a field's schema has its `Change`, until it is made part of the description."""


class Change(Enum):
    """What a change of a field does to agents that run. The value is a sentence for its description."""

    LIVE = "A change takes effect without a restart."
    PLACEMENT = "A change restarts no agent on a node that stays."
    REPLACE = "A change replaces the agents one by one."
    REFUSED = "Cannot be changed."

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(core), CHANGE_KEY: self.name}


def list_of(key: str) -> tuple[AfterValidator, Schema]:
    """Demand of a list that its items differ in `key` (named as in the API), which must be a required text."""

    def check(items: list[Any]) -> list[Any]:
        seen = set()
        for index, item in enumerate(items):
            if (value := getattr(item, key)) in seen:
                about = {"key": key, "value": value, "field": f"[{index}]"}
                raise PydanticCustomError("duplicate", "{key} {value} is given twice", about)
            seen.add(value)
        return items

    return AfterValidator(check), Schema({"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]})


ATOMIC: Final = Schema({"x-kubernetes-list-type": "atomic"})

# ------------------------------------------------------------------------------------------------- names and labels

_LABEL_NAME: Final = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_DNS_LABEL: Final = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN: Final = rf"{_DNS_LABEL}(\.{_DNS_LABEL})*"
LABEL_KEY_PATTERN: Final = rf"^({_SUBDOMAIN}/)?{_LABEL_NAME}$"

LabelKey = Annotated[str, Field(min_length=1, max_length=317, pattern=LABEL_KEY_PATTERN)]
LabelValue = Annotated[str, Field(max_length=63, pattern=rf"^({_LABEL_NAME})?$")]
ObjectName = Annotated[str, Field(min_length=1, max_length=253, pattern=rf"^{_SUBDOMAIN}$")]
NamespaceName = Annotated[str, Field(min_length=1, max_length=63, pattern=rf"^{_DNS_LABEL}$")]
PoolName = Annotated[str, Field(min_length=1, max_length=POOL_NAME_LENGTH, pattern=rf"^{_DNS_LABEL}$")]


def _keys(holds: Callable[[str], bool], cel: str, message: str) -> tuple[AfterValidator, Schema]:
    """Demand something of every key of a map, in Python and in CEL (where the key is called `key`)."""

    def check(value: dict[str, Any]) -> dict[str, Any]:
        for key in value:
            if not holds(key):
                raise ValueError(message)
        return value

    rule = {"rule": f"self.all(key, {cel})", "message": message}
    return AfterValidator(check), Schema({"x-kubernetes-validations": [rule]})


def _fits(pattern: str, text: str) -> bool:
    """Whether a text matches; Python's `$` alone would also match before a line feed at the end."""
    return re.fullmatch(pattern.removeprefix("^").removesuffix("$"), text, re.ASCII) is not None


def _cel_text(text: str) -> str:
    """Return a text as a literal of CEL."""
    return "'" + text.replace("\\", "\\\\") + "'"


def _is_label_key(key: str) -> bool:
    return len(key) <= 317 and _fits(LABEL_KEY_PATTERN, key)


_label_keys = _keys(
    _is_label_key,
    f"size(key) <= 317 && key.matches({_cel_text(LABEL_KEY_PATTERN)})",
    "each key must be a name such as app or example.com/app: letters, digits, '-', '_' and '.'",
)
_no_own_keys = _keys(
    lambda key: not key.startswith(f"{GROUP}/"),
    f"!key.startsWith('{GROUP}/')",
    f"keys that begin with {GROUP}/ are set by the operator alone",
)
_no_gpu_keys = _keys(
    lambda key: not key.startswith("nvidia.com/"),
    "!key.startsWith('nvidia.com/')",
    "an agent must not take a GPU from the engines: nvidia.com/ resources cannot be requested for it",
)


def _both(first: tuple[AfterValidator, Schema], second: tuple[AfterValidator, Schema]) -> tuple[Any, ...]:
    rules = [*first[1].keys["x-kubernetes-validations"], *second[1].keys["x-kubernetes-validations"]]
    return first[0], second[0], Schema({"x-kubernetes-validations": rules})


Labels = Annotated[dict[str, LabelValue], Field(max_length=32), *_label_keys]
"""Labels that something must have."""
PodLabels = Annotated[dict[str, LabelValue], Field(max_length=32), *_both(_label_keys, _no_own_keys)]
PodAnnotations = Annotated[
    dict[str, Annotated[str, Field(max_length=4096)]], Field(max_length=32), *_both(_label_keys, _no_own_keys)
]

# ------------------------------------------------------------------------------------------------------- quantities


def _int_or_string(cel: str, message: str, longest: int) -> Schema:
    """Describe a number or text that a rule in CEL holds for: its message says more than a pattern would."""
    return Schema(
        {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "x-kubernetes-int-or-string": True,
            "maxLength": longest,
            "x-kubernetes-validations": [{"rule": cel, "message": message}],
        },
        replace=True,
    )


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_quantity(value: Any) -> bool:
    if _is_whole(value):
        return bool(value >= 0)
    return isinstance(value, str) and len(value) <= quantity.MAX_LENGTH and _fits(quantity.PATTERN, value)


_CEL_IS_QUANTITY: Final = f"string(self).matches({_cel_text(quantity.PATTERN)})"
_A_QUANTITY: Final = "must be a quantity such as 8Gi, 500M or a whole number, not negative"


def _check_quantity(value: Any) -> Any:
    if not _is_quantity(value):
        raise ValueError(_A_QUANTITY)
    return value


Quantity = Annotated[
    int | str,
    BeforeValidator(_check_quantity),
    _int_or_string(_CEL_IS_QUANTITY, _A_QUANTITY, quantity.MAX_LENGTH),
]
"""A quantity as it was written, not negative."""

Amount = Annotated[
    int | str,
    BeforeValidator(_check_quantity),
    Schema(
        {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "x-kubernetes-int-or-string": True,
            "maxLength": quantity.MAX_LENGTH,
            "minimum": 0,
            "pattern": quantity.PATTERN,
        },
        replace=True,
    ),
]
"""The same within lists and maps, where a rule of its own for each would cost the apiserver of 1.31 too much."""

Resources = Annotated[dict[str, Amount], Field(max_length=6), *_both(_label_keys, _no_gpu_keys)]
"""Amounts of resources by name."""


def _check_size(value: Any) -> Any:
    if not _is_quantity(value) or quantity.parse_quantity(value) < 1 << 20:
        raise ValueError(_A_SIZE)
    return value


_A_SIZE: Final = "must be a size of at least 1Mi, such as 8Gi, 500M or a whole number of bytes"

Size = Annotated[
    int | str,
    BeforeValidator(_check_size),
    _int_or_string(
        f"{_CEL_IS_QUANTITY} && quantity(string(self)).compareTo(quantity('1Mi')) >= 0", _A_SIZE, quantity.MAX_LENGTH
    ),
]
"""A quantity of bytes as it was written, 1Mi or more."""


def cel_at_most(small: str, large: str) -> str:
    """Return the rule in CEL that one quantity is not larger than another; what is no quantity is judged elsewhere."""
    return (
        f"!isQuantity(string({small})) || !isQuantity(string({large}))"
        f" || quantity(string({small})).compareTo(quantity(string({large}))) <= 0"
    )


_SHARE: Final = r"^(100|[1-9][0-9]?)%$"
_A_SHARE: Final = "must be a whole number of at least 1, or a percentage such as 10%"


def _check_share(value: Any) -> Any:
    if (1 <= value <= 1 << 30) if _is_whole(value) else isinstance(value, str) and _fits(_SHARE, value):
        return value
    raise ValueError(_A_SHARE)


IntOrPercent = Annotated[
    int | str,
    BeforeValidator(_check_share),
    _int_or_string(
        f"type(self) == int ? int(self) >= 1 && int(self) <= {1 << 30} : string(self).matches({_cel_text(_SHARE)})",
        _A_SHARE,
        16,
    ),
]
