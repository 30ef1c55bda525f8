"""Models of any two kinds side by side in one engine: each says what it says alone, whatever becomes of the other.

Alone means vLLM's own LLM in a process that has loaded nothing else. By default two engines are started, in a dense
model and in a mixture of experts, and every other kind lives in the first one; ``-m long`` starts one in each kind,
with all the others.
"""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from schemas.contexts import Tier
from tests.support.asked import Asked, engine_of, long_run, said
from tests.support.kinds import KINDS, Said, alone

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

HERE = tuple(name for name, kind in KINDS.items() if kind.here)
CHOSEN = {
    "dense": ("other", "moe"),
    "moe": ("other",),
}
"""By default: the kind that an engine starts in, and those that live beside it."""
_LONG = pytest.mark.long
FIRSTS = [*CHOSEN, *(pytest.param(name, marks=_LONG) for name in HERE if name not in CHOSEN)]


@pytest.fixture(scope="module", params=FIRSTS)
async def beside(request: pytest.FixtureRequest) -> AsyncIterator[tuple[str, Any]]:
    """An engine with several kinds that was started in one of them."""
    first: str = request.param
    partners = HERE if long_run(request) else CHOSEN[first]
    engine = engine_of(first, *(name for name in partners if name != first))
    async with engine:
        await engine.initialize(first)
        yield first, engine


@pytest.mark.parametrize("partner", HERE)
async def test_two_kinds_say_what_they_say_alone(
    request: pytest.FixtureRequest, beside: tuple[str, Any], partner: str
) -> None:
    first, engine = beside
    if partner == first or (partner not in CHOSEN.get(first, ()) and not long_run(request)):
        pytest.skip("not one of the chosen pairs")
    pair = (first, partner)
    expected = alone(*pair)
    await engine.switch(first)
    assert {name: await said(engine, name) for name in pair} == {name: expected[name] for name in pair}
    await _alternating(engine, pair, expected)
    for name, other in (pair, pair[::-1]):
        for lower, tier in ((engine.park, Tier.PARKED), (engine.drop, Tier.DROPPED)):
            await engine.switch(other)
            assert (await lower(name)).tier is tier
            assert await said(engine, other) == expected[other]
            assert await said(engine, name) == expected[name]
            assert await said(engine, other) == expected[other]
    await engine.switch(first)
    await engine.drop(partner)


async def _alternating(engine: Any, pair: tuple[str, str], expected: dict[str, Said]) -> None:
    """Switches in the middle of answers; one of them is parked in the middle of its own."""
    running: dict[str, Asked] = {}
    for tokens in (4, 8, 12):
        for name in pair:
            await engine.switch(name)
            if name not in running:
                running[name] = Asked(engine, name)
            await running[name].has(tokens)
    await engine.switch(pair[0])
    await engine.park(pair[1])
    for name in pair:
        await engine.switch(name)
        assert await running[name].said() == expected[name]
