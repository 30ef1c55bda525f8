"""Whose a session is, and for how long: a name that somebody else knows is of no use to them."""

import asyncio
from dataclasses import replace

import pytest

from schemas.base import Origin
from schemas.progress import Part, Progress
from service.engine.answering.sessions import Sessions
from service.errors import SessionLost
from service.ports import Turn
from tests.support.virtual_time import virtual_time

MINE = Turn("a-secret-name", 0, final=False, owner=("acme", b"key"))


@pytest.mark.parametrize("owner", [("", b"key"), ("other", b"key"), ("acme", b"another"), ("acme", None)])
async def test_a_session_goes_on_for_its_tenant_and_key_alone(owner):
    sessions = Sessions(idle_s=60.0)
    mine = sessions.enter("llama", MINE)
    with pytest.raises(SessionLost, match="not here"):
        sessions.enter("llama", replace(MINE, part=1, owner=owner))
    assert sessions.enter("llama", replace(MINE, owner=owner)) is not mine, "the same name begins one of their own"
    assert sessions.enter("llama", replace(MINE, part=1)) is mine


async def test_nothing_that_is_said_of_a_session_names_it():
    sessions = Sessions(idle_s=60.0)
    mine = sessions.enter("llama", MINE)
    with pytest.raises(SessionLost) as again:
        sessions.enter("llama", MINE)
    with pytest.raises(SessionLost) as absent:
        sessions.enter("qwen", replace(MINE, part=1))
    await mine.leave(MINE, completed=False, idle_s=60.0)
    with pytest.raises(SessionLost) as ended:
        await mine.turn(1, lambda: False)
    assert not [error for error in (again, absent, ended) if MINE.session in str(error.value)]


def test_only_the_next_part_makes_a_session_wait_anew():
    with virtual_time() as loop:
        loop.run_until_complete(_waits_for_the_next_part())


async def _waits_for_the_next_part():
    sessions = Sessions(idle_s=60.0)
    mine = sessions.enter("llama", MINE)
    await asyncio.sleep(100)
    assert len(sessions) == 1, "it has a part to answer"
    await mine.leave(MINE, completed=True, idle_s=60.0)
    await asyncio.sleep(50)
    for part in (1, 3):
        turn = replace(MINE, part=part)
        assert sessions.enter("llama", turn) is mine
        await mine.leave(turn, completed=part == 1, idle_s=60.0)
        await asyncio.sleep(50)
    assert len(sessions) == 0, "no part 2 came in time, though a bad part 3 did"


@pytest.mark.parametrize("answered", [True, False])
@pytest.mark.parametrize("part", [0, 1])
async def test_a_request_that_comes_again_does_not_meet_what_it_came_to_in_vain(part: int, answered: bool) -> None:
    begun = Progress(call="c", engine="e", parts=(Part(prompt=[1], said=[2]),)) if part else None
    turn = replace(MINE, part=part, origin=Origin("requests", 0, part))
    sessions = Sessions(idle_s=60.0)
    in_vain = sessions.enter("llama", turn, begun)
    if answered:
        await in_vain.leave(turn, completed=True, idle_s=60.0)
    with pytest.raises(SessionLost, match="taken already"):
        sessions.enter("llama", replace(turn, origin=Origin("requests", 0, 7)))
    ahead = replace(turn, part=part + 3, origin=Origin("requests", 0, 8))
    assert sessions.enter("llama", ahead) is in_vain
    with pytest.raises(SessionLost, match="taken already"):
        sessions.enter("llama", ahead)
    anew = sessions.enter("llama", turn, begun)
    assert anew is not in_vain
    with pytest.raises(SessionLost, match="elsewhere"):
        await in_vain.turn(ahead.part, lambda: False)
    await in_vain.leave(turn, completed=False, idle_s=60.0)
    assert sessions.enter("llama", replace(turn, part=part + 1, origin=Origin("requests", 0, 9))) is anew
