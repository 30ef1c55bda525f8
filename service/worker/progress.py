"""What long answers have said is kept as they go: who has their partition next goes on with them."""

import asyncio
import time

from service.worker.jobs import Job
from service.worker.lifecycle import Lifecycle

_LOOK_S = 0.5
_SHARE = 0.05
"""Of its time, for one that has taken long: all of it is written each time, twenty times its length at the most."""


class ProgressLoop:
    """Looks at all that runs, once in a while. What takes less than ``interval_s`` is never kept."""

    def __init__(self, *, lifecycle: Lifecycle, interval_s: float) -> None:
        self._lifecycle = lifecycle
        self._interval_s = interval_s

    async def run(self) -> None:
        """Until the worker ends."""
        while True:
            await asyncio.sleep(min(_LOOK_S, self._interval_s))
            self._lifecycle.keep(self._due)

    def _due(self, job: Job) -> bool:
        """Whether a run has said so much that it is to be kept; noted as done then."""
        ran_s = job.ran_s(time.time())
        if ran_s - job.kept_s < max(self._interval_s, _SHARE * ran_s):
            return False
        job.kept_s = ran_s
        return True
