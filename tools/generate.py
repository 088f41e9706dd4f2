"""Writes what the documentation says about settings and metrics from the code that has them.

    python -m tools.generate            write the pages that differ
    python -m tools.generate --check    write nothing; exit 1 and show what differs

`docs/metrics.md`, `docs/kubernetes-reference.md`, the CustomResourceDefinitions, parts of the chart and the code of the
agents' reports are made as a whole. In the other pages people write the text, and each table stands between two
markers, `<!-- generated: NAME -->` and `<!-- end: NAME -->`.
"""

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path

from pydantic import BaseModel

from orbitkv.config import LIVE_SETTINGS, NOT_THERE_YET, SETTINGS
from orbitkv.vllm.served import FEATURES
from orbitkv_agent.cluster.settings import ClusterSettings
from orbitkv_agent.config import AgentConfig, NamespaceSettings, describe_default
from orbitkv_agent.config_sources import flag_name, variable_name
from orbitkv_agent.observe.metrics import METRICS, OTHER, PREFIX, MetricRow
from orbitkv_crds.stamps import INFORMATION, SKIP_REASONS
from orbitkv_operator import metrics as operator
from orbitkv_operator import settings as operator_config
from orbitkv_operator.admission import metrics as webhook
from tools.chart import templates, values_files
from tools.kubernetes_files import CompileError, api_files, crd_files
from tools.kubernetes_reference import reference_page
from tools.markdown import code, table

ROOT = Path(__file__).resolve().parent.parent
AREAS = {
    "pool": ("Page pool", "The memory that holds pages."),
    "cache": ("Cache", "What is stored. A block is a page of one group, all shards of it together."),
    "query": ("Queries", "What engines ask for, and the bytes that are reserved for the answers."),
    "leases": ("Leases", "Pages that were promised to an engine and are not yet being copied."),
    "transfer": ("Saves and restores", "Copies between the engines' memory and the pool."),
    "sessions": ("Sessions", "Connections and registrations of engines."),
}


class GenerateError(Exception):
    """A page cannot be made; the message says what to change."""


# -------------------------------------------------------------------------------------------------------------- tables


def agent_settings() -> str:
    """The agent's settings."""
    return table(
        ("Setting", "Flag", "Environment variable", "Default", "Meaning"),
        (
            (
                code(name),
                code(flag_name(name)),
                code(variable_name(name)),
                default_of(AgentConfig, name),
                about(AgentConfig, name),
            )
            for name in AgentConfig.model_fields
        ),
    )


def namespace_settings() -> str:
    """Settings of one cache namespace."""
    fields = NamespaceSettings.model_fields
    rows = ((code(name), default_of(NamespaceSettings, name), about(NamespaceSettings, name)) for name in fields)
    return table(("Setting", "Default", "Meaning"), rows)


def cluster_settings() -> str:
    """Settings of the agent's place in a cluster."""
    fields = ClusterSettings.model_fields
    return table(
        ("Setting", "Default", "Meaning"),
        ((code(f"cluster.{n}"), _given(n), about(ClusterSettings, n)) for n in fields),
    )


def _given(name: str) -> str:
    """A cluster setting's default; those without one say in their description where they come from."""
    return "" if ClusterSettings.model_fields[name].is_required() else default_of(ClusterSettings, name)


def operator_settings() -> str:
    """The operator's times; the chart has values for the rest of its settings."""
    fields = operator_config.Settings.model_fields
    times = (name for name in fields if name.endswith("_seconds"))
    rows = (
        (code(operator_config.PREFIX + n.upper()), code(f"{fields[n].default:g}"), about(operator_config.Settings, n))
        for n in times
    )
    return table(("Environment variable", "Default (seconds)", "Meaning"), rows)


def plugin_settings() -> str:
    """Settings of the engine plugins."""
    rows = (
        (
            code(setting.key),
            code(setting.variable),
            code(str(setting.default).lower() if isinstance(setting.default, bool) else str(setting.default)),
            setting.rule.removeprefix("a ").capitalize(),
            setting.description,
        )
        for setting in SETTINGS.values()
    )
    return table(("Key", "Environment variable", "Default", "Value", "Meaning"), rows)


