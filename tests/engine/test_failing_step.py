"""A model whose step raises ends with its own requests; the others serve on with the same tokens.

The core of these tests keeps two batches under way, so that there is one behind the step that fails.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import vllm

from service.errors import SwitchFailed
from tests.support.checkpoints import make_vision
from tests.support.engine_spec import until
from tests.support.greedy import PROMPT, Greedy, alone, greedy, usual
from tests.support.hybrid import make_hybrid
from tests.support.kinds import checkpoints, picture
from tests.support.waiting import PATIENCE_S

pytestmark = [pytest.mark.engine]
TOKENS = 80


@pytest.fixture(scope="module")
async def ahead(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    from service.engine import MultiModelEngine
    from tests.engine.test_failure import engine_args

    paths = checkpoints()
    two = {"distributed_executor_backend": "tests.support.two_ahead.TwoAhead"}
    folder = tmp_path_factory.mktemp("failing")
    make_hybrid(folder / "refused", tokenizer=paths["qwen"])
    models = {"llama": paths["llama"], "qwen": paths["qwen"], "vision": make_vision(folder / "vision", paths["llama"])}
    models["refused"] = folder / "refused"
    engine = MultiModelEngine(
        {alias: engine_args(path, **two) for alias, path in models.items()},
        disable_log_stats=True,
        device_memory_bytes=1 << 60,
    )
    async with engine:
        await engine.initialize("llama")
        yield engine


def fails(times: int, *, after: int = 0) -> Callable[[Any], None]:
    """Called in the workers: so many steps of the seated model raise, when so many more were run."""

    def put_in(wrapper: Any) -> None:
        worker = wrapper.worker
        whole, left = worker.execute_model, [after, times]

        def step(*given: Any, **how: Any) -> Any:
            if left[0] > 0:
                left[0] -= 1
                return whole(*given, **how)
            left[1] -= 1
            if left[1] <= 0:
                del worker.execute_model
            raise RuntimeError("this step can't be run")

        worker.execute_model = step

    return put_in


def works_again(wrapper: Any) -> None:
    """Called in the workers: the seated model's steps run."""
    del wrapper.worker.execute_model


def known(worker: Any) -> int:
    return len(worker.model_runner.requests)


async def reason(request: Greedy) -> str | None:
    """Why a request ended."""
    await request.tokens()
    return request.finish_reason


@pytest.fixture
async def expected(ahead: Any) -> dict[str, tuple[int, ...]]:
    return {alias: await usual(ahead, alias, tokens=TOKENS) for alias in ("qwen", "llama")}


@pytest.mark.parametrize("after", [0, pytest.param(1, marks=pytest.mark.long), 5])
async def test_the_others_requests_and_its_own_next_ones_are_as_if_nothing_had_been(
    ahead: Any, expected: dict[str, tuple[int, ...]], after: int
) -> None:
    await ahead.switch("qwen")
    frozen = Greedy(ahead, "qwen", PROMPT, TOKENS)
    await frozen.has(5)
    await ahead.switch("llama")
    running = [Greedy(ahead, "llama", f"{PROMPT} {number}", 900) for number in range(3)]
    for request in running:
        await request.has(5)
    await ahead.collective_rpc(fails(1, after=after))
    assert [await reason(request) for request in running] == ["error"] * 3
    again = [Greedy(ahead, "llama", PROMPT, TOKENS) for _ in range(3)]
    assert [await request.tokens() for request in again] == [expected["llama"]] * 3
    assert await greedy(ahead, "llama", tokens=1)
    await ahead.switch("qwen")
    assert await frozen.tokens() == expected["qwen"]
    assert await ahead.collective_rpc(known, model="llama") <= [1]


async def test_a_session_that_waits_for_its_next_part_ends_with_the_step_of_another_request(
    ahead: Any, expected: dict[str, tuple[int, ...]]
) -> None:
    from vllm import SamplingParams
    from vllm.engine.protocol import StreamingInput

    more = asyncio.Event()

    async def parts() -> AsyncIterator[Any]:
        yield StreamingInput(prompt=PROMPT)
        await more.wait()

    await ahead.switch("llama")
    session = ahead.generate(parts(), SamplingParams(max_tokens=4, ignore_eos=True), "session", model="llama")
    said = 0
    while said < 4:
        said = len((await anext(session)).outputs[0].token_ids)
    running = Greedy(ahead, "llama", PROMPT, 900)
    await running.has(5)
    await ahead.collective_rpc(fails(1))
    assert await reason(running) == "error"
    more.set()
    async with asyncio.timeout(PATIENCE_S):
        ends = [output.outputs[0].finish_reason async for output in session]
    assert ends[-1] == "error"
    assert await greedy(ahead, "llama", tokens=TOKENS) == expected["llama"]


