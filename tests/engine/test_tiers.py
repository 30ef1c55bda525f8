"""Tiers on the real engine: what must not be lowered, and what a sleeping model becomes."""

from typing import Any

import pytest

from schemas.contexts import Tier
from service.errors import SwitchFailed
from tests.support.greedy import PROMPT, Greedy, greedy, usual

pytestmark = pytest.mark.engine


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


async def test_a_sleeping_model_can_be_dropped_and_comes_back_awake(multi: Any) -> None:
    expected = await usual(multi, "qwen")
    await multi.switch("llama")
    await multi.sleep(1, model="qwen")
    assert (await multi.drop("qwen")).tier is Tier.DROPPED
    await multi.switch("qwen")
    assert multi.info("qwen").tier is Tier.RESIDENT
    assert not await multi.is_sleeping(model="qwen")
    assert await greedy(multi, "qwen") == expected
