"""What vLLM's own tests of LLMEngine and of its sampling check, of one model of an engine of several.

Theirs: tests/v1/engine/test_llm_engine.py and tests/v1/sample/test_sampling_params_e2e.py. Each behaviour is looked at
at rest and where another model has its turn between any two steps: with the same tokens, where it is about tokens.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.conftest import model_entries
from tests.support import kinds
from tests.support.judge import judge
from tests.support.kinds import NGRAM, encoded, numbers, picture

pytestmark = [pytest.mark.engine, pytest.mark.parity]
PROMPT = "Hello my name is Robert and I"
PROMPTS = (PROMPT, "The sea is", "Where do you walk?")
_IDS = itertools.count()


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    """``llama`` beside ``qwen`` and ``vision``, and as it is without a tokenizer (``bare``) and with speculation
    (``ngram``).

    Its core is a process of its own: where speculation has brought llvmlite in, vLLM starts no other engine.
    """
    from vllm.engine.arg_utils import EngineArgs

    from service.engine import MultiModelLLM

    entries = model_entries()
    entries = {alias: {**entries[alias], "max_model_len": 512} for alias in ("llama", "qwen")}
    entries["llama"] = {key: value for key, value in entries["llama"].items() if key in EngineArgs.__dataclass_fields__}
    entries["llama"].pop("structured_outputs_config")
    entries["bare"] = {**entries["llama"], "skip_tokenizer_init": True}
    entries["ngram"] = {**entries["llama"], "speculative_config": NGRAM}
    arguments = {alias: EngineArgs(**{**entry, "disable_log_stats": False}) for alias, entry in entries.items()}
    arguments["vision"] = EngineArgs(**kinds.engine_args("vision"))
    options = {"enable_multiprocessing": True, "device_memory_bytes": 8 << 30}
    with MultiModelLLM.from_engine_args(arguments, **options) as llm:
        llm.switch("llama")
        yield llm


class Asks:
    """Requests to a model, in whose steps' midst ``away`` has its turns."""

    def __init__(self, llm: Any, away: str | None) -> None:
        self._llm = llm
        self.away = away

    def __call__(self, prompts: Any, *each: Any, model: str = "llama") -> list[Any]:
        """The final output of each prompt."""
        prompts = [prompts] if isinstance(prompts, str | dict) else prompts
        names = [f"asked-{next(_IDS)}" for _ in prompts]
        self._llm.switch(model)
        for name, prompt, params in zip(names, prompts, each * len(prompts) if len(each) == 1 else each, strict=True):
            self._llm.add_request(name, prompt, params)
        ended: dict[str, Any] = {}
        while len(ended) < len(names):
            outputs = self._llm.step()
            if self.away is not None:
                self._llm.switch(self.away)
                outputs += self._llm.step()
                self._llm.switch(model)
            ended |= {output.request_id: output for output in outputs if output.finished}
        assert not self._llm.has_unfinished_requests(model=model)
        return [ended[name] for name in names]


@pytest.fixture
def ask(llm: Any, away: str | None) -> Asks:
    return Asks(llm, away)


@pytest.fixture
def at_rest(llm: Any) -> Asks:
    return Asks(llm, None)


def params(**more: Any) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(**{"max_tokens": 16, "output_kind": RequestOutputKind.FINAL_ONLY, **more})


def greedy(**more: Any) -> Any:
    return params(temperature=0, **more)


def tokens(outputs: list[Any]) -> list[list[tuple[int, ...]]]:
    return [[tuple(each.token_ids) for each in output.outputs] for output in outputs]


@judge("LLMEngine", "test_n_gt_1", "test_parallel_sampling")
def test_each_request_has_as_many_samples_as_it_asked_for_and_no_two_alike(ask: Asks, at_rest: Asks) -> None:
    counts = (3, 1, 7)
    wanted = [params(temperature=2.0, n=n, seed=42, max_tokens=40) for n in counts]
    expected = tokens(at_rest(PROMPTS, *wanted))
    outputs = ask(PROMPTS, *wanted)
    for output, count in zip(outputs, counts, strict=True):
        assert [each.index for each in output.outputs] == list(range(count))
        assert len({each.text for each in output.outputs}) == count
    assert tokens(outputs) == expected


