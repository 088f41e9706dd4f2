"""`python -m bench [NAME] [--json]`: run one bench, or all that this machine can run."""

from __future__ import annotations

import argparse
import importlib
import sys

from bench.figures import Figure, json_line, machine, say, table

BENCHES: dict[str, str] = {
    "admission": "what the webhook costs reviews, the start of a pod, and thousands of pods",
    "query": "what a lookup costs the engine's scheduler",
    "gpu": "saving and restoring pages of a GPU against one large copy",
    "host_copy": "saving and restoring pages against a plain numpy copy",
    "index": "memory and speed of the index at 100,000 and 2 million pages",
    "operator": "what the operator costs where a thousand nodes report",
    "scheduler": "what 500 waiting requests cost the engine in a step",
    "ttft": "time to the first token of a real vLLM on a GPU, and what restores cost others",
}
"""Modules of this package with a function `run`, which returns figures. One that not every machine can run has
`why_not` too: why this one cannot, "" when it can. A machine needs only what the bench that it runs imports."""


def main() -> int:
    """Run benches; exit code 1 when a bound is missed."""
    names = "\n".join(f"  {name:<10} {what}" for name, what in BENCHES.items())
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
        module = importlib.import_module(f"bench.{name}")
        why_not = module.why_not() if hasattr(module, "why_not") and not arguments.name else ""
        if why_not:
            say(f"\n{name}: left out, because {why_not}")
            continue
        say(f"\n{name}: {BENCHES[name]}")
        figures: list[Figure] = module.run()
        print(table(figures), file=sys.stderr if arguments.json else sys.stdout)
        if arguments.json:
            print(json_line(name, figures), flush=True)
        missed |= any(figure.kept is False for figure in figures)
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(main())
