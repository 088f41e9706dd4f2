"""Who may use a pool, and who may attach to a cache namespace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from orbitkv_crds.model import Model, Rule
from orbitkv_crds.selectors import LabelSelector
from orbitkv_crds.types import ATOMIC, Change

ServiceAccountName = Annotated[
    str,
    Field(
        min_length=1,
        max_length=317,
        pattern=r"^([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?/)?[a-z0-9]([-a-z0-9.]*[a-z0-9])?$",
    ),
]


class AllowedNamespaces(Model):
    """Namespaces whose CacheNamespaces may use a pool."""

    source: Annotated[Literal["All", "Selector"], Change.LIVE] = Field(
        default="All",
        alias="from",
        description="All: every namespace. Selector: those whose labels match `selector`.",
    )
    selector: Annotated[LabelSelector, Change.LIVE] | None = Field(
        default=None, description="Labels of the namespaces, for Selector; {} matches every namespace."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "(self.from == 'Selector') == has(self.selector)",
            "selector must be given with from: Selector, and only then",
            lambda it: (it.source == "Selector") == (it.selector is not None),
            ".selector",
        ),
    )

    def admits(self, labels: Mapping[str, str] | None) -> bool:
        """Whether a namespace with these labels is admitted; None: its labels are not known."""
        if self.selector is None:
            return True
        return labels is not None and self.selector.matches(labels)


class Access(Model):
    """Pods that may attach to a cache namespace."""

    namespaces: Annotated[Literal["Same", "Selector", "All"], Change.LIVE] = Field(
        default="Same",
        description="Where the pods may run. Same: in the namespace of this object. Selector: in namespaces "
        "whose labels match `selector`, and in the same one. All: anywhere.",
    )
    selector: Annotated[LabelSelector, Change.LIVE] | None = Field(
        default=None, description="Labels of the namespaces, for Selector."
    )
    service_accounts: Annotated[list[ServiceAccountName], ATOMIC, Change.LIVE] | None = Field(
        default=None,
        max_length=64,
        description="ServiceAccounts that the pods may have: `name` in any of the namespaces above, or "
        "`namespace/name`. Every ServiceAccount, if not given.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "(self.namespaces == 'Selector') == has(self.selector)",
            "selector must be given with namespaces: Selector, and only then",
            lambda it: (it.namespaces == "Selector") == (it.selector is not None),
            ".selector",
        ),
    )

    def refusal(
        self,
        own_namespace: str,
        pod_namespace: str,
        pod_namespace_labels: Mapping[str, str] | None,
        service_account: str,
    ) -> str | None:
        """Return why a pod may not attach, as part of a sentence, or None if it may.

        `own_namespace` is that of the CacheNamespace. Labels None: they are not known, so no selector matches.
        """
        if pod_namespace != own_namespace:
            if self.namespaces == "Same":
                return f"access.namespaces is Same: only pods in the namespace {own_namespace} may attach"
            if self.selector is not None and (
                pod_namespace_labels is None or not self.selector.matches(pod_namespace_labels)
            ):
                return f"the labels of the namespace {pod_namespace} do not match access.selector"
        if self.service_accounts is not None and not {
            service_account,
            f"{pod_namespace}/{service_account}",
        }.intersection(self.service_accounts):
            return f"the ServiceAccount {pod_namespace}/{service_account} is not among access.serviceAccounts"
        return None
