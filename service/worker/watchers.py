"""Several watchers as one."""

from collections.abc import Mapping, Sequence
from typing import Any

from schemas.results import Result
from schemas.status import Status
from service.ports import Watcher


class Watchers(Watcher):
    """Tells each of them, in order."""

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self._watchers = tuple(watchers)

    def status(self, status: Status) -> None:
        for watcher in self._watchers:
            watcher.status(status)

    def settled(self, result: Result, *, alias: str, dead: bool, publish_s: float) -> None:
        for watcher in self._watchers:
            watcher.settled(result, alias=alias, dead=dead, publish_s=publish_s)

    def cost(self, usage: Mapping[str, Any]) -> None:
        for watcher in self._watchers:
            watcher.cost(usage)

    def repeated(self, alias: str, *, why: str) -> None:
        for watcher in self._watchers:
            watcher.repeated(alias, why=why)

    def lost(self, alias: str) -> None:
        for watcher in self._watchers:
            watcher.lost(alias)
