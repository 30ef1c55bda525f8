"""Tiers on the real engine: what must not be lowered, and what a sleeping model becomes."""

from typing import Any

import pytest

from schemas.contexts import Tier
from service.errors import SwitchFailed
from tests.support.greedy import PROMPT, Greedy, alone, frozen, greedy, in_core, usual
from tests.support.volume import shown
from tests.support.waiting import LOOKS

pytestmark = pytest.mark.engine


async def test_a_model_with_unfinished_requests_is_not_dropped(multi: Any) -> None:
    request, _ = await frozen(multi, "llama", "qwen", 100)
    with pytest.raises(SwitchFailed, match="1 unfinished"):
        await multi.drop("llama")
    await multi.switch("llama")
    assert len(await request.tokens()) == 100


async def test_the_active_model_is_neither_parked_nor_dropped(multi: Any) -> None:
    for lower in (multi.park, multi.drop):
        with pytest.raises(SwitchFailed, match="active"):
            await lower("llama")
    assert len(await greedy(multi)) == 24


async def test_a_sleeping_model_can_be_dropped_and_comes_back_awake(multi: Any) -> None:
    expected = await usual(multi, "qwen")
    await multi.switch("llama")
    await multi.sleep(1, model="qwen")
    assert (await multi.drop("qwen")).tier is Tier.DROPPED
    await multi.switch("qwen")
    assert multi.info("qwen").tier is Tier.RESIDENT
    assert not await multi.is_sleeping(model="qwen")
    assert await greedy(multi, "qwen") == expected


def without_weights(wrapper: Any) -> int:
    """Called in the workers: how many models have let go of their weights."""
    from service.engine.worker.calls import contexts_of

    runners = [context.worker.model_runner for context in contexts_of(wrapper).by_key.values()]
    return sum(runner.model is None for runner in runners)


@pytest.mark.parametrize("parked", shown([False, True], True))
async def test_one_that_sleeps_lightly_and_is_put_to_sleep_deeply_has_let_go_of_its_weights(
    multi: Any, parked: bool
) -> None:
    expected = await alone(multi, "qwen")
    await multi.switch("llama")
    if parked:
        await multi.park("qwen")
    await multi.sleep(1, model="qwen")
    assert multi.info("qwen").tier is Tier.PARKED
    assert await multi.collective_rpc(without_weights, model="llama") == [0]
    await multi.sleep(2, model="qwen")
    assert multi.info("qwen").tier is Tier.DROPPED
    assert await multi.collective_rpc(without_weights, model="llama") == [1]
    assert await multi.wake_up(model="qwen")
    assert await alone(multi, "qwen") == expected
    assert await multi.collective_rpc(without_weights, model="qwen") == [0]


async def test_one_that_sleeps_deeply_may_be_told_to_sleep_and_to_pause_again(multi: Any) -> None:
    expected = await alone(multi, "qwen")
    await multi.switch("llama")
    for _ in range(2):
        await multi.sleep(2, model="qwen")
    await multi.pause_generation(model="qwen")
    await multi.resume_generation(model="qwen")
    assert await multi.wake_up(model="qwen")
    assert await alone(multi, "qwen") == expected


async def test_a_sleeping_model_with_requests_is_not_put_to_sleep_deeply_and_sleeps_on(multi: Any) -> None:
    expected = await alone(multi, "qwen", tokens=100)
    await multi.switch("qwen")
    for _ in range(LOOKS):
        kept = Greedy(multi, "qwen", PROMPT, 100)
        await kept.has(5)
        await multi.sleep(1, "keep", model="qwen")
        if (await in_core(multi, "qwen"))["unfinished"]:
            break
        await multi.wake_up(model="qwen")
    with pytest.raises(Exception, match="can't outlive the weights"):
        await multi.sleep(2, "keep", model="qwen")
    assert await multi.is_paused(model="qwen")
    assert multi.info("qwen").tier is Tier.PARKED
    assert await multi.wake_up(model="qwen")
    assert await kept.tokens() == expected
