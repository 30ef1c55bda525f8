"""Models of every kind whose blocks or states are laid out in another way, parked in the middle of their answers."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from schemas.contexts import KvKept, Tier
from tests.support.asked import Asked, engine_of, said
from tests.support.greedy import in_core
from tests.support.kinds import KINDS, alone
from tests.support.one_allocation import HAS_ONE
from tests.support.waiting import LOOKS

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

CHOSEN = ("hybrid", "mla", "lora", "vision", "audio", "speculative")
HERE = tuple(name for name in CHOSEN if KINDS[name].here)


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[Any]:
    engine = engine_of("other", *HERE)
    async with engine:
        await engine.initialize("other")
        yield engine


@pytest.mark.parametrize("name", HERE)
async def test_a_kind_that_is_parked_in_the_middle_of_an_answer_says_what_it_says_alone(engine: Any, name: str) -> None:
    """Latent attention, too, which on a CPU would prefill by another formula than it decodes by."""
    expected = alone("other", *HERE)  # of all at once, for one import of vLLM
    for _ in range(LOOKS):
        await engine.switch(name)
        running = Asked(engine, name)
        parked = 0
        for tokens in (4, 9, 14):
            await running.has(tokens)
            await engine.switch("other")
            parked += await _parked(engine, name)
            assert await said(engine, "other") == expected["other"]
            await engine.switch(name)
        assert await running.said() == expected[name]
        if parked == 3:
            break
    assert parked == 3
    await engine.switch("other")
    await engine.drop(name)


async def _parked(engine: Any, name: str) -> bool:
    """Park a model with what its request has in the KV cache; False where its core had ended the request before."""
    unfinished = bool((await in_core(engine, name))["unfinished"])
    info = await engine.park(name)
    assert info.tier is Tier.PARKED
    if unfinished:
        assert info.kv_kept in ({KvKept.ALL, KvKept.IN_USE} if HAS_ONE else {KvKept.NONE})
        assert (info.kv_kept_bytes > 0) is HAS_ONE
    return unfinished
