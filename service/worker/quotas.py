"""The loop that keeps a worker's quotas what they are for the pool: by their file, and by what the others have."""

import asyncio
import time
from collections import defaultdict

from schemas.status import TenantShare
from service.ports import Announcements, Settlement, Watcher
from service.scheduling.quotas import Quotas

_LOOK_S = 1.0


class QuotaLoop:
    """Looks every second."""

    def __init__(self, *, quotas: Quotas, announcements: Announcements, worker: str) -> None:
        self._quotas = quotas
        self._announcements = announcements
        self._worker = worker

    async def run(self) -> None:
        """Until the worker ends."""
        while True:
            self._quotas.limits.look()
            self._quotas.others(await self._elsewhere())
            await asyncio.sleep(_LOOK_S)

    async def _elsewhere(self) -> dict[str, list[TenantShare]]:
        """What each other worker that is there has of each tenant; what one that has gone had is nobody's any more."""
        found = defaultdict(list)
        for presence in await self._announcements.others():
            if presence.worker != self._worker:
                for tenant, share in presence.tenants.items():
                    found[tenant].append(share)
        return found


class OwnUsage(Watcher):
    """Counts what tenants spend where there is no topic of it, and no other worker."""

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas

    def settled(self, settlement: Settlement, *, alias: str, publish_s: float) -> None:  # noqa: ARG002
        if (usage := settlement.usage) is not None:
            self._quotas.spent(usage["tenant"], usage["prompt_tokens"] + usage["generated_tokens"], time.monotonic())
            self._quotas.ended(usage["tenant"], usage["id"])
