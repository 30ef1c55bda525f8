"""Where results and chunks go: to the topic and partition that a request names, where there is such a one."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import lru_cache

import structlog
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from schemas.base import immutable
from schemas.requests import ReplyTo
from service.kafka.connection import client_options, close_client, start
from service.kafka.topics import configs_of
from service.settings import KafkaSettings, TopicSettings

log = structlog.get_logger(__name__)

_FRESH_S = 300.0
"""How long a topic that was seen is taken to be there; one that is deleted earlier is noticed by a failing write."""
_PATIENCE_S = 3.0
"""How long a topic that was never looked for may take to become visible: its client may just have made it."""
_BETWEEN_LOOKS_S = 0.5
_MISSING_S = 60.0
"""How long a missing topic is not waited for again. It is looked for all the same."""
_MISSING_KEPT = 10_000
_ALLOWED_KEPT = 1000
_RULES_AGAIN_S = 10.0
"""How long a topic whose rules could not be learned is taken to have those that it had, or none that matters."""
_TROUBLE = (KafkaError, OSError, TimeoutError, AssertionError)
"""What a look may end with; an AssertionError of aiokafka where there is no broker."""
_TIMESTAMP_LIMITS = tuple(f"message.timestamp.{side}.max.ms" for side in ("before", "after", "difference"))
_LEAST_LIMIT_MS = 60_000
"""Below this a broker may refuse even the marker that ends a transaction. It tries that again for ever, also where the
topic is deleted meanwhile, and nobody can commit to the partition of requests any more: seen with Kafka 4.1."""


@immutable
class Place:
    """Where something is written; ``reply`` is what was asked for, if that is it. ``note``: why it is not."""

    reply: ReplyTo | None = None
    note: str | None = None


_NO_REPLY = Place()


class ReplyTopics:
    """Which reply topics there are, and how many partitions they have; looked up beside the writers, never in them.

    All topics are looked up at once, at most twice a second, however many names there are that nobody has made.
    """

    def __init__(self, *, kafka: KafkaSettings, topics: TopicSettings) -> None:
        self._kafka = kafka
        self._allows = lru_cache(_ALLOWED_KEPT)(topics.allows_reply)
        self._sizes: dict[str, int] = {}
        self._looked_at = float("-inf")
        """When the last look began, and whether a broker answered it."""
        self._answered = False
        self._looking = asyncio.Lock()
        self._missing: OrderedDict[ReplyTo, float] = OrderedDict()
        """Until when they are not waited for."""
        self._rules: OrderedDict[str, tuple[float, str | None]] = OrderedDict()
        """By topic: until when they are taken to be so, and one by which nothing may be written there."""
        self._unruled: set[str] = set()
        """Topics whose rules the next look is for."""
        self._asking = asyncio.Lock()

    async def place(self, reply: ReplyTo | None) -> Place:
        """Where to write what is to go to ``reply``: there, or else to the topic of all, with a note that says why.

        Takes a few seconds at most, where a topic is not there. While no broker answers it is taken to be there.
        """
        if reply is None:
            return _NO_REPLY
        if not self._allows(reply.topic):
            return Place(note=f"{reply}: not a topic that this worker may write to")
        now = time.monotonic()
        if self._there(reply) and now - self._looked_at < _FRESH_S:
            return await self._by_its_rules(reply)
        until = now if self._missing.get(reply, now) > now else now + _PATIENCE_S
        while await self._look(since=now):
            if self._there(reply):
                self._missing.pop(reply, None)
                return await self._by_its_rules(reply)
            now = time.monotonic()
            if now >= until:
                self._note_missing(reply)
                return Place(note=f"{reply}: no such topic or partition")
        return Place(reply)

    async def gone(self, reply: ReplyTo) -> bool:
        """Whether it is not there any more, now that something could not be written to it."""
        return await self._look(since=time.monotonic()) and not self._there(reply)

    async def _by_its_rules(self, reply: ReplyTo) -> Place:
        """A topic that is there, unless a rule of its own would hang the transactions that write there."""
        if not self._ruled(reply.topic):
            self._unruled.add(reply.topic)
            async with self._asking:
                if not self._ruled(reply.topic):
                    await self._ask_for_rules(reply.topic)
        _, rule = self._rules[reply.topic]
        return (
            Place(reply) if rule is None else Place(note=f"{reply}: its {rule} would hang this worker's transactions")
        )

    def _ruled(self, topic: str) -> bool:
        until, _ = self._rules.get(topic, (0.0, None))
        return time.monotonic() < until

    async def _ask_for_rules(self, topic: str) -> None:
        """Learn those of a topic and of all others that are waited for: one look for all, like that for topics."""
        topics = sorted({topic, *self._unruled})
        self._unruled.clear()
        found: dict[str, dict[str, str]] | None = None
        try:
            async with self._admin() as admin:
                found = await configs_of(admin, topics)
        except _TROUBLE as error:
            log.warning("reply_topic.rules_unknown", topics=topics, why=repr(error))
        until = time.monotonic() + (_RULES_AGAIN_S if found is None else _FRESH_S)
        for one in topics:
            _, before = self._rules.pop(one, (0.0, None))
            rule = before if found is None else _hanging_rule(found.get(one, {}))
            self._rules[one] = until, rule
            if rule is not None:
                log.error("reply_topic.hangs", topic=one, rule=rule)
        while len(self._rules) > max(_MISSING_KEPT, len(topics)):
            self._rules.popitem(last=False)

    def _there(self, reply: ReplyTo) -> bool:
        return (reply.partition or 0) < self._sizes.get(reply.topic, 0)

    def _note_missing(self, reply: ReplyTo) -> None:
        if reply not in self._missing:
            log.warning("reply_topic.missing", reply_to=str(reply))
        self._missing[reply] = time.monotonic() + _MISSING_S
        self._missing.move_to_end(reply)
        while self._missing and (len(self._missing) > _MISSING_KEPT or self._forgotten(next(iter(self._missing)))):
            self._missing.popitem(last=False)

    def _forgotten(self, reply: ReplyTo) -> bool:
        """Whether its time of not being waited for is over."""
        return self._missing[reply] <= time.monotonic()

    async def _look(self, *, since: float) -> bool:
        """Have a look that began after ``since``; False where no broker answered. Those who wait share one."""
        async with self._looking:
            if self._looked_at > since:
                return self._answered
            await asyncio.sleep(max(0.0, self._looked_at + _BETWEEN_LOOKS_S - time.monotonic()))
            self._looked_at, self._answered = time.monotonic(), False
            try:
                async with self._admin() as admin:
                    there = await admin.describe_topics()
            except _TROUBLE as error:
                log.warning("reply_topic.unknown", why=repr(error))
                return False
            self._sizes = {topic["topic"]: len(topic["partitions"]) for topic in there if topic["error_code"] == 0}
            self._answered = True
            return True

    @asynccontextmanager
    async def _admin(self) -> AsyncIterator[AIOKafkaAdminClient]:
        admin = AIOKafkaAdminClient(**client_options(self._kafka))
        try:
            await start(admin)
            yield admin
        finally:
            await close_client(admin.close())


def _hanging_rule(configs: Mapping[str, str]) -> str | None:
    """A rule of a topic's own by which a broker may refuse a transaction's marker; None also where no rule is known."""
    if configs.get("message.timestamp.type") == "LogAppendTime":
        return None
    found = ((name, configs.get(name) or "") for name in _TIMESTAMP_LIMITS)  # brokers differ in how they say none
    return next((f"{name} of {said}" for name, said in found if said.isdecimal() and int(said) < _LEAST_LIMIT_MS), None)
