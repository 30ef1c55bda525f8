"""What vLLM's own tests of AsyncLLM check (tests/v1/engine/test_async_llm.py), of one model of an engine of several.

At rest, and while the model's place is taken and given back all the time: the same tokens, the same ends. The object
is the one that code for AsyncLLM holds; requests are sampled with a seed, so that each must say what it says alone.
"""

import asyncio
from collections import defaultdict
from typing import Any
from unittest.mock import PropertyMock, patch

import pytest

from tests.support.engine_spec import until
from tests.support.judge import Life, judge
from tests.support.volume import shown

pytestmark = [pytest.mark.engine, pytest.mark.parity]
PROMPT = "Hello my name is Robert and"
MANY, LONG = 24, 3000
KINDS = ("DELTA", "FINAL_ONLY")
kinds = pytest.mark.parametrize("kind", KINDS)
in_pieces = pytest.mark.parametrize("kind", shown(KINDS, "DELTA"))


@pytest.fixture
def llm(multi: Any) -> Any:
    """The AsyncLLM of ``llama``."""
    llm = multi.context("llama")
    assert not llm.output_processor.has_unfinished_requests()
    return llm


class Said:
    """What has come of one request, by sample."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []
        self._tokens: dict[int, tuple[int, ...]] = defaultdict(tuple)

    @property
    def tokens(self) -> tuple[tuple[int, ...], ...]:
        return tuple(self._tokens[index] for index in sorted(self._tokens))

    @property
    def count(self) -> int:
        return sum(map(len, self.tokens))

    def take(self, output: Any, kind: str) -> None:
        self.outputs.append(output)
        for each in output.outputs:
            before = self._tokens[each.index] if kind == "DELTA" else ()
            self._tokens[each.index] = (*before, *each.token_ids)


def params(kind: str = "DELTA", max_tokens: int = 10, **more: Any) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    chosen = {"ignore_eos": True, "temperature": 0.5, "seed": 33, "output_kind": RequestOutputKind[kind], **more}
    return SamplingParams(max_tokens=max_tokens, **chosen)


async def ask(
    llm: Any,
    id_: str,
    kind: str = "DELTA",
    max_tokens: int = 10,
    *,
    said: Said | None = None,
    enough: int | None = None,
    **more: Any,
) -> Said:
    """A request's answer, or what has come when ``enough`` tokens have."""
    said = Said() if said is None else said
    async for output in llm.generate(prompt=PROMPT, sampling_params=params(kind, max_tokens, **more), request_id=id_):
        said.take(output, kind)
        if enough is not None and said.count >= enough:
            break
    return said


async def begun(said: Said) -> None:
    """Until something of it has come."""
    await until(lambda: bool(said.outputs))


async def all_begun(llm: Any, count: int, kind: str) -> Said:
    """Until each of so many unfinished samples has said something: they are served in turn, and a later one was.

    Without asking them: what is told at its end only says nothing before.
    """
    await until(lambda: llm.output_processor.get_num_unfinished_requests() >= count)
    return await ask(llm, "beside", kind)


async def nothing_left(llm: Any) -> None:
    """Whoever left is forgotten, as soon as its generator is closed."""
    await until(lambda: not llm.output_processor.has_unfinished_requests())


@kinds
@judge("AsyncLLM", "test_load")
async def test_many_requests_at_once_get_all_their_tokens(llm: Any, life: Life, kind: str) -> None:
    alone = (await ask(llm, "alone", kind)).tokens
    async with life:
        asked = [ask(llm, f"request-{n}", kind) for n in range(MANY)]
        assert {each.tokens for each in await asyncio.gather(*asked)} == {alone}
    assert not llm.output_processor.has_unfinished_requests()


@in_pieces
@judge("AsyncLLM", "test_abort")
async def test_who_goes_away_disturbs_nobody_and_leaves_nothing(llm: Any, life: Life, kind: str) -> None:
    leaves, samples = range(1, MANY, 10), {n: 3 if n % 7 == 1 else 1 for n in range(MANY)}
    alone = {n: (await ask(llm, "alone", kind, 60, n=n)).tokens for n in (1, 3)}
    async with life:
        tasks = [
            asyncio.create_task(ask(llm, f"request-{n}", kind, LONG if n in leaves else 60, n=samples[n]))
            for n in range(MANY)
        ]
        first = await ask(llm, "beside", kind)
        for n in leaves:
            tasks[n].cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        for n, end in enumerate(ended):
            if n in leaves:
                assert isinstance(end, asyncio.CancelledError)
            else:
                assert end.tokens == alone[samples[n]]
        await nothing_left(llm)
        assert (await ask(llm, f"request-{leaves[0]}", kind)).tokens == first.tokens, "its name can be had again"


