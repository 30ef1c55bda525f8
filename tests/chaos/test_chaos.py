"""A short chaos run, and what its judge says of results that we know."""

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from aiokafka.structs import ConsumerRecord

from deploy.local.broker import LocalBroker
from tests.chaos.check import Asked, Recovery, judge, recovery
from tests.chaos.plan import Kind, plan


def record(
    id_: str, model: str = "llama", *, says: str | None = None, outcome: str = "completed", at: float = 0, **more: str
) -> ConsumerRecord[Any, Any]:
    words = f"{model}0 {model}1" if says is None else says
    body = {"choices": [{"message": {"content": words}}]} if words else None
    value = json.dumps({"id": id_, "outcome": outcome, "model": model, "body": body, **more}).encode()
    return ConsumerRecord("results", 0, 0, round(1000 * at), 0, id_.encode(), value, None, 0, len(value), ())


def poison(id_: str) -> ConsumerRecord[Any, Any]:
    return record(id_, says="", outcome="failed", failure="poison")


def test_one_right_result_per_request_is_good() -> None:
    asked = {
        "a": Asked("llama", 0, words=2),
        "b": Asked("qwen", 0, words=2),
        "c": Asked("llama", 0, fatal=True),
        "d": Asked("llama", 0, words=9, cancelled=True),
        "e": Asked("llama", 0, words=2, cancelled=True),
    }
    records = [
        record("a"),
        record("b", "qwen"),
        poison("c"),
        record("d", outcome="cancelled"),
        record("e"),
    ]
    assert judge(asked, records, [record("c")]).good


@pytest.mark.parametrize(
    ("request_", "results", "dead", "what"),
    [
        (Asked("llama", 0, words=2), [], [], "lost"),
        (Asked("llama", 0, words=2), [record("a"), record("a")], [], "repeated"),
        (Asked("llama", 0, words=2), [record("a", says="qwen0 qwen1")], [], "wrong_model"),
        (Asked("llama", 0, words=3), [record("a")], [], "wrong"),
        (Asked("llama", 0, words=2), [record("a", outcome="cancelled")], [], "wrong"),
        (Asked("llama", 0, words=2), [poison("a")], [record("a")], "wrong"),
        (Asked("llama", 0, words=2), [record("a")], [record("a")], "wrong"),
        (Asked("llama", 0, fatal=True), [record("a", outcome="failed", says="")], [record("a")], "wrong"),
        (Asked("llama", 0, fatal=True), [poison("a")], [], "wrong"),
        (Asked("llama", 0, fatal=True), [poison("a")], [record("a"), record("a")], "wrong"),
    ],
)
def test_each_way_to_be_wrong_is_told(request_: Asked, results: list[Any], dead: list[Any], what: str) -> None:
    verdict = judge({"a": request_}, results, dead)
    assert (getattr(verdict, what), verdict.good) == (["a"], False)


def test_what_nobody_asked_for_is_told() -> None:
    assert judge({}, [record("stranger")], []).unasked == ["stranger"]
    assert judge({}, [], [record("letter")]).unasked == ["letter"]


def test_a_recovery_ends_when_nobody_is_answered_late_any_more() -> None:
    times = {98.5: 98.6, 99.9: 108, 100.5: 100.6, 103: 110, 109: 111.5, 109.5: 109.6, 112: 112.1, 130: 140}
    asked = {str(at): Asked("llama", at) for at in times}
    results = [record(str(at), at=answered) for at, answered in times.items()]
    assert recovery(asked, results, 100, [(50, 99)]) == Recovery(100, 11.5, disturbed=False)
    assert recovery(asked, results, 100, [(90, 101)]).disturbed


def test_a_seed_makes_the_same_plan_with_every_kind_in_it() -> None:
    first, second = (plan(seed=4, faults=20, over_s=60, workers=3, kinds=frozenset(Kind)) for _ in range(2))
    assert first == second
    assert {fault.kind for fault in first} == set(Kind)


@pytest.mark.broker
@pytest.mark.timeout(280)
async def test_a_short_run_loses_nothing_and_repeats_nothing(tmp_path: Path) -> None:
    if reason := LocalBroker.missing():
        pytest.skip(f"needs a broker that may be stopped: {reason}")
    figures = tmp_path / "figures.json"
    command = ["tests.chaos", "--requests=1000", "--faults=8", "--seed=3", "--rate=50", f"--json={figures}"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        code = await process.wait()
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)  # it ends its workers and its broker
            await process.wait()
    told = json.loads(figures.read_text())["figures"]
    assert (told["lost"], told["repeated"], told["wrong_model"], told["unasked"], told["wrong"]) == (0, 0, 0, 0, 0)
    assert (told["sent"], code) == (told["results"], 0)
    assert told["parked"] > 0
