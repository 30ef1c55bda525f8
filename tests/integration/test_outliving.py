"""Long answers outlive their worker: whoever has their partitions next goes on with what they had said."""

import asyncio
import signal
import time

import pytest

from schemas.results import Outcome
from service.client import Client
from service.settings import Settings
from tests.support.bus import Bus
from tests.support.pool import delete_topics, settings_for
from tests.support.process import Worker, working

pytestmark = pytest.mark.broker

ANSWERS = 100
TOKENS = 800
STEP = "--step-s=0.01"
QUICK = {"shutdown_timeout_s": 0, "presence_interval_s": 0.5, "session_timeout_s": 6.0, "log_level": "info"}
LEFT_WITHIN_S = 5.0


async def kept(settings: Settings) -> set[bytes]:
    """The requests of which it is kept what they have said."""
    left: dict[bytes, bytes | None] = {}
    for record in await Bus(settings.kafka.bootstrap_servers).read(settings.topics.named(settings.topics.progress)):
        left[record.key] = record.value
    return {key for key, value in left.items() if value is not None}


async def all_kept(settings: Settings) -> None:
    async with asyncio.timeout(60):
        while len(await kept(settings)) < ANSWERS:
            pass


async def end(worker: Worker, how: signal.Signals) -> float:
    """Seconds until its process has ended."""
    began = time.monotonic()
    worker.process.process.send_signal(how)
    async with asyncio.timeout(60):
        await worker.process.process.wait()
    return time.monotonic() - began


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
async def test_another_goes_on_with_all_that_a_worker_ran(bootstrap: str, how: signal.Signals) -> None:
    settings = settings_for(bootstrap)
    try:
        async with Client(settings=settings, timeout_s=120) as client:
            async with working(settings, STEP, **QUICK) as first:
                asked = [
                    await client.submit(
                        {
                            "model": "llama",
                            "messages": [{"role": "user", "content": "hello"}],
                            "max_tokens": TOKENS,
                            "stream": number % 2 == 0,
                        }
                    )
                    for number in range(ANSWERS)
                ]
                await all_kept(settings)
                took_s = await end(first, how)
                assert how is signal.SIGKILL or took_s < LEFT_WITHIN_S
            async with working(settings, STEP, **QUICK):
                results = [await client.result(one) for one in asked]
        assert {result.outcome for result in results} == {Outcome.COMPLETED}
        assert [len(result.continued) for result in results] == [1] * ANSWERS
        whole = "".join(f"llama{index} " for index in range(TOKENS))
        assert {result.body["choices"][0]["message"]["content"] for result in results if result.body} == {whole}
        assert {result.attempt.n for result in results} == {1 if how is signal.SIGTERM else 2}
        assert await kept(settings) == set()
    finally:
        await delete_topics(settings)
