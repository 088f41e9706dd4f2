"""What every object of ours has: metadata and conditions."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import Field

from orbitkv_crds.model import Model
from orbitkv_crds.types import list_of


class ObjectMeta(Model):
    """What is read of an object's metadata."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    creation_timestamp: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)


class Condition(Model):
    """One statement on the object's state."""

    type: str = Field(
        max_length=316,
        pattern=r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?"
        r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])$",
        description="What the statement is about.",
    )
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it holds.")
    observed_generation: int | None = Field(
        default=None, ge=0, description="Generation of the object that was looked at."
    )
    last_transition_time: Annotated[str, Field(json_schema_extra={"format": "date-time"}, max_length=64)] = Field(
        description="When the status last changed."
    )
    reason: str = Field(
        min_length=1,
        max_length=1024,
        pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
        description="Why, in one word for programs.",
    )
    message: str = Field(max_length=32768, description="Why, and what can be done, for people.")


Conditions = Annotated[list[Condition], Field(max_length=16), *list_of("type")]


def find_condition(conditions: Iterable[Condition], kind: str) -> Condition | None:
    """Return the condition of a type, or None."""
    return next((condition for condition in conditions if condition.type == kind), None)


def condition(
    before: Iterable[Condition],
    kind: str,
    status: bool | None,
    reason: str,
    message: str,
    generation: int,
    now: datetime | None = None,
) -> Condition:
    """Return a condition; its time of change is kept from `before` while the status stays. `status` None: unknown."""
    text: Literal["True", "False", "Unknown"] = "Unknown" if status is None else "True" if status else "False"
    known = find_condition(before, kind)
    moment = (now or datetime.now(UTC)).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return Condition(
        type=kind,
        status=text,
        observed_generation=generation,
        last_transition_time=known.last_transition_time if known is not None and known.status == text else moment,
        reason=reason,
        message=message,
    )
