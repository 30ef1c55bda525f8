"""The short way for the answers of switches: a real socket, and what stands in for vLLM's clients and core."""

import asyncio
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine import UtilityOutput
from vllm.v1.serial_utils import UtilityResult

from service.engine.core import replies as core
from service.engine.core import routing
from service.engine.frontend.frontend import Frontend
from service.engine.frontend.replies import Replies
from tests.support.waiting import PATIENCE_S


def frontend(key: int) -> Any:
    """A frontend as far as answers come to it."""
    made = object.__new__(Frontend)
    made.key = key
    made.llm = SimpleNamespace(engine_core=SimpleNamespace(utility_results={}))
    return made


def told(call_id: int, result: Any = None, failure: str | None = None) -> UtilityOutput:
    return UtilityOutput(call_id, failure, None if failure else UtilityResult(result))


async def test_an_answer_comes_to_the_call_of_the_client_that_made_it(tmp_path: Path) -> None:
    frontends = {"llama": frontend(0), "qwen": frontend(1)}
    waiting = {alias: asyncio.get_running_loop().create_future() for alias in frontends}
    for alias, future in waiting.items():
        frontends[alias].llm.engine_core.utility_results[7] = future
    read = Replies(str(tmp_path / "replies"), frontends)
    try:
        sent = core.Replies(str(tmp_path / "replies"))
        assert sent.send(1, told(7, {"stall_ms": 0.5, "left": {"kv": 3}}))
        async with asyncio.timeout(PATIENCE_S):
            assert await waiting["qwen"] == {"stall_ms": 0.5, "left": {"kv": 3}}
        assert frontends["qwen"].llm.engine_core.utility_results == {}
        assert not waiting["llama"].done()
        waiting["llama"].cancel()
        for client, call_id in ((0, 7), (0, 8), (5, 7)):  # given up, never made, and of a client that is gone
            assert sent.send(client, told(call_id, 1))
        frontends["llama"].llm.engine_core.utility_results[9] = last = asyncio.get_running_loop().create_future()
        assert sent.send(0, told(9, "the last one"))
        async with asyncio.timeout(PATIENCE_S):
            assert await last == "the last one"
    finally:
        read.close()
    assert not sent.send(1, told(10, 1))


async def test_what_the_short_way_has_no_room_for_goes_vllms(tmp_path: Path) -> None:
    read = Replies(str(tmp_path / "replies"), {})
    try:
        sent = core.Replies(str(tmp_path / "replies"))
        assert not sent.send(0, told(1, failure="it is not loaded"))
        assert not sent.send(0, told(1, "x" * (1 << 20)))
        assert not sent.send(0, told(1, object()))
        assert [sent.send(0, told(1, n)) for n in range(1000)].count(False) > 0  # nobody reads meanwhile
    finally:
        read.close()


class Core:
    """An engine core as far as a call comes to it, with vLLM's own way of running one."""

    from vllm.v1.engine.core import EngineCoreProc

    _invoke_utility_method = staticmethod(EngineCoreProc._invoke_utility_method)

    def __init__(self, way: Any, shuts_down: bool = False) -> None:
        self.said: list[Any] = []
        self.output_queue: Any = SimpleNamespace(put_nowait=self.said.append)
        self._shuts_down = shuts_down
        commands = {"activate": self._activate, "park": lambda key: {"parked": key}}
        vars(self)[routing._STATE] = SimpleNamespace(replies=way, commands=commands)

    def _activate(self, key: int, *_: Any) -> Any:
        if key == 2:
            raise LookupError("the model is not loaded")
        return {"active": key}

    def _reject_utility_in_shutdown(self, client: int, call_id: int, name: str) -> bool:
        return self._shuts_down


class Way:
    def __init__(self, *, room: bool = True) -> None:
        self.room = room
        self.sent: list[tuple[int, int, Any]] = []

    def send(self, client: int, output: Any) -> bool:
        if not self.room or output.failure_message is not None:
            return False
        self.sent.append((client, output.call_id, output.result.result))
        return True


def handle(made: Core, command: str, *arguments: Any) -> list[Any]:
    """What is left to vLLM's own handling of a call."""
    from vllm.v1.engine import EngineCoreRequestType

    left: list[Any] = []
    request = (3, 11, "gearshift", (command, list(arguments)))
    routing.handle_client_request(lambda *call: left.append(call[2]), made, EngineCoreRequestType.UTILITY, request)
    return left


def test_a_switch_is_answered_by_the_short_way_and_nothing_else_is() -> None:
    way = Way()
    made = Core(way)
    assert handle(made, "activate", 1, None) == []
    assert (way.sent, made.said) == ([(3, 11, {"active": 1})], [])
    assert len(handle(made, "park", 1)) == 1
    assert len(handle(Core(None), "activate", 1, None)) == 1


@pytest.mark.parametrize(("key", "room"), [(1, False), (2, True)])
def test_a_switch_that_fails_or_finds_no_room_there_is_answered_vllms_way(key: int, room: bool) -> None:
    made = Core(Way(room=room))
    assert handle(made, "activate", key, None) == []
    ((client, outputs),) = made.said
    found = outputs.utility_output
    assert (client, found.call_id) == (3, 11)
    if room:
        assert "the model is not loaded" in found.failure_message
    else:
        assert found.result.result == {"active": 1}


def test_a_core_that_shuts_down_refuses_a_switch_as_it_refuses_any_call() -> None:
    made = Core(Way(), shuts_down=True)
    assert handle(made, "activate", 1, None) == []
    assert vars(made)[routing._STATE].replies.sent == []


def test_an_answer_that_comes_later_takes_the_short_way_as_well() -> None:
    way, later = Way(), Future[Any]()
    made = Core(way)
    vars(made)[routing._STATE].commands["activate"] = lambda *_: later
    handle(made, "activate", 1, None)
    assert way.sent == []
    later.set_result("there")
    assert way.sent == [(3, 11, "there")]