def live_settings() -> str:
    """Settings of the plugins that a cache namespace can give."""
    return ", ".join(map(code, LIVE_SETTINGS))


def announced_settings() -> str:
    """Settings that are refused as not there yet."""
    return ", ".join(map(code, NOT_THERE_YET))


def served_features() -> str:
    """What of vLLM works with the cache."""
    return table(("Feature", "Shown by"), ((row.title, code(row.test)) for row in FEATURES if row.served))


def unserved_features() -> str:
    """What of vLLM turns the cache off."""
    scopes = {"engine": "the engine", "request": "the request"}
    off = (row for row in FEATURES if not row.served)
    rows = ((row.title, scopes[row.scope], row.reason[0].upper() + row.reason[1:]) for row in off)
    return table(("Feature", "Off for", "Because"), rows)


def chart_values() -> str:
    """The values of the Helm chart."""
    return table(("Value", "Default", "Meaning"), values_files.values_rows())


def skip_reasons() -> str:
    """Why an annotated pod starts without the cache."""
    return table(("Reason", "Meaning"), ((code(reason), capital(text)) for reason, text in SKIP_REASONS.items()))


def injection_notes() -> str:
    """What an injected pod is told."""
    return table(("Note", "Meaning"), ((code(reason), capital(text)) for reason, text in INFORMATION.items()))


def capital(text: str) -> str:
    """The text as a sentence begins, unless with code."""
    return text[:1].upper() + text[1:]


def about(model: type[BaseModel], name: str) -> str:
    """The description of a setting."""
    return model.model_fields[name].description or ""


def default_of(model: type[BaseModel], name: str) -> str:
    """A setting's default: a value as code, and words as they are."""
    text = describe_default(model, name)
    return text if " " in text or text == "none" else code(text)


# --------------------------------------------------------------------------------------------------------------- pages


METRIC_HEADER = ("Name", "Type", "Labels", "Meaning")
WEBHOOK_METRICS_HEAD = """\
Each replica of the webhook serves these on port 9090, to the same readers, and beside them
`orbitkv_last_event_timestamp_seconds` of its own watches."""
OPERATOR_METRICS_HEAD = """\
The operator serves these on port 9090, to whoever may `get` the path `/metrics` ([kubernetes.md](kubernetes.md))."""
METRICS_HEAD = """\
<!-- Made by tools/generate.py from the METRICS of orbitkv_agent.observe.metrics and orbitkv_operator.metrics. -->

# Metrics

The agent serves Prometheus metrics on `http://127.0.0.1:9091/metrics` and its health on `/health`; `metrics_address`
moves or disables both ([configuration](configuration.md)). `/health` answers 200 while the agent serves, and 503 with
the reason while it drains or hangs. `/ready` answers 200 when engines can attach, and 503 with what is missing. In a
cluster `/metrics` is for those who may `get` the path `/metrics`: send a bearer token.

Names ending in `_total` are counters: they start at zero when the agent starts. Sizes are in bytes, durations in
seconds. No label ever holds a hash, a prompt or a request id. A label value that is not listed here is counted as
`OTHER`.

**At rest everything reserved is returned.** While no engine has work in flight, every gauge of reserved, pinned or
in-flight bytes, pages and copies is zero. The agent checks this when it stops."""


def metrics_page() -> str:
    """The page on metrics."""
    parts = [METRICS_HEAD.replace("OTHER", OTHER)]
    for area, rows in groupby(METRICS, key=lambda row: row.area):
        title, introduction = AREAS[area]
        parts += [f"## {title}", introduction, metric_table(rows)]
    operator_rows = ((code(PREFIX + row.name), row.kind, labels(row.labels), row.help) for row in operator.METRICS)
    parts += ["## Operator", OPERATOR_METRICS_HEAD, table(METRIC_HEADER, operator_rows)]
    webhook_rows = ((code(PREFIX + row.name), row.kind, labels(row.labels), row.help) for row in webhook.METRICS)
    parts += ["## Webhook", WEBHOOK_METRICS_HEAD, table(METRIC_HEADER, webhook_rows)]
    return "\n\n".join(parts) + "\n"


