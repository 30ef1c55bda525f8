"""``python -m tests.upgrade --json F``: a pool on three brokers is upgraded under load; then everything is counted.

Its workers are replaced one by one (a new one is there before the old one is told to go), a broker is replaced by one
without data, and topics grow from 12 to 24 partitions. With ``--older`` the pool is one worker of an earlier commit's
code and one of the present one's, each of them killed, and each replaced by the other. Exits 1 when a result is lost,
repeated, by a wrong model or not as asked, and when a worker ended that nobody told to.
"""

import argparse
import asyncio
import sys

from deploy.local.cluster import LocalCluster
from tests.chaos.command import add_outlets, folder_of_logs, tell
from tests.upgrade.older import COMMIT, NoHistory
from tests.upgrade.run import Upgrade, UpgradeRun


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--brokers", type=int, default=3)
    parser.add_argument("--rate", type=float, default=40.0, help="requests per second")
    parser.add_argument("--quiet", type=float, default=10.0, help="seconds before, between and after what is done")
    parser.add_argument("--partitions", type=int, default=12, help="of each topic, before there are twice as many")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--older", nargs="?", const=COMMIT, help="a commit; without one, the one that tests use")
    add_outlets(parser)
    given = parser.parse_args()
    folder = folder_of_logs(given, "upgrade")
    upgrade = Upgrade(
        workers=2 if given.older else given.workers,
        rate=given.rate,
        quiet_s=given.quiet,
        partitions=given.partitions,
        seed=given.seed,
        older=given.older,
    )
    with LocalCluster(given.brokers) as cluster:
        try:
            figures = asyncio.run(UpgradeRun(upgrade, cluster, folder)())
        except NoHistory as reason:
            print(reason, file=sys.stderr)
            return 2
    return tell(figures, given, folder)


if __name__ == "__main__":
    sys.exit(main())
