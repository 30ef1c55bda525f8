"""Requests at a steady pace in the background, and whether each of them got one result."""

import asyncio
import json
import uuid
from collections import Counter
from types import TracebackType
from typing import Self

from aiokafka import AIOKafkaProducer

from schemas.codec import encode_request
from service.settings import Settings
from tests.chaos.reader import everything, reading
from tests.support.waiting import PATIENCE_S

PAUSE_S = 0.02


class Flow:
    """Asks while the block runs; a broker that is away holds it up. Opened with ``async with``."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._bootstrap = settings.kafka.bootstrap_servers
        self._results = settings.topics.named(settings.topics.results)
        self._asking: asyncio.Task[None] | None = None
        self._stopped = False
        self.asked: list[str] = []

    async def __aenter__(self) -> Self:
        self._asking = asyncio.create_task(self._ask(), name="flow")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    async def _ask(self) -> None:
        async with AIOKafkaProducer(bootstrap_servers=self._bootstrap, enable_idempotence=True) as producer:
            while not self._stopped:
                id_ = uuid.uuid4().hex
                body = {"model": "llama", "messages": [{"role": "user", "content": id_}], "max_tokens": 3}
                topics = self._settings.topics
                record = encode_request(topics.named(topics.requests), body, id_=id_)
                sending = await producer.send(record.topic, record.value, record.key, headers=list(record.headers))
                self.asked.append(id_)
                await sending
                await asyncio.sleep(PAUSE_S)

    async def answered(self, count: int, *, within_s: float = PATIENCE_S) -> None:
        """Wait until there are results for at least so many of these requests."""
        seen: set[bytes] = set()
        async with asyncio.timeout(within_s), reading(self._bootstrap, self._results) as results:
            while len(seen.intersection(id_.encode() for id_ in self.asked)) < count:
                seen.update(record.key for record in await results.more() if record.key is not None)

    async def more(self, *, within_s: float = PATIENCE_S) -> None:
        """Wait until something that is asked from now on is answered."""
        await self.answered(len(self.asked) + 5, within_s=within_s)

    async def stop(self) -> None:
        """Ask nothing more, once the broker has what was asked."""
        self._stopped = True
        if self._asking is not None:
            await self._asking

    async def answers(self, *, within_s: float = PATIENCE_S) -> Counter[str]:
        """How many completed results each id has, once all that was asked has one."""
        await self.stop()
        await self.answered(len(self.asked), within_s=within_s)
        results = [json.loads(record.value) for record in await everything(self._bootstrap, self._results)]
        return Counter(result["id"] for result in results if result["outcome"] == "completed")

    def once_each(self) -> Counter[str]:
        """What the answers are to be."""
        return Counter(self.asked)