async def test_a_step_that_fails_while_a_switch_waits_for_it_ends_neither_the_switch_nor_the_others(
    ahead: Any, expected: dict[str, tuple[int, ...]]
) -> None:
    await ahead.switch("qwen")
    frozen = Greedy(ahead, "qwen", PROMPT, TOKENS)
    await frozen.has(5)
    await ahead.switch("llama")
    running = [Greedy(ahead, "llama", f"{PROMPT} {number}", 900) for number in range(4)]
    for request in running:
        await request.has(5)
    failing = asyncio.create_task(ahead.collective_rpc(fails(1)))
    reports = await asyncio.gather(*(ahead.switch(alias) for alias in ("qwen", "llama") * 4))
    await failing
    assert all(report.switched for report in reports)
    assert [await reason(request) for request in running] == ["error"] * 4
    assert await greedy(ahead, "llama", tokens=TOKENS) == expected["llama"]
    await ahead.switch("qwen")
    assert await frozen.tokens() == expected["qwen"]


async def test_steps_that_fail_again_and_again_end_each_time_only_who_asked(
    ahead: Any, expected: dict[str, tuple[int, ...]]
) -> None:
    await ahead.switch("llama")
    await ahead.collective_rpc(fails(1 << 30))
    for _ in range(5):
        assert await reason(Greedy(ahead, "llama", PROMPT, TOKENS)) == "error"
    assert await alone(ahead, "qwen", tokens=TOKENS) == expected["qwen"]
    await ahead.collective_rpc(works_again, model="llama")
    assert await alone(ahead, "llama", tokens=TOKENS) == expected["llama"]


async def test_an_image_that_a_failed_step_was_to_encode_is_seen_by_the_next_one(ahead: Any) -> None:
    await ahead.switch("vision")
    seen = await greedy(ahead, "vision", picture("red"), 24)
    await ahead.reset_prefix_cache(model="vision")
    await ahead.collective_rpc(fails(1))
    assert await reason(Greedy(ahead, "vision", picture("blue"), 24)) == "error"
    blue = await greedy(ahead, "vision", picture("blue"), 24)
    assert await greedy(ahead, "vision", picture("red"), 24) == seen
    await ahead.switch("llama")
    await ahead.drop("vision")
    await ahead.switch("vision")
    assert await greedy(ahead, "vision", picture("blue"), 24) == blue


async def test_an_image_of_a_request_that_was_cancelled_before_its_model_was_there_is_seen_by_the_next_one(
    ahead: Any,
) -> None:
    """It was sent once, and is not sent again."""
    await ahead.switch("vision")
    seen = {colour: await greedy(ahead, "vision", picture(colour), 24) for colour in ("red", "blue")}
    await ahead.switch("llama")
    await ahead.drop("vision")
    cancelled, waiting = (Greedy(ahead, "vision", picture(colour), 24) for colour in ("red", "blue"))
    await until(lambda: ahead.get_num_unfinished_requests(model="vision") == 2)
    cancelled.task.cancel()
    await until(lambda: ahead.get_num_unfinished_requests(model="vision") == 1)
    await ahead.switch("vision")
    assert await waiting.tokens() == seen["blue"]
    for _ in range(2):
        assert await greedy(ahead, "vision", picture("red"), 24) == seen["red"]


async def test_a_checkpoint_that_the_device_refuses_at_its_first_step_takes_nobody_along(
    ahead: Any, expected: dict[str, tuple[int, ...]]
) -> None:
    """Heads of 16, which the CPU's attention has none for in 0.32."""
    await ahead.switch("llama")
    running = Greedy(ahead, "llama", PROMPT, TOKENS)
    await running.has(5)
    try:
        await ahead.switch("refused")
    except SwitchFailed:
        assert vllm.__version__.startswith("0.26"), "it makes a step as it warms a model up"
        assert ahead.active == "llama"
    else:
        ended = await reason(Greedy(ahead, "refused", PROMPT, 8))
        if ended == "length":
            pytest.skip("this vLLM runs it")
        assert ended == "error"
        await ahead.switch("llama")
    assert await running.tokens() == expected["llama"]


def gone(worker: Any) -> None:
    """Called in the workers: the device is gone; no step runs any more, and nothing can be waited for."""
    from service.platforms import current

    def raises(*_: Any, **__: Any) -> None:
        raise RuntimeError("the device is gone")

    worker.worker.execute_model = raises
    vars(current())["synchronize"] = raises


async def test_where_the_workers_can_not_go_on_either_it_is_the_end_of_everything_at_once(ahead: Any) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    await ahead.switch("llama")
    frozen = Greedy(ahead, "qwen", PROMPT, 900)
    running = [Greedy(ahead, "llama", f"{PROMPT} {number}", 900) for number in range(4)]
    for request in running:
        await request.has(5)
    failing = asyncio.create_task(ahead.collective_rpc(gone))
    switches = [asyncio.create_task(ahead.switch(alias)) for alias in ("qwen", "llama") * 4]
    async with asyncio.timeout(PATIENCE_S):
        assert isinstance(await ahead.died(), EngineDeadError)
    for request in (*running, frozen):
        with pytest.raises(EngineDeadError):
            await request.tokens()
    ended = await asyncio.gather(failing, *switches, return_exceptions=True)
    assert isinstance(ended[-1], EngineDeadError)
    for late in (ahead.switch("qwen"), greedy(ahead, "llama"), ahead.check_health()):
        with pytest.raises(EngineDeadError):
            await late
