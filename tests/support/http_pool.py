"""Workers with doors of their own over one log, as one pool."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai

from schemas.base import Record
from schemas.codec import decode_result, kind_of
from service import settings as settings_module
from service.app import serve
from service.http.server import HttpServer
from tests.support.bus import Bus, until
from tests.support.fake_worker import parts
from tests.support.pool import settings_for
from tests.support.records import as_record


class Pool:
    """Workers with doors, over topics that no other test has."""

    def __init__(self, bootstrap: str, **given: object) -> None:
        self.settings = settings_for(bootstrap, http_port=0, presence_interval_s=0.2, **given)
        self._bootstrap = bootstrap
        self._given = {"topic_prefix": self.settings.topics.topic_prefix, "group_id": self.settings.worker.group_id}
        self._given |= {"request_partitions": 2, "result_partitions": 2, "hold_s": 0.0, **given}

    @asynccontextmanager
    async def door(self, name: str, *, step_s: float = 0.001, **given: object) -> AsyncIterator[httpx.AsyncClient]:
        """A worker that is ready, and its door."""
        settings = settings_module.load(
            bootstrap_servers=self._bootstrap,
            worker_id=f"{self.settings.topics.topic_prefix}{name}",
            presence_interval_s=0.2,
            http_port=0,
            **{**self._given, **given},
        )
        stop, server = asyncio.Event(), HttpServer(settings)
        running = asyncio.create_task(serve(settings, parts(("llama", "qwen"), step_s=step_s), stop, server))
        try:
            async with httpx.AsyncClient(base_url=server.address, timeout=60, verify=False) as http:

                async def ready() -> bool:
                    return running.done() or (await http.get("/ready")).status_code == 200

                await until(ready, within_s=120)
                yield http
        finally:
            stop.set()
            await running

    async def asked(self) -> dict[str, Any]:
        """The bodies in the topic of calls, by id."""
        return {(one.key or b"").decode(): json.loads(one.value or b"null") for one in await self.records("calls")}

    async def records(self, topic: str) -> list[Record]:
        bus = Bus(self._bootstrap, prefix=self.settings.topics.topic_prefix)
        return [as_record(one) for one in await bus.read(self.settings.topics.named(topic))]

    async def forget_before(self, topic: str, partition: int, offset: int) -> None:
        """Let retention take what is older."""
        await Bus(self._bootstrap).forget_before(offset, partition, topic)

    async def answers(self) -> Counter[str]:
        """How many results the topic of answers has of each id."""
        records = await self.records("answers")
        return Counter(decode_result(one).id for one in records if kind_of(one) == "result")


def official(door: httpx.AsyncClient, key: str = "none") -> openai.AsyncOpenAI:
    base = f"{str(door.base_url).rstrip('/')}/v1"
    return openai.AsyncOpenAI(base_url=base, api_key=key, max_retries=0, http_client=door)
