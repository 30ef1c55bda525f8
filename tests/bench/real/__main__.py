"""``python -m tests.bench.real [--json FILE] [--only PART ...] [--folder FOLDER]``.

Each part is a module of this package with ``figures``, what it measures, and ``BARS``, what must hold. The checkpoints
are made in FOLDER the first time (0.9 GB). All figures of a part are ratios of what one run measured.
"""

import argparse
import os
import sys
import traceback
from importlib import import_module
from pathlib import Path

import uvloop

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from tests.bench.card.__main__ import plugin_known
from tests.bench.card.run import Card, Figures

PARTS = ("lending", "load", "parking", "start")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.real")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--folder", type=Path, help="where the checkpoints are, or are made")
    given = parser.parse_args()
    import vllm

    from deploy.local.setup import home

    figures = Figures(given.json, vllm=vllm.__version__)
    parts = {name: import_module(f"tests.bench.real.{name}") for name in given.only}
    failed = []
    with plugin_known():
        card = Card(given.folder or home() / "card", "real", figures, cycles=0)
        for name, part in parts.items():
            print(f"-- {name}", flush=True)
            try:
                figures.note(**uvloop.run(part.figures(card)))
            except Exception:
                failed.append(name)
                traceback.print_exc()
    for part in parts.values():
        for name, (sign, bar) in part.BARS.items():
            if name in figures.known:
                value = figures.known[name]
                holds = value <= bar if sign == "<=" else value >= bar
                print(f"{'yes' if holds else 'NO ':4} {name} {value} {sign} {bar}")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
