"""CacheNamespace: the cache of one tenant."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field

from orbitkv_crds.access import Access
from orbitkv_crds.meta import Conditions, ObjectMeta
from orbitkv_crds.model import Model, Rule, or_empty
from orbitkv_crds.names import API_VERSION
from orbitkv_crds.quantity import whole_quantity
from orbitkv_crds.types import Change, PoolName, Quantity, Size, cel_at_most

KIND: Final = "CacheNamespace"
PLURAL: Final = "cachenamespaces"

ENGINE_OPTIONS: Final = (
    "mode",
    "max_wait_ms",
    "wait_for_full_prefix",
    "model_fingerprint",
    "min_load_tokens",
    "save_decode",
)
"""Fields of the spec that are sent to engines, under these names."""


class PoolRef(Model):
    """A pool."""

    name: Annotated[PoolName, Change.REFUSED] = Field(description="Name of the ManagerPool.")


class Quota(Model):
    """Memory and disk that the cache may take, on each node."""

    dram: Annotated[Size, Change.LIVE] | None = Field(
        default=None,
        description="Most memory that its pages may take on a node. Beyond it only its own pages are evicted."
        " If not given: what the pool allows one namespace.",
    )
    guaranteed_dram: Annotated[Quantity, Change.LIVE] | None = Field(
        default=None,
        description="Memory on each node within which nobody else evicts its pages. The guarantees of a pool "
        "fit into its memory together: the oldest CacheNamespaces come first. None, if not given.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            f"!has(self.dram) || !has(self.guaranteedDram) || {cel_at_most('self.guaranteedDram', 'self.dram')}",
            "must not be larger than dram",
            lambda it: it.dram_bytes is None or it.guaranteed_dram_bytes <= it.dram_bytes,
            ".guaranteedDram",
        ),
    )

    @property
    def dram_bytes(self) -> int | None:
        """`dram` in bytes; None: what the pool allows."""
        return None if self.dram is None else whole_quantity(self.dram)

    @property
    def guaranteed_dram_bytes(self) -> int:
        """`guaranteedDram` in bytes."""
        return 0 if self.guaranteed_dram is None else whole_quantity(self.guaranteed_dram)


class Retention(Model):
    """Which pages stay."""

    insert_class: Annotated[Literal["probationary", "retained"], Change.LIVE] = Field(
        default="probationary",
        alias="class",
        description="What new pages are. probationary ones leave first, until they are used again; retained "
        "ones leave last.",
    )


class CacheNamespaceSpec(Model):
    """One tenant's cache: where it is, what it may take, and who may use it."""

    pool_ref: Annotated[PoolRef, Change.REFUSED] = Field(description="The pool that keeps the cache.")
    quota: Quota = Field(default=Quota(), description="What the cache may take, on each node.")
    retention: Retention = Field(default=Retention(), description="Which pages stay.")
    access: Access = Field(default=Access(), description="Pods that may attach.")
    mode: Annotated[Literal["read_write", "save_only"], Change.LIVE] | None = Field(
        default=None,
        description="save_only: engines store pages and never ask for any. If not given: what the engine is "
        "set to (read_write).",
    )
    model_fingerprint: Annotated[str, Change.LIVE] | None = Field(
        default=None,
        max_length=256,
        description="Name for the model's weights that you vouch for: engines with the same name must have "
        "the same weights. If not given: worked out from the weights.",
    )
    wait_for_full_prefix: Annotated[bool, Change.LIVE] | None = Field(
        default=None,
        description="Whether a request is held until its whole prefix can be fetched. If not given: what the "
        "engine is set to (false).",
    )
    max_wait_ms: Annotated[int, Change.LIVE] | None = Field(
        default=None,
        ge=0,
        le=600_000,
        description="Longest time in milliseconds that a request is held while its pages are looked up. If "
        "not given: what the engine is set to (2000).",
    )
    min_load_tokens: Annotated[int, Change.LIVE] | None = Field(
        default=None,
        ge=0,
        le=1 << 30,
        description="When fewer tokens than this could be fetched, they are computed instead. If not given: "
        "what the engine is set to (0).",
    )
    save_decode: Annotated[bool, Change.LIVE] | None = Field(
        default=None,
        description="Whether pages with generated tokens are kept too. If not given: what the engine is set to (true).",
    )
    reset_generation: Annotated[int, Change.LIVE] = Field(
        default=0, ge=0, le=2**53, description="Raising it retires every page that was stored before. It only rises."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.poolRef.name == oldSelf.poolRef.name",
            "cannot be changed: make another CacheNamespace for the other pool",
            None,
            ".poolRef.name",
        ),
        Rule(
            "self.resetGeneration >= oldSelf.resetGeneration",
            "only rises: pages of an earlier generation are gone",
            None,
            ".resetGeneration",
        ),
    )

    @property
    def engine_options(self) -> dict[str, Any]:
        """What engines are told when they attach: the options that are set, by the names of the engine plugins."""
        options = {name: getattr(self, name) for name in ENGINE_OPTIONS}
        return {name: value for name, value in options.items() if value is not None}


