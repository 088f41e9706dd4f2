"""Settings of a pool that agents take on while they run: the file live.yaml, which the operator writes."""

from __future__ import annotations

from typing import Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from orbitkv_crds.access import AllowedNamespaces
from orbitkv_crds.managerpool import LogLevel, ManagerPoolSpec
from orbitkv_crds.model import describe_errors


class LiveSettings(BaseModel):
    """What live.yaml holds. Sizes are bytes; None is no limit. Keys that this release does not know are passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore", hide_input_in_errors=True)

    query_budget_percent: int = Field(default=75, ge=1, le=100)
    instance_budget: int | None = Field(default=None, ge=1)
    log_level: LogLevel = "info"
    max_quota_dram: int | None = Field(default=None, ge=1)
    allowed_namespaces: AllowedNamespaces = Field(default=AllowedNamespaces())

    @classmethod
    def of(cls, spec: ManagerPoolSpec) -> Self:
        """Return the settings that a pool's spec asks for."""
        return cls(
            query_budget_percent=spec.memory.query_budget_percent,
            instance_budget=spec.memory.instance_budget_bytes,
            log_level=spec.logging.level,
            max_quota_dram=spec.max_quota_dram_bytes,
            allowed_namespaces=spec.allowed_namespaces,
        )

    @classmethod
    def read(cls, text: str) -> Self:
        """Return what a file holds.

        Raises:
            ValueError: it is no such file; the message names the key and the rule.
        """
        try:
            return cls.model_validate(yaml.safe_load(text) or {})
        except yaml.YAMLError as error:
            raise ValueError(f"not YAML: {error}") from None
        except ValidationError as error:
            raise ValueError(describe_errors(error)) from None

    def write(self) -> str:
        """Return the file; the same settings are always the same text."""
        return yaml.safe_dump(self.model_dump(mode="json", by_alias=True, exclude_none=True), sort_keys=True)
