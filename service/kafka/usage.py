"""What results have cost, as the topic ``usage`` says: sums, and what comes."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields

import structlog
from aiokafka import TopicPartition

from schemas.codec import decode_usage, explain
from schemas.usage import Usage
from service.errors import GearshiftError
from service.kafka.reader import TopicReader, as_unavailable
from service.settings import Settings, read_keys

log = structlog.get_logger(__name__)
_LAST_S = 600.0
_AGAIN_AFTER_S = 1.0
GROUPS: dict[str, Callable[[Usage], str]] = {
    "tenant": lambda usage: usage.tenant,
    "model": lambda usage: usage.model or "",
    "endpoint": lambda usage: usage.endpoint or "",
    "outcome": lambda usage: usage.outcome.value,
    "worker": lambda usage: usage.worker,
}
"""What usage may be grouped by."""


@dataclass(slots=True)
class Sum:
    """What some results have cost together."""

    results: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    running_s: float = 0.0
    switch_s: float = 0.0

    def add(self, usage: Usage) -> None:
        """Count one more."""
        self.results += 1
        for each in fields(self)[1:]:
            setattr(self, each.name, getattr(self, each.name) + getattr(usage, each.name))


class Sums:
    """Sums by the values of the groups ``by``, which are names in GROUPS."""

    def __init__(self, by: Sequence[str]) -> None:
        self._by = tuple(by)
        self._sums: dict[tuple[str, ...], Sum] = {}

    def add(self, usage: Usage) -> None:
        """Count one more."""
        self._sums.setdefault(tuple(GROUPS[name](usage) for name in self._by), Sum()).add(usage)

    def rows(self) -> list[dict[str, str | int | float]]:
        """Each group with its sums, by name, in the groups' order."""
        return [
            {**dict(zip(self._by, names, strict=True)), **asdict(found)} for names, found in sorted(self._sums.items())
        ]


async def summed_usage(settings: Settings, *, by: Sequence[str], since: float | None = None) -> Sums:
    """Over all that is kept, or since a moment (seconds since the epoch). Raises TopicError, BrokerUnavailable."""
    sums = Sums(by)
    topic = settings.topics.named(settings.topics.usage)
    async with TopicReader(kafka=settings.kafka, topics=[topic], since=since) as reader:
        async for record in reader.backlog():
            try:
                sums.add(decode_usage(record))
            except ValueError:
                log.warning("record.malformed", at=str(record.origin))
    return sums


async def follow_usage(settings: Settings, take: Callable[[Usage, float], None]) -> None:
    """Tell of each result's usage when it comes, and before that of the last minutes'; until cancelled.

    ``take`` is told the moment beside it, on this process's monotonic clock; it is never one to come, whatever clock
    made it. Where the pool has a key, only what it signed counts. Raises ConfigError.
    """
    keys = read_keys(settings.worker.pool_key_file, "pool_key_file")
    topic, since = settings.topics.named(settings.topics.usage), time.time() - _LAST_S
    places: dict[TopicPartition, int] = {}
    while True:
        try:
            reader = TopicReader(kafka=settings.kafka, topics=[topic], since=since, places=dict(places))
            with as_unavailable(topic):
                async with reader:
                    while True:
                        for record in await reader.read():
                            places[TopicPartition(topic, record.partition)] = record.offset + 1
                            at = time.monotonic() - max(0.0, time.time() - record.timestamp)
                            try:
                                take(decode_usage(record, keys=keys), at)
                            except ValueError as error:
                                log.warning("record.malformed", at=str(record.origin), why=explain(error))
        except GearshiftError as error:
            log.warning("usage.unreadable", why=str(error))
        await asyncio.sleep(_AGAIN_AFTER_S)
