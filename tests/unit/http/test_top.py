"""The status page in a terminal."""

import asyncio
import io

import pytest

from schemas.objectives import Objective
from service.cli.options import Terminal
from service.cli.top import lane, look, screen
from service.errors import ConfigError, NoAnswer
from tests.support.fake_engine import FakeEngine
from tests.support.waiting import PATIENCE_S


def drawn(state: dict) -> str:
    console = Terminal(file=io.StringIO(), width=100)
    console.print(screen(state, width=100))
    return console.file.getvalue()


def test_a_lane_is_full_where_the_model_ran_and_pale_where_its_requests_were_frozen():
    history = {
        "since": 100.0,
        "now": 110.0,
        "turns": [{"model": "a", "from": 100, "to": 104}, {"model": "b", "from": 104, "to": 110}],
        "frozen": [{"model": "a", "from": 104, "to": 107}],
    }
    assert lane("a", history, 10) == "████░░░···"
    assert lane("b", history, 10) == "····██████"
    assert [lane("b", history, width) for width in (0, -3)] == ["█", "█"], "beside an alias that takes the whole line"


async def test_it_shows_what_runs_what_is_frozen_and_what_failed(served):
    async with served(engine=FakeEngine(step_s=0.002), dev_mode=True) as s:
        await s.http.post("/v1/completions", json={"model": "lama", "prompt": "x"})
        body = {"model": "llama", "prompt": "x", "max_tokens": 1_000_000}
        asked = asyncio.create_task(s.http.post("/v1/completions", json=body, timeout=None))
        async with asyncio.timeout(PATIENCE_S):
            while not (state := await asyncio.to_thread(look, s.server.address))["requests"]:
                pass
        await s.http.post("/v1/models/switch", json={"model": "qwen", "mode": "keep"})
        state = await asyncio.to_thread(look, s.server.address)
        text = drawn(state)
        assert "▶ qwen" in text
        assert "frozen at" in text
        assert state["requests"][0]["id"] in text
        assert "The model `lama` does not exist" in text
        asked.cancel()


async def test_objectives_have_a_row_each(served):
    async with served(engine=FakeEngine(step_s=0.05), objective=Objective(ttft_s=2.5, tpot_s=1e-6)) as s:
        for tokens in (1, 60):
            await s.openai.completions.create(model="qwen", prompt="x", max_tokens=tokens)
        text = drawn(await asyncio.to_thread(look, s.server.address))
    rows = [line.split() for line in text.splitlines()]
    assert ["qwen", "2.5", "s", "1e-06", "s", "2", "50%", "of", "90%", "decode", "1"] in rows
    assert ["llama", "2.5", "s", "1e-06", "s", "0", "-"] in rows


async def test_a_server_that_wants_a_key_or_is_none_is_said_in_words(served, tmp_path):
    (tmp_path / "keys").write_text("sesame look\nasker ask\n")
    async with served(api_keys_file=tmp_path / "keys") as s:
        with pytest.raises(NoAnswer, match="--key-file"):
            await asyncio.to_thread(look, s.server.address)
        with pytest.raises(NoAnswer, match="role look"):
            await asyncio.to_thread(look, s.server.address, "asker")
        state = await asyncio.to_thread(look, s.server.address, "sesame")
        assert state["worker"]["worker"] == "w1"
    with pytest.raises(NoAnswer):
        await asyncio.to_thread(look, s.server.address)
    with pytest.raises(ConfigError):
        look("localhost:8000")
