"""Requests that wait for their model's first load: they can be aborted, and are counted; with vLLM's own AsyncLLM."""

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import PoolingParams, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.engine.output_processor import OutputProcessor

from service.engine.frontend.early import Early, early_llm
from service.engine.frontend.frontend import Frontend
from service.errors import HandedBack, UnknownModel
from tests.support.engine_spec import until
from tests.support.waiting import PATIENCE_S


class Client:
    """A client of a core that has not loaded the model: it answers nothing, unless a test does."""

    def __init__(self) -> None:
        self.resources = SimpleNamespace(engine_dead=False, ctx=SimpleNamespace(destroy=lambda linger: None))
        self.utility_results: dict[int, asyncio.Future[Any]] = {}
        self.aborted: list[str] = []

    async def get_supported_tasks_async(self) -> Any:
        future = asyncio.get_running_loop().create_future()
        self.utility_results[len(self.utility_results)] = future
        return await future

    async def abort_requests_async(self, ids: list[str]) -> None:
        self.aborted += ids

    def shutdown(self, timeout: float | None = None) -> None:
        """There is nothing to end."""


class Model(Frontend):
    """A frontend whose AsyncLLM has such a client."""

    def __init__(self) -> None:
        self.alias, self.key, self.registry = "qwen", 1, None
        self.client = Client()
        self.llm = llm = object.__new__(early_llm())
        self.early = llm._early = Early()
        llm.engine_core = self.client
        llm.output_processor = OutputProcessor(None, log_stats=False)
        llm.output_handler = llm.renderer = None
        llm.log_requests = False
        llm.scheduler_config = SimpleNamespace(max_num_queued_reqs=None, max_num_queued_tokens=None)
        llm.admission_stats = llm.logger_manager = None
        llm.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(kv_sharing_fast_prefill=False))


@pytest.fixture
async def model() -> Model:
    return Model()


async def generated(model: Model, request_id: str, prompt: Any = "Hello", **params: Any) -> list[Any]:
    return [output async for output in model.llm.generate(prompt, SamplingParams(**params), request_id)]


async def waiting(model: Model, *request_ids: str, **params: Any) -> list[asyncio.Task[list[Any]]]:
    tasks = [asyncio.create_task(generated(model, each, **params)) for each in request_ids]
    await until(lambda: not Counter(request_ids) - Counter(request_id for request_id, *_ in model.early.values()))
    return tasks


async def test_a_request_that_waits_for_its_models_first_load_is_counted_and_aborted(model: Model) -> None:
    first, second, again = await waiting(model, "first", "second", "second", n=2)
    assert len(model.running) == 3
    await model.llm.abort("second")
    for each in (second, again):
        async with asyncio.timeout(PATIENCE_S):
            (output,) = await each
        assert (output.request_id, output.prompt, output.finished) == ("second", "Hello", True)
        assert [sample.finish_reason for sample in output.outputs] == ["abort", "abort"]
    assert len(model.running) == 1
    await model.llm.abort(model.running, internal=True)
    assert (await first)[0].finished
    assert not model.running
    assert model.client.aborted == []


async def test_they_count_where_a_model_takes_only_so_many_requests(model: Model) -> None:
    if not hasattr(model.llm, "check_admission"):
        pytest.skip("since vLLM 0.32")
    from vllm.exceptions import QueueOverflowError

    model.llm.scheduler_config.max_num_queued_reqs = 3
    (samples,) = await waiting(model, "first", n=2)
    assert model.llm.get_num_unfinished_requests() == 2
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(QueueOverflowError):
            await generated(model, "too many", n=2)
    (second,) = await waiting(model, "second")
    with pytest.raises(QueueOverflowError):
        model.llm.check_admission()
    await model.llm.abort(["first", "second"])
    await asyncio.gather(samples, second)
    assert model.llm.get_num_unfinished_requests() == 0
    model.llm.check_admission(3)


