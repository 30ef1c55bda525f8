"""Models that are run in different ways, side by side in one engine: each says what it says when it is alone.

Most of them have the weights of ``llama`` in float32, so that they must say exactly what ``llama`` says.
"""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from schemas.contexts import Tier
from tests.support.checkpoints import make_quantized, make_vision
from tests.support.engine_spec import ENDLESS
from tests.support.greedy import PROMPT, Greedy, alone, frozen, greedy
from tests.support.kinds import encoded, picture
from tests.support.waiting import LOOKS

pytestmark = pytest.mark.engine
MIB = 1 << 20
TOKENS = 80

LIKE_LLAMA = ("ngram", "chunked", "uncached", "connected")
"""Aliases with the weights of ``llama``, run in another way."""
OTHERS = ("half", "quantized", "elsewhere", "vision")
ALL = ("llama", *LIKE_LLAMA, *OTHERS)
SCHEMA = {
    "type": "object",
    "properties": {
        "names": {"type": "array", "items": {"type": "string", "maxLength": 9}, "minItems": 8, "maxItems": 8}
    },
    "required": ["names"],
    "additionalProperties": False,
}


def engine_args(path: Path, **given: Any) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs

    common = {
        "max_model_len": 1024,
        "dtype": "float32",
        "enforce_eager": True,
        "kv_cache_memory_bytes": 32 * MIB,
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
    }
    return AsyncEngineArgs(model=str(path), **{**common, **given})


def connector(folder: Path) -> dict[str, Any]:
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Where the aliases with a KV connector keep what they computed."""
    return {alias: tmp_path_factory.mktemp(alias) for alias in ("connected", "elsewhere")}


@pytest.fixture(scope="module")
async def varied(
    vllm_engine: Any, models: dict[str, Path], stored: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Any]:
    """The session's engine, with models more for as long as these tests run."""
    multi, llama, folder = vllm_engine.multi, models["llama"], tmp_path_factory.mktemp("checkpoints")
    speculation = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
    added = {
        "ngram": engine_args(llama, speculative_config=speculation),
        "chunked": engine_args(
            llama,
            max_num_batched_tokens=32,
            max_num_seqs=4,
            block_size=32,
            kv_cache_memory_bytes=8 * MIB,
            stream_interval=8,
        ),
        "uncached": engine_args(llama, enable_prefix_caching=False, max_num_seqs=3, scheduling_policy="priority"),
        "connected": engine_args(llama, kv_transfer_config=connector(stored["connected"])),
        "half": engine_args(llama, dtype="bfloat16", max_model_len=256),
        # In float32 the kernel of a CPU with AMX refuses it.
        "quantized": engine_args(make_quantized(folder / "quantized", llama), dtype="bfloat16"),
        "elsewhere": engine_args(models["qwen"], kv_transfer_config=connector(stored["elsewhere"])),
        "vision": engine_args(make_vision(folder / "vision", llama)),
    }
    for alias, arguments in added.items():
        arguments.distributed_executor_backend = multi.model_configs["llama"].distributed_executor_backend
        await multi.add_model(alias, arguments)
    yield multi
    await multi.switch("llama")
    for alias in added:
        await multi.remove_model(alias)


@pytest.fixture(scope="module")
async def said(varied: Any) -> dict[str, tuple[int, ...]]:
    """What each says alone, right after its first load."""
    return {alias: await alone(varied, alias, tokens=TOKENS) for alias in ALL}


async def test_each_models_metrics_say_its_own_cache_and_lengths(varied: Any, said: dict[str, tuple[int, ...]]) -> None:
    """A core tells whoever connects what its first model settled."""
    for alias in ("llama", "chunked", "half"):
        (info,) = (
            sample.labels
            for family in varied.registries[alias].collect()
            for sample in family.samples
            if family.name == "vllm:cache_config_info"
        )
        cache = varied.context(alias).vllm_config.cache_config
        assert (info["num_gpu_blocks"], info["block_size"]) == (str(cache.num_gpu_blocks), str(cache.block_size))
    assert varied.context("chunked").vllm_config.cache_config.num_gpu_blocks != (
        varied.context("llama").vllm_config.cache_config.num_gpu_blocks
    )