@judge("LLMEngine", "test_penalties")
def test_penalties_change_what_is_said(ask: Asks, at_rest: Asks) -> None:
    cut = {"temperature": 1.2, "min_p": 0.5, "top_p": 0.5, "top_k": 3, "seed": 1, "max_tokens": 60, "ignore_eos": True}
    much = params(presence_penalty=1.2, frequency_penalty=1.2, repetition_penalty=1.2, **cut)
    expected = tokens(at_rest(PROMPT, much))
    assert tokens(ask(PROMPT, much)) == expected != tokens(at_rest(PROMPT, params(**cut)))


@judge("LLMEngine", "test_stop")
def test_a_stop_word_ends_an_answer_before_it_or_behind_it(ask: Asks, at_rest: Asks) -> None:
    (whole,) = at_rest(PROMPT, greedy())
    words = whole.outputs[0].text.split()
    stop = next(word for n, word in enumerate(words) if n > 1 and word not in " ".join(words[:n]))
    before, _, _ = whole.outputs[0].text.partition(stop)
    (without,) = ask(PROMPT, greedy(stop=stop))
    (with_it,) = ask(PROMPT, greedy(stop=stop, include_stop_str_in_output=True))
    assert (without.outputs[0].text, with_it.outputs[0].text) == (before, before + stop)
    assert without.outputs[0].stop_reason == with_it.outputs[0].stop_reason == stop


@judge("LLMEngine", "test_stop_token_ids")
def test_the_first_of_several_stop_tokens_ends_an_answer_in_whatever_order_they_are_named(
    ask: Asks, at_rest: Asks
) -> None:
    (whole,) = tokens(at_rest(PROMPT, greedy()))[0]
    stops = list(dict.fromkeys(whole[5:]))[:2]
    end = min(whole.index(stop) for stop in stops)
    for named in (stops, stops[::-1]):
        (output,) = ask(PROMPT, greedy(stop_token_ids=named))
        assert tuple(output.outputs[0].token_ids) == whole[: end + 1]
        assert output.outputs[0].stop_reason == whole[end]


@judge("LLMEngine", "test_detokenize_false")
def test_who_wants_no_text_gets_tokens_and_their_logprobs_without(ask: Asks, at_rest: Asks) -> None:
    expected = tokens(at_rest(PROMPT, greedy()))
    (output,) = ask(PROMPT, greedy(detokenize=False, logprobs=3, prompt_logprobs=3))
    assert (tokens([output]), output.outputs[0].text) == (expected, "")
    for each in (*output.prompt_logprobs[1:], *output.outputs[0].logprobs):
        assert 3 <= len(each) <= 4
        assert {one.decoded_token for one in each.values()} == {None}


@judge("LLMEngine", "test_bad_words")
def test_bad_words_are_not_said(llm: Any, ask: Asks, at_rest: Asks) -> None:
    tokenizer = llm.get_tokenizer(model="llama")
    bad: dict[int, str] = {}
    for _ in range(2):
        (said,) = tokens(at_rest(PROMPT, greedy(bad_words=[*bad.values()])))[0]
        words = {token: tokenizer.decode([token]) for token in said}  # written in one way only: others aren't forbidden
        bad |= [(token, word) for token, word in words.items() if tokenizer.encode(word.strip()) == [token]][:1]
        (said,) = tokens(ask(PROMPT, greedy(bad_words=[*bad.values()])))[0]
        assert not bad.keys() & set(said)
    assert len(bad) == 2


@judge("LLMEngine", "test_logits_processor")
def test_a_processor_of_logits_in_a_request_is_refused(ask: Asks) -> None:
    with pytest.raises((ValueError, TypeError)):
        ask(PROMPT, params(logits_processors=[lambda _, logits: logits]))