@pytest.mark.parametrize(
    ("prompt", "text", "token_ids"),
    [
        ([1, 2], None, [1, 2]),
        ({"prompt_token_ids": [1, 2]}, None, [1, 2]),
        ({"prompt": "Hello"}, "Hello", []),
        ({"encoder_prompt": "", "decoder_prompt": "Hello"}, "Hello", []),
        ({"encoder_prompt": "", "decoder_prompt": [1, 2]}, None, [1, 2]),
        ({"encoder_prompt": "", "decoder_prompt": {"prompt": "Hello", "prompt_token_ids": [1]}}, "Hello", [1]),
        ({"encoder_prompt": "Hello", "decoder_prompt": None}, None, []),
    ],
    ids=str,
)
async def test_what_is_aborted_says_the_prompt_in_whichever_form_it_came(
    model: Model, prompt: Any, text: str | None, token_ids: list[int]
) -> None:
    (task,) = await waiting(model, "asked", prompt=prompt)
    await model.llm.abort("asked")
    async with asyncio.timeout(PATIENCE_S):
        (output,) = await task
    assert (output.prompt, output.prompt_token_ids, output.finished) == (text, token_ids, True)


async def test_so_is_one_for_a_pooling_model(model: Model) -> None:
    async def encoded() -> list[Any]:
        return [output async for output in model.llm.encode("Hello", PoolingParams(task="embed"), "pooled")]

    task = asyncio.create_task(encoded())
    await until(lambda: bool(model.client.utility_results))
    await model.llm.abort(["pooled"])
    async with asyncio.timeout(PATIENCE_S):
        (output,) = await task
    assert (output.request_id, output.finished, output.outputs.data.numel()) == ("pooled", True, 0)


async def test_who_gives_one_up_leaves_nothing(model: Model) -> None:
    (task,) = await waiting(model, "given up")
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert not model.running


async def test_one_that_is_handed_back_raises_that(model: Model) -> None:
    (task,) = await waiting(model, "handed back")
    model.early.end(HandedBack("it was dropped"))
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(EngineGenerateError) as failure:
            await task
    assert isinstance(failure.value.__cause__, HandedBack)


async def test_whoever_asks_a_model_that_is_removed_is_told_so(model: Model) -> None:
    asking = asyncio.create_task(model.llm.get_supported_tasks())
    task = asyncio.create_task(generated(model, "waiting"))
    await until(lambda: len(model.client.utility_results) == 2)
    assert model.retire() is model.client
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(EngineGenerateError) as failure:
            await task
        assert isinstance(failure.value.__cause__, UnknownModel)
        with pytest.raises(UnknownModel, match="qwen was removed"):
            await asking
    with pytest.raises(UnknownModel, match="qwen was removed"):
        await model.llm.get_supported_tasks()
    with pytest.raises(EngineGenerateError) as failure:
        await generated(model, "late")
    assert isinstance(failure.value.__cause__, UnknownModel)
    assert model.client.utility_results, "an answer that still comes must find its call"


async def test_whoever_waits_for_an_engine_that_is_shut_down_is_told_so(model: Model) -> None:
    asking = asyncio.create_task(model.llm.get_supported_tasks())
    task = asyncio.create_task(generated(model, "waiting"))
    await until(lambda: len(model.client.utility_results) == 2)
    model.close()
    async with asyncio.timeout(PATIENCE_S):
        for each in (asking, task):
            with pytest.raises(EngineDeadError, match="the engine was shut down"):
                await each
    assert not model.running


def test_an_engine_may_be_shut_down_when_its_event_loop_is_gone() -> None:
    loop = asyncio.new_event_loop()
    model = loop.run_until_complete(_made())
    task = loop.create_task(model.llm.get_supported_tasks())
    loop.run_until_complete(until(lambda: bool(model.client.utility_results)))
    loop.close()
    model.close()
    assert model.llm.engine_core is model.client
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # its loop will not run it again


async def _made() -> Model:
    return Model()
