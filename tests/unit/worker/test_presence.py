"""What a worker says of itself, and how ``gearshift status`` shows it."""

import re
import time

import pytest

from schemas.status import HoldInfo, Presence
from service.cli.operate import pool_table
from service.cli.options import Terminal


async def test_the_pool_shows_what_is_wrong_with_a_worker_and_what_it_found_lost(serve):
    async with serve(stall_after_s=0.5) as serving:
        bus = serving.bus
        bus.overtaken, bus.forgotten, bus.stuck, bus.stuck_s = 7, 2, "requests/3 has lag [and] is not read", 1.0
        presence = await bus.until(lambda: next((one for one in bus.presences if one.state == "unhealthy"), None))
    said = shown(presence)
    for text in ("requests/3 has lag [and] is not read", "took 7 requests unread", "offsets of 2 partitions"):
        assert text in said


def test_the_pool_shows_who_is_held_at_a_model_and_for_how_long():
    def said(**hold: object) -> str:
        held = HoldInfo(model="qwen", since=0.0, **hold)
        return shown(Presence(worker="w1", pool="p", at=0.0, interval_s=1.0, hold=held))

    assert "holds qwen until the next switch" in said()
    assert "holds qwen until it has nothing left to do" in said(drained=True)
    assert re.search(r"holds qwen for (599|600) s", said(until=time.time() + 600))
    assert "manual" not in said()


@pytest.mark.parametrize(("inactive", "says"), [("park", "wait for a switch"), ("refuse", "are refused")])
async def test_the_pool_shows_who_switches_by_command_only(serve, inactive, says):
    async with serve(inactive=inactive) as serving:
        assert f"manual: requests for other models {says}" in shown(serving.worker.presence.now())


def shown(presence: Presence) -> str:
    console = Terminal(width=250, force_terminal=False)
    with console.capture() as capture:
        console.print(pool_table((presence,)))
    return capture.get()