def linear_method(model: Any) -> str:
    """Called in the workers: how the first layer multiplies."""
    return type(model.model.layers[0].self_attn.o_proj.quant_method).__name__


async def last_output(multi: Any, model: str, prompt: Any, tokens: int = 8) -> Any:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return [output async for output in multi.generate(prompt, params, f"last-{id(prompt)}", model=model)][-1]


@pytest.mark.parametrize("alias", LIKE_LLAMA)
def test_another_way_of_running_a_model_changes_no_token(said: dict[str, tuple[int, ...]], alias: str) -> None:
    assert said[alias] == said["llama"]


@pytest.mark.parametrize("alias", ALL)
async def test_a_request_frozen_in_the_middle_goes_on_with_the_same_tokens(
    varied: Any, said: dict[str, tuple[int, ...]], alias: str
) -> None:
    other = "llama" if alias != "llama" else "elsewhere"
    request, report = await frozen(varied, alias, other, TOKENS)
    assert report.kept == 1
    assert await greedy(varied, other, tokens=TOKENS) == said[other]
    await varied.switch(alias)
    assert await request.tokens() == said[alias]


@pytest.mark.parametrize("alias", ["llama", *LIKE_LLAMA])
async def test_a_parked_request_is_prefilled_again_and_says_the_same(
    varied: Any, said: dict[str, tuple[int, ...]], alias: str
) -> None:
    request, _ = await frozen(varied, alias, "elsewhere", TOKENS)
    assert (await varied.park(alias)).tier is Tier.PARKED
    await varied.switch(alias)
    assert await request.tokens() == said[alias]


async def test_all_of_them_taking_turns_under_load_say_what_they_say_alone(
    varied: Any, said: dict[str, tuple[int, ...]]
) -> None:
    exact = ("llama", *LIKE_LLAMA, "elsewhere", "vision")  # the others' rounding hangs on who shares the batch
    running = [(alias, Greedy(varied, alias, PROMPT, TOKENS)) for alias in exact for _ in range(4)]
    turn = 0
    while not all(request.task.done() for _, request in running):
        await varied.switch(exact[turn % len(exact)])
        turn += 1
        await greedy(varied, tokens=2)
    assert turn > len(exact)
    assert [(alias, await request.tokens()) for alias, request in running] == [
        (alias, said[alias]) for alias, _ in running
    ]


async def test_each_keeps_its_own_sizes(varied: Any, said: dict[str, tuple[int, ...]]) -> None:
    def sizes(worker: Any) -> tuple[Any, ...]:
        config = worker.vllm_config
        return (
            str(config.model_config.dtype),
            config.model_config.max_model_len,
            config.cache_config.block_size,
            config.scheduler_config.max_num_seqs,
            config.scheduler_config.max_num_batched_tokens,
        )

    found = {alias: (await varied.collective_rpc(sizes, model=alias))[0] for alias in ALL}
    assert found["half"][:2] == ("torch.bfloat16", 256)
    assert found["llama"][:3] == ("torch.float32", 4096, 128)
    assert found["chunked"][1:] == (1024, 32, 4, 32)
    assert found["uncached"][3] == 3
    assert await varied.apply_model(linear_method, model="quantized") == ["CompressedTensorsLinearMethod"]
    assert await varied.apply_model(linear_method, model="llama") == ["UnquantizedLinearMethod"]
    blocks = {alias: varied.context(alias).vllm_config.cache_config.num_gpu_blocks for alias in ("uncached", "chunked")}
    assert blocks["chunked"] == blocks["uncached"]  # a quarter of the bytes in blocks of a quarter of the size
    await varied.switch("half")
    with pytest.raises(Exception, match="maximum context length is 256"):
        await greedy(varied, "half", "word " * 400, 8)


