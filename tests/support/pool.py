"""A pool of one worker on the real broker, around the fake engine: the other side of the client's tests."""

import asyncio
import gc
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient

from service.app import Progress, serve
from service.models_file import ModelsFile
from service.ports import Engine
from service.settings import Settings, load
from tests.support.bus import Bus
from tests.support.fake_worker import parts


def settings_for(bootstrap: str, **given: Any) -> Settings:
    """Settings whose topics and group no other test has; small in what a test need not wait for."""
    name = f"t{uuid.uuid4().hex[:10]}"
    small = {"request_partitions": 2, "result_partitions": 2, "presence_interval_s": 0.5, "hold_s": 0.0}
    return load(bootstrap_servers=bootstrap, topic_prefix=f"{name}-", group_id=name, **{**small, **given})


async def delete_topics(settings: Settings) -> None:
    """Leave the broker as it was found."""
    admin = AIOKafkaAdminClient(bootstrap_servers=settings.kafka.bootstrap_servers)
    await admin.start()
    try:
        ours = [name for name in await admin.list_topics() if name.startswith(settings.topics.topic_prefix)]
        if ours:
            await admin.delete_topics(ours)
    finally:
        await admin.close()


async def kept_progress(settings: Settings) -> set[bytes]:
    """The keys of the requests and sessions of which it is kept what they have said."""
    left: dict[bytes, bytes | None] = {}
    for record in await Bus(settings.kafka.bootstrap_servers).read(settings.topics.named(settings.topics.progress)):
        left[record.key] = record.value
    return {key for key, value in left.items() if value is not None}


@asynccontextmanager
async def serving(settings: Settings, *, step_s: float = 0.0, switch_s: float = 0.0) -> AsyncIterator[Settings]:
    """A worker that serves ``llama`` and ``qwen`` until the block ends. What is asked inside it hears as it comes."""
    stop, booted = asyncio.Event(), asyncio.Event()
    made = parts(("llama", "qwen"), step_s=step_s, switch_s=switch_s)
    gc.freeze()  # a worker looks for garbage when it begins to serve: not in all that the other tests have loaded

    async def open_engine(models: ModelsFile, loaded: Settings, progress: Progress) -> Engine:
        booted.set()  # what it boots into is settled
        return await made.open_engine(models, loaded, progress)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(serve(settings, replace(made, open_engine=open_engine), stop), name="worker")
        await booted.wait()
        try:
            yield settings
        finally:
            stop.set()
