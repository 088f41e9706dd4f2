"""`python -m bench [NAME] [--json]`: run one bench, or all that this machine can run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from bench import admission, gpu, host_copy, index, operator, query, scheduler
from bench.figures import Figure, json_line, machine, say, table

BENCHES: dict[str, tuple[str, Callable[[], list[Figure]]]] = {
    "admission": ("what the webhook costs reviews, the start of a pod, and thousands of pods", admission.run),
    "query": ("what a lookup costs the engine's scheduler", query.run),
    "gpu": ("saving and restoring pages of a GPU against one large copy", gpu.run),
    "host_copy": ("saving and restoring pages against a plain numpy copy", host_copy.run),
    "index": ("memory and speed of the index at 100,000 and 2 million pages", index.run),
    "operator": ("what the operator costs where a thousand nodes report", operator.run),
    "scheduler": ("what 500 waiting requests cost the engine in a step", scheduler.run),
}


def main() -> int:
    """Run benches; exit code 1 when a bound is missed."""
    names = "\n".join(f"  {name:<10} {what}" for name, (what, _) in BENCHES.items())
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Measure OrbitKV on this machine, each figure beside its baseline.",
        epilog=f"benches:\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", choices=sorted(BENCHES), help="one bench (default: all)")
    parser.add_argument("--json", action="store_true", help="the last line of each bench is one JSON object")
    arguments = parser.parse_args()
    say(machine())
    missed = False
    for name in [arguments.name] if arguments.name else BENCHES:
        what, measure = BENCHES[name]
        if name == "gpu" and not arguments.name and gpu.why_not():
            say(f"\n{name}: left out, because {gpu.why_not()}")
            continue
        say(f"\n{name}: {what}")
        figures = measure()
        print(table(figures), file=sys.stderr if arguments.json else sys.stdout)
        if arguments.json:
            print(json_line(name, figures), flush=True)
        missed |= any(figure.kept is False for figure in figures)
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(main())
