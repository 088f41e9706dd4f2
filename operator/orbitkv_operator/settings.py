"""The operator's settings: one frozen model, from flags and environment variables (a flag wins).

The webhook, which is a program of its own, reads its settings in the same way.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from orbitkv_crds.stamps import PayloadMode

PREFIX: Final = "ORBITKV_OPERATOR_"
Model = TypeVar("Model", bound=BaseModel)
_SERVICE_ACCOUNT_NAMESPACE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class SettingsError(Exception):
    """Settings that cannot be used; `problems` says which and why, a line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


def split_list(value: Any) -> Any:
    """Read a list whose items are separated by commas."""
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def _read_json(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value or "[]")
    except ValueError:
        raise ValueError("must be a list in JSON") from None


class Settings(BaseModel):
    """Everything that can be set on the operator. Times are seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    namespace: str = Field(min_length=1, description="Namespace that the operator and all agents run in.")
    pod_name: str = Field(min_length=1, description="Name of this replica: its identity in the Lease.")
    pod_ip: str = Field(default="", description="Address under which agents reach this replica; empty: found out.")
    agent_image: str = Field(min_length=1, description="Image of agents whose pool names none.")
    agent_pull_secrets: Annotated[tuple[str, ...], BeforeValidator(split_list)] = Field(
        default=(), description="Secrets for pulling agents' images, separated by commas; a pool's own come after them."
    )
    payload_image: str = Field(
        default="", description="Image with the files that engines load, which agents' pods pull ahead; empty: none."
    )
    payload_pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field(
        default="IfNotPresent", description="When nodes pull it."
    )
    payload_pull_secrets: Annotated[tuple[str, ...], BeforeValidator(split_list)] = Field(
        default=(), description="Secrets for pulling it, separated by commas."
    )
    payload_mode: PayloadMode = Field(
        default="init", description="How it gets into engines' pods; with imageVolume it is tried whether that works."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe entries to log."
    )
    certificates: Literal["self-managed", "cert-manager"] = Field(
        default="self-managed",
        description="Who makes the Secret orbitkv-certificates: the operator itself, or cert-manager.",
    )
    webhook: bool = Field(
        default=False, description="Whether the chart has installed the webhook: then it is probed each minute."
    )
    lmcache: bool = Field(
        default=False, description="Whether the webhook serves pods that are labelled for LMCache's operator."
    )
    network_policy: bool = Field(default=True, description="Whether each pool gets a NetworkPolicy.")
    metrics_from: Annotated[tuple[dict[str, Any], ...], BeforeValidator(_read_json)] = Field(
        default=(),
        description="NetworkPolicyPeers (a JSON list) that may reach the agents' metrics; none given: everybody.",
    )
    metrics_port: int = Field(default=9090, ge=0, le=65535, description="Port of /metrics; 0 takes any free one.")
    probes_port: int = Field(default=8081, ge=0, le=65535, description="Port of /livez and /readyz.")
    reports_port: int = Field(default=9443, ge=0, le=65535, description="Port that agents push their reports to.")
    lease_seconds: float = Field(default=15, gt=0, description="Time after which another replica takes over.")
    renew_seconds: float = Field(default=10, gt=0, description="Time in which the acting replica must renew its Lease.")
    retry_seconds: float = Field(default=3, gt=0, description="Rhythm in which the Lease is looked at.")
    audit_seconds: float = Field(
        default=60, gt=0, description="Rhythm in which lists are held against what the watches have shown."
    )
    silence_seconds: float = Field(
        default=70, gt=0, description="Time without a word after which a watch is opened again."
    )
    probe_seconds: float = Field(default=60, gt=0, description="Rhythm in which the webhook is tried.")
    sweep_seconds: float = Field(
        default=300, gt=0, description="Rhythm in which all pods are looked through for those that the webhook missed."
    )
    patience_seconds: float = Field(
        default=300, gt=0, description="Time that a pod may be ready before it counts as running without its cache."
    )
    check_seconds: float = Field(
        default=30, gt=0, description="Rhythm in which its own certificate and address are looked at."
    )
    status_seconds: float = Field(
        default=10, gt=0, description="Shortest time between two writes of one object's status."
    )
    resync_seconds: float = Field(
        default=300, gt=0, description="Longest time between two looks at an object that nothing happens to."
    )


_ABOUT: Final = """\
The operator of OrbitKV: it runs the node agents that ManagerPools describe, and reports on them and on CacheNamespaces.
It runs in a cluster, with the rights that the chart gives it; outside of one it uses $KUBECONFIG.

Every setting can also be given as an environment variable: --agent-image as ORBITKV_OPERATOR_AGENT_IMAGE.
"""


def load_settings(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> Settings:
    """Put the operator's settings together. `--help` and a wrong command line end with SystemExit.

    Raises:
        SettingsError: a value cannot be used.
    """
    return read_settings(Settings, "orbitkv-operator", _ABOUT, PREFIX, arguments, environment)


def read_settings(
    model: type[Model],
    program: str,
    about: str,
    prefix: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
) -> Model:
    """Put a program's settings together, as `load_settings` does. `prefix` is that of its environment variables.

    Raises:
        SettingsError: a value cannot be used.
    """
    parser = argparse.ArgumentParser(
        prog=program, description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('orbitkv')}")
    for name, field in model.model_fields.items():
        parser.add_argument("--" + name.replace("_", "-"), metavar="VALUE", help=field.description, default=None)
    given = {name: text for name, text in vars(parser.parse_args(arguments)).items() if text is not None}
    values = {name: value for name, value in _defaults(environment).items() if name in model.model_fields}
    values |= {
        name: environment[prefix + name.upper()] for name in model.model_fields if prefix + name.upper() in environment
    }
    values |= given
    try:
        return model(**values)
    except ValidationError as error:
        raise SettingsError([_problem(prefix, item["loc"], item["msg"]) for item in error.errors()]) from None


def _defaults(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return what the pod tells about itself."""
    found: dict[str, Any] = {"pod_name": environment.get("POD_NAME") or socket.gethostname()}
    found |= {"pod_ip": environment["POD_IP"]} if environment.get("POD_IP") else {}
    if namespace := environment.get("POD_NAMESPACE"):
        return found | {"namespace": namespace}
    try:
        return found | {"namespace": _SERVICE_ACCOUNT_NAMESPACE.read_text(encoding="ascii").strip()}
    except OSError:
        return found


def _problem(prefix: str, location: tuple[int | str, ...], message: str) -> str:
    name = str(location[0]) if location else "settings"
    return f"{prefix}{name.upper()} (--{name.replace('_', '-')}): {message.removeprefix('Value error, ')}"
