"""Settings of the agent that only a cluster has."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

POD_VARIABLES = {
    "node_name": "NODE_NAME",
    "pod_name": "POD_NAME",
    "pod_namespace": "POD_NAMESPACE",
    "pod_uid": "POD_UID",
}
"""Settings that a pod is told by the downward API, and the environment variables that hold them."""


class ClusterSettings(BaseModel):
    """Who this agent is in its cluster, and where it finds what it needs there."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    pool: str = Field(min_length=1, max_length=50, description="Name of the ManagerPool that this agent belongs to.")
    node_name: str = Field(min_length=1, description="Node that the agent runs on. Default: `$NODE_NAME`.")
    pod_name: str = Field(min_length=1, description="The agent's pod. Default: `$POD_NAME`.")
    pod_namespace: str = Field(min_length=1, description="The pod's namespace. Default: `$POD_NAMESPACE`.")
    pod_uid: str = Field(min_length=1, description="The pod's uid. Default: `$POD_UID`.")
    live_path: str = Field(
        default="/etc/orbitkv/live.yaml",
        min_length=1,
        description="File with the pool's settings that change while the agent runs; it is read again when it changes.",
    )
    state_path: str = Field(
        default="/var/lib/orbitkv",
        min_length=1,
        description="Folder in which the agent keeps what it knows of the cluster, to run on without the apiserver.",
    )
    reports_address: str = Field(
        min_length=1,
        description="Where the operator takes reports (`host:port`), or `off`. "
        "Default: `orbitkv-reports.<pod_namespace>.svc:9443`.",
    )
    reports_server_name: str = Field(
        min_length=1,
        description="Name in the certificate of that server. Default: `orbitkv-reports.<pod_namespace>.svc`.",
    )
    reports_ca_path: str = Field(
        default="/etc/orbitkv/ca.crt", min_length=1, description="File with the authority behind that certificate."
    )
    reports_token_path: str = Field(
        default="/var/run/secrets/orbitkv/token",
        min_length=1,
        description="File with the token that the agent shows to that server.",
    )
    reports_interval_seconds: float = Field(
        default=15.0,
        gt=0,
        le=3600,
        description="Time between two reports, give or take a fifth, until the operator asks for another.",
    )
    kubeconfig: str = Field(
        default="", description="File that says how to reach the apiserver. Empty: the pod's service account."
    )

    @model_validator(mode="before")
    @classmethod
    def _name_the_reports_service(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("pod_namespace"):
            host = f"orbitkv-reports.{data['pod_namespace']}.svc"
            return {"reports_address": f"{host}:9443", "reports_server_name": host} | data
        return data
