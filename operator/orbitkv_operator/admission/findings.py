"""What the operator has found out for the webhook: a ConfigMap, written by the one and read by the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

_TRUE = "true"


@dataclass(frozen=True)
class Findings:
    """What is known of a payload image on this cluster."""

    payload_image: str = ""
    """The image that `pull_failing` is about."""
    image_volumes: bool = False
    """Whether the apiserver keeps image volumes: it drops them silently where the feature is off."""
    pull_failing: str = ""
    """Why no node can pull the payload, in words for a person; empty: some node can, or none has tried."""

    @classmethod
    def read(cls, data: Mapping[str, str] | None) -> Self:
        """Return what the ConfigMap says; of what it lacks, nothing is known."""
        found = data or {}
        return cls(
            found.get("payloadImage", ""), found.get("imageVolumes") == _TRUE, found.get("payloadPullFailing", "")
        )

    def write(self) -> dict[str, str]:
        """Return the ConfigMap's data."""
        return {
            "payloadImage": self.payload_image,
            "imageVolumes": _TRUE if self.image_volumes else "false",
            "payloadPullFailing": self.pull_failing,
        }