# -------------------------------------------------------------------------------------------------------------- status


class CacheTier(Model):
    """One tier of a cache, all nodes together."""

    used: str | None = Field(default=None, max_length=32, description="What its pages take.")


class CacheTiers(Model):
    """Use by tier, all nodes together, as last reported by the agents."""

    dram: CacheTier | None = Field(default=None, description="Memory.")


class AttachedPod(Model):
    """A pod whose engine is attached."""

    namespace: str = Field(max_length=63, description="Its namespace.")
    name: str = Field(max_length=253, description="Its name.")
    node: str = Field(max_length=253, description="Where it runs.")
    sessions: int = Field(ge=0, description="Its connections to the agent.")
    engine: str | None = Field(default=None, max_length=64, description="Its engine and the engine's version.")
    requested_tokens: int | None = Field(
        default=None, ge=0, description="Tokens of prompts that it asked for since its engine attached."
    )
    hit_tokens: int | None = Field(default=None, ge=0, description="Tokens of them that came from the cache.")


class Attached(Model):
    """Who is attached."""

    pods: int = Field(default=0, ge=0, description="Pods.")
    sessions: int = Field(default=0, ge=0, description="Connections to agents.")
    without: int = Field(
        default=0, ge=0, description="Pods that ask for it and run without; the condition InUse names the first ones."
    )
    first: list[AttachedPod] | None = Field(default=None, max_length=10, description="The first 10 pods.")


class LastHour(Model):
    """Tokens of prompts in the last hour, all nodes together."""

    hit_rate: str | None = Field(
        default=None, max_length=16, description="Share of the tokens that came from the cache."
    )
    requested_tokens: int = Field(default=0, ge=0, description="Tokens that engines asked for.")
    hit_tokens: int = Field(default=0, ge=0, description="Tokens of them that came from the cache.")
    computed_tokens: int = Field(default=0, ge=0, description="Tokens of them that engines had to compute.")


class CacheNamespaceStatus(Model):
    """What the operator sees."""

    observed_generation: int | None = Field(default=None, ge=0, description="Generation of the spec that was acted on.")
    tiers: CacheTiers | None = Field(default=None, description="Use, all nodes together.")
    attached: Attached | None = Field(default=None, description="Who is attached.")
    last_hour: LastHour | None = Field(default=None, description="Tokens of the last hour.")
    conditions: Conditions | None = Field(
        default=None,
        description="Accepted (the pool takes it), PoolReady, Ready (both), InUse (an engine is attached; "
        "False is healthy when idle).",
    )


class CacheNamespace(Model):
    """The cache of one tenant: engines that attach to it share pages with each other and with nobody else."""

    api_version: Literal["orbitkv.io/v1alpha1"] = API_VERSION
    kind: Literal["CacheNamespace"] = KIND
    metadata: ObjectMeta
    spec: CacheNamespaceSpec = Field(description="What is wanted.")
    status: Annotated[CacheNamespaceStatus, or_empty(CacheNamespaceStatus)] = Field(
        default=CacheNamespaceStatus(), description="What the operator sees."
    )

    @property
    def full_name(self) -> str:
        """The name under which engines know it: `namespace/name`, at most 317 characters."""
        return f"{self.metadata.namespace}/{self.metadata.name}"
