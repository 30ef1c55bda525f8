"""What a pool was asked, read back from what it answered; and how large its models are taken to be."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.base import Origin
from schemas.results import Outcome, Result, Timing
from schemas.usage import Usage, usage_of
from service.models_file import ModelSpec, Scheduling
from service.scheduling.machines import CARDS
from service.scheduling.sizes import costs_of, size_of
from service.scheduling.traffic import LeftOut, Log, Traffic

NAMES = {"llama": "llama", "qwen": "qwen", "polite": "llama"}


def result(
    offset: int, *, model: str = "llama", at: float = 1000.0, outcome: Outcome = Outcome.COMPLETED, said: int = 7
):
    body = {"usage": {"prompt_tokens": 5, "completion_tokens": said}} if said else None
    return Result(
        id=f"r{offset}",
        origin=Origin(topic="requests", partition=0, offset=offset),
        outcome=outcome,
        status=200,
        model=model,
        body=body,
        timing=Timing(received=at, finished=at + 3, latency_s=3.0, waited_s=1.0),
    )


def read(*lines: Any) -> tuple[Log, list[tuple[float, int, int, int]]]:
    log = Log(NAMES)
    for line in lines:
        log.add(line.model_dump_json(exclude_none=True) if isinstance(line, Result | Usage) else line)
    return log, list(log.traffic(("llama", "qwen")))


def usage(of: Result) -> Usage:
    return Usage(**usage_of(of, tenant="t"))


def test_results_are_requests_in_order_of_their_arrival_from_zero_on():
    log, rows = read(result(1, at=1005.0, model="qwen"), result(2, at=1000.0, said=9))
    assert rows == [(0.0, 0, 5, 9), (5.0, 1, 5, 7)]
    assert not log.left_out


@pytest.mark.parametrize("first", ["result", "usage"])
def test_a_request_that_is_told_twice_is_counted_once_and_its_result_is_believed(first: str):
    told = [result(1, at=1000.0), usage(result(1, at=1000.0))]
    log, rows = read(*(told if first == "result" else reversed(told)), result(2, at=1010.0), usage(result(2)))
    assert rows == [(0.0, 0, 5, 7), (10.0, 0, 5, 7)]
    assert log.left_out == {LeftOut.TWICE: 2}


def test_of_usage_alone_a_request_came_before_it_ran():
    _, rows = read(usage(result(1, at=1000.0)), usage(result(2, at=1004.0)))
    assert rows == [(0.0, 0, 5, 7), (4.0, 0, 5, 7)]


def test_kcats_envelope_is_opened():
    envelope = {"topic": "results", "partition": 0, "offset": 3, "payload": result(1).model_dump_json()}
    _, rows = read(json.dumps(envelope))
    assert rows == [(0.0, 0, 5, 7)]


def test_an_adapter_s_requests_are_its_model_s():
    _, rows = read(result(1, model="polite"))
    assert rows == [(0.0, 0, 5, 7)]


def test_what_was_given_up_before_it_said_anything_wanted_what_others_get():
    gone = result(3, at=1002.0, outcome=Outcome.EXPIRED, said=0)
    _, rows = read(result(1, said=10), result(2, said=20), gone)
    assert rows[-1] == (2.0, 0, 5, 15)


def test_what_was_cut_off_wanted_what_others_get_and_what_it_had_said_at_least():
    cut = [result(n, at=1000.0 + n, outcome=Outcome.EXPIRED, said=said) for n, said in ((3, 2), (4, 90))]
    _, rows = read(result(1, said=10), result(2, said=20), *cut)
    assert [said for *_, said in rows[-2:]] == [15, 90]


@pytest.mark.parametrize("others", [True, False])
def test_a_model_of_which_nobody_was_answered_is_taken_to_say_as_much_as_others_and_that_is_told(others: bool):
    starved = [result(n, model="qwen", at=1000.0 + n, outcome=Outcome.EXPIRED, said=0) for n in (3, 4)]
    log, rows = read(*([result(1, said=300)] if others else []), *starved)
    (_, _, prompt, said) = rows[-1]
    assert (prompt, said) == ((5, 300) if others else (500, 256))
    assert log.assumed == ("qwen",)


@pytest.mark.parametrize("name", ["at", "running_s", "switch_s"])
def test_a_time_that_no_clock_has_is_no_time(name: str):
    told = json.loads(usage(result(1)).model_dump_json()) | {name: int("9" * 400)}
    log, rows = read(json.dumps(told))
    assert len(rows) + log.left_out[LeftOut.UNREADABLE] == 1


def test_a_record_that_claims_the_impossible_is_cut_to_size():
    _, rows = read(result(1, said=1 << 52))
    assert rows[0][3] < 1 << 31


def test_nothing_is_left_out_silently():
    failed = result(1, outcome=Outcome.FAILED, said=0)
    log, rows = read(failed, result(2, model="bert"), "{}", "no JSON", '{"timing": 1, "origin": 2}', "[]", "NaN")
    assert rows == []
    assert log.left_out == {LeftOut.FAILED: 1, LeftOut.STRANGER: 1, LeftOut.UNREADABLE: 5}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(("origin", "timing", "received", "at", "body", "usage", "payload")), inner)
    ),
    max_leaves=12,
)


@given(json_values)
def test_no_line_stops_it(value: Any):
    log = Log(NAMES)
    log.add(json.dumps(value))
    assert len(log.traffic(("llama", "qwen"))) + sum(log.left_out.values()) == 1


@given(st.sampled_from(sorted(json.loads(result(1).model_dump_json()))), json_values)
def test_no_field_of_a_result_stops_it(name: str, value: Any):
    log = Log(NAMES)
    log.add(json.dumps({**json.loads(result(1).model_dump_json()), name: value}))
    assert len(log.traffic(("llama", "qwen"))) + sum(log.left_out.values()) == 1


@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 1)), min_size=1), st.floats(0.1, 10), st.floats(0.01, 3))
def test_faster_is_the_same_and_a_new_model_comes_on_top(rows: list[tuple[float, int]], factor: float, share: float):
    traffic = Traffic(("a", "b"))
    for at, of in sorted(rows):
        traffic.add(at, of, 3, 4)
    assert traffic.sped(factor).counts() == traffic.counts()
    assert traffic.sped(factor).span_s == pytest.approx(traffic.span_s / factor)
    more = traffic.joined("c", share)
    assert more.counts()[:2] == traffic.counts()
    assert share * len(rows) - 1 < more.counts()[2] <= share * len(rows) + 1e-6
    assert list(more.at) == sorted(more.at)


@pytest.mark.parametrize(
    ("name", "billions", "each"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", 8, 2),
        ("/models/qwen3-0.6b", 0.6, 2),
        ("Qwen/Qwen2.5-72B-Instruct-AWQ", 72, 0.5),
        ("mistralai/Mixtral-8x7B-v0.1", 56, 2),
        ("RedHatAI/Llama-3.3-70B-Instruct-FP8", 70, 1),
        ("smollm-135m", 0.135, 2),
    ],
)
def test_a_model_s_size_is_in_its_name(name: str, billions: float, each: float):
    size = size_of(name)
    assert (size.billions, size.byte_per_weight, size.known) == (billions, each, True)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.7])
def test_a_new_model_gets_all_of_its_share(share: float):
    traffic = Traffic(("a",))
    for n in range(10):
        traffic.add(n, 0, 3, 4)
    assert traffic.joined("b", share).counts()[1] == round(10 * share)


@pytest.mark.parametrize("name", ["x/tiny-0b", "x/tiny-0.0m"])
def test_a_size_of_nothing_is_none(name: str):
    assert not size_of(name).known


def test_a_name_that_tells_nothing_is_said_to_be_a_guess():
    assert not size_of("/models/newest").known


def test_a_folder_s_config_counts_more_than_its_name(tmp_path: Path):
    folder = tmp_path / "nothing-1b"
    folder.mkdir()
    config = {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    size = size_of(str(folder))
    assert size.billions == pytest.approx(8.03, rel=0.01)
    assert size.kv_bytes_per_token == 131072


def test_memory_and_limits_of_models_yaml_count_and_no_model_is_planned_larger_than_its_device():
    given = Scheduling(memory=20_000_000_000, max_concurrency=4)
    known, _ = costs_of(ModelSpec("m", {"model": "x-8b"}, scheduling=given), CARDS["gaudi3"], row_tokens=100)
    assert (known.device_bytes, known.max_running) == (20e9, 4)
    tight, _ = costs_of(ModelSpec("m", {"model": "x-32b"}), CARDS["h100"], row_tokens=20_000)
    assert tight.device_bytes == CARDS["h100"].device_bytes
    assert 1 <= tight.max_running < 64


@given(gaps=st.lists(st.floats(0, 400), min_size=1, max_size=300), most=st.integers(1, 400))
def test_slices_are_as_many_as_asked_for_whole_and_in_order(gaps: list[float], most: int):
    traffic, at = Traffic(("llama",)), 0.0
    for number, gap in enumerate(gaps, start=1):
        at += gap
        traffic.add(at, 0, number, 1)
    made = traffic.sliced(most)
    if most >= len(traffic):
        assert made is traffic
        return
    numbers = list(made.prompt)
    assert most - 64 < len(numbers) <= most
    assert numbers == sorted(set(numbers))
    came = [0.0, *traffic.at]
    for (_, before), (number, now) in pairwise(zip(numbers, made.at, strict=True)):
        assert now - before == pytest.approx(came[number] - came[number - 1], abs=1e-6)


def test_a_burst_counts_for_what_was_asked_in_it_and_what_comes_once_is_not_all_there_is():
    traffic = Traffic(("llama",))
    for number in range(9_000):
        traffic.add(0.0, 0, number + 1, 1)  # all at midnight
    for number in range(1_000):
        traffic.add(86.4 * number, 0, 9_001 + number, 1)
    made = traffic.sliced(1_000)
    a_slice = 36
    assert sum(number <= 9_000 for number in made.prompt) == pytest.approx(900, abs=a_slice)
    assert made.span_s == pytest.approx(8_640, abs=86.4 * a_slice)


def test_a_day_is_stood_for_by_as_many_as_are_asked_for_from_all_of_its_hours():
    traffic = Traffic(("llama",))
    for number in range(86_400):
        traffic.add(float(number), 0, number + 1, 1)
    made = traffic.sliced(20_000)
    assert len(made) == pytest.approx(20_000, abs=64)
    assert len({(number - 1) // 3600 for number in made.prompt}) == 24
    apart = sum(two != one + 1 for one, two in pairwise(made.prompt))
    assert apart == 63  # nothing is left out within a slice
