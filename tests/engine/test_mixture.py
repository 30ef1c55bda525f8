"""A mixture of experts and a dense model behind one bus, whichever of them the engine was started with."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from service.client import Client, RequestFailed
from tests.support.doors import open_doors
from tests.support.engines import open_engine
from tests.support.kinds import PROMPT, TOKENS, Said, alone, engine_args

pytestmark = [pytest.mark.engine, pytest.mark.broker]
PAIR = ("moe", "other")


@pytest.fixture(params=PAIR)
async def bus(request: pytest.FixtureRequest, broker: Any, tmp_path: Path) -> AsyncIterator[Client]:
    """A client of a worker whose engine was started with one of the two, and has not seen the other.

    A third can't be loaded, though it was to be, and to stay.
    """
    entries = {alias: engine_args(alias) for alias in PAIR}
    (tmp_path / "absent").mkdir()
    entries["absent"] = {"model": str(tmp_path / "absent"), "preload": True, "pin": True}
    engine = await open_engine(tmp_path, entries, default=request.param)
    async with engine, open_doors(engine, broker.bootstrap) as doors:
        yield doors.bus


async def said(bus: Client, model: str) -> Said:
    asked = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
    answer = await bus.complete(model=model, prompt=PROMPT, **asked)
    return tuple(answer.choices[0].token_ids)


async def test_each_says_over_the_bus_what_it_says_alone(bus: Client) -> None:
    expected = alone(*PAIR)
    assert {alias: await said(bus, alias) for alias in PAIR} == expected, "the scheduler switches"
    for alias in (*PAIR, *PAIR):
        status = await bus.switch(alias, hold="forever")
        assert status.model == alias
        assert await said(bus, alias) == expected[alias]
    await bus.switch(PAIR[0], hold=0)
    with pytest.raises(RequestFailed, match="absent"):
        await said(bus, "absent")
    both = await asyncio.gather(*(said(bus, alias) for alias in PAIR * 4))
    assert both == [expected[alias] for alias in PAIR * 4]
