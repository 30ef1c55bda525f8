"""Several watchers as one."""

from collections.abc import Sequence

from schemas.status import Status
from service.ports import Settlement, Watcher


class Watchers(Watcher):
    """Tells each of them, in order."""

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self._watchers = tuple(watchers)

    def status(self, status: Status) -> None:
        for watcher in self._watchers:
            watcher.status(status)

    def settled(self, settlement: Settlement, *, alias: str, publish_s: float) -> None:
        for watcher in self._watchers:
            watcher.settled(settlement, alias=alias, publish_s=publish_s)

    def repeated(self, alias: str, *, why: str) -> None:
        for watcher in self._watchers:
            watcher.repeated(alias, why=why)

    def lost(self, alias: str) -> None:
        for watcher in self._watchers:
            watcher.lost(alias)
