"""``python -m tests.soak --minutes 120 --json F``: a chaos run whose workers are left alone, so that they grow old.

Strangers' records, switches, holds, cancels and broker restarts, a fault every twenty seconds; three brokers, three
workers. The worst comes first, five times: a worker's memory is what its worst moment took, for Python gives an arena
of 1 MiB back only once nothing in it is used. Exits 1 when anything is lost, repeated or wrong, when a worker ended,
or when one grew: memory by more than 2 % (the last quarter's median against the second's), descriptors or threads at
all, connections beyond what there were in the first half, or when anything is left unread.
"""

import argparse
import asyncio
import contextlib
import sys
from collections import Counter
from typing import Any

from deploy.local.cluster import LocalCluster
from service.consumer.positions import Positions
from tests.chaos.command import add_outlets, folder_of_logs, tell
from tests.chaos.plan import Fault, Kind
from tests.chaos.run import Run, Scale
from tests.soak.growth import Watch, course, growth, kinds

KINDS = frozenset({Kind.BROKER, Kind.BROKER_KILL, Kind.SWITCH, Kind.HOLD, Kind.CANCEL, Kind.HOSTILE})
FAULT_EVERY_S = 20.0
WORST_FIRST = tuple(Fault(at_s, Kind.HOSTILE, 0) for at_s in (0.0, 20.0, 40.0, 60.0, 80.0))
MEMORY_GROWTH = 0.02
_LAG_WITHIN_S = 30.0


class Soak(Run):
    """A chaos run that looks at its workers."""

    async def __call__(self) -> dict[str, Any]:
        watch = Watch(self.workers.pids)
        watching = asyncio.create_task(watch.run(), name="watch")
        try:
            figures = await super().__call__()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        grown = {f"{name} ({pid})": growth(samples) for (name, pid), samples in watch.seen.items() if len(samples) > 8}
        told = {
            "memory_growth": max(one.memory for one in grown.values()),
            "descriptor_growth": max(one.descriptors for one in grown.values()),
            "thread_growth": max(one.threads for one in grown.values()),
            "connection_growth": max(one.connections for one in grown.values()),
            "by_process": {name: repr(one) for name, one in grown.items()},
            "memory_mib": {f"{name} ({pid})": course(samples) for (name, pid), samples in watch.seen.items()},
            "descriptors": {f"{name} ({pid})": kinds(samples) for (name, pid), samples in watch.seen.items()},
        }
        counted = ("descriptor_growth", "thread_growth", "connection_growth")
        steady = told["memory_growth"] <= MEMORY_GROWTH and all(told[name] <= 0 for name in counted)
        whole = figures["lag_end"] == figures["worker_ends"] == 0
        return {**figures, **told, "good": figures["good"] and steady and whole}

    async def _traffic(self) -> dict[str, int]:
        await self.wrecker.all(WORST_FIRST)
        faults = Counter(await super()._traffic())
        faults.update(fault.kind.value for fault in WORST_FIRST)
        return dict(faults)

    async def _while_they_live(self) -> dict[str, Any]:
        lag = await self._lag()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAG_WITHIN_S):
                while lag:
                    lag = await self._lag()
        return {"lag_end": lag}

    async def _lag(self) -> int:
        async with Positions(settings=self.settings) as positions:
            return sum(position.lag for position in await positions.show())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second")
    parser.add_argument("--brokers", type=int, default=3)
    parser.add_argument("--workers", type=int, default=3)
    add_outlets(parser)
    given = parser.parse_args()
    folder = folder_of_logs(given, "soak")
    seconds = 60 * given.minutes
    scale = Scale(
        requests=round(seconds * given.rate),
        faults=max(len(KINDS), round(seconds / FAULT_EVERY_S)),
        seed=given.seed,
        rate=given.rate,
        workers=given.workers,
        kinds=KINDS,
        hold_s=1.0,
        park_after_s=2.0,
    )
    with LocalCluster(given.brokers) as cluster:
        figures = asyncio.run(Soak(scale, cluster, folder)())
    return tell(figures, given, folder)


if __name__ == "__main__":
    sys.exit(main())
