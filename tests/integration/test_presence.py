"""A worker is heard of from before its engine is up until it has left, however long it loads."""

import asyncio
from dataclasses import replace

import pytest

from service.app import serve
from service.client import Client
from service.kafka.presence import STALE_INTERVALS
from tests.support.bus import until
from tests.support.fake_worker import parts
from tests.support.pool import delete_topics, settings_for

pytestmark = pytest.mark.broker


async def test_a_worker_that_loads_for_long_is_heard_of_all_the_time(bootstrap):
    settings = settings_for(bootstrap, presence_interval_s=3)  # a busy machine may be silent for seconds
    opens, stop, made = asyncio.Event(), asyncio.Event(), parts(("llama", "qwen"))

    async def open_engine(*given):
        given[-1]("reading weights")
        await opens.wait()
        return await made.open_engine(*given)

    try:
        async with asyncio.TaskGroup() as tasks, Client(settings=settings) as client:
            tasks.create_task(serve(settings, replace(made, open_engine=open_engine), stop))
            said = {}

            async def heard_for_long():
                present = await client.presences()
                assert present or not said
                said.update({one.at: one for one in present if one.loading is not None})
                return len(said) > STALE_INTERVALS + 1  # one that was silent for so long would not be there any more

            await until(heard_for_long)
            assert {(one.worker, one.state) for one in said.values()} == {(settings.worker.worker_id, "loading")}
            assert {one.loading.model for one in said.values()} == {"llama"}
            assert len({one.loading.since for one in said.values()}) == 1
            opens.set()

            async def serves():
                return any(one.state == "serving" for one in await client.presences())

            await until(serves)
            stop.set()
    finally:
        stop.set()
        await delete_topics(settings)
