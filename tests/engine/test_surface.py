"""Everything that AsyncLLM can do is here too, per model; a walk over vLLM's signatures finds what is missing."""

import asyncio
import inspect
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.greedy import PROMPT, Greedy, alone, greedy

pytestmark = pytest.mark.engine
ELSEWHERE = {"from_vllm_config", "from_engine_args"}
"""Constructors: here they are class methods that take models by alias."""


def public(owner: type) -> dict[str, Any]:
    return {name: value for name, value in inspect.getmembers(owner) if not name.startswith("_")}


def test_no_public_name_or_parameter_of_async_llm_is_missing() -> None:
    from vllm.engine.protocol import EngineClient
    from vllm.v1.engine.async_llm import AsyncLLM

    from service.engine.multi_model import MultiModelEngine

    missing = []
    for owner in (AsyncLLM, EngineClient):
        for name, theirs in public(owner).items():
            ours = getattr(MultiModelEngine, name, None)
            if ours is None:
                missing.append(name)
            elif callable(theirs) and not isinstance(theirs, property):
                missing += [f"{name}({parameter})" for parameter in lacking(theirs, ours)]
    assert missing == []


def lacking(theirs: Any, ours: Any) -> list[str]:
    """Parameters of ``theirs`` that ``ours`` does not take."""
    taken = inspect.signature(ours).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in taken.values()):
        return []
    return [name for name in inspect.signature(theirs).parameters if name not in taken and name != "self"]


async def test_every_operation_reaches_the_model_that_it_names(multi: Any) -> None:
    for alias in ("llama", "qwen"):
        assert multi.context(alias).vllm_config.model_config.model == multi.get_vllm_config(alias).model_config.model
        assert "generate" in await multi.get_supported_tasks(model=alias)
        assert multi.get_tokenizer(model=alias).encode("hello")
        assert await multi.reset_prefix_cache(model=alias)
        await multi.reset_mm_cache(model=alias)
        await multi.reset_encoder_cache(model=alias)
        assert not await multi.is_paused(model=alias)
        assert not await multi.is_tracing_enabled(model=alias)
    await multi.check_health()
    await multi.do_log_stats()
    assert multi.is_running
    assert not multi.is_stopped
    assert not multi.errored


async def test_a_pooling_model_answers_beside_generators(engine: Any, multi: Any) -> None:
    from vllm import PoolingParams

    await multi.switch("minilm")
    outputs = [output async for output in multi.encode("hello", PoolingParams(task="embed"), "embedding")]
    assert outputs[-1].outputs.data.shape == (384,)
    await multi.switch("llama")
    with pytest.raises(Exception, match="does not support pooling"):
        await anext(multi.encode("hello", PoolingParams(task="embed"), "refused"))


async def test_several_samples_are_frozen_and_aborted_together(multi: Any) -> None:
    request = Greedy(multi, "llama", PROMPT, 2000, n=3, temperature=0.8, seed=1)
    await request.has(3)
    assert multi.get_num_unfinished_requests(model="llama") == 3
    await multi.switch("qwen")
    await multi.abort(request.id)
    await request.tokens()
    assert multi.get_num_unfinished_requests() == 0


async def test_pausing_and_resuming_concerns_one_model(multi: Any) -> None:
    expected = await alone(multi, "llama")
    await multi.pause_generation(mode="keep", clear_cache=False, model="llama")
    paused = Greedy(multi, "llama", PROMPT, 24)
    await multi.switch("qwen")
    await greedy(multi, "qwen")
    await multi.switch("llama")
    assert await multi.is_paused(model="llama")
    assert paused.seen == 0
    await multi.resume_generation(model="llama")
    assert await paused.tokens() == expected


async def test_streamed_input_survives_a_switch_between_two_pieces(multi: Any) -> None:
    from vllm import SamplingParams
    from vllm.engine.protocol import StreamingInput

    pieces: asyncio.Queue[str | None] = asyncio.Queue()

    async def stream() -> AsyncIterator[Any]:
        while (piece := await pieces.get()) is not None:
            yield StreamingInput(prompt=piece)

    def outputs() -> Any:
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        return multi.generate(stream(), params, "streamed", model="llama")

    async def heard(switching: bool) -> list[int]:
        tokens: list[int] = []
        pieces.put_nowait("Tell me")
        async for output in outputs():
            tokens = list(output.outputs[0].token_ids)
            if len(tokens) == 6 and pieces.empty() and not closed:
                if switching:
                    await multi.switch("qwen")
                pieces.put_nowait(" about your day.")
                pieces.put_nowait(None)
                closed.append(True)
                if switching:
                    await multi.switch("llama")
        return tokens

    closed: list[bool] = []
    plain = await heard(False)
    closed = []
    assert await heard(True) == plain


async def test_an_error_of_an_input_stream_comes_out_as_it_is(multi: Any) -> None:
    from vllm import SamplingParams

    class Mine(Exception):
        pass

    async def stream() -> AsyncIterator[Any]:
        raise Mine
        yield

    with pytest.raises(Mine):
        await anext(multi.generate(stream(), SamplingParams(max_tokens=3), "broken", model="llama"))


async def test_callables_reach_the_workers_of_a_frozen_model(multi: Any) -> None:
    names = await multi.apply_model(lambda model: type(model).__name__, model="qwen")
    assert names == ["Qwen3ForCausalLM"]
    assert multi.active == "llama"
    assert await multi.apply_model(lambda model: type(model).__name__) == ["LlamaForCausalLM"]
    with pytest.raises(Exception, match="ZeroDivisionError"):
        await multi.apply_model(lambda model: 1 // 0, model="qwen")
    assert len(await greedy(multi, "llama")) == 24


async def test_unknown_names_and_second_starts_are_refused_as_documented(multi: Any) -> None:
    from service.engine.multi_model import MultiModelEngine

    with pytest.raises(ValueError, match="cannot be empty"):
        MultiModelEngine({})
    for misuse in (multi.switch("lama"), multi.switch_model("lama"), multi.initialize("lama")):
        with pytest.raises(ValueError, match=r"Model 'lama' not found.*did you mean 'llama'"):
            await misuse
    with pytest.raises(ValueError, match="lama"):
        multi.context("lama")
    with pytest.raises(RuntimeError, match=r"Use switch_model\(\)"):
        await multi.initialize("llama")
    with pytest.raises(ValueError, match="negative"):
        await multi.switch("qwen", drain_timeout=-1)
    unstarted = MultiModelEngine(dict(multi.model_configs))
    for use in (unstarted.context, lambda: unstarted.engine):
        with pytest.raises(RuntimeError, match="not initialized"):
            use()
    with pytest.raises(RuntimeError, match="not initialized"):
        await unstarted.switch("llama")
    unstarted.shutdown()
    unstarted.shutdown()


async def test_draining_waits_and_gives_up(multi: Any) -> None:
    request = Greedy(multi, "llama", PROMPT, 60)
    await request.has(1)
    await multi.wait_for_requests_to_drain(60)
    assert multi.info("llama").unfinished == 0
    assert len(await request.tokens()) == 60
    long = Greedy(multi, "llama", PROMPT, 3000)
    await long.has(1)
    with pytest.raises(TimeoutError):
        await multi.wait_for_requests_to_drain(0.05, model="llama")
    await multi.abort([long.id])
    await long.tokens()
