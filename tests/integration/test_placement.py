"""Three workers share a pool's models: each model's requests go to a worker that has it, and each is answered once."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from schemas.results import Result
from service.app import serve
from service.client import Client
from service.settings import Settings
from tests.support.bus import until
from tests.support.fake_worker import parts
from tests.support.pool import delete_topics, settings_for

pytestmark = pytest.mark.broker

MODELS = ("ant", "bee", "cat")
PARTITIONS = 4


def named(settings: Settings, worker: str) -> Settings:
    return settings.model_copy(update={"worker": settings.worker.model_copy(update={"worker_id": worker})})


@asynccontextmanager
async def working(settings: Settings, *workers: str) -> AsyncIterator[None]:
    """Workers that serve until the block ends."""
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        for worker in workers:
            tasks.create_task(serve(named(settings, worker), parts(MODELS), stop), name=worker)
        try:
            yield
        finally:
            stop.set()


async def owners(client: Client, settings: Settings) -> dict[str, dict[str, set[int]]]:
    """Per model, which partitions of its topic each worker has."""
    present = await client.presences()
    return {
        alias: {
            presence.worker: set(presence.partitions.get(settings.topics.for_alias(alias), ()))
            for presence in present
            if settings.topics.for_alias(alias) in presence.partitions
        }
        for alias in MODELS
    }


async def test_each_model_s_partitions_go_to_workers_that_have_it_and_the_client_writes_there(bootstrap: str):
    # A pool that is not heard of for a moment is asked in the topic of all; what comes to a worker from there stays.
    apart = {"request_partitions": PARTITIONS, "park_after_s": 3600.0, "presence_interval_s": 3.0}
    settings = settings_for(bootstrap, **apart)
    try:
        async with working(settings, *(f"has-{alias}" for alias in MODELS)), Client(settings=settings) as client:

            async def all_owned(workers: int) -> bool:
                found = await owners(client, settings)
                whole = set(range(PARTITIONS))
                return len(await client.presences()) == workers and all(
                    set().union(*found[alias].values()) == whole for alias in MODELS
                )

            async def has_joined() -> bool:
                there = any(one.partitions for one in await client.presences() if one.worker == "passing")
                return there and await all_owned(4)

            async def at_home() -> bool:
                """Its model is active there: all three began with the first one, and still have it."""
                active = {
                    presence.worker: next(info.alias for info in presence.contexts if info.active)
                    for presence in await client.presences()
                }
                found = await owners(client, settings)
                return await all_owned(3) and all(active[w] == alias for alias in MODELS for w in found[alias])

            await until(lambda: all_owned(3))
            for alias in MODELS:
                await client.switch(alias, target=f"has-{alias}", hold="forever")
            async with working(settings, "passing"):  # it joins and leaves: two assignments
                await until(has_joined)
            await until(at_home)

            ids = [
                await client.submit({"model": alias, "prompt": "hello", "max_tokens": 2})
                for _ in range(20)
                for alias in MODELS
            ]
            results: list[Result] = await asyncio.gather(*(client.result(id_) for id_ in ids))
            for number, result in enumerate(results):
                alias = MODELS[number % 3]
                assert result.origin.topic == settings.topics.for_alias(alias)
                assert result.body is not None
                assert result.body["choices"][0]["text"] == f"{alias}0 {alias}1 "
            asked = [record async for record in client.requests(past=True)]
            assert len(asked) == len(ids)
            assert sorted([r.id async for r in client.results(past=True, follow=False)]) == sorted(ids)
    finally:
        await delete_topics(settings)
