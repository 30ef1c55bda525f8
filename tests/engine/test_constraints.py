"""Constraints that are made to take for ever: each is refused alone, and whoever asks beside it notices nothing."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest

from service.engine.answering.constraints import Room
from service.engine.processes.trial import Limits, Trials, Verdict
from service.ports import Answer
from tests.support.engine_spec import LONG, chat, completion, text

NESTED = {"regex": "(((a{1,100}){1,100}){1,100}){90,100}"}
"""xgrammar compiles it in no time; each token is slower than the one before, without end."""
WORDS = [f"{number:06}" for number in range(100_000)]
BOMBS = {
    "a long enumeration": {"json": {"enum": WORDS}},
    "a choice of many": {"choice": WORDS},
    "a grammar of many words": {"grammar": "root ::= " + " | ".join(f'"{word}"' for word in WORDS)},
    "many properties, of which each may be missing": {
        "json": {"type": "object", "properties": {f"p{word}": {"type": "integer"} for word in WORDS[:5000]}}
    },
}
SHORT = {"grammar": "root ::= " + " ".join(f'[a-z]{{1,{most}}} "x"' for most in range(1000, 1600))}
"""Parsed in 2 ms, however slow a machine is: only compiling it takes what it may not."""
COMPILED_S = 10.0
"""What compiling a bomb takes of a processor until it is given up: a loop that did it would wait for so long."""
AMPLE = Limits(cpu_s=60, memory_bytes=4 << 30)


def constraint(value: dict[str, Any]) -> Any:
    from vllm.sampling_params import StructuredOutputsParams

    return StructuredOutputsParams(**value)


@pytest.fixture
def trials(engine: Any) -> Iterator[Trials]:
    trials = Trials()
    trials.add("llama", engine.multi.context("llama").vllm_config)
    yield trials
    trials.close()


@asynccontextmanager
async def watched_loop() -> AsyncIterator[list[float]]:
    """How long this loop, which carries heartbeats, let others wait: the times, the longest of which counts."""
    waits = [0.0]

    async def beat() -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            waits.append(time.monotonic() - before)

    task = asyncio.create_task(beat())
    yield waits
    task.cancel()


@pytest.mark.parametrize("name", BOMBS)
def test_what_takes_too_much_time_is_ended(trials: Trials, name: str) -> None:
    began = time.monotonic()
    assert trials.judge("llama", constraint(BOMBS[name]), Limits(cpu_s=0.5, memory_bytes=4 << 30)) is not Verdict.FIT
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("name", BOMBS)
def test_what_takes_too_much_memory_is_ended(trials: Trials, name: str) -> None:
    limits = Limits(cpu_s=AMPLE.cpu_s, memory_bytes=8 << 20)
    assert trials.judge("llama", constraint(BOMBS[name]), limits) is not Verdict.FIT


@pytest.mark.parametrize(
    "value",
    [
        {"regex": "[a-z]{1,20}"},
        {"regex": "(unclosed"},
        {"json": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}},
        {"json": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 5}},
        {"grammar": 'root ::= "a" | root "b"'},
        {"grammar": "no grammar"},
        {"choice": ["left", "right"]},
    ],
)
def test_what_is_small_is_fit_or_for_vllm_to_refuse(trials: Trials, value: dict[str, Any]) -> None:
    assert trials.judge("llama", constraint(value), Limits(cpu_s=5, memory_bytes=256 << 20)) is Verdict.FIT


def test_trials_go_on_after_their_process_has_died(trials: Trials) -> None:
    assert trials.judge("llama", constraint({"regex": "a"}), AMPLE) is Verdict.FIT
    assert trials._started is not None
    psutil.Process(trials._started.process.pid).kill()
    trials._started.process.join()
    assert trials.judge("llama", constraint({"regex": "b"}), AMPLE) is Verdict.FIT


@pytest.mark.long
def test_trials_go_without_a_fork_server(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Gaudi, where the imports open the card: in a new interpreter, which loads no platform's plugin."""
    monkeypatch.setenv("RAY_JOB_ID", "1")
    trials = Trials()
    trials.add("llama", engine.multi.context("llama").vllm_config)
    try:
        assert trials.judge("llama", constraint({"regex": "a"}), AMPLE) is Verdict.FIT
        assert trials.judge("llama", constraint({"choice": WORDS}), Limits(0.2, 4 << 30)) is not Verdict.FIT
    finally:
        trials.close()


async def beside(engine: Any, asked: Any) -> tuple[Answer, Answer, float]:
    """What a call and an ordinary one beside it are answered, and the longest wait of the loop meanwhile."""
    async with watched_loop() as waits:
        ordinary = asyncio.create_task(engine.answer(chat(max_tokens=LONG)))
        answer, other = await engine.answer(asked), await ordinary
    return answer, other, max(waits)


@pytest.mark.parity
async def test_a_bomb_is_refused_while_others_are_answered(engine: Any) -> None:
    alone = await engine.answer(chat(max_tokens=LONG))
    answer, other, wait = await beside(engine, chat(structured_outputs=SHORT))
    assert answer.status == 400
    assert not answer.retriable
    too_complex = f"structured output's grammar is too complex: compiling it takes more than {COMPILED_S:.0f} s"
    assert too_complex in str(answer.body)
    assert text(other) == text(alone)
    assert wait < COMPILED_S / 2
    again = time.monotonic()
    await engine.answer(chat(structured_outputs=SHORT))
    assert time.monotonic() - again < COMPILED_S / 2, "it is known by now"


async def test_each_prompt_of_a_stream_has_its_own_answer_in_whatever_order_constraints_were_tried(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All wait for the trial of the first, which is the last to hear of it."""
    monkeypatch.setattr(engine._constraints, "room", Room(1))
    prompts = ["One", "Two", "Three", "Four"]
    asked = {"prompt": prompts, "echo": True, "structured_outputs": {"regex": "[a-z ]{3,30}"}, "ignore_eos": False}

    async def sink(_chunk: dict[str, Any]) -> None: ...

    streamed = await engine.answer(completion(stream=True, **asked), sink)
    plain = await engine.answer(completion(**asked))
    said, expected = ([choice["text"] for choice in answer.body["choices"]] for answer in (streamed, plain))
    assert [text.startswith(prompt) for text, prompt in zip(expected, prompts, strict=True)] == [True] * len(prompts)
    assert said == expected


@pytest.mark.parity
@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.long), True])
async def test_what_gets_slower_with_each_token_is_ended_alone(engine: Any, stream: bool) -> None:
    alone = await engine.answer(chat(max_tokens=LONG))
    answer, other, _ = await beside(engine, chat(structured_outputs=NESTED, max_tokens=400, stream=stream))
    assert answer.status == 400
    assert "constraint took more than 0.5 s" in str(answer.body)
    assert text(other) == text(alone)
    assert (await engine.answer(chat(max_tokens=4))).status == 200