@in_pieces
@judge("AsyncLLM", "test_multi_abort")
async def test_several_are_aborted_by_one_call_and_keep_what_they_had(llm: Any, life: Life, kind: str) -> None:
    ended, samples = (5, 10, 15, 20), {n: 3 if n in {5, 15, 18} else 1 for n in range(MANY)}
    alone = {n: (await ask(llm, "alone", kind, 60, n=n)).tokens for n in (1, 3)}
    async with life:
        tasks = {n: asyncio.create_task(ask(llm, f"request-{n}", kind, LONG, n=samples[n])) for n in ended}
        await all_begun(llm, sum(samples[n] for n in ended), kind)
        others = [n for n in range(MANY) if n not in ended]
        tasks |= {n: asyncio.create_task(ask(llm, f"request-{n}", kind, 60, n=samples[n])) for n in others}
        await ask(llm, "beside", kind)
        await llm.abort([f"request-{n}" for n in ended])
        for n, task in tasks.items():
            said = await task
            if n in ended:
                assert {each.finish_reason for each in said.outputs[-1].outputs} == {"abort"}
                assert all(0 < len(tokens) < LONG for tokens in said.tokens)
                assert [tokens[:60] for tokens in said.tokens] == [
                    whole[: len(tokens)] for whole, tokens in zip(alone[samples[n]], said.tokens, strict=True)
                ]
            else:
                assert said.tokens == alone[samples[n]]
        await nothing_left(llm)


@pytest.mark.parametrize("n", [1, 3])
@judge("AsyncLLM", "test_finished_flag")
async def test_the_last_output_alone_says_that_it_is_the_last(llm: Any, life: Life, n: int) -> None:
    async with life:
        said = await ask(llm, "request-33", max_tokens=60, temperature=1.0, ignore_eos=False, n=n)
        assert [output.finished for output in said.outputs] == [False] * (len(said.outputs) - 1) + [True]


@judge("AsyncLLM", "test_mid_stream_cancellation")
async def test_requests_are_left_in_the_middle_and_their_names_can_be_had_again(llm: Any, life: Life) -> None:
    alone = (await ask(llm, "alone", max_tokens=20)).tokens
    async with life:
        asked = [ask(llm, f"request-{n}", max_tokens=1000, enough=20) for n in range(MANY)]
        assert {tokens[:20] for said in await asyncio.gather(*asked) for tokens in said.tokens} == set(alone)
        await nothing_left(llm)
        assert (await ask(llm, "request-0", max_tokens=20)).tokens == alone


@judge("AsyncLLM", "test_dp_rank_argument")
async def test_a_rank_is_one_that_is_there(llm: Any, life: Life) -> None:
    async with life:
        ranked = llm.generate(PROMPT, params(), "request-34", data_parallel_rank=0)
        assert [output async for output in ranked][-1].finished
        with pytest.raises(Exception, match="out of range"):
            await anext(llm.generate(PROMPT, params(), "request-35", data_parallel_rank=1))


@judge("AsyncLLM", "test_check_health")
async def test_health_is_told_and_a_dead_engine_is_an_error(llm: Any, life: Life) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    async with life:
        await llm.check_health()
        with patch.object(type(llm), "errored", PropertyMock(return_value=True)), pytest.raises(EngineDeadError):
            await llm.check_health()
        await llm.check_health()


@kinds
@judge("AsyncLLM", "test_abort_final_output")
async def test_who_is_aborted_is_told_so_with_what_there_was(llm: Any, life: Life, kind: str) -> None:
    alone = (await ask(llm, "alone", kind, 60)).tokens[0]
    async with life:
        task = asyncio.create_task(ask(llm, "aborted", kind, LONG))
        await all_begun(llm, 1, kind)
        await llm.abort("aborted")
        said = await task
        last = said.outputs[-1]
        assert (last.finished, len(last.outputs), last.num_cached_tokens >= 0) == (True, 1, True)
        assert (last.outputs[0].finish_reason, last.outputs[0].stop_reason) == ("abort", None)
        assert 0 < said.count < LONG
        assert said.tokens[0][:60] == alone[: said.count]
        assert kind == "DELTA" or len(said.outputs) == 1
        assert not llm.output_processor.has_unfinished_requests()


