"""What AsyncLLM can do, on the real engine: what it means for one model of many, and for its frozen requests."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from schemas.contexts import Tier
from tests.support.engine_spec import until
from tests.support.greedy import PROMPT, Greedy, alone, frozen, greedy, usual
from tests.support.judge import judge
from tests.support.profiles import traces
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.engine


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
    expected = await usual(multi, "llama")
    await multi.pause_generation(mode="keep", clear_cache=False, model="llama")
    paused = Greedy(multi, "llama", PROMPT, 24)
    await multi.switch("qwen")
    await greedy(multi, "qwen")
    await multi.switch("llama")
    assert await multi.is_paused(model="llama")
    assert paused.seen == 0
    await multi.resume_generation(model="llama")
    assert await paused.tokens() == expected


async def frozen_beside_a_running_one(multi: Any) -> tuple[Greedy, Greedy]:
    """A request of ``qwen`` that was interrupted, and one of ``llama`` that runs for long."""
    waiting, _ = await frozen(multi, "qwen", "llama", 100)
    running = Greedy(multi, "llama", PROMPT, 3000)
    await running.has(1)
    return waiting, running


@pytest.mark.parametrize("mode", ["abort", "keep"])
@pytest.mark.parametrize("asleep", [False, True], ids=["paused", "asleep"])
async def test_a_frozen_model_is_paused_and_put_to_sleep_while_another_one_runs(
    multi: Any, mode: str, asleep: bool
) -> None:
    expected = await usual(multi, "qwen", tokens=100)
    frozen, running = await frozen_beside_a_running_one(multi)
    async with asyncio.timeout(PATIENCE_S):
        if asleep:
            await multi.sleep(1, mode, model="qwen")
            assert await multi.is_sleeping(model="qwen")
        else:
            await multi.pause_generation(mode=mode, model="qwen")
        assert await multi.is_paused(model="qwen")
    assert not running.task.done()
    await multi.abort(running.id)
    if asleep:
        assert await multi.wake_up(model="qwen")
    else:
        await multi.resume_generation(model="qwen")
    await multi.switch("qwen")
    tokens = await frozen.tokens()
    assert frozen.finish_reason == ("abort" if mode == "abort" else "length")
    assert tokens == expected[: len(tokens)]
    assert await greedy(multi, "qwen", tokens=100) == expected


async def test_a_pause_that_waits_lets_what_runs_end_even_where_it_is_frozen_meanwhile(multi: Any) -> None:
    expected = await usual(multi, "qwen", tokens=100)
    frozen, running = await frozen_beside_a_running_one(multi)
    waiting = asyncio.create_task(multi.pause_generation(mode="wait", model="qwen"))
    await running.has(20)
    assert not waiting.done()
    await multi.abort(running.id)
    await multi.switch("qwen")
    assert await frozen.tokens() == expected
    async with asyncio.timeout(PATIENCE_S):
        await waiting
    await multi.resume_generation(model="qwen")


async def test_a_pause_is_asked_to_wait_in_vllms_older_words_too(multi: Any) -> None:
    running = Greedy(multi, "llama", PROMPT, 60)
    await running.has(1)
    with pytest.warns(DeprecationWarning, match='mode="wait"'):
        await multi.pause_generation(wait_for_inflight_requests=True)
    assert await multi.is_paused()
    assert len(await running.tokens()) == 60
    assert running.finish_reason == "length"
    await multi.resume_generation()
    assert len(await greedy(multi, "llama")) == 24


async def test_a_pause_that_waits_for_requests_of_a_model_that_was_left_ends_with_them(multi: Any) -> None:
    await multi.switch("llama")
    running = Greedy(multi, "llama", PROMPT, 3500)
    await running.has(3)
    waiting = asyncio.create_task(multi.pause_generation(mode="wait", model="llama"))
    async with asyncio.timeout(PATIENCE_S):
        while not await multi.is_paused(model="llama"):
            pass
    await multi.switch("qwen")
    assert not waiting.done()
    await multi.abort(running.id)
    async with asyncio.timeout(PATIENCE_S):
        await waiting
    await multi.resume_generation(model="llama")
    await multi.switch("llama")
    assert len(await greedy(multi, "llama")) == 24


async def test_a_model_that_goes_to_sleep_while_it_is_left_sleeps(multi: Any) -> None:
    expected = await usual(multi, "llama")
    for _ in range(3):
        await multi.switch("llama")
        running = Greedy(multi, "llama", PROMPT, 3500)
        await running.has(3)
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(multi.sleep(1, model="llama"), multi.switch("qwen"))
        assert await multi.is_sleeping(model="llama")
        await running.tokens()
        assert running.finish_reason == "abort"
        assert await multi.wake_up(model="llama")
    assert await alone(multi, "llama") == expected


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


@judge("vllm-gaudi", "test_initialize_invalid_model_raises")
async def test_unknown_names_and_second_starts_are_refused_as_documented(multi: Any) -> None:
    from service.engine import MultiModelEngine

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


def sampled(**params: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**{"temperature": 0, "max_tokens": 8, "ignore_eos": True, **params})


def refusals() -> tuple[type[Exception], ...]:
    """What vLLM raises where a request is refused: its own class since 0.32."""
    import vllm.exceptions

    own = getattr(vllm.exceptions, "VLLMClientError", ValueError)
    return ValueError, own


async def outputs_of(generator: Any) -> Any:
    return [output async for output in generator][-1]


@pytest.mark.parametrize("refused", ["n", "final", "stop", "pooling", "embeddings"])
async def test_streamed_input_is_refused_where_vllm_refuses_it(multi: Any, refused: str) -> None:
    import torch
    from vllm import PoolingParams
    from vllm.engine.protocol import StreamingInput
    from vllm.sampling_params import RequestOutputKind

    async def stream() -> AsyncIterator[Any]:
        yield StreamingInput(prompt={"prompt_embeds": torch.zeros(2, 64)} if refused == "embeddings" else "Tell me")

    params = {
        "n": sampled(n=2, temperature=1.0),
        "final": sampled(output_kind=RequestOutputKind.FINAL_ONLY),
        "stop": sampled(stop=["day"]),
        "pooling": PoolingParams(task="embed"),
        "embeddings": sampled(),
    }[refused]
    with pytest.raises(refusals(), match=r"not (currently )?supported|prompt_embeds"):
        await outputs_of(multi.generate(stream(), params, "refused", model="llama"))
    assert multi.get_num_unfinished_requests() == 0


async def test_the_text_of_a_prompt_is_given_beside_an_engine_request_only(multi: Any) -> None:
    with pytest.raises(ValueError, match="prompt_text"):
        multi.generate("Hello", sampled(), "misused", prompt_text="Hello")
    with pytest.raises(ValueError, match="prompt_text"):
        multi.add_request("misused", "Hello", sampled(), prompt_text="Hello")
    llm = multi.context()
    tasks = await llm.get_supported_tasks()
    request = llm.input_processor.process_inputs("prepared", "Hello", sampled(), supported_tasks=tasks)
    output = await outputs_of(multi.generate(request, sampled(), "prepared", prompt_text="Hello there"))
    assert output.prompt == "Hello there"
    plain = await outputs_of(multi.generate("Hello", sampled(), "plain", prompt_text=None))
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids


async def test_a_rank_that_is_not_there_is_refused(multi: Any) -> None:
    ranked = multi.generate("Hello", sampled(), "ranked", data_parallel_rank=7)
    with pytest.raises(refusals(), match="data_parallel_rank 7 is out of range"):
        await outputs_of(ranked)


async def test_requests_end_by_their_internal_names_too(multi: Any) -> None:
    asked = [Greedy(multi, "llama", PROMPT, 2000) for _ in range(3)]
    for request in asked:
        await request.has(1)
    names = sorted(multi.context("llama").output_processor.request_states)
    await multi.abort(names[0], internal=True)
    await multi.abort(["nobody", "nothing"])
    assert multi.get_num_unfinished_requests(model="llama") == 2
    await multi.abort(names[1:], internal=True, model="llama")
    for request in asked:
        await request.tokens()
        assert request.finish_reason == "abort"


async def test_a_call_of_the_workers_that_takes_too_long_is_a_timeout(multi: Any) -> None:
    with pytest.raises(TimeoutError):
        await multi.collective_rpc(lambda worker: __import__("time").sleep(1), timeout=0.05, model="qwen")
    assert len(await greedy(multi, "llama")) == 24


async def test_what_is_wrong_inside_is_vllms_own_error_with_its_cause(multi: Any) -> None:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.exceptions import EngineDeadError

    assert isinstance(multi.dead_error, EngineDeadError)
    lora = LoRARequest("none", 1, "/nowhere")
    with pytest.raises(refusals(), match="LoRA is not enabled"):
        await outputs_of(multi.generate("Hello", sampled(), "refused", lora_request=lora, model="llama"))
    with pytest.raises(TypeError):
        multi.generate("Hello", sampled())
    assert len(await greedy(multi, "llama")) == 24


async def test_the_engine_as_a_whole_is_one_engine_client_that_follows_the_switches(multi: Any) -> None:
    from vllm.engine.protocol import EngineClient

    held = multi.engine
    assert isinstance(held, EngineClient)
    for alias in ("llama", "qwen", "llama"):
        await multi.switch(alias)
        assert multi.engine is held
        for name in ("vllm_config", "model_config", "renderer", "input_processor", "output_processor", "tokenizer"):
            assert getattr(held, name) is getattr(multi.context(alias), name)
        output = await outputs_of(held.generate("Hello", sampled(), "whole"))
        assert output.prompt_token_ids == multi.get_tokenizer(model=alias).encode("Hello")


async def test_whatever_an_async_llm_has_the_engine_has_too(multi: Any) -> None:
    await greedy(multi, "llama", tokens=2)
    theirs = {name: value for name, value in vars(multi.context("llama")).items() if not name.startswith("_")}
    assert {name: getattr(multi, name) for name in theirs} == theirs


async def test_a_prompt_is_tokenized_as_the_caller_says(multi: Any) -> None:
    whole = await outputs_of(multi.generate(PROMPT, sampled(), "whole"))
    cut = await outputs_of(multi.generate(PROMPT, sampled(), "cut", tokenization_kwargs={"truncate_prompt_tokens": 3}))
    assert len(whole.prompt_token_ids) > 3
    assert cut.prompt_token_ids == whole.prompt_token_ids[-3:]


async def test_a_profile_is_what_the_workers_did_meanwhile(multi: Any, profiles: Path) -> None:
    before = traces(profiles)
    await multi.start_profile(model="lynx")
    await greedy(multi, "llama", tokens=2)
    await multi.stop_profile()
    assert [b"aten::" in trace for name, trace in traces(profiles).items() if name not in before] == [True]
    assert len(await greedy(multi, "llama")) == 24


async def test_a_profile_ends_with_its_model_and_the_next_one_is_like_the_first(multi: Any, profiles: Path) -> None:
    for _ in range(2):
        before = traces(profiles)
        await multi.preload("lynx")
        await multi.start_profile(model="lynx")
        await greedy(multi, "llama", tokens=2)
        await multi.drop("lynx")
        assert [b"aten::" in trace for name, trace in traces(profiles).items() if name not in before] == [True]


async def test_changed_weights_are_heard_in_their_model_alone_and_reloaded_ones_as_before(multi: Any) -> None:
    def turn(model: Any) -> None:
        model.model.norm.weight.data.neg_()

    expected = {alias: await usual(multi, alias) for alias in ("llama", "qwen")}
    await multi.apply_model(turn, model="qwen")
    changed = await alone(multi, "qwen")
    assert changed != expected["qwen"]
    assert await alone(multi, "llama") == expected["llama"]
    await multi.park("qwen")
    assert await alone(multi, "qwen") == changed
    await multi.switch("llama")
    await multi.collective_rpc("reload_weights", model="qwen")
    assert await greedy(multi, "llama") == expected["llama"]
    assert await alone(multi, "qwen") == expected["qwen"]


async def test_what_a_model_was_not_started_for_is_refused(multi: Any) -> None:
    for operation in (multi.start_weight_update, multi.finish_weight_update):
        with pytest.raises(Exception, match="Weight transfer not configured"):
            await operation(model="qwen")
    await multi.scale_elastic_ep(1, model="qwen")  # as many as there are
    with pytest.raises(NotImplementedError, match=r"data_parallel_size is 1 and can.t become 2: .* for all models"):
        await multi.scale_elastic_ep(2, model="qwen")
    named = {alias: config.model_config.served_model_name for alias, config in multi.get_all_vllm_configs().items()}
    assert named == {alias: alias for alias in multi.available_models}
    assert len(await greedy(multi, "llama")) == 24


async def test_what_only_032_can_be_asked_is_answered_by_the_model_that_is_named(multi: Any) -> None:
    if not hasattr(multi.context("llama"), "compute_weight_checksums"):
        pytest.skip("since vLLM 0.32")
    await multi.switch("llama")
    sums = {}
    for alias in ("llama", "qwen"):  # the active one, and a frozen one
        await multi.update_weight_version(f"{alias}-7", model=alias)
        [sums[alias]] = await multi.compute_weight_checksums(model=alias)
        assert multi.get_num_queued_tokens(model=alias) == 0
        assert multi.check_admission(1, model=alias) is None
        assert multi.get_kv_event_sources(model=alias) == {}
        assert (await multi.get_status(model=alias))["total_engines"] == 1
        await multi.notify_kv_transfer_request_rejected("nobody", {}, model=alias)
    assert [await multi.get_weight_version(model=alias) for alias in sums] == ["llama-7", "qwen-7"]
    assert sums["llama"] != sums["qwen"]


async def test_a_kv_cache_is_not_let_go_of_alone_and_the_model_is_not_taken_for_asleep(multi: Any) -> None:
    if not hasattr(multi.context("qwen"), "release_kv_cache_memory"):
        pytest.skip("since vLLM 0.32")
    expected = await alone(multi, "qwen")
    await multi.switch("llama")
    await multi.pause_generation(model="qwen")
    with pytest.raises(Exception, match="kv_cache can't be let go of alone: sleep gives"):
        await multi.release_kv_cache_memory(model="qwen")
    assert multi.info("qwen").tier is Tier.RESIDENT
    await multi.resume_generation(model="qwen")
    assert not await multi.is_sleeping(model="qwen")
    assert await alone(multi, "qwen") == expected


async def test_a_model_comes_back_from_a_checkpoint_as_it_was(multi: Any) -> None:
    if not hasattr(multi.context("llama"), "checkpoint_prepare"):
        pytest.skip("since vLLM 0.32")
    expected = await usual(multi, "llama")
    frozen = Greedy(multi, "llama", PROMPT, 24)
    await frozen.has(1)
    await multi.switch("qwen")
    for alias in ("qwen", "llama"):
        await multi.checkpoint_prepare(model=alias)
        await multi.checkpoint_restore(model=alias)
    await multi.switch("llama")
    assert await frozen.tokens() == expected


async def test_a_request_for_a_model_that_was_never_loaded_is_counted_and_aborted_and_a_question_ends_with_the_model(
    multi: Any,
) -> None:
    expected = await usual(multi, "qwen")
    await multi.switch("llama")
    await multi.add_model("twin", multi.model_configs["qwen"])
    waiting = Greedy(multi, "twin", PROMPT, 24)
    await until(lambda: multi.get_num_unfinished_requests(model="twin") == 1)
    with pytest.raises(TimeoutError, match="waiting for requests to drain"):
        await multi.wait_for_requests_to_drain(0.01, model="twin")
    with pytest.raises(RuntimeError, match="twin can't be removed: it has 1 unfinished requests"):
        await multi.remove_model("twin")
    await multi.abort(waiting.id)
    assert await waiting.tokens() == ()
    assert waiting.finish_reason == "abort"
    asking = asyncio.create_task(multi.get_supported_tasks(model="twin"))
    await multi.remove_model("twin")
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(Exception, match="the model was removed"):
            await asking
    await multi.add_model("twin", multi.model_configs["qwen"])
    assert await alone(multi, "twin") == expected
    await multi.switch("llama")
    await multi.remove_model("twin")


async def test_a_model_that_was_parked_before_all_slept_is_parked_when_all_are_woken(multi: Any) -> None:
    expected = await usual(multi, "qwen")
    await multi.switch("llama")
    await multi.park("qwen")
    await multi.sleep(1, "keep")
    assert await multi.wake_up()
    assert multi.info("qwen").tier is Tier.PARKED
    assert (await multi.switch("qwen")).tier_found is Tier.PARKED
    assert await greedy(multi, "qwen") == expected
    assert await alone(multi, "llama")
