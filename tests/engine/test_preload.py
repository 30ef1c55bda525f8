"""Bringing a parked model back beside the active one: what runs goes on, and whatever is asked meanwhile is right."""

import asyncio
from typing import Any

import pytest

from schemas.contexts import Tier
from tests.support.greedy import PROMPT, Greedy, alone, greedy

pytestmark = pytest.mark.engine


@pytest.fixture
async def parked(multi: Any) -> tuple[int, ...]:
    """``qwen`` is parked, ``llama`` active; what qwen says when it is asked."""
    said = await alone(multi, "qwen")
    await multi.switch("llama")
    await multi.park("qwen")
    return said


async def test_what_can_be_done_beside_the_active_models_steps_is_enough(multi: Any, parked: tuple[int, ...]) -> None:
    running = Greedy(multi, "llama", PROMPT, 200)
    await running.has(5)
    assert (await multi.preload("qwen", stall=False)).tier is Tier.RESIDENT
    assert await running.tokens() == await greedy(multi, "llama", tokens=200)
    assert (await multi.switch("qwen")).tier_found is Tier.RESIDENT
    assert await greedy(multi, "qwen") == parked


async def test_a_dropped_model_is_only_read_ahead_without_a_stall(multi: Any, parked: tuple[int, ...]) -> None:
    await multi.drop("qwen")
    assert (await multi.preload("qwen", stall=False)).tier is Tier.DROPPED
    await multi.switch("qwen")
    assert await greedy(multi, "qwen") == parked


@pytest.mark.parametrize("asked", ["qwen", "lynx"])
async def test_a_switch_that_comes_meanwhile_is_done(multi: Any, parked: tuple[int, ...], asked: str) -> None:
    preloading = asyncio.create_task(multi.preload("qwen"))
    expected = parked if asked == "qwen" else await alone(multi, "lynx")
    await multi.switch(asked)
    assert await greedy(multi, asked) == expected
    assert (await preloading).tier is Tier.RESIDENT


@pytest.mark.parametrize("lower", ["park", "drop"])
async def test_a_model_that_is_put_away_meanwhile_is_put_away_whole(
    multi: Any, parked: tuple[int, ...], lower: str
) -> None:
    preloading = asyncio.create_task(multi.preload("qwen", stall=False))
    await asyncio.gather(preloading, getattr(multi, lower)("qwen"), return_exceptions=True)
    await multi.switch("qwen")
    assert await greedy(multi, "qwen") == parked
