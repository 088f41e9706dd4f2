"""The webhook's settings: one frozen model, from flags and environment variables (a flag wins)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from orbitkv_crds.names import WEBHOOK, WEBHOOK_PORT
from orbitkv_crds.stamps import PayloadMode
from orbitkv_operator.settings import read_settings, split_list

PREFIX: Final = "ORBITKV_WEBHOOK_"
_ABOUT: Final = """\
The admission webhook of OrbitKV: it gives annotated pods what their engines need to attach to the cache.
It runs in a cluster, with the rights that the chart gives it; outside of one it uses $KUBECONFIG.

Every setting can also be given as an environment variable: --payload-image as ORBITKV_WEBHOOK_PAYLOAD_IMAGE.
"""


class Settings(BaseModel):
    """Everything that can be set on the webhook."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    namespace: str = Field(min_length=1, description="Namespace of the release.")
    payload_image: str = Field(min_length=1, description="Image with the files that engines load.")
    payload_pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field(
        default="IfNotPresent", description="When nodes pull it."
    )
    payload_pull_secrets: Annotated[tuple[str, ...], BeforeValidator(split_list)] = Field(
        default=(), description="Secrets for pulling it, separated by commas; they must exist in the pods' namespaces."
    )
    payload_mode: PayloadMode = Field(
        default="init", description="How the files get into a pod: copied by an init container, or as an image volume."
    )
    socket_volume: Literal["hostPath", "csi"] = Field(
        default="hostPath",
        description="How pods get the folder of the agent's socket: they mount it, or the CSI driver does.",
    )
    pod_security_default: Literal["privileged", "baseline", "restricted"] = Field(
        default="privileged", description="What Pod Security enforces in namespaces that have no label for it."
    )
    lmcache: bool = Field(
        default=False, description="Whether pods that are labelled for LMCache's operator are served."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe entries to log."
    )
    port: int = Field(default=WEBHOOK_PORT, ge=0, le=65535, description="Port of the webhook; 0 takes any free one.")
    metrics_port: int = Field(default=9090, ge=0, le=65535, description="Port of /metrics; 0 takes any free one.")
    probes_port: int = Field(default=8081, ge=0, le=65535, description="Port of /livez and /readyz.")
    look_seconds: float = Field(
        default=10, gt=0, description="Rhythm in which certificate and the operator's findings are read."
    )
    audit_seconds: float = Field(
        default=60, gt=0, description="Rhythm in which lists are held against what the watches have shown."
    )
    silence_seconds: float = Field(
        default=70, gt=0, description="Time without a word after which a watch is opened again."
    )


def load_settings(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> Settings:
    """Put the settings together. `--help` and a wrong command line end with SystemExit.

    Raises:
        SettingsError: a value cannot be used.
    """
    return read_settings(Settings, WEBHOOK, _ABOUT, PREFIX, arguments, environment)
