"""Switches while batches are under way: their tokens come, in their place. Steps that fail: test_failing_step.py.

The CPU platform schedules one step at a time. An executor of the tests' own lets the core have two under way, as with
a pipeline; what a switch does about them is the same where a device schedules ahead.
"""

import statistics
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.test_failure import engine_args, paths_in
from tests.support.greedy import PROMPT, Greedy, greedy, usual

pytestmark = [pytest.mark.engine, pytest.mark.parity]


@pytest.fixture(scope="module")
async def ahead(models_path: Path) -> AsyncIterator[Any]:
    """Of finished configurations."""
    from service.engine import MultiModelEngine

    paths = paths_in(models_path)
    two = {"distributed_executor_backend": "tests.support.two_ahead.TwoAhead"}
    engine = MultiModelEngine.from_vllm_config(
        {alias: engine_args(paths[alias], **two).create_engine_config() for alias in ("llama", "qwen")},
        disable_log_stats=True,
        device_memory_bytes=1 << 60,
    )
    async with engine:
        await engine.initialize("llama")
        yield engine


async def test_batches_under_way_are_finished_before_a_switch_and_nobody_notices(ahead: Any) -> None:
    expected = {alias: await usual(ahead, alias, tokens=150) for alias in ("llama", "qwen")}
    await ahead.switch("llama")
    running = []
    for _ in range(3):  # they come apart, and go on in batches of their own
        running += [(alias, Greedy(ahead, alias, PROMPT, 150)) for alias in ("llama", "qwen")]
        await running[-2][1].has(3)

    async def quiesce_ms() -> float:
        report = await ahead.switch("qwen" if ahead.active == "llama" else "llama")
        return float(report.phases_ms["quiesce"])

    quiesced = []
    while not all(request.task.done() for _, request in running):
        quiesced.append(await quiesce_ms())
        await greedy(ahead, tokens=3)
    for alias, request in running:
        assert await request.tokens() == expected[alias]
    assert len(quiesced) > 5
    at_rest = [await quiesce_ms() for _ in range(20)]
    assert statistics.median(quiesced) > 5 * statistics.median(at_rest)  # they waited for steps


@pytest.mark.parametrize("short_way", [False, True])
def test_a_step_that_fails_while_a_switch_waits_for_it_ends_the_loop_and_is_no_answer(short_way: bool) -> None:
    from vllm.v1.engine import EngineCoreRequestType
    from vllm.v1.engine.core import EngineCoreProc

    from service.engine.core.context import StepFailed
    from service.engine.core.routing import handle_client_request

    answers: list[Any] = []

    def switch(*_: Any) -> None:
        raise StepFailed from RuntimeError("the device is gone")

    def utility(*_: Any) -> None:
        EngineCoreProc._invoke_utility_method("gearshift", switch, None, answers.append)

    core = SimpleNamespace(
        gearshift_contexts=SimpleNamespace(replies=answers if short_way else None, commands={"activate": switch}),
        output_queue=SimpleNamespace(put_nowait=answers.append),
        _reject_utility_in_shutdown=lambda *_: False,
        _invoke_utility_method=EngineCoreProc._invoke_utility_method,
    )
    call = (0, 1, "gearshift", ("activate", [1, None]))
    with pytest.raises(RuntimeError, match="a step failed") as end:
        handle_client_request(utility, core, EngineCoreRequestType.UTILITY, call)
    assert str(end.value.__cause__) == "the device is gone"
    assert answers == []
