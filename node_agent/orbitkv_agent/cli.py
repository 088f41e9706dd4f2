"""The command `orbitkv-agent`.

Exit codes: 0 done; 1 the agent refused, hangs, drains or ended badly; 2 the command line or a setting is wrong; 3 no
agent listens there; 4 the agent is to serve GPUs and sees none.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from orbitkv.config import nearest_first
from orbitkv.protocol.messages import ConfigureNamespace
from orbitkv_agent.admin import AdminConnection, AdminError, NoAgentError, parse_status
from orbitkv_agent.config import AgentConfig, choices, describe_default
from orbitkv_agent.config_sources import ConfigError, LoadedConfig, flag_name, load_config
from orbitkv_agent.host_memory import memory_allowance
from orbitkv_agent.logs import set_up_logging, written_by_a_thread
from orbitkv_agent.observe.snapshot import Snapshot
from orbitkv_agent.observe.status import render_status
from orbitkv_agent.quantity import format_quantity, parse_quantity
from orbitkv_crds.names import AGENT_SEES_NO_GPU

OK, FAILED, USAGE, NO_AGENT, NO_GPU = 0, 1, 2, 3, AGENT_SEES_NO_GPU

logger = logging.getLogger(__name__)

_ABOUT = """\
The node agent of OrbitKV: it keeps the KV cache of the engines on this machine in host memory and gives it back.

  orbitkv-agent serve --pool 4GiB           run the agent
  orbitkv-agent status                      ask a running one how it is
  orbitkv-agent COMMAND --help              more about a command
"""
_ABOUT_SERVE = """\
Run the agent until SIGTERM or Ctrl-C; then it finishes what it began and ends.

Every setting below can also be given as an environment variable (--pool as ORBITKV_AGENT_POOL) and in a YAML file
(pool: 4GiB). A flag wins over the environment, the environment over the file.

examples:
  orbitkv-agent serve                                    half of this machine's memory, /tmp/orbitkv-50055.sock
  orbitkv-agent serve --pool 64GiB --log-format json
  orbitkv-agent serve --config /etc/orbitkv/agent.yaml
  ORBITKV_AGENT_POOL=8GiB orbitkv-agent serve --port 50056 --metrics-address off    a second agent
"""
_ABOUT_CONFIG = """\
Print the settings that `serve` would run with, and where each was given. Takes the same flags.

examples:
  orbitkv-agent config
  orbitkv-agent config --config /etc/orbitkv/agent.yaml --json
"""
_ABOUT_STATUS = """\
Ask a running agent for its state: memory, cache namespaces, engines and what they lack, work in flight, hit rate.
Exits with 1 when it drains or hangs, with 3 when there is none.

examples:
  orbitkv-agent status
  orbitkv-agent status --json | jq .pool
  orbitkv-agent status --socket /tmp/orbitkv-50056.sock
"""
_ABOUT_CONFIGURE = """\
Change what a cache namespace may use, while the agent runs. What is not given stays as it is. Until the agent restarts:
settings that must outlive it belong into its file.

examples:
  orbitkv-agent configure-namespace team-a --quota 8GiB --guaranteed 2GiB
  orbitkv-agent configure-namespace team-a --quota none
  orbitkv-agent configure-namespace team-a --reset-generation 1     forget all that is stored for team-a
