"""ManagerPool: who runs the caches, where, and how large they are."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from orbitkv_crds.access import AllowedNamespaces
from orbitkv_crds.core import Affinity, Env, LocalObjectReference, ResourceRequirements, Toleration
from orbitkv_crds.meta import Conditions, ObjectMeta
from orbitkv_crds.model import Model, Rule, or_empty
from orbitkv_crds.names import AGENT_METRICS_PORT, API_VERSION, POOL_NAME_LENGTH, RESERVED_POOL_NAMES
from orbitkv_crds.quantity import whole_quantity
from orbitkv_crds.types import (
    ATOMIC,
    Change,
    IntOrPercent,
    Labels,
    ObjectName,
    PodAnnotations,
    PodLabels,
    Size,
    cel_at_most,
    list_of,
)

KIND: Final = "ManagerPool"
PLURAL: Final = "managerpools"

GPU_NODES: Final = {"nvidia.com/gpu.present": "true"}
"""Where agents run unless told otherwise, if they serve GPUs."""
GPU_TAINT: Final = Toleration(key="nvidia.com/gpu", operator="Exists", effect="NoSchedule")

GPUAccess = Literal["auto", "runtimeClass", "runtimeClassCDI", "defaultRuntime", "privileged", "dra", "none"]
LogLevel = Literal["debug", "info", "warning", "error"]


class UpdateStrategy(Model):
    """How agents are replaced after a change that needs it."""

    max_unavailable: Annotated[IntOrPercent, Change.LIVE] = Field(
        default=1,
        description="How many agents may be away at one time: a number, or a percentage of the nodes (rounded up).",
    )
    paused: Annotated[bool, Change.LIVE] = Field(default=False, description="Whether no agent is replaced for now.")


class GPU(Model):
    """How agents get at GPUs."""

    access: Annotated[GPUAccess, Change.REPLACE] = Field(
        default="auto",
        description="The way to the GPUs. auto: runtimeClass if the RuntimeClass is there when the pool is made, else "
        "defaultRuntime. runtimeClass, runtimeClassCDI: NVIDIA's runtime by a RuntimeClass, in its usual mode or with "
        "the Container Device Interface. defaultRuntime: NVIDIA's runtime is the nodes' default. privileged: agents "
        "have all devices of the node, for runtimes that add the driver's libraries only. none: host mode, for engines "
        "on CPUs. dra: a claim with admin access to all GPUs of the node, which NVIDIA's driver for Dynamic Resource "
        "Allocation serves. The condition GPUAccess says whether agents see the GPUs.",
    )
    runtime_class_name: Annotated[ObjectName, Change.REPLACE] | None = Field(
        default=None,
        description="RuntimeClass of the agents; nvidia for runtimeClass and runtimeClassCDI, if not given.",
    )


class Memory(Model):
    """The memory that each agent has for pages."""

    pool: Annotated[Size, Change.REPLACE] = Field(
        description="Memory for pages on each node, for example 64Gi. It is set aside for the agent's pod."
    )
    query_budget_percent: Annotated[int, Change.LIVE] = Field(
        default=75, ge=1, le=100, description="Share of the pool that may be reserved for restores at one time."
    )
    instance_budget: Annotated[Size, Change.LIVE] | None = Field(
        default=None, description="The same for one engine alone, as a size; the whole budget, if not given."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            f"!has(self.instanceBudget) || {cel_at_most('self.instanceBudget', 'self.pool')}",
            "must not be larger than pool",
            lambda it: it.instance_budget is None or whole_quantity(it.instance_budget) <= it.pool_bytes,
            ".instanceBudget",
        ),
    )

    @property
    def pool_bytes(self) -> int:
        """`pool` in bytes."""
        return whole_quantity(self.pool)

    @property
    def instance_budget_bytes(self) -> int | None:
        """`instanceBudget` in bytes; None: the whole budget."""
        return None if self.instance_budget is None else whole_quantity(self.instance_budget)


class MaxQuota(Model):
    """What the CacheNamespaces of one namespace may take in all."""

    dram: Annotated[Size, Change.LIVE] | None = Field(
        default=None, description="Memory on each node: the largest sum of `quota.dram`. No limit, if not given."
    )

    @property
    def dram_bytes(self) -> int | None:
        """`dram` in bytes; None: no limit."""
        return None if self.dram is None else whole_quantity(self.dram)


class PodMonitor(Model):
    """The PodMonitor that is made for the Prometheus operator, where its kind is installed."""

    enabled: Annotated[bool, Change.LIVE] = Field(default=True, description="Whether it is made.")
    labels: Annotated[Labels, Change.LIVE] | None = Field(
        default=None, description="Labels by which your Prometheus picks it, for example release: prometheus."
    )


class Metrics(Model):
    """Where agents serve metrics."""

    port: Annotated[int, Change.REPLACE] = Field(
        default=AGENT_METRICS_PORT,
        ge=1,
        le=65535,
        description="Port of /metrics, /health and /ready on each agent's pod.",
    )
    pod_monitor: PodMonitor = Field(
        default=PodMonitor(),
        description="The PodMonitor that is made where the Prometheus operator is installed.",
    )


class Logging(Model):
    """What agents log."""

    level: Annotated[LogLevel, Change.LIVE] = Field(default="info", description="Least severe entries to log.")


class ManagerPoolSpec(Model):
    """Which nodes have a cache, how large it is, and how its agents run."""

    image: Annotated[str, Change.REPLACE] | None = Field(
        default=None,
        min_length=1,
        max_length=1024,
        description="Image of the agents; the one that comes with the operator, if not given.",
    )
    image_pull_secrets: Annotated[list[LocalObjectReference], *list_of("name"), Change.REPLACE] | None = Field(
        default=None, max_length=16, description="Secrets of the release namespace for pulling the image."
    )
    priority_class_name: Annotated[ObjectName, Change.REPLACE] | None = Field(
        default=None, description="PriorityClass of the agents; the chart's orbitkv-agent, if not given."
    )
    pod_annotations: Annotated[PodAnnotations, Change.REPLACE] | None = Field(
        default=None, description="Annotations for the agents' pods."
    )
    pod_labels: Annotated[PodLabels, Change.REPLACE] | None = Field(
        default=None, description="Labels for the agents' pods."
    )
    env: Annotated[Env, Change.REPLACE] | None = Field(
        default=None, description="Environment variables for the agents. What the operator sets itself wins."
    )
    extra_args: Annotated[list[Annotated[str, Field(max_length=4096)]], ATOMIC, Change.REPLACE] | None = Field(
        default=None, max_length=64, description="Flags for `orbitkv-agent serve`, after those of the operator."
    )
    resources: Annotated[ResourceRequirements, Change.REPLACE] | None = Field(
        default=None,
        description="Requests and limits of the agents. What is not given is worked out: memory from the pool.",
    )
    node_selector: Annotated[Labels, Change.PLACEMENT] | None = Field(
        default=None,
        description='Labels of the nodes that get an agent. If not given: nvidia.com/gpu.present: "true" '
        "where agents serve GPUs, every node in host mode.",
    )
    affinity: Annotated[Affinity, Change.PLACEMENT] | None = Field(
        default=None, description="Further wishes on where agents run."
    )
    tolerations: Annotated[list[Toleration], ATOMIC, Change.PLACEMENT] | None = Field(
        default=None,
        max_length=32,
        description="Taints that agents do not mind. If not given: nvidia.com/gpu with the effect NoSchedule.",
    )
    update_strategy: UpdateStrategy = Field(
        default=UpdateStrategy(), description="How agents are replaced after a change that needs it."
    )
    gpu: GPU = Field(default=GPU(), description="How agents get at GPUs.")
    memory: Memory = Field(description="The memory that each agent has for pages.")
    allowed_namespaces: AllowedNamespaces = Field(
        default=AllowedNamespaces(), description="Namespaces whose CacheNamespaces may use the pool."
    )
    max_quota_per_namespace: MaxQuota | None = Field(
        default=None, description="What the CacheNamespaces of one namespace may take in all."
    )
    metrics: Metrics = Field(default=Metrics(), description="Where agents serve metrics.")
    logging: Logging = Field(default=Logging(), description="What agents log.")

    @property
    def host_mode(self) -> bool:
        """Whether agents serve engines on CPUs only."""
        return self.gpu.access == "none"

    @property
    def node_selector_in_force(self) -> dict[str, str]:
        """`nodeSelector`, or its default."""
        if self.node_selector is not None:
            return dict(self.node_selector)
        return {} if self.host_mode else dict(GPU_NODES)

    @property
    def tolerations_in_force(self) -> list[Toleration]:
        """`tolerations`, or their default."""
        return [GPU_TAINT] if self.tolerations is None else list(self.tolerations)

    @property
    def max_quota_dram_bytes(self) -> int | None:
        """`maxQuotaPerNamespace.dram` in bytes; None: no limit."""
        return None if self.max_quota_per_namespace is None else self.max_quota_per_namespace.dram_bytes


# -------------------------------------------------------------------------------------------------------------- status


class NodeCounts(Model):
    """How many nodes."""

    desired: int = Field(default=0, ge=0, description="Nodes that are to have an agent.")
    ready: int = Field(default=0, ge=0, description="Nodes whose agent is ready.")
    updated: int = Field(default=0, ge=0, description="Nodes whose agent is as the spec says now.")
    unhealthy: int = Field(default=0, ge=0, description="Nodes whose agent has a problem.")


class UnhealthyNode(Model):
    """A node whose agent has a problem."""

    name: str = Field(max_length=253, description="The node.")
    pod: str | None = Field(default=None, max_length=253, description="The agent's pod, if there is one.")
    reason: str = Field(max_length=128, description="The problem in one word, for example OOMKilled.")
    message: str = Field(max_length=1024, description="The problem, and what can be done.")


class PoolTier(Model):
    """One tier of a pool, all nodes together."""

    capacity: str | None = Field(default=None, max_length=32, description="What the nodes have.")
    used: str | None = Field(default=None, max_length=32, description="What pages take of it.")


class PoolTiers(Model):
    """Capacity and use by tier, all nodes together, as last reported by the agents."""

    dram: PoolTier | None = Field(default=None, description="Memory.")


class ManagerPoolStatus(Model):
    """What the operator sees."""

    observed_generation: int | None = Field(default=None, ge=0, description="Generation of the spec that was acted on.")
    gpu_route: str | None = Field(default=None, max_length=32, description="The way to the GPUs that is in use.")
    cache_namespaces: int | None = Field(default=None, ge=0, description="CacheNamespaces that refer to this pool.")
    nodes: NodeCounts | None = Field(default=None, description="How many nodes are to have an agent, and have one.")
    unhealthy_nodes: Annotated[list[UnhealthyNode], *list_of("name")] | None = Field(
        default=None, max_length=10, description="Nodes whose agent has a problem: the first 10."
    )
    tiers: PoolTiers | None = Field(default=None, description="Capacity and use, all nodes together.")
    conditions: Conditions | None = Field(
        default=None,
        description="Ready (all in one), Available (agents serve), Progressing (agents are being replaced), "
        "ConfigValid, GPUAccess.",
    )


class ManagerPool(Model):
    """A set of nodes on which OrbitKV keeps a cache: an agent runs on each and owns a pool of memory there."""

    api_version: Literal["orbitkv.io/v1alpha1"] = API_VERSION
    kind: Literal["ManagerPool"] = KIND
    metadata: ObjectMeta
    spec: ManagerPoolSpec = Field(description="What is wanted.")
    status: Annotated[ManagerPoolStatus, or_empty(ManagerPoolStatus)] = Field(
        default=ManagerPoolStatus(), description="What the operator sees."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            f"size(self.metadata.name) <= {POOL_NAME_LENGTH}"
            " && self.metadata.name.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')",
            f"a pool's name has at most {POOL_NAME_LENGTH} characters: lower-case letters, digits and '-'",
            lambda it: _is_pool_name(it.metadata.name),
        ),
        Rule(
            f"!(self.metadata.name in {list(RESERVED_POOL_NAMES)})",
            f"{', '.join(RESERVED_POOL_NAMES)} are kept for OrbitKV's own objects: give the pool another name",
            lambda it: it.metadata.name not in RESERVED_POOL_NAMES,
        ),
    )

    @property
    def name(self) -> str:
        """The pool's name."""
        return self.metadata.name


def _is_pool_name(name: str) -> bool:
    return (
        1 <= len(name) <= POOL_NAME_LENGTH
        and all(
            character.isascii() and (character.islower() or character.isdigit() or character == "-")
            for character in name
        )
        and name[0] != "-"
        and name[-1] != "-"
    )
