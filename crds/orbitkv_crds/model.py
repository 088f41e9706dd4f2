"""What all models of this package share: how they read objects, and rules between fields.

A model reads what the apiserver sends, and an object may come from a newer release: a field that this release does not
know is passed over. What people write is checked strictly by the apiserver, against the schema made from these models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    GetJsonSchemaHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema, PydanticCustomError


@dataclass(frozen=True)
class Rule:
    """A rule between fields, once for the apiserver and once for us.

    `cel` is evaluated on the object that the model describes. `check` says the same in Python; None for a rule that
    compares with the object as it was before a change (`oldSelf`): only the apiserver sees both. `field` is the path
    of the field to name, such as `.dram`.
    """

    cel: str
    message: str
    check: Callable[[Any], bool] | None
    field: str = ""


class Model(BaseModel):
    """Base of everything in an object: camelCase outside, immutable, nothing converted."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        frozen=True,
        strict=True,
        extra="ignore",
        hide_input_in_errors=True,
    )
    rules: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="after")
    def _follows_rules(self) -> Self:
        for rule in self.rules:
            if rule.check is not None and not rule.check(self):
                raise PydanticCustomError("rule", "{message}", {"message": rule.message, "field": rule.field})
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler(core)
        if cls.rules:
            handler.resolve_ref_schema(schema)["x-kubernetes-validations"] = [
                {"rule": rule.cel, "message": rule.message, **({"fieldPath": rule.field} if rule.field else {})}
                for rule in cls.rules
            ]
        return schema

    def to_body(self) -> dict[str, Any]:
        """Return the object as the API has it: camelCase, without what is unset."""
        return self.model_dump(by_alias=True, exclude_none=True, mode="json")


def or_empty(status: type[Model]) -> WrapValidator:
    """Read a status that this release cannot read as an empty one, so that it never hides the spec.

    Every status can be worked out again; one that a newer release wrote may hold more than this one allows.
    """

    def read(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            return status()

    return WrapValidator(read)


def describe_errors(error: ValidationError) -> str:
    """Return in one line what is wrong with an object."""
    return "; ".join(each_error(error))


def each_error(error: ValidationError) -> list[str]:
    """Return what is wrong with an object: each field's path and rule, as `spec.memory.pool: must be ...`."""
    lines = []
    for each in error.errors(include_url=False, include_input=False):
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in each["loc"])
        path = (path + each.get("ctx", {}).get("field", "")).removeprefix(".")
        message = each["msg"].removeprefix("Value error, ")
        lines.append(f"{path}: {message}" if path else message)
    return lines