"""


class _Parser(argparse.ArgumentParser):
    """Reports what is wrong in one line, and knows its flags."""

    def __init__(self, **options: object) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)  # type: ignore[arg-type]
        self.flags: list[str] = ["--help"]

    def flag(self, name: str, help: str, metavar: str | None = None) -> None:
        """Add a flag that takes text."""
        self.flags.append(name)
        self.add_argument(name, help=help.replace("%", "%%"), metavar=metavar)

    def switch(self, name: str, help: str) -> None:
        """Add a flag that takes nothing."""
        self.flags.append(name)
        self.add_argument(name, help=help, action="store_true")

    def error(self, message: str) -> NoReturn:
        """Report a wrong command line."""
        self.exit(USAGE, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code. `--help` and a wrong command line end with SystemExit instead."""
    parser, commands = _parsers()
    options, unknown = parser.parse_known_args(arguments)
    command = commands[options.command]
    if unknown:
        name = unknown[0].partition("=")[0]
        near = f"; the nearest is {nearest_first(name, command.flags)[0]}" if name.startswith("-") else ""
        command.error(f"{unknown[0]!r} is not known here{near}")
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except ConfigError as error:
        return _fail(USAGE, *error.problems)
    except NoAgentError as error:
        return _fail(NO_AGENT, str(error))
    except AdminError as error:
        return _fail(FAILED, str(error))


def _parsers() -> tuple[_Parser, dict[str, _Parser]]:
    """Return the parser of the command and those of its subcommands."""
    parser = _Parser(prog="orbitkv-agent", description=_ABOUT)
    group = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name: str, run: Callable[[argparse.Namespace], int], help: str, about: str) -> _Parser:
        sub: _Parser = group.add_parser(name, help=help, description=about)
        sub.set_defaults(run=run)
        return sub

    serve = command("serve", _serve, "run the agent", _ABOUT_SERVE)
    status = command("status", _status, "ask a running agent for its state", _ABOUT_STATUS)
    config = command("config", _config, "print the settings in force and where they come from", _ABOUT_CONFIG)
    configure = command("configure-namespace", _configure, "change what a cache namespace may use", _ABOUT_CONFIGURE)

    config.switch("--json", "print one JSON object")
    for sub in (serve, config):
        sub.flag("--config", "YAML file with settings; default: $ORBITKV_AGENT_CONFIG", "FILE")
        for name, field in AgentConfig.model_fields.items():
            about = f"{field.description} Default: {describe_default(AgentConfig, name)}."
            sub.flag(flag_name(name), about, "|".join(choices(AgentConfig, name)) or "VALUE")
    status.switch("--json", "print the state as one JSON object")
    configure.add_argument("name", metavar="NAME", help='the cache namespace; "" is the one without a name')
    configure.flag("--quota", "most memory that its pages may take, or none for no limit", "SIZE")
    configure.flag("--guaranteed", "memory within which only the namespace itself evicts its pages", "SIZE")
    configure.flag("--class", "retention class of new pages", "probationary|retained")
    configure.flag("--reset-generation", "raising it retires every page that was stored before", "NUMBER")
    for sub in (status, configure):
        sub.flag("--socket", "the agent's socket; default: the one that the settings name", "PATH")
        sub.flag("--config", "the agent's YAML file, to find its socket", "FILE")
    return parser, {"serve": serve, "status": status, "config": config, "configure-namespace": configure}


def _fail(code: int, *lines: str) -> int:
    for line in lines:
        print(f"orbitkv-agent: {line}", file=sys.stderr)
    return code


def _load(options: argparse.Namespace) -> LoadedConfig:
    """Put the settings together; commands without flags for them take the environment and the file."""
    given = {name: getattr(options, name, None) for name in AgentConfig.model_fields}
    return load_config({name: text for name, text in given.items() if text is not None}, os.environ, options.config)


# ------------------------------------------------------------------------------------------------------------ commands


