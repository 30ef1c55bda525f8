"""``python -m tests.chaos``: producers at a steady rate, three workers, random faults; then everything is counted.

Exits 1 when a result is lost, repeated, by a wrong model, not asked for, or not what an innocent request must get, and
when a worker ended that no planned fault explains.
"""

import argparse
import asyncio
import math
import sys

from deploy.local.cluster import LocalCluster
from tests.chaos.asking import LONG, LONG_SHARE
from tests.chaos.command import add_outlets, folder_of_logs, tell
from tests.chaos.plan import Kind
from tests.chaos.run import Run, Scale

BROKERS = (
    "three or more have three replicas, two of which must have what is acknowledged; one that is alone is away with all"
    " that it has, and with what it should have said to its own partitions"
)
LONG_ANSWERS = (
    f"one of {LONG_SHARE} answers has {LONG[0]} to {LONG[1]} words, and outlives its worker; words that were said twice"
    " are counted"
)
LARGEST = "bytes of a hostile batch on the wire; a larger one is written to the topic of requests, and to no other"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--faults", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second")
    parser.add_argument("--brokers", type=int, default=3, help=BROKERS)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--kinds", default=",".join(Kind), help="only these kinds of fault, separated by commas")
    parser.add_argument("--hold", type=float, default=1.0, help="seconds that a switch stands")
    parser.add_argument("--park-after", type=float, default=2.0, help="seconds after which the bus keeps a request")
    parser.add_argument("--long-answers", action="store_true", help=LONG_ANSWERS)
    parser.add_argument("--largest", type=float, default=math.inf, help=LARGEST)
    add_outlets(parser)
    given = parser.parse_args()
    folder = folder_of_logs(given, "chaos")
    scale = Scale(
        requests=given.requests,
        faults=given.faults,
        seed=given.seed,
        rate=given.rate,
        workers=given.workers,
        kinds=frozenset(Kind(kind) for kind in given.kinds.split(",")),
        hold_s=given.hold,
        park_after_s=given.park_after,
        long_answers=given.long_answers,
        largest=given.largest,
    )
    with LocalCluster(given.brokers) as cluster:
        figures = asyncio.run(Run(scale, cluster, folder)())
    return tell(figures, given, folder)


if __name__ == "__main__":
    sys.exit(main())
