"""The parts of Kubernetes' own types (core/v1) that appear in our objects, with the rules that the apiserver has."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from orbitkv_crds.model import Model, Rule
from orbitkv_crds.quantity import parse_quantity
from orbitkv_crds.selectors import LabelSelector
from orbitkv_crds.types import ATOMIC, Amount, LabelKey, LabelValue, NamespaceName, ObjectName, Resources, list_of

EnvName = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[-._a-zA-Z][-._a-zA-Z0-9]*$")]
KeyName = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")]


def _exactly_one(*fields: str) -> Rule:
    """Demand that exactly one of some fields is given (named as in the API)."""
    names = {field: "".join("_" + c.lower() if c.isupper() else c for c in field) for field in fields}
    return Rule(
        f"[{', '.join(f'has(self.{field})' for field in fields)}].exists_one(given, given)",
        f"exactly one of {', '.join(fields)} must be given",
        lambda it: sum(getattr(it, name) is not None for name in names.values()) == 1,
    )


# --------------------------------------------------------------------------------------------------------- environment


class LocalObjectReference(Model):
    """An object in the release namespace."""

    name: ObjectName = Field(description="The object's name.")


class ObjectFieldSelector(Model):
    """A field of the agent's own pod."""

    field_path: str = Field(
        min_length=1, max_length=512, description="Path of the field, for example metadata.labels['topology']."
    )
    api_version: str | None = Field(default=None, max_length=64, description="Version of the path; v1 if not given.")


class ResourceFieldSelector(Model):
    """A request or limit of the agent's own container."""

    resource: str = Field(
        min_length=1,
        max_length=64,
        pattern=r"^(limits|requests)\.[-a-z0-9]+$",
        description="For example limits.memory.",
    )
    container_name: NamespaceName | None = Field(default=None, description="The container; the agent's if not given.")
    divisor: Amount | None = Field(default=None, description="Unit of the value; 1 if not given.")


class KeySelector(Model):
    """One key of a Secret or ConfigMap of the release namespace."""

    name: ObjectName = Field(description="Name of the object.")
    key: KeyName = Field(description="The key in it.")
    optional: bool | None = Field(default=None, description="Whether agents start without the object or the key.")


class EnvVarSource(Model):
    """Where the value of a variable comes from."""

    field_ref: ObjectFieldSelector | None = Field(default=None, description="A field of the agent's pod.")
    resource_field_ref: ResourceFieldSelector | None = Field(
        default=None, description="A request or limit of the agent's container."
    )
    secret_key_ref: KeySelector | None = Field(default=None, description="A key of a Secret of the release namespace.")
    config_map_key_ref: KeySelector | None = Field(
        default=None, description="A key of a ConfigMap of the release namespace."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        _exactly_one("fieldRef", "resourceFieldRef", "secretKeyRef", "configMapKeyRef"),
    )


class EnvVar(Model):
    """An environment variable of the agents."""

    name: EnvName = Field(description="Name of the variable.")
    value: str | None = Field(default=None, max_length=8192, description="Its value.")
    value_from: EnvVarSource | None = Field(default=None, description="Where its value comes from, instead of `value`.")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.value) || !has(self.valueFrom)",
            "value and valueFrom cannot both be given",
            lambda it: it.value is None or it.value_from is None,
        ),
    )


Env = Annotated[list[EnvVar], Field(max_length=64), *list_of("name")]

# ----------------------------------------------------------------------------------------------------------- resources


class ResourceRequirements(Model):
    """What an agent asks for, and what it may use at most."""

    requests: Resources | None = Field(default=None, description="What is set aside for each agent on its node.")
    limits: Resources | None = Field(default=None, description="What each agent may use at most.")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.requests) || !has(self.limits) || self.requests.all(name, !(name in self.limits)"
            " || quantity(string(self.requests[name])).compareTo(quantity(string(self.limits[name]))) <= 0)",
            "no request may be larger than its limit",
            lambda it: all(
                parse_quantity(amount) <= parse_quantity(it.limits[name])
                for name, amount in (it.requests or {}).items()
                if name in (it.limits or {})
            ),
            ".requests",
        ),
    )


# ----------------------------------------------------------------------------------------------------------- placement


class Toleration(Model):
    """A taint that agents do not mind."""

    key: LabelKey | None = Field(default=None, description="Key of the taint; every taint, if not given.")
    operator: Literal["Exists", "Equal"] | None = Field(
        default=None, description="How the taint's value relates to `value`: Equal if not given."
    )
    value: LabelValue | None = Field(default=None, description="Value of the taint, for Equal.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        default=None, description="Effect of the taint; every effect, if not given."
    )
    toleration_seconds: int | None = Field(
        default=None, description="How long a taint with NoExecute is tolerated; for ever, if not given."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "has(self.key) || (has(self.operator) && self.operator == 'Exists')",
            "operator must be Exists where no key is given",
            lambda it: it.key is not None or it.operator == "Exists",
            ".operator",
        ),
        Rule(
            "!has(self.operator) || self.operator != 'Exists' || !has(self.value) || self.value == ''",
            "Exists takes no value",
            lambda it: it.operator != "Exists" or not it.value,
            ".value",
        ),
        Rule(
            "!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
            "tolerationSeconds goes with the effect NoExecute only",
            lambda it: it.toleration_seconds is None or it.effect == "NoExecute",
            ".tolerationSeconds",
        ),
    )


