"""Quotas are the pool's: what one worker's tenants have spent, every worker knows from the log."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from schemas.codec import decode_result, decode_usage
from schemas.results import Outcome
from service.app import serve
from service.client import Client
from service.errors import ConfigError
from service.kafka.topics import ensure_topics
from tests.support.bus import until
from tests.support.fake_worker import parts
from tests.support.http_pool import Pool
from tests.support.pool import delete_topics
from tests.support.process import working

pytestmark = pytest.mark.broker
BLUE = {"x-gearshift-tenant": "blue"}


@pytest.fixture
async def pool(bootstrap: str, tmp_path: Path) -> AsyncIterator[Pool]:
    (tmp_path / "quotas.yaml").write_text("tenants: {blue: {tokens_per_minute: 60}, green: {concurrent: 2}}")
    made = Pool(bootstrap, quotas_file=tmp_path / "quotas.yaml")
    await ensure_topics(made.settings, ["llama", "qwen"])
    yield made
    await delete_topics(made.settings)


def body(tokens: int) -> dict[str, object]:
    return {"model": "llama", "prompt": "x", "max_tokens": tokens}


async def status(door: httpx.AsyncClient, **headers: str) -> int:
    return (await door.post("/v1/completions", json=body(1), headers=headers)).status_code


async def test_what_was_spent_at_one_door_is_spent_at_every_door_and_at_those_that_open_later(pool: Pool) -> None:
    async with pool.door("one") as one, pool.door("two") as two:
        assert (await one.post("/v1/completions", json=body(100), headers=BLUE)).status_code == 200

        async def known() -> bool:
            return [await status(door, **BLUE) for door in (one, two)] == [429, 429]

        await until(known)
        assert [await status(door) for door in (one, two)] == [200, 200]
        refused = await two.post("/v1/completions", json=body(1), headers=BLUE)
        assert 60 <= int(refused.headers["retry-after"]) <= 110
    async with pool.door("three") as three:

        async def known_there() -> bool:
            return await status(three, **BLUE) == 429

        await until(known_there)
        assert await status(three) == 200
    usages = [decode_usage(one) for one in await pool.records("usage")]
    assert {usage.generated_tokens for usage in usages if usage.tenant == "blue"} >= {100}


async def test_a_durable_call_is_refused_as_any_other_but_not_one_that_was_asked_before(pool: Pool) -> None:
    key = {**BLUE, "idempotency-key": "k1"}
    async with pool.door("one") as one:
        first = await one.post("/v1/completions", json=body(100), headers=key)
        assert first.status_code == 200

        async def known() -> bool:
            return await status(one, **BLUE) == 429

        await until(known)
        new = await one.post("/v1/completions", json=body(1), headers={**BLUE, "prefer": "respond-async"})
        assert new.status_code == 429
        again = await one.post("/v1/completions", json=body(100), headers=key)
        assert (again.status_code, again.json()) == (200, first.json())


async def test_over_the_bus_all_are_answered_in_order_and_others_at_once(pool: Pool) -> None:
    async with pool.door("one", step_s=0.05), Client(settings=pool.settings, timeout_s=60) as client:
        long = await asyncio.gather(*(client.submit(body(100), tenant="green") for _ in range(2)))
        short = await asyncio.gather(*(client.submit(body(5), tenant="green") for _ in range(6)))
        reds = await asyncio.gather(*(client.submit(body(1), tenant="red") for _ in range(3)))
        red = await asyncio.gather(*map(client.result, reds))
        green = await asyncio.gather(*map(client.result, (*long, *short)))
    assert {result.outcome for result in (*red, *green)} == {Outcome.COMPLETED}
    assert max(result.timing.finished for result in red) < max(result.timing.finished for result in green)
    began = [result.timing.finished - result.timing.latency_s + result.timing.waited_s for result in green]
    ended = [result.timing.finished for result in green]
    most = max(sum(b <= moment < e for b, e in zip(began, ended, strict=True)) for moment in began)
    assert most <= 2
    assert sum(result.timing.waited_for.get("quota", 0.0) > 0 for result in green) >= 6
    assert all("quota" not in result.timing.waited_for for result in red)


async def test_tokens_can_t_be_counted_without_the_topic_of_usage(pool: Pool) -> None:
    topics = pool.settings.topics.model_copy(update={"usage_records": False})
    with pytest.raises(ConfigError, match="usage_records"):
        await serve(pool.settings.model_copy(update={"topics": topics}), parts(("llama",)), asyncio.Event())


async def test_a_flood_holds_up_nobody_in_its_partition_and_is_answered_once_in_order_whoever_is_killed(
    pool: Pool,
) -> None:
    """Far more is asked than a worker may hold, of a model's own topic, by bodies that leave its name to that."""
    small = {"max_waiting": 160, "quotas_file": pool.settings.worker.quotas_file, "session_timeout_s": 6.0}
    flooded = {"tenant": "green", "key": "one for both", "topic_of": "llama"}
    async with Client(settings=pool.settings, timeout_s=200) as client:
        async with working(pool.settings, "--step-s=0.05", **small) as first:
            await client.result(await client.submit(body(1)))
            greens = [await client.submit({"prompt": "x", "max_tokens": 10}, **flooded) for _ in range(400)]
            for _ in range(5):
                red = await client.submit(body(1), tenant="red", key="one for both", topic_of="llama")
                await client.result(red)
            before = Counter(decode_result(one).id for one in await pool.records("results"))
            assert sum(id_ in before for id_ in greens) < len(greens) / 2, "all five were behind these"
            first.process.process.kill()
        async with working(pool.settings, **small):
            results = await asyncio.gather(*map(client.result, greens))
    assert {result.outcome for result in results} == {Outcome.COMPLETED}
    asked = Counter(decode_result(one).id for one in await pool.records("results"))
    assert asked == Counter(greens) + Counter({id_: 1 for id_ in asked if id_ not in greens})
    moved = await pool.records("throttled")
    assert len(moved) > 200
    assert {one.key for one in moved} == {b"green"}
    again = {result.id for result in results if result.attempt.n > 1}
    began = [result.timing.finished - result.timing.latency_s + result.timing.waited_s for result in results]
    once = [at for at, result in zip(began, results, strict=True) if result.id not in again]
    assert once == sorted(once)
    assert len(again) <= 2
