"""A short chaos run, and what its judge says of results that we know."""

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from aiokafka.record.default_records import DefaultRecordBatch

from deploy.local.broker import LocalBroker
from deploy.local.cluster import replication
from tests.chaos.check import (
    Asked,
    Recovery,
    Strange,
    continued,
    judge,
    recovery,
    stepped_over,
    unexplained,
)
from tests.chaos.hostile import shapes
from tests.chaos.mark import is_marked, last_offset
from tests.chaos.plan import QUIET_AFTER_S, QUIET_BEFORE_S, Kind, plan
from tests.chaos.reader import Read
from tests.chaos.shape import ASKING, Role, Seen, Shape
from tests.chaos.shape import record as strange_record
from tests.support.batches import CODECS
from tests.support.tally import total
from tests.support.workers import End

SEEN = Seen("p-", "pool", ("chaos-0", "chaos-1"), ("a", "b"))


def record(
    id_: str, model: str = "llama", *, says: str | None = None, outcome: str = "completed", at: float = 0, **more: str
) -> Read:
    words = f"{model}0 {model}1" if says is None else says
    body = {"choices": [{"message": {"content": words}}]} if words else None
    value = json.dumps({"id": id_, "outcome": outcome, "model": model, "body": body, **more}).encode()
    return Read(0, 0, at, id_.encode(), value)


def poison(id_: str) -> Read:
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
        (Asked("llama", 0, words=2, unsure=True), [record("a"), record("a")], [], "repeated"),
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


def test_what_nobody_said_was_written_may_have_no_result() -> None:
    verdict = judge({"a": Asked("llama", 0, unsure=True)}, [], [])
    assert (verdict.sent, verdict.good) == (0, True)


def of_origin(origin: str, outcome: str = "failed") -> Read:
    topic, partition, offset = origin.rsplit("/", 2)
    place = {"topic": topic, "partition": int(partition), "offset": int(offset)}
    value = json.dumps({"id": "same", "outcome": outcome, "model": None, "origin": place}).encode()
    return Read(0, 0, 0, b"same", value)


def test_each_hostile_request_ends_once_in_a_result_or_in_a_report() -> None:
    strange = {"requests/0/1": Strange("x"), "requests/0/2": Strange("x"), "requests/0/3": Strange("y", answered=True)}
    results = [of_origin("requests/0/1"), of_origin("requests/0/3", "completed")]
    status = Read(0, 0, 0, None, b'{"reason": "requests/0/2 to 3: the batch inflates to more than 9 bytes"}')
    skipped = stepped_over([status])
    verdict = judge({}, results, [record("same")], strange=strange, stepped_over=skipped)
    assert verdict.good
    assert verdict.strange_outcomes == {"failed": 1, "completed": 1, "stepped over": 1}
    assert judge({}, results, [], strange=strange).lost == ["requests/0/2: x"]
    assert judge({}, [*results, results[0]], [], strange=strange, stepped_over=skipped).repeated == ["requests/0/1: x"]
    assert judge({}, [*results, of_origin("requests/0/2")], [], strange=strange, stepped_over=skipped).good
    refused = [results[0], of_origin("requests/0/3")]
    assert judge({}, refused, [], strange=strange, stepped_over=skipped).wrong == ["requests/0/3: y: failed None None"]


def test_a_request_whose_deadline_had_passed_must_expire_and_another_must_not() -> None:
    expired = [record("a", says="", outcome="expired")]
    assert judge({"a": Asked("llama", 0, expired=True)}, expired, []).good
    assert judge({"a": Asked("llama", 0, expired=True)}, [record("a")], []).wrong == ["a"]
    assert judge({"a": Asked("llama", 0)}, expired, []).wrong == ["a"]


def end(said: str, *, at: float = 10, code: int = 1, signalled: bool = False) -> End:
    return End(0, at, code, signalled=signalled, said=said)


def test_a_process_may_end_by_what_was_planned_alone() -> None:
    planned = [(Kind.ENGINE, 5.0, 35.0), (Kind.HOLD, 0.0, 99.0), (Kind.BROKER_KILL, 40.0, 60.0)]
    poisoned = [end("gearshift: the engine died: a prompt killed it", at=at) for at in (4, 6, 8, 50, 51, 80, 81)]
    told = end("", code=-9, signalled=True)
    away = [end("gearshift: no broker answers", at=at) for at in (39, 41)]
    malformed = end("TypeError: object of type 'NoneType' has no len()", at=45)
    killed = end("", code=-9, at=70)
    left = unexplained([*poisoned, told, *away, malformed, killed], planned)
    assert left == [poisoned[0], away[0], malformed, killed, poisoned[6]]


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


def test_every_third_fault_is_a_kill_with_nothing_around_it_where_there_is_time() -> None:
    faults = plan(seed=1, faults=30, over_s=1000, workers=3, kinds=frozenset(Kind))
    kills = [
        one.at_s
        for one in faults
        if one.kind is Kind.SIGKILL
        and not any(one.at_s - QUIET_BEFORE_S < f.at_s < one.at_s + QUIET_AFTER_S for f in faults if f is not one)
    ]
    assert (len(faults), {fault.kind for fault in faults}) == (30, set(Kind))
    assert len(kills) >= 10
    assert all(0 < fault.at_s < 1000 for fault in faults)