async def test_each_streams_at_its_own_interval(varied: Any, said: dict[str, tuple[int, ...]]) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(temperature=0, max_tokens=33, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    pieces = {}
    for alias in ("llama", "chunked"):
        await varied.switch(alias)
        outputs = varied.generate(PROMPT, params, f"streamed-{alias}")
        pieces[alias] = [len(output.outputs[0].token_ids) async for output in outputs]
    assert sum(pieces["llama"]) == sum(pieces["chunked"]) == 33
    assert min(pieces["chunked"][1:-1]) >= 8  # the first and the last come at once
    assert min(pieces["llama"][1:-1]) < 8


async def test_a_models_kv_connector_ends_with_it_and_no_other_does(
    varied: Any, stored: dict[str, Path], tmp_path: Path
) -> None:
    def tell_ends(_worker: Any, folder: Path | None) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

        if folder is None:
            del ExampleConnector.shutdown
        else:
            ExampleConnector.shutdown = lambda self: (folder / Path(self._storage_path).name).touch()

    def told() -> list[str]:
        return [one.name for one in tmp_path.iterdir()]

    await varied.switch("llama")
    for alias in ("connected", "elsewhere"):
        await varied.preload(alias)
    await varied.collective_rpc(tell_ends, args=(tmp_path,))
    await varied.drop("connected")
    await varied.collective_rpc(tell_ends, args=(None,))
    assert told() == [stored["connected"].name]


class StepsHeard:
    """A stat logger that counts the steps that a frontend hears of."""

    def __init__(self) -> None:
        self.count = 0

    def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
        self.count += scheduler_stats is not None


async def test_the_steps_in_which_a_prompt_is_read_are_told_to_the_model_whose_they_are(varied: Any) -> None:
    """No token comes of them; ``chunked`` reads 32 tokens in each."""
    await varied.switch("chunked")
    heard = {alias: StepsHeard() for alias in ("llama", "chunked")}
    before = varied.steps
    for alias, counter in heard.items():
        varied.context(alias).logger_manager.stat_loggers.append(counter)
    try:
        prompt = {"prompt_token_ids": [5 + n % 200 for n in range(640)]}
        await Greedy(varied, "chunked", prompt, 1).tokens()
    finally:
        for alias, counter in heard.items():
            varied.context(alias).logger_manager.stat_loggers.remove(counter)
    assert heard["llama"].count == 0
    assert varied.steps - before == heard["chunked"].count >= 20


@pytest.mark.parametrize("alias", ["llama", "elsewhere", "chunked"])
async def test_structured_output_keeps_to_its_schema_across_a_switch_in_the_middle(varied: Any, alias: str) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    def ask() -> Greedy:
        constraint = StructuredOutputsParams(json=SCHEMA)
        return Greedy(varied, alias, PROMPT, 400, structured_outputs=constraint, ignore_eos=False)

    other = "llama" if alias != "llama" else "elsewhere"
    await varied.switch(alias)
    whole = ask()
    expected = await whole.tokens()
    assert len(json.loads(whole.text)["names"]) == 8
    for _ in range(LOOKS):
        half = ask()
        await half.has(10)
        await varied.switch(other)
        await greedy(varied, other)
        if not half.task.done():
            break
        await varied.switch(alias)
    assert half.seen < len(expected)
    await varied.switch(alias)
    assert await half.tokens() == expected
    assert half.text == whole.text


class Guessed:
    """A stat logger that counts the tokens that were guessed and right."""

    def __init__(self) -> None:
        self.right = 0

    def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
        guesses = None if scheduler_stats is None else scheduler_stats.spec_decoding_stats
        self.right += 0 if guesses is None else guesses.num_accepted_tokens


async def test_speculation_is_at_work_before_and_after_a_switch(varied: Any, said: dict[str, tuple[int, ...]]) -> None:
    """A model that repeats itself has its tokens guessed: several come at a time."""
    loggers = varied.context("ngram").logger_manager.stat_loggers
    for away in ("elsewhere", "llama"):
        guessed = Guessed()
        loggers.append(guessed)
        await varied.switch("ngram")
        request = Greedy(varied, "ngram", PROMPT, ENDLESS)
        await request.has(250)
        await varied.switch(away)
        await greedy(varied, away)
        before, seen, pieces = guessed.right, request.seen, request.outputs
        await varied.switch("ngram")
        await request.has(seen + 250)
        await varied.abort(request.id)
        await request.tokens()
        loggers.remove(guessed)
        assert 0 < before < guessed.right
        assert request.outputs - pieces < 0.8 * (request.seen - seen)


async def test_a_prefix_is_found_again_after_a_round_trip_and_never_a_stale_one(
    varied: Any, said: dict[str, tuple[int, ...]]
) -> None:
    prompt = " ".join(["Tell me about your day."] * 60)
    await varied.switch("llama")
    await varied.reset_prefix_cache(model="llama")
    first = await last_output(varied, "llama", prompt)
    assert first.num_cached_tokens == 0
    await varied.switch("chunked")  # the same weights, the same prompt, another cache
    assert (await last_output(varied, "chunked", prompt)).num_cached_tokens == 0
    await varied.switch("llama")
    again = await last_output(varied, "llama", prompt)
    assert again.num_cached_tokens > 0
    await varied.switch("chunked")
    await varied.park("llama")
    await varied.switch("llama")
    after_parking = await last_output(varied, "llama", prompt)
    assert after_parking.num_cached_tokens == 0
    await varied.switch("chunked")
    await varied.drop("llama")
    await varied.switch("llama")
    after_dropping = await last_output(varied, "llama", prompt)
    assert after_dropping.num_cached_tokens == 0
    tokens = [output.outputs[0].token_ids for output in (first, again, after_parking, after_dropping)]
    assert all(each == tokens[0] for each in tokens)


async def test_each_connector_stores_and_finds_its_own_models_cache(
    varied: Any, stored: dict[str, Path], said: dict[str, tuple[int, ...]]
) -> None:
    prompt = " ".join(["List three things that you like."] * 40)
    before = {alias: len(list(folder.rglob("*.safetensors"))) for alias, folder in stored.items()}
    answers = {}
    for alias, folder in stored.items():
        await varied.switch(alias)
        answers[alias] = await last_output(varied, alias, prompt)
        assert len(list(folder.rglob("*.safetensors"))) > before[alias]
    for alias in stored:
        await varied.switch(alias)
        await varied.reset_prefix_cache(model=alias)
        found = await last_output(varied, alias, prompt)
        assert found.num_cached_tokens > 0  # not in the device's cache any more: from the connector
        assert found.outputs[0].token_ids == answers[alias].outputs[0].token_ids


async def test_images_are_seen_before_and_after_switches_and_parking(
    varied: Any, said: dict[str, tuple[int, ...]]
) -> None:
    async def seen(request: Greedy) -> tuple[tuple[int, ...], float]:
        """Its tokens, and how sure the model was of them: that hangs on what it was shown, if they do not."""
        tokens = await request.tokens()
        assert request.logprob is not None
        return tokens, round(request.logprob, 3)

    def look(color: str) -> Greedy:
        return Greedy(varied, "vision", picture(color), TOKENS, logprobs=0)

    await varied.switch("vision")
    red, blue = await seen(look("red")), await seen(look("blue"))
    assert red != blue
    frozen = look("red")
    await frozen.has(5)
    await varied.switch("llama")
    waiting = look("blue")
    assert await greedy(varied, "llama", tokens=TOKENS) == said["llama"]
    await varied.park("vision")
    await varied.switch("vision")
    assert await seen(frozen) == red
    assert await seen(waiting) == blue
    sent = varied.context("vision").renderer.mm_processor_cache
    assert (len(sent._cache), await varied.collective_rpc(encoded, model="vision")) == (2, [2])
    await varied.reset_encoder_cache(model="vision")
    assert (len(sent._cache), await varied.collective_rpc(encoded, model="vision")) == (2, [0])
    await varied.reset_mm_cache(model="vision")
    assert len(sent._cache) == 0
    assert await seen(look("red")) == red


async def test_the_most_urgent_are_scheduled_first_when_their_model_comes_back(varied: Any) -> None:
    """``uncached`` runs three requests at a time."""
    await varied.switch("llama")
    ended: list[int] = []

    def ask(priority: int) -> Greedy:
        request = Greedy(varied, "uncached", f"{PROMPT} {priority}", 20, priority=priority)
        request.task.add_done_callback(lambda _: ended.append(priority))
        return request

    requests = [ask(priority) for priority in (5, 4, 3, 2, 1, 0)]
    await greedy(varied, "llama")
    assert varied.info("uncached").unfinished == 6
    await varied.switch("uncached")
    for request in requests:
        await request.tokens()
    assert set(ended[:3]) == {0, 1, 2}