class NodeSelectorRequirement(Model):
    """A demand on one label or field of a node."""

    key: LabelKey = Field(description="The label's key.")
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"] = Field(
        description="How the label's value relates to `values`."
    )
    values: Annotated[list[LabelValue], ATOMIC] | None = Field(
        default=None,
        max_length=64,
        description="Values for In and NotIn, one whole number for Gt and Lt; none for Exists and DoesNotExist.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.operator in ['In', 'NotIn'] ? has(self.values) && size(self.values) > 0"
            " : self.operator in ['Gt', 'Lt'] ? has(self.values) && size(self.values) == 1"
            " && self.values[0].matches('^[0-9]+$')"
            " : !has(self.values) || size(self.values) == 0",
            "In and NotIn need at least one value, Gt and Lt one whole number; Exists and DoesNotExist take none",
            lambda it: _has_its_values(it.operator, it.values or []),
            ".values",
        ),
    )


def _has_its_values(operator: str, values: list[str]) -> bool:
    if operator in ("In", "NotIn"):
        return bool(values)
    if operator in ("Gt", "Lt"):
        return len(values) == 1 and values[0].isascii() and values[0].isdigit()
    return not values


class NodeSelectorTerm(Model):
    """Demands on a node, all of which must hold. A term without any matches no node."""

    match_expressions: Annotated[list[NodeSelectorRequirement], ATOMIC] | None = Field(
        default=None, max_length=16, description="Demands on the node's labels."
    )
    match_fields: Annotated[list[NodeSelectorRequirement], ATOMIC] | None = Field(
        default=None, max_length=4, description="Demands on the node's fields; the key must be metadata.name."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.matchFields) || self.matchFields.all(demand, demand.key == 'metadata.name'"
            " && demand.operator in ['In', 'NotIn'] && has(demand.values) && size(demand.values) == 1)",
            "matchFields takes the key metadata.name, the operator In or NotIn, and one value",
            lambda it: all(
                demand.key == "metadata.name" and demand.operator in ("In", "NotIn") and len(demand.values or []) == 1
                for demand in it.match_fields or []
            ),
            ".matchFields",
        ),
    )


class NodeSelector(Model):
    """Terms, one of which must hold."""

    node_selector_terms: Annotated[list[NodeSelectorTerm], ATOMIC] = Field(
        min_length=1, max_length=16, description="The terms."
    )


class PreferredSchedulingTerm(Model):
    """A term that nodes had better meet."""

    weight: int = Field(ge=1, le=100, description="How much it counts.")
    preference: NodeSelectorTerm = Field(description="The term.")


class NodeAffinity(Model):
    """Which nodes."""

    required_during_scheduling_ignored_during_execution: NodeSelector | None = Field(
        default=None, description="What a node must have."
    )
    preferred_during_scheduling_ignored_during_execution: Annotated[list[PreferredSchedulingTerm], ATOMIC] | None = (
        Field(default=None, max_length=16, description="What a node had better have.")
    )


class PodAffinityTerm(Model):
    """Pods beside which, or away from which, agents are to run."""

    topology_key: LabelKey = Field(description="Label of nodes: nodes with the same value count as one place.")
    label_selector: LabelSelector | None = Field(default=None, description="Which pods.")
    namespaces: Annotated[list[NamespaceName], ATOMIC] | None = Field(
        default=None, max_length=64, description="Namespaces of the pods; the release namespace, if neither is given."
    )
    namespace_selector: LabelSelector | None = Field(default=None, description="Namespaces of the pods, by label.")
    match_label_keys: Annotated[list[LabelKey], ATOMIC] | None = Field(
        default=None, max_length=16, description="Labels in which the pods must equal the agent."
    )
    mismatch_label_keys: Annotated[list[LabelKey], ATOMIC] | None = Field(
        default=None, max_length=16, description="Labels in which the pods must differ from the agent."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "(!has(self.matchLabelKeys) && !has(self.mismatchLabelKeys)) || has(self.labelSelector)",
            "matchLabelKeys and mismatchLabelKeys need a labelSelector",
            lambda it: (
                it.label_selector is not None or (it.match_label_keys is None and it.mismatch_label_keys is None)
            ),
        ),
    )


class WeightedPodAffinityTerm(Model):
    """A term that had better hold."""

    weight: int = Field(ge=1, le=100, description="How much it counts.")
    pod_affinity_term: PodAffinityTerm = Field(description="The term.")


class PodAffinity(Model):
    """Beside which pods, or away from which."""

    required_during_scheduling_ignored_during_execution: Annotated[list[PodAffinityTerm], ATOMIC] | None = Field(
        default=None, max_length=16, description="What must hold."
    )
    preferred_during_scheduling_ignored_during_execution: Annotated[list[WeightedPodAffinityTerm], ATOMIC] | None = (
        Field(default=None, max_length=16, description="What had better hold.")
    )


class Affinity(Model):
    """Where agents may and had better run."""

    node_affinity: NodeAffinity | None = Field(default=None, description="Which nodes.")
    pod_affinity: PodAffinity | None = Field(default=None, description="Beside which pods.")
    pod_anti_affinity: PodAffinity | None = Field(default=None, description="Away from which pods.")