# --- what a stranger writes ---


@pytest.mark.parametrize("codec", CODECS)
def test_a_strange_batch_is_one_that_a_client_reads(codec: str) -> None:
    shape = Shape(
        "x",
        (strange_record(b"k", b"v" * 300, [(b"x", None), (b"y", b"")]), strange_record(None, None)),
        codec,
        at=1.79e9,
    )
    batch = DefaultRecordBatch(shape.batch)
    assert batch.validate_crc()
    read = [(one.offset, one.key, one.value, one.headers, one.timestamp) for one in batch]
    moment = 1_790_000_000_000
    assert read == [(0, b"k", b"v" * 300, [("x", None), ("y", b"")], moment), (1, None, None, [], moment)]
    assert (is_marked(shape.batch), last_offset(shape.batch)) == (True, 1)


def test_every_topic_gets_at_least_forty_strange_records_in_shapes_of_their_own_names() -> None:
    for role in Role:
        made = list(shapes(role, SEEN))
        assert sum(len(shape.records) for shape in made) >= 40
        assert {"bomb zstd", "bomb gzip", "bomb lz4", "bomb snappy"} <= {shape.name for shape in made}
        assert any(shape.answered for shape in made) == (role in ASKING - {Role.CALLS}), "a call may repeat another"


def test_three_brokers_must_have_two_of_three_copies() -> None:
    assert replication(3)["min.insync.replicas"] == replication(3)["transaction.state.log.min.isr"] == "2"
    assert set(replication(1).values()) == {"1"}


@pytest.mark.broker
@pytest.mark.timeout(1200)
async def test_a_short_run_loses_nothing_and_repeats_nothing(tmp_path: Path) -> None:
    if reason := LocalBroker.missing():
        pytest.skip(f"needs a broker that may be stopped: {reason}")
    figures, log = tmp_path / "figures.json", tmp_path / "log"
    size = ["--requests=300", "--workers=2", f"--faults={len(Kind)}"]
    command = ["tests.chaos", *size, "--seed=3", "--rate=50", "--largest=500000", f"--json={figures}"]
    with log.open("wb") as said:
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", *command, stdout=said, stderr=said)
    try:
        code = await process.wait()
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)  # it ends its workers and its broker
            await process.wait()
    if not figures.exists():
        pytest.fail(f"exit {code}: {log.read_text()[-5000:]}")
    told = json.loads(figures.read_text())["figures"]
    wrong = {name: examples for name, examples in told["examples"].items() if examples}
    if wrong or told["ends_by_record"] or code:
        pytest.fail(f"exit {code}: {wrong} {told['ends_by_record']} {told['answers_of_wrong']}")
    told["hostile_outcomes"].pop("stepped over", None)
    assert told["results"] == sum(told["outcomes"].values()) + sum(told["hostile_outcomes"].values())
    assert sum(told["outcomes"].values()) == told["sent"]
    assert told["parked"] > 0
    assert told["skewed"] > 0
    assert all(records >= 40 for records in told["hostile_by_topic"].values())
    assert told["hostile_by_topic"]["REQUESTS"] > told["hostile_by_topic"]["THROTTLED"]  # the largest ones, too
    assert len(told["hostile_by_topic"]) == len(Role)


def test_what_was_said_twice_is_counted_beside_what_is_in_results(tmp_path: Path) -> None:
    asked = {"a": Asked("llama", 0, words=2), "b": Asked("llama", 0, words=2000)}
    long = json.loads(record("b", says="llama0 " * 2000).value or b"") | {"continued": [700, 1400]}
    results = [record("a"), Read(0, 0, 0, b"b", json.dumps(long).encode())]
    (tmp_path / "said-1").write_bytes((1500).to_bytes(8, "little"))
    (tmp_path / "said-2").write_bytes((602).to_bytes(8, "little"))
    found = continued(asked, results, decoded=total(tmp_path))
    assert (found.long, found.continued, found.said, found.decoded) == (1, 1, 2002, 2102)
    assert round(found.repeated_share, 4) == round(100 / 2002, 4)


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.support.tally import Tally
tally = Tally(Path(sys.argv[1]))
for _ in range(1234):
    tally.add()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_tally_outlives_its_process(tmp_path: Path) -> None:
    for _ in range(2):
        assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False).returncode == -signal.SIGKILL
    assert total(tmp_path) == 2468


def test_a_long_answer_is_no_sign_of_a_slow_recovery() -> None:
    asked = {"long": Asked("llama", 99.5, words=2000), "short": Asked("llama", 100.5), "last": Asked("llama", 102)}
    records = [record("long", at=130), record("short", at=104), record("last", at=102.2)]
    assert recovery(asked, records, 100, []).took_s == 4.0
