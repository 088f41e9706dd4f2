"""Label selectors: what they look like, and whether they match."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from orbitkv_crds.model import Model, Rule
from orbitkv_crds.types import ATOMIC, LabelKey, Labels, LabelValue


class LabelSelectorRequirement(Model):
    """A demand on one label."""

    key: LabelKey = Field(description="The label's key.")
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"] = Field(
        description="How the label's value relates to `values`."
    )
    values: Annotated[list[LabelValue], ATOMIC] | None = Field(
        default=None, max_length=64, description="Values for In and NotIn; none for Exists and DoesNotExist."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.operator in ['In', 'NotIn'] ? has(self.values) && size(self.values) > 0"
            " : !has(self.values) || size(self.values) == 0",
            "In and NotIn need at least one value; Exists and DoesNotExist take none",
            lambda it: (it.operator in ("In", "NotIn")) == bool(it.values),
            ".values",
        ),
    )

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether the labels meet the demand. As in Kubernetes a label that is not there is NotIn anything."""
        present = self.key in labels
        match self.operator:
            case "Exists":
                return present
            case "DoesNotExist":
                return not present
            case "In":
                return present and labels[self.key] in (self.values or [])
            case "NotIn":
                return not present or labels[self.key] not in (self.values or [])


class LabelSelector(Model):
    """A demand on an object's labels; an empty one matches every object."""

    match_labels: Labels | None = Field(default=None, description="Labels that must be there, with these values.")
    match_expressions: Annotated[list[LabelSelectorRequirement], ATOMIC] | None = Field(
        default=None, max_length=16, description="Further demands, all of which must hold."
    )

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether every demand holds for the labels."""
        return all(labels.get(key) == value for key, value in (self.match_labels or {}).items()) and all(
            requirement.matches(labels) for requirement in self.match_expressions or []
        )
