"""The command `orbitkv`.

Exit codes: 0 all is well; 1 something does not work; 2 the command line is wrong, or the cluster cannot be asked.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Final, NoReturn

from orbitkv_operator.cli.cluster import Cluster
from orbitkv_operator.cli.doctor import examine
from orbitkv_operator.cli.explain import NoSuchPodError, explain, uses_the_cache
from orbitkv_operator.cli.findings import Level, as_json, count, render
from orbitkv_operator.cluster.api import Api, ApiError

OK, PROBLEMS, USAGE = 0, 1, 2

_ABOUT: Final = """\
Says how OrbitKV is on a cluster, from wherever kubectl works, with your rights. It changes nothing.

  orbitkv doctor                       what is wrong with this cluster, and what to do
  orbitkv explain pod TEAM/POD         whether a pod uses its cache, and why not
"""
_ABOUT_DOCTOR: Final = """\
Look at versions, operator, webhook, certificates, pools, GPUs, and at each namespace with CacheNamespaces: whether pods
there can get the cache. Pods are tried in dry runs, which leave nothing. What your rights do not reach is said and left
out. Exits with 1 if something does not work.

examples:
  orbitkv doctor
  orbitkv doctor --json | jq '.findings[] | select(.level == "problem")'
"""
_ABOUT_EXPLAIN: Final = """\
Follow a pod from its annotation to its hits: what the webhook decided, its CacheNamespace, the agent of its node, its
engine. Exits with 0 if the pod uses its cache, with 1 if it does not.

examples:
  orbitkv explain pod team-a/chat-6d5f9c7b8-x2x7q
  orbitkv explain pod chat-6d5f9c7b8-x2x7q -n team-a --json
"""


class _Parser(argparse.ArgumentParser):
    """Reports what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Report a wrong command line."""
        self.exit(USAGE, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code. `--help` and a wrong command line end with SystemExit instead."""
    options = _parser().parse_args(arguments)
    namespace, name = _pod_name(options) if options.command == "explain" else ("", "")
    logging.getLogger().addHandler(logging.NullHandler())  # what goes wrong is said below, once
    try:
        api = _connect(options.kubeconfig)
        if options.command == "doctor":
            code = run_doctor(api, options.system_namespace, options.json)
        else:
            code = run_explain(api, options.system_namespace, namespace, name, options.json)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever reads has seen enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still to be flushed
        return PROBLEMS
    except (ApiError, NoSuchPodError, _NoClusterError) as error:
        print(f"orbitkv: {error}", file=sys.stderr)
        return USAGE


def run_doctor(api: Api, system: str, as_object: bool) -> int:
    """Examine a cluster and print what was found; return the exit code."""
    findings = examine(Cluster(api, system))
    counts = count(findings)
    if as_object:
        print(json.dumps(as_json(findings, healthy=not counts[Level.PROBLEM]), indent=2))
    else:
        print(render(findings))
        print(f"\n{counts[Level.PROBLEM]} problems, {counts[Level.WARNING]} warnings")
    return PROBLEMS if counts[Level.PROBLEM] else OK


def run_explain(api: Api, system: str, namespace: str, name: str, as_object: bool) -> int:
    """Explain a pod and print it; return the exit code."""
    findings = explain(Cluster(api, system), namespace, name)
    uses = uses_the_cache(findings)
    if as_object:
        print(json.dumps(as_json(findings, pod=f"{namespace}/{name}", usesCache=uses), indent=2))
    else:
        print(render(findings))
        yet = " yet" if findings[-1].level is Level.INFO else ""
        print(f"\nPod {namespace}/{name} {'uses its cache' if uses else f'does not use a cache{yet}'}.")
    return OK if uses else PROBLEMS


class _NoClusterError(Exception):
    """There is no way to a cluster; the message says what was tried."""


def _connect(kubeconfig: str | None) -> Api:
    from kubernetes.config.config_exception import ConfigException

    from orbitkv_operator.cluster.api import KubernetesApi, load_client

    try:
        return KubernetesApi(load_client(kubeconfig))
    except (AttributeError, TypeError, ValueError):  # what a file that is no kubeconfig makes the library raise
        file = kubeconfig or "the kubeconfig"
        raise _NoClusterError(f"no cluster can be reached: {file} is no kubeconfig") from None
    except (ConfigException, OSError) as error:
        raise _NoClusterError(f"no cluster can be reached: {error} (--kubeconfig or $KUBECONFIG names one)") from None


def _pod_name(options: argparse.Namespace) -> tuple[str, str]:
    before, slash, after = str(options.name).partition("/")
    namespace, name = (before, after) if slash else (options.namespace, before)
    parser: _Parser = options.parser
    if not namespace or not name:
        parser.error("name the pod as NAMESPACE/NAME, or its namespace with -n")
    if options.namespace not in (None, namespace):
        parser.error(f"the pod is named in namespace {namespace}, and -n says {options.namespace}")
    return namespace, name


def _parser() -> _Parser:
    parser = _Parser(prog="orbitkv", description=_ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('orbitkv')}")
    group = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    doctor = group.add_parser(
        "doctor",
        help="what is wrong with this cluster",
        description=_ABOUT_DOCTOR,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    explained = group.add_parser(
        "explain",
        help="whether a pod uses its cache, and why not",
        description=_ABOUT_EXPLAIN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    explained.add_argument("kind", choices=("pod",), metavar="pod", help="what is explained")
    explained.add_argument("name", metavar="NAMESPACE/NAME", help="which one")
    explained.add_argument("-n", "--namespace", help="its namespace, if the name has none")
    explained.set_defaults(parser=explained)
    for sub in (doctor, explained):
        sub.add_argument("--json", action="store_true", help="print one JSON object")
        sub.add_argument("--kubeconfig", metavar="FILE", help="which cluster; default: $KUBECONFIG, ~/.kube/config")
        sub.add_argument(
            "--system-namespace", metavar="NAME", default="", help="where OrbitKV is installed; default: looked for"
        )
    return parser


if __name__ == "__main__":
    sys.exit(main())
