"""Measures speed and says so: `scripts/bench`."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from typing import Any

from scripts._bench.figures import FIGURES, Figure, Row
from scripts._bench.peers import PEERS
from scripts._bench.peers import figure as beside_peers
from scripts._bench.plan import FULL, QUICK, Plan
from scripts._bench.report import medians, table
from scripts._bench.server import Server


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    arguments.add_argument("--only", metavar="NAME,...", default="", help=f"some of: {', '.join(FIGURES)}")
    arguments.add_argument("--quick", action="store_true", help="small sizes: shows that it works, not how fast")
    arguments.add_argument("--runs", type=int, default=1, metavar="N", help="measure N times and give medians")
    arguments.add_argument(
        "--peers", metavar="NAME,...", default="", help=f"beside other executors, installed for it: {', '.join(PEERS)}"
    )
    arguments.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    return arguments


async def measure(figures: dict[str, Figure], plan: Plan, runs: int) -> dict[str, Any]:
    """Every figure once, then every figure again: what the machine does meanwhile hits all of them."""
    with Server.started() as server:
        measured: dict[str, list[list[Row]]] = {name: [] for name in figures}
        for run in range(runs):
            for name, figure in figures.items():
                begun = time.monotonic()
                measured[name].append(await figure.measure(server, plan))
                say(f"{name}: run {run + 1} of {runs}, {time.monotonic() - begun:.0f} s")
        return {
            "setup": {**server.setup, "runs": runs, "sizes": "quick" if plan is QUICK else "full"},
            "figures": {
                name: {"title": figures[name].title, "setup": figures[name].setup, "rows": medians(rows)}
                for name, rows in measured.items()
            },
        }


def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def main() -> int:
    arguments = parser()
    options = arguments.parse_args()
    peers = [name for name in options.peers.split(",") if name]
    names = [name for name in options.only.split(",") if name] or ([] if peers else list(FIGURES))
    for what, asked, known in (("figure", names, FIGURES), ("peer", peers, PEERS)):
        if unknown := set(asked) - set(known):
            arguments.error(f"no such {what}: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    figures = {name: FIGURES[name] for name in names}
    if peers:
        figures["peers"] = beside_peers(peers)
    if options.runs < 1:
        arguments.error("--runs must be at least 1")
    report = asyncio.run(measure(figures, QUICK if options.quick else FULL, options.runs))
    print(json.dumps(report, indent=2) if options.json else table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
