"""The table of `orbitkv-agent status`: a snapshot for people."""

from __future__ import annotations

from collections.abc import Sequence

from orbitkv_agent.observe.snapshot import InstanceRow, NamespaceRow, Snapshot
from orbitkv_agent.quantity import format_quantity as size

UNNAMED = "(unnamed)"
_INSTANCES = ("INSTANCE", "NAMESPACE", "STATE", "PAGE", "LEASES", "RESTORES", "SAVES", "MODEL")


def render_status(snapshot: Snapshot) -> str:
    """Return the state of the agent as text, without a final newline."""
    agent, pool, cache, query = snapshot["agent"], snapshot["pool"], snapshot["cache"], snapshot["query"]
    leases, transfer, sessions = snapshot["leases"], snapshot["transfer"], snapshot["sessions"]
    used = _share(pool["used_bytes"], pool["capacity_bytes"])
    waiting = f" ({query['unadmitted_now']} wait for admission)" if query["unadmitted_now"] else ""
    reserved = sum(query["reserved_bytes_by_phase"].values())
    facts = [
        (
            "agent",
            f"{'draining' if agent['draining'] else 'serving'}, {agent['mode']} mode, release {agent['release']}",
        ),
        ("boot", f"{agent['boot_id']}, process {agent['pid']}, up {_duration(agent['uptime_seconds'])}"),
        ("socket", agent["socket_path"]),
        ("pool", f"{used}, {size(pool['largest_free_bytes'])} free in one piece"),
        ("stored", f"{_count(sum(cache['resident_blocks'].values()), 'block')}, {size(cache['resident_bytes'])}"),
        ("hit rate", _hit_rate(cache["block_hits"], cache["block_misses"])),
        ("sessions", str(sum(sessions["by_namespace"].values()))),
        (
            "queries",
            f"{query['outstanding']} open{waiting}, {_share(reserved, query['budget_bytes'])} of the budget reserved",
        ),
        ("leases", f"{leases['live']} live, {_count(leases['pinned_pages'], 'page')}, {size(leases['pinned_bytes'])}"),
        ("restores", f"{transfer['restores_inflight']} in flight, {size(transfer['restore_inflight_bytes'])}"),
        ("saves", f"{transfer['saves_inflight']} in flight, {size(transfer['save_inflight_bytes'])}"),
    ]
    if sessions["publish_stalled"]:
        facts.append(
            ("stalled", f"{_count(sessions['publish_stalled'], 'copy', 'copies')} in flight for too long (see the log)")
        )
    lines = [f"{name:10}{value}" for name, value in facts]
    lines += ["", *_table(("NAMESPACE", "USED", "QUOTA", "GUARANTEED", "NEW PAGES", "RESET"), _namespaces(snapshot))]
    lines += [
        "",
        *_table(
            ("INSTANCE", "NAMESPACE", "STATE", "PAGE", "LEASES", "RESTORES", "SAVES", "MODEL"), _instances(snapshot)
        ),
    ]
    return "\n".join(lines)


def _namespaces(snapshot: Snapshot) -> list[tuple[str, ...]]:
    def cells(row: NamespaceRow) -> tuple[str, ...]:
        quota = "no limit" if row["quota_bytes"] is None else _share(row["used_bytes"], row["quota_bytes"])
        guaranteed = size(row["guaranteed_bytes"])
        return (
            row["name"] or UNNAMED,
            size(row["used_bytes"]),
            quota,
            guaranteed,
            row["insert_class"],
            str(row["reset_generation"]),
        )

    return [cells(row) for row in snapshot["namespaces"]]


def _instances(snapshot: Snapshot) -> list[tuple[str, ...]]:
    def state(row: InstanceRow) -> str:
        if row["off"]:
            return f"off: {row['off']}"
        return "serving" if row["serving"] else f"not yet: {row['missing']}"

    return [
        (
            row["engine"],
            row["cache_namespace"] or UNNAMED,
            state(row),
            size(row["page_bytes"]) if row["page_bytes"] else "-",
            str(row["leases"]),
            str(row["restores"]),
            str(row["saves"]),
            row["model"],
        )
        for row in snapshot["instances"]
    ]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows in columns that are as wide as their contents; an empty table says so.

    Engines name themselves and their models: what a terminal would take for a command is shown as a question mark.
    """
    if not rows:
        return [f"{header[0]}  none"]
    rows = [["".join(sign if sign.isprintable() else "?" for sign in cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    ]


def _count(number: int, thing: str, things: str = "") -> str:
    return f"{number:,} {thing if number == 1 else things or thing + 's'}"


def _share(part: int, whole: int) -> str:
    percent = f" ({100 * part / whole:.0f} %)" if whole else ""
    return f"{size(part)} of {size(whole)}{percent}"


def _hit_rate(hits: int, misses: int) -> str:
    asked = hits + misses
    if not asked:
        return "no block was asked for yet"
    return f"{100 * hits / asked:.1f} % of {_count(asked, 'block')} asked for since the start"


def _duration(seconds: float) -> str:
    """Return a duration in its two largest units."""
    rest = int(seconds)
    parts: list[str] = []
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        number, rest = divmod(rest, length)
        if number or (unit == "s" and not parts):
            parts.append(f"{number} {unit}")
    return " ".join(parts[:2])