@judge("AsyncLLM", "test_pause_resume_basic")
async def test_pausing_twice_is_pausing_and_resuming_is_always_safe(llm: Any, life: Life) -> None:
    alone = (await ask(llm, "alone")).tokens
    async with life:
        assert not await llm.is_paused()
        await llm.resume_generation()
        assert not await llm.is_paused()
        for mode in ("abort", "abort", "wait", "keep"):
            await llm.pause_generation(mode=mode)
            assert await llm.is_paused()
        await llm.resume_generation()
        for _ in range(5):
            await llm.pause_generation(mode="abort")
            await llm.resume_generation()
        assert not await llm.is_paused()
        assert (await ask(llm, "after")).tokens == alone


@judge("AsyncLLM", "test_pause_abort")
async def test_a_pause_that_aborts_ends_what_runs_and_what_comes_after_it_is_answered(llm: Any, life: Life) -> None:
    alone = (await ask(llm, "alone", max_tokens=60)).tokens
    async with life:
        said = Said()
        task = asyncio.create_task(ask(llm, "runs", max_tokens=LONG, said=said))
        await begun(said)
        await llm.pause_generation(mode="abort")
        await task
        assert (said.outputs[-1].finished, said.outputs[-1].outputs[0].finish_reason) == (True, "abort")
        assert said.tokens[0][:60] == alone[0][: said.count]
        await llm.resume_generation()
        assert (await ask(llm, "after", max_tokens=60)).tokens == alone


@judge("AsyncLLM", "test_pause_wait")
async def test_a_pause_that_waits_is_there_when_what_runs_has_ended(llm: Any, life: Life) -> None:
    alone = (await ask(llm, "alone", max_tokens=40)).tokens
    async with life:
        said = Said()
        task = asyncio.create_task(ask(llm, "runs", max_tokens=40, said=said))
        await begun(said)
        await llm.pause_generation(mode="wait")
        assert (await task).tokens == alone
        assert said.outputs[-1].outputs[0].finish_reason == "length"
        await llm.resume_generation()


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.long), 3])
@judge("AsyncLLM", "test_pause_keep_single_request", "test_pause_keep_multi_request")
async def test_a_pause_that_keeps_freezes_what_runs_until_it_is_resumed(llm: Any, life: Life, count: int) -> None:
    alone = (await ask(llm, "alone", max_tokens=200)).tokens
    async with life:
        said = [Said() for _ in range(count)]
        tasks = [asyncio.create_task(ask(llm, f"kept-{n}", max_tokens=200, said=each)) for n, each in enumerate(said)]
        for each in said:
            await begun(each)
        await llm.pause_generation(mode="keep", clear_cache=False)
        while len(llm.output_processor.request_states) == count and await moved(said):
            """What was under way comes."""
        frozen = [each.count for each in said]
        assert await llm.is_paused()
        later = asyncio.create_task(ask(llm, "later", max_tokens=5))
        await asyncio.sleep(0.1)
        assert [each.count for each in said] == frozen
        assert not later.done()
        assert all(number < 200 for number in frozen)
        await llm.resume_generation()
        assert {each.tokens for each in await asyncio.gather(*tasks)} == {alone}
        assert (await later).count == 5


async def moved(said: list[Said], within_s: float = 0.1) -> bool:
    before = [each.count for each in said]
    await asyncio.sleep(within_s)
    return before != [each.count for each in said]


@judge("AsyncLLM", "test_pause_keep_race_fine_grained")
async def test_pauses_that_follow_each_other_lose_no_token(llm: Any, life: Life) -> None:
    alone = (await ask(llm, "alone", max_tokens=60)).tokens
    async with life:
        tasks = [asyncio.create_task(ask(llm, f"request-{n}", max_tokens=60)) for n in range(3)]
        while not all(task.done() for task in tasks):
            await llm.pause_generation(mode="keep", clear_cache=False)
            await llm.resume_generation()
            await asyncio.sleep(0.002)
        assert {(await task).tokens for task in tasks} == {alone}
