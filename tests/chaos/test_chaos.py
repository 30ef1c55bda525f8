"""A short chaos run, and what its judge says of results that we know."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from aiokafka.structs import ConsumerRecord

from deploy.local.broker import LocalBroker
from tests.chaos.check import Asked, judge
from tests.chaos.plan import Kind, plan


def record(id_: str, model: str, *, says: str | None = None, outcome: str = "completed") -> ConsumerRecord[Any, Any]:
    body = {"choices": [{"message": {"content": f"{says or model}0 {says or model}1"}}]}
    value = json.dumps({"id": id_, "outcome": outcome, "model": model, "body": body}).encode()
    return ConsumerRecord("results", 0, 0, 0, 0, id_.encode(), value, None, 0, len(value), ())


def test_one_result_per_request_by_its_own_model_is_good() -> None:
    asked = {"a": Asked("llama", 0), "b": Asked("qwen", 0), "c": Asked("llama", 0, fatal=True)}
    records = [record("a", "llama"), record("b", "qwen"), record("c", "llama", outcome="failed")]
    assert judge(asked, records).good


def test_each_way_to_be_wrong_is_told() -> None:
    asked = {id_: Asked("llama", 0) for id_ in ("lost", "twice", "wrong", "failed")}
    records = [
        record("twice", "llama"),
        record("twice", "llama"),
        record("wrong", "llama", says="qwen"),
        record("failed", "llama", outcome="failed"),
        record("stranger", "llama"),
    ]
    verdict = judge(asked, records)
    assert (verdict.lost, verdict.repeated, verdict.wrong_model) == (["lost"], ["twice"], ["wrong"])
    assert (verdict.failed, verdict.unasked, verdict.good) == (["failed"], ["stranger"], False)


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
    command = ["tests.chaos", "--requests=1200", "--faults=7", "--seed=3", "--rate=50", f"--json={figures}"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    code = await process.wait()
    told = json.loads(figures.read_text())["figures"]
    assert (told["lost"], told["repeated"], told["wrong_model"], told["unasked"]) == (0, 0, 0, 0)
    assert code == 0
