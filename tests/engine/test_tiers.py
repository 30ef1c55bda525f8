"""Tiers on the real engine: what parking, dropping and sleeping give back, and that nothing changes by it."""

from typing import Any

import pytest

from schemas.contexts import Tier
from service.errors import SwitchFailed
from service.platforms.cpu import resident_bytes
from tests.support.greedy import PROMPT, Greedy, alone, greedy

pytestmark = pytest.mark.engine
MIB = 1 << 20


def worker_rss(multi: Any) -> int:
    return sum(map(resident_bytes, multi.worker_pids))


async def test_parking_gives_the_kv_cache_back_and_a_running_request_survives_it(multi: Any) -> None:
    expected = await alone(multi, "llama", tokens=300)
    request = Greedy(multi, "llama", PROMPT, 300)
    await request.has(20)
    await multi.switch("qwen")
    before = worker_rss(multi)
    info = await multi.park("llama")
    assert info.tier is Tier.PARKED
    assert before - worker_rss(multi) > 50 * MIB
    report = await multi.switch("llama")
    assert report.tier_found is Tier.PARKED
    assert await request.tokens() == expected


async def test_a_dropped_model_is_loaded_again_and_says_the_same(multi: Any) -> None:
    expected = await alone(multi, "lynx")
    await multi.switch("llama")
    assert (await multi.drop("lynx")).tier is Tier.DROPPED
    waiting = Greedy(multi, "lynx", PROMPT, 24)
    report = await multi.switch("lynx")
    assert report.tier_found is Tier.DROPPED
    assert await waiting.tokens() == expected


async def test_a_model_with_unfinished_requests_is_not_dropped(multi: Any) -> None:
    request = Greedy(multi, "llama", PROMPT, 100)
    await request.has(1)
    await multi.switch("qwen")
    with pytest.raises(SwitchFailed, match="1 unfinished"):
        await multi.drop("llama")
    await multi.switch("llama")
    assert len(await request.tokens()) == 100


async def test_the_active_model_is_neither_parked_nor_dropped(multi: Any) -> None:
    for lower in (multi.park, multi.drop):
        with pytest.raises(SwitchFailed, match="active"):
            await lower("llama")
    assert len(await greedy(multi)) == 24


async def test_preloading_brings_a_model_back_while_another_one_serves(multi: Any) -> None:
    expected = await alone(multi, "qwen")
    await multi.switch("llama")
    for lower in (multi.park, multi.drop):
        await lower("qwen")
        assert (await multi.preload("qwen")).tier is Tier.RESIDENT
        assert multi.active == "llama"
    report = await multi.switch("qwen")
    assert report.tier_found is Tier.RESIDENT
    assert await greedy(multi, "qwen") == expected


@pytest.mark.parametrize("level", [1, 2])
async def test_sleep_gives_memory_back_and_waking_the_weights_alone_schedules_nothing(multi: Any, level: int) -> None:
    expected = await alone(multi, "llama")
    before = worker_rss(multi)
    await multi.sleep(level, model="llama")
    assert before - worker_rss(multi) > 50 * MIB
    asleep_on = Tier.PARKED if level == 1 else Tier.DROPPED
    assert multi.info("llama").tier is asleep_on
    asleep = Greedy(multi, "llama", PROMPT, 24)
    assert not await multi.wake_up(["weights"], model="llama")
    assert multi.info("llama").tier is asleep_on
    await multi.switch("qwen")
    await greedy(multi, "qwen")
    await multi.switch("llama")
    assert asleep.seen == 0
    assert await multi.is_sleeping(model="llama")
    assert await multi.wake_up(["kv_cache"], model="llama")
    assert multi.info("llama").tier is Tier.RESIDENT
    assert await asleep.tokens() == expected


async def test_a_sleeping_model_can_be_dropped_and_comes_back_awake(multi: Any) -> None:
    expected = await alone(multi, "qwen")
    await multi.switch("llama")
    await multi.sleep(1, model="qwen")
    assert (await multi.drop("qwen")).tier is Tier.DROPPED
    await multi.switch("qwen")
    assert multi.info("qwen").tier is Tier.RESIDENT
    assert not await multi.is_sleeping(model="qwen")
    assert await greedy(multi, "qwen") == expected