@judge("LLMEngine", "test_allowed_token_ids")
def test_only_allowed_tokens_are_said_and_only_tokens_that_there_are_can_be_allowed(ask: Asks) -> None:
    (output,) = ask(PROMPT, params(allowed_token_ids=[10], seed=1))
    assert set(output.outputs[0].token_ids) == {10}
    for wrong in ([], [-1], [10_000_000]):
        with pytest.raises(refusals()):
            ask(PROMPT, params(allowed_token_ids=wrong))


def refusals() -> tuple[type[Exception], ...]:
    import vllm.exceptions

    return ValueError, getattr(vllm.exceptions, "VLLMClientError", ValueError)


@judge("LLMEngine", "test_seed")
def test_a_seed_repeats_what_was_said_and_another_one_does_not(ask: Asks, at_rest: Asks) -> None:
    expected = tokens(at_rest(PROMPT, params(seed=42)))
    assert tokens(ask(PROMPT, params(seed=42))) == expected != tokens(ask(PROMPT, params(seed=43)))


@judge("LLMEngine", "test_engine_metrics")
def test_the_metrics_of_a_model_count_its_own_tokens(llm: Any, ask: Asks) -> None:
    ask(PROMPT, greedy(max_tokens=1), model="ngram")
    before = counted(llm)
    outputs = ask(PROMPTS, greedy(max_tokens=100, ignore_eos=True), model="ngram")
    after = counted(llm)
    assert {len(each) for output in tokens(outputs) for each in output} == {100}
    grown = {name: after[name] - before[name] for name in after}
    assert grown == {"running": 0, "tokens": 300, "requests": 3, "sum": 300, "bucket": 3}
    (accepted,) = named(llm, "spec_decode_num_accepted_tokens_per_pos")
    assert len(accepted.values) == NGRAM["num_speculative_tokens"]


def named(llm: Any, name: str) -> list[Any]:
    return [metric for metric in llm.get_metrics(model="ngram") if metric.name == f"vllm:{name}"]


def counted(llm: Any) -> dict[str, float]:
    """What the metrics of the model with speculation say."""
    (running,), (said,) = named(llm, "num_requests_running"), named(llm, "generation_tokens")
    (each,) = named(llm, "request_generation_tokens")
    return {
        "running": running.value,
        "tokens": said.value,
        "requests": each.count,
        "sum": each.sum,
        "bucket": each.buckets["+Inf"],
    }


@judge("LLMEngine", "test_skip_tokenizer_initialization")
def test_a_model_without_a_tokenizer_takes_and_gives_tokens_alone(ask: Asks, at_rest: Asks) -> None:
    wanted = greedy(prompt_logprobs=1, detokenize=True)
    with pytest.raises(refusals(), match="skip_tokenizer_init"):
        ask("abc", wanted, model="bare")
    expected = tokens(at_rest({"prompt_token_ids": [70, 71, 72]}, greedy()))
    (output,) = ask({"prompt_token_ids": [70, 71, 72]}, wanted, model="bare")
    assert (tokens([output])[0][0], output.outputs[0].text) == (expected[0][0], "")


@judge("LLMEngine", "test_compatibility_with_skip_tokenizer_init")
def test_a_model_without_a_tokenizer_refuses_constraints(ask: Asks) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    wanted = params(structured_outputs=StructuredOutputsParams(regex="[0-9]+"))
    with pytest.raises(refusals()):
        ask({"prompt_token_ids": [70, 71, 72]}, wanted, model="bare")


def test_what_is_kept_of_pictures_is_forgotten_when_that_is_asked_for_their_model(llm: Any, at_rest: Asks) -> None:
    from vllm import SamplingParams

    def look() -> list[Any]:
        params = SamplingParams(temperature=0, max_tokens=4, logprobs=0)
        return [numbers(at_rest(picture(colour), params, model="vision")[0]) for colour in ("red", "blue")]

    def kept() -> tuple[int, list[int]]:
        return len(sent._cache), llm.collective_rpc(encoded, model="vision")

    seen = look()
    sent = llm.context("vision").renderer.mm_processor_cache
    assert kept() == (2, [2])
    llm.reset_encoder_cache(model="vision")
    assert kept() == (2, [0])
    llm.reset_mm_cache(model="vision")
    assert kept() == (0, [0])
    assert look() == seen
    assert kept() == (2, [2])
