"""How the agent's settings come together: flags, environment, file, defaults.

Every setting NAME can be given as a flag (`--name`), as the environment variable `ORBITKV_AGENT_NAME` and in a YAML
file (`name:`); the first of these that has it wins, and what nobody gives has its default. The file's path comes from
`--config` or `ORBITKV_AGENT_CONFIG`. Whatever is not known is refused by name, wherever it stands. With a `cluster`
section, what it does not say about the agent's own pod comes from `NODE_NAME`, `POD_NAME` and the like.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import ValidationError

from orbitkv.config import nearest_first
from orbitkv_agent.cluster.settings import POD_VARIABLES, ClusterSettings
from orbitkv_agent.config import AgentConfig, NamespaceSettings
from orbitkv_agent.host_memory import memory_allowance
from orbitkv_agent.quantity import format_quantity

VARIABLE_PREFIX: Final = "ORBITKV_AGENT_"
FILE_VARIABLE: Final = VARIABLE_PREFIX + "CONFIG"
_SERVICE_LINK: Final = re.compile(r"ORBITKV_AGENT_(SERVICE_HOST|SERVICE_PORT|PORT_\d+_(TCP|UDP|SCTP))(_\w+)?")
"""Variables that Kubernetes makes in pods beside a Service named `orbitkv-agent`."""


class ConfigError(Exception):
    """The settings cannot be used. `problems` has one line each: setting, value, where it was given, rule."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(frozen=True)
class LoadedConfig:
    """The settings in force, and where each was given (`default` where nobody did)."""

    config: AgentConfig
    sources: Mapping[str, str]


def flag_name(setting: str) -> str:
    """Return the flag that gives a setting."""
    return "--" + setting.replace("_", "-")


def variable_name(setting: str) -> str:
    """Return the environment variable that gives a setting."""
    return VARIABLE_PREFIX + setting.upper()


def load_config(flags: Mapping[str, str], environ: Mapping[str, str], config_file: str | None = None) -> LoadedConfig:
    """Put the settings together.

    Args:
        flags: what the command line gave, by setting.
        environ: the process's environment; only `ORBITKV_AGENT_*` matters.
        config_file: path of the YAML file; None looks for it in the environment.

    Raises:
        ConfigError: with a line for each thing that is wrong.
    """
    problems: list[str] = []
    values: dict[str, Any] = {}
    sources = dict.fromkeys(AgentConfig.model_fields, "default")
    allowance = memory_allowance()
    sources["pool"] = f"default: half of {format_quantity(allowance.size)} ({allowance.source})"
    for layer in (_from_file(config_file, environ, problems), _from_environment(environ, problems), _from_flags(flags)):
        for name, (value, source) in layer.items():
            values[name] = value
            sources[name] = source
    if values.get("cluster") is not None:
        values["cluster"] = _with_pod_facts(values["cluster"], environ)
    config = None
    try:
        config = AgentConfig(**values)
    except ValidationError as error:
        problems += [_problem(dict(detail), values, sources) for detail in error.errors()]
    if config is None or problems:
        raise ConfigError(problems)
    return LoadedConfig(config, sources)


_Layer = dict[str, tuple[Any, str]]
"""Value and source by setting."""


def _from_flags(flags: Mapping[str, str]) -> _Layer:
    return {name: (value, f"flag {flag_name(name)}") for name, value in flags.items()}


def _from_environment(environ: Mapping[str, str], problems: list[str]) -> _Layer:
    layer: _Layer = {}
    for variable, value in sorted(environ.items()):
        name = variable.removeprefix(VARIABLE_PREFIX).lower()
        if not variable.startswith(VARIABLE_PREFIX) or variable == FILE_VARIABLE or _is_service_link(variable, value):
            continue
        if name in AgentConfig.model_fields:
            layer[name] = (value, f"environment {variable}")
        else:
            near = variable_name(nearest_first(name, AgentConfig.model_fields)[0])
            problems.append(f"environment {variable}: there is no such setting; the nearest is {near}")
    return layer


def _is_service_link(variable: str, value: str) -> bool:
    is_url = re.match(r"(tcp|udp|sctp)://", value) is not None
    return _SERVICE_LINK.fullmatch(variable) is not None or (variable == variable_name("port") and is_url)


def _from_file(path: str | None, environ: Mapping[str, str], problems: list[str]) -> _Layer:
    given_by = "--config" if path is not None else FILE_VARIABLE
    path = path if path is not None else environ.get(FILE_VARIABLE)
    if path is None:
        return {}
    try:
        document = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        problems.append(f"file {path} (from {given_by}): it cannot be read: {reason}")
        return {}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" at line {mark.line + 1}" if mark is not None else ""
        problems.append(f"file {path}: it is not YAML{line}: {getattr(error, 'problem', None) or 'syntax error'}")
        return {}
    if document is None:
        return {}
    if not isinstance(document, dict):
        problems.append(f"file {path}: it must be a mapping of settings to values, not a {type(document).__name__}")
        return {}
    layer: _Layer = {}
    for name, value in document.items():
        if name in AgentConfig.model_fields:
            layer[name] = (value, f"file {path}")
        else:
            near = nearest_first(str(name), AgentConfig.model_fields)[0]
            problems.append(f"{name} (file {path}): there is no such setting; the nearest is {near}")
    return layer


def _with_pod_facts(cluster: Any, environ: Mapping[str, str]) -> Any:
    """Return the `cluster` section with what the environment says about the pod; the model judges what it is."""
    if isinstance(cluster, str):
        try:
            cluster = yaml.safe_load(cluster)
        except yaml.YAMLError:
            return cluster
    if not isinstance(cluster, Mapping):
        return cluster
    facts = {name: environ[variable] for name, variable in POD_VARIABLES.items() if environ.get(variable)}
    return {**facts, **cluster}


def _problem(detail: dict[str, Any], values: Mapping[str, Any], sources: Mapping[str, str]) -> str:
    """Return one error of the model as a line: setting, value, source, rule."""
    place = [str(part) for part in detail["loc"] if part != "[key]"]
    rule = detail["msg"].removeprefix("Value error, ").replace("Input should be", "must be").split(", unable to")[0]
    if not place:  # a rule about several settings, which names them
        about = [f"{name}: {source}" for name, source in sources.items() if re.search(rf"\b{name}\b", rule)]
        return f"{rule} ({', '.join(about)})"
    setting = place[0]
    where = ".".join(place)
    if detail["type"] == "extra_forbidden":
        fields = ClusterSettings.model_fields if setting == "cluster" else NamespaceSettings.model_fields
        near = nearest_first(place[-1], fields)[0]
        return f"{where} ({sources[setting]}): there is no such setting; the nearest is {near}"
    if detail["type"] == "model_type":
        rule = "must be a mapping of settings to values"
    if detail["type"] == "missing" and place[-1] in POD_VARIABLES:
        return f"{where} ({sources[setting]}): must be given, here or as the variable {POD_VARIABLES[place[-1]]}"
    value = values.get(setting)
    for part in place[1:]:
        value = value.get(part) if isinstance(value, Mapping) else value
    shown = "" if isinstance(value, Mapping) else f" is {value!r}"
    return f"{where}{shown} ({sources.get(setting, 'default')}): {rule}"
