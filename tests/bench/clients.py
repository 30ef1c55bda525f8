"""What each of many clients reads: with the topics of all, and with a reply topic that they share.

Each client makes as many requests, every second one streamed, against a worker around the fake engine. Beside the
bytes of keys, values and headers that a client reads stands what there was to read in all: what a client reads that
reads every partition of ``results`` and ``chunks``. Prints a line of JSON for each way.

``python -m tests.bench.clients [--clients 200] [--requests 5] [--reply-partitions 50]``
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

from deploy.local.broker import find_broker
from service.client import Client
from service.kafka.reader import TopicReader
from service.settings import Settings
from tests.support.pool import delete_topics, serving, settings_for

_OPENING_AT_ONCE = 10


async def ask(client: Client, requests: int) -> None:
    """Every second one streamed; raises where an answer is not the right one."""
    for n in range(requests):
        asked = {"model": "llama", "prompt": "hello", "max_tokens": 20}
        if n % 2:
            text = "".join([piece.choices[0].text async for piece in client.stream(**asked)])
        else:
            text = (await client.complete(**asked)).choices[0].text
        assert text == "".join(f"llama{k} " for k in range(20)), text


async def measure(settings: Settings, clients: int, requests: int, make: Callable[[int], Client]) -> dict[str, Any]:
    """Open all clients, let them ask at once, and say what they read."""
    gate = asyncio.Semaphore(_OPENING_AT_ONCE)
    async with AsyncExitStack() as stack:

        async def opened(n: int) -> Client:
            async with gate:
                client = await stack.enter_async_context(make(n))
                await client.complete(model="llama", prompt="warm", max_tokens=1)  # its readers are open by then
                return client

        there = await asyncio.gather(*map(opened, range(clients)))
        began = time.monotonic()
        await asyncio.gather(*(ask(client, requests) for client in there))
        took = time.monotonic() - began
        read = [client.traffic.bytes for client in there]
    names = [settings.topics.named(name) for name in (settings.topics.results, settings.topics.chunks)]
    names += settings.topics.reply_topics
    async with TopicReader(kafka=settings.kafka, topics=names) as reader:
        sizes = [record.size async for record in reader.backlog()]
    return {
        "clients": clients,
        "requests": clients * (requests + 1),
        "took_s": round(took, 1),
        "records_in_all": len(sizes),
        "bytes_in_all": sum(sizes),
        "bytes_read_mean": round(statistics.mean(read)),
        "bytes_read_max": max(read),
        "share": round(statistics.mean(read) / sum(sizes), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--requests", type=int, default=5)
    parser.add_argument("--reply-partitions", type=int, default=50)
    given = parser.parse_args()
    with find_broker() as broker:
        asyncio.run(compare(broker.bootstrap, given))


async def compare(bootstrap: str, given: argparse.Namespace) -> None:
    """Both ways, one after the other."""
    for shared in (False, True):
        partitions = given.reply_partitions
        settings = settings_for(bootstrap, result_partitions=12, reply_partitions=partitions, request_partitions=4)
        reply = f"{settings.topics.topic_prefix}replies" if shared else None
        topics = settings.topics.model_copy(update={"reply_topics": () if reply is None else (reply,)})
        settings = settings.model_copy(update={"topics": topics})

        def make(n: int, settings: Settings = settings, reply: str | None = reply, of: int = partitions) -> Client:
            place = None if reply is None else n % of
            return Client(settings=settings, reply_topic=reply, reply_partition=place, timeout_s=300)

        async with serving(settings):
            found = await measure(settings, given.clients, given.requests, make)
        print(json.dumps({"reply_topic": shared, "partitions": partitions if shared else 12, **found}))
        await delete_topics(settings)


if __name__ == "__main__":
    main()