def metric_table(rows: Iterable[MetricRow]) -> str:
    """The metrics of one area."""
    return table(METRIC_HEADER, ((code(PREFIX + row.name), row.kind, labels_of(row), row.help) for row in rows))


def labels_of(row: MetricRow) -> str:
    """A metric's labels, with their values where these are fixed."""
    known = f": {', '.join(map(code, row.known))}" if row.known else ""
    return labels(row.labels) + known


def labels(names: Iterable[str]) -> str:
    """Labels as code."""
    return ", ".join(map(code, names))


SECTIONS: dict[str, Callable[[], str]] = {
    "agent-settings": agent_settings,
    "namespace-settings": namespace_settings,
    "cluster-settings": cluster_settings,
    "operator-settings": operator_settings,
    "plugin-settings": plugin_settings,
    "live-settings": live_settings,
    "announced-settings": announced_settings,
    "served-features": served_features,
    "unserved-features": unserved_features,
    "chart-values": chart_values,
    "skip-reasons": skip_reasons,
    "injection-notes": injection_notes,
}
PAGES: dict[str, Callable[[], str]] = {
    "docs/metrics.md": metrics_page,
    "docs/kubernetes-reference.md": reference_page,
    "charts/orbitkv/values.yaml": values_files.values_yaml,
    "charts/orbitkv/values.schema.json": values_files.values_schema,
    "charts/orbitkv/templates/operator/roles.yaml": templates.operator_roles,
    "charts/orbitkv/templates/webhook/roles.yaml": templates.webhook_roles,
    **templates.crd_templates(),
}
PAGES_WITH_SECTIONS = ("docs/configuration.md", "docs/injection.md", "docs/kubernetes.md", "docs/vllm.md")
_MARKED = re.compile(r"(<!-- generated: (?P<name>[\w-]+) -->\n).*?(\n<!-- end: (?P=name) -->)", re.DOTALL)


def fill(text: str, page: str) -> str:
    """Return a page's text with what stands between its markers made anew.

    Raises:
        GenerateError: a marker has no partner, or names no section.
    """

    def section(match: re.Match[str]) -> str:
        if match["name"] not in SECTIONS:
            raise GenerateError(f"{page}: there is no section {match['name']}; there are {', '.join(SECTIONS)}")
        return match[1] + SECTIONS[match["name"]]() + match[3]

    filled, count = _MARKED.subn(section, text)
    if count != text.count("<!-- generated:") or count != text.count("<!-- end:"):
        raise GenerateError(f"{page}: each `<!-- generated: NAME -->` needs its `<!-- end: NAME -->`")
    return filled


def generated(root: Path) -> dict[str, str]:
    """Return the pages by path as they should be.

    Raises:
        GenerateError: a page with sections is missing or has wrong markers.
    """
    pages = {page: make() for page, make in PAGES.items()} | crd_files() | api_files()
    for page in PAGES_WITH_SECTIONS:
        path = root / page
        if not path.exists():
            raise GenerateError(f"{page} is missing: its text is written by hand")
        pages[page] = fill(path.read_text(encoding="utf-8"), page)
    return pages


def difference(page: str, present: str, wanted: str) -> str:
    """Return the lines that differ."""
    before, after = present.splitlines(), wanted.splitlines()
    return "\n".join(difflib.unified_diff(before, after, page, f"{page} (from the code)", n=0, lineterm=""))


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Write or check the pages; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.generate", description="Make the generated documentation.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a page is not up to date")
    options = parser.parse_args(arguments)
    try:
        pages = generated(root)
    except (GenerateError, CompileError) as error:
        print(error, file=sys.stderr)
        return 1
    drifted = False
    for page, wanted in pages.items():
        path = root / page
        present = path.read_text(encoding="utf-8") if path.exists() else ""
        if present == wanted:
            continue
        drifted = True
        if options.check:
            print(difference(page, present, wanted), file=sys.stderr)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted, encoding="utf-8")
            print(f"wrote {page}", file=sys.stderr)
    if options.check and drifted:
        print("these pages are not what the code says: run `make generate`", file=sys.stderr)
    return 1 if options.check and drifted else 0


if __name__ == "__main__":
    sys.exit(main())