def _serve(options: argparse.Namespace) -> int:
    # A container's first process is not ended by a signal that it does not handle, but killed after the pod's grace.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    loaded = _load(options)
    config = loaded.config
    set_up_logging(config.log_level, config.log_format)
    logger.info("pool sized", extra={"pool_bytes": config.pool_bytes, "given_by": loaded.sources["pool"]})
    allowance = memory_allowance()
    if config.pool_bytes > allowance.size:
        logger.warning(
            "the pool is larger than what this process may use, %s (%s): it will be killed before the pool is full; "
            "lower --pool",
            format_quantity(allowance.size),
            allowance.source,
        )

    from orbitkv.cuda import CudaUnavailableError
    from orbitkv_agent.agent import Agent  # the other commands need none of it
    from orbitkv_agent.sessions.peers import keep_peers_out
    from orbitkv_agent.sessions.server import SocketTakenError

    keep_peers_out()  # before anybody can connect
    try:
        agent = Agent(config)
    except (OSError, SocketTakenError) as error:  # a socket or an address cannot be had; the message names it
        return _fail(FAILED, str(error))
    except CudaUnavailableError as error:
        return _fail(NO_GPU, f"mode is cuda, but {error}; let the agent see a GPU and its driver, or set mode to host")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: agent.request_stop())
    with written_by_a_thread():
        return OK if agent.run() else FAILED


def _config(options: argparse.Namespace) -> int:
    loaded = _load(options)
    values = loaded.config.model_dump(mode="json")
    if options.json:
        print(json.dumps({name: {"value": values[name], "source": loaded.sources[name]} for name in values}))
        return OK
    rows = [(name, _shown(value)) for name, value in values.items()]
    name_width, value_width = (max(len(row[column]) for row in rows) for column in (0, 1))
    for name, value in rows:
        print(f"{name:{name_width}}  {value:{min(value_width, 40)}}  {loaded.sources[name]}")
    return OK


def _shown(value: object) -> str:
    """Return a setting's value as it could be written on the command line; a dash where there is none."""
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value)


def _socket_path(options: argparse.Namespace) -> str:
    return str(options.socket or _load(options).config.socket_path)


def _status(options: argparse.Namespace) -> int:
    with AdminConnection(_socket_path(options)) as agent:
        body = agent.status()
    if options.json:
        print(body.decode())
    else:
        print(render_status(parse_status(body)))
    return FAILED if json.loads(body)["agent"]["draining"] else OK


def _configure(options: argparse.Namespace) -> int:
    path = _socket_path(options)
    problems: list[str] = []
    quota = _size(options.quota, "--quota", problems)
    guaranteed = _size(options.guaranteed, "--guaranteed", problems)
    insert_class = getattr(options, "class")
    if insert_class not in (None, "probationary", "retained"):
        problems.append(f"--class is {insert_class!r}: must be probationary or retained")
    reset = options.reset_generation
    if reset is not None and not reset.isdecimal():
        problems.append(f"--reset-generation is {reset!r}: must be a whole number")
    if problems:
        raise ConfigError(problems)
    with AdminConnection(path) as agent:
        settings = _current(parse_status(agent.status()), options.name)
        if options.quota is not None:
            settings.quota_bytes = quota
        if guaranteed is not None:
            settings.guaranteed_bytes = guaranteed
        settings.insert_class = insert_class or settings.insert_class
        settings.reset_generation = settings.reset_generation if reset is None else int(reset)
        agent.configure(settings)
    limit = "no limit" if settings.quota_bytes is None else format_quantity(settings.quota_bytes)
    print(
        f"{options.name or '(unnamed)'}: quota {limit}, guaranteed {format_quantity(settings.guaranteed_bytes)}, "
        f"new pages {settings.insert_class}, reset generation {settings.reset_generation}"
    )
    return OK


def _size(text: str | None, flag: str, problems: list[str]) -> int | None:
    if text is None or (text == "none" and flag == "--quota"):
        return None
    try:
        return parse_quantity(text)
    except ValueError as error:
        problems.append(f"{flag} is {text!r}: {error}")
        return None


def _current(snapshot: Snapshot, name: str) -> ConfigureNamespace:
    """Return the settings that a namespace has now, or the defaults."""
    for row in snapshot["namespaces"]:
        if row["name"] == name:
            return ConfigureNamespace(
                name,
                quota_bytes=row["quota_bytes"],
                guaranteed_bytes=row["guaranteed_bytes"],
                insert_class=row["insert_class"],
                reset_generation=row["reset_generation"],
            )
    return ConfigureNamespace(name)
