"""The ordinary traffic: requests at a steady rate, some by producers whose clocks are wrong."""

import asyncio
import random
import time
import uuid
from collections.abc import Iterable
from typing import Any

from aiokafka import AIOKafkaProducer

from schemas.base import Outgoing
from schemas.codec import encode_request
from service.settings import TopicSettings
from tests.chaos.check import Asked
from tests.support.fake_engine import POISON

ALIASES = ("llama", "qwen")
SKEW_S = 3500.0
"""How wrong a clock is. A broker refuses records that claim to be made over an hour from now."""
TTL_S = 600.0
"""Longer than any fault may hold a request up, and shorter than clocks are wrong."""
EXPIRED_SHARE = 40
"""One of so many requests has a deadline that has passed."""
LONG_SHARE, LONG = 20, (1000, 3000)
"""Where answers may be long, one of so many has so many words: it takes longer than most faults leave it."""


class Asking:
    """Sends requests and notes in ``asked`` what is to come back."""

    def __init__(self, *, topics: TopicSettings, bootstrap: str, seed: int, long_answers: bool = False) -> None:
        self._long_answers = long_answers
        self._topic = topics.named(topics.requests)
        self._bootstrap = bootstrap
        self._dice = random.Random(seed)
        self.asked: dict[str, Asked] = {}
        self.skewed = 0

    def producer(self) -> AIOKafkaProducer:
        """A producer that writes each record once, and soon sees partitions that are added."""
        return AIOKafkaProducer(bootstrap_servers=self._bootstrap, enable_idempotence=True, metadata_max_age_ms=2000)

    async def at_a_rate(self, numbers: Iterable[int], rate: float) -> None:
        """A request for each number, the first of them 0, so many a second."""
        began = time.time()
        async with self.producer() as producer:
            pending: set[asyncio.Future[Any]] = set()
            for n in numbers:
                if (early := began + n / rate - time.time()) > 0:
                    await asyncio.sleep(early)
                pending.add(await self.ask(producer, skew_s=(0.0, -SKEW_S, 0.0, SKEW_S)[n % 4]))
                pending = {future for future in pending if not future.done()}
            await asyncio.gather(*pending)

    async def ask(
        self, producer: AIOKafkaProducer, *, fatal: bool = False, skew_s: float = 0.0
    ) -> "asyncio.Future[Any]":
        """One request, by a clock that is so wrong; ``fatal``: it kills the engine of whoever runs it."""
        dice, now = self._dice, time.time()
        id_ = uuid.UUID(int=dice.getrandbits(128)).hex
        model, words, ends = dice.choice(ALIASES), dice.randint(1, 20), dice.randrange(EXPIRED_SHARE) == 0
        expired = ends and not fatal
        if self._long_answers and not fatal and dice.randrange(LONG_SHARE) == 0:
            words = dice.randint(*LONG)
        content = f"{POISON} {id_}" if fatal else f"request {id_}"
        body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": words}
        limits = {"deadline": now - 1} if expired else {"ttl": TTL_S} if skew_s else {}
        self.asked[id_] = Asked(model=model, at=now, words=words, fatal=fatal, expired=expired)
        self.skewed += bool(skew_s)
        record = encode_request(self._topic, body, id_=id_, **limits)
        return await send(producer, record, at=now + skew_s)

    def recent(self) -> str | None:
        """One of the last ordinary requests."""
        ordinary = [id_ for id_, request in list(self.asked.items())[-50:] if not (request.fatal or request.expired)]
        return self._dice.choice(ordinary) if ordinary else None


async def send(producer: AIOKafkaProducer, record: Outgoing, *, at: float | None = None) -> "asyncio.Future[Any]":
    """Hand a record to a producer, made ``at`` a moment; the future is done when the broker has it."""
    return await producer.send(
        record.topic,
        record.value,
        record.key,
        headers=list(record.headers),
        timestamp_ms=None if at is None else round(at * 1000),
    )
