"""Control, status, presence, results and dead letters: what is written is read again, also by a later version."""

import gc
import json
import math
import tracemalloc
from collections import OrderedDict
from functools import partial
from types import MappingProxyType

import pytest
from pydantic import ValidationError

from schemas import codec
from schemas.base import Origin, Outgoing, Record, unchecked
from schemas.batches import BatchEnd, BatchEnded
from schemas.contexts import ContextInfo, SwitchMode, SwitchReport, Tier
from schemas.control import CONTROL_TYPES, DESIRED_TYPES, Cancel, Pin, Switch, Unpin, parse_control
from schemas.errors import ErrorObject, FailureClass
from schemas.requests import Attempt
from schemas.results import Chunk, Freeze, Outcome, Result, Timing
from schemas.status import Presence, Status, StatusState
from schemas.usage import Usage, tokens_of, usage_of


def as_read(written: Outgoing) -> Record:
    return Record(written.topic, 0, 5, 50.0, written.key, written.value, written.headers)


def control(value: object, headers: tuple[tuple[str, bytes], ...] = ()) -> Record:
    return Record("control", 0, 5, 50.0, b"any", json.dumps(value).encode(), headers)


def test_a_model_alone_is_a_switch_for_everyone():
    event = codec.decode_control(control({"model": "qwen"}))
    assert isinstance(event, Switch)
    assert (event.model, event.target, event.issued, event.id) == ("qwen", "*", 50.0, "control/0/5")


@pytest.mark.parametrize("kind", ["cancel", "control.cancel", "gearshift.control.cancel"])
def test_the_type_may_stand_in_the_cloudevents_header(kind):
    event = codec.decode_control(control({"request": "r1"}, (("ce_type", kind.encode()), ("ce_id", b"e1"))))
    assert isinstance(event, Cancel)
    assert (event.request, event.id) == ("r1", "e1")


def test_a_structured_cloudevent_is_unwrapped():
    value = {"specversion": "1.0", "id": "e2", "type": "control.pin", "source": "/x", "data": {"model": "qwen"}}
    event = codec.decode_control(control(value, (("content-type", b"application/cloudevents+json"),)))
    assert isinstance(event, Pin)
    assert (event.id, event.model) == ("e2", "qwen")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([], "a JSON object, not a list"),
        ({"type": "swich", "model": "a"}, "type: unknown control event 'swich' (did you mean 'switch'?)"),
        ({"type": "switch"}, "model: Field required"),
        ({"model": "a", "drain_timeout": -1}, "greater than or equal to 0"),
        ({"model": "a", "hold": "until tuesday"}, "switch.hold: give seconds (0 or more), 'drained' or 'forever'"),
        ({"model": "a", "hold": -1}, "switch.hold: give seconds (0 or more), 'drained' or 'forever'"),
        ({"model": "a", "hold": math.inf}, "expected"),
    ],
)
def test_a_malformed_control_event_says_what_is_wrong(value, says):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - any ValueError is explained
        codec.decode_control(control(value))
    assert says in codec.explain(caught.value)


def test_what_undoes_a_desire_shares_its_key_so_that_the_latest_counts():
    written = [codec.encode_control("control", event) for event in (Pin(model="a"), Unpin(model="a"))]
    assert written[0].key == written[1].key == b"*/pin/a"


def test_every_kind_of_control_event_is_either_desired_state_or_a_command():
    assert DESIRED_TYPES < CONTROL_TYPES
    assert {"switch", "cancel", "pause", "resume", "sleep", "wake", "pin", "unpin"} <= DESIRED_TYPES
    assert {"query", "reload", "profile", "reset_cache", "lora.list"} <= CONTROL_TYPES - DESIRED_TYPES


def test_a_later_versions_fields_are_kept_and_are_no_error():
    event = parse_control({"type": "switch", "model": "qwen", "reason": "a field of tomorrow"})
    assert json.loads(codec.encode_control("control", event).value)["reason"] == "a field of tomorrow"


@pytest.mark.parametrize(
    "value",
    [
        {"model": "qwen", "messages": []},
        {"model": "qwen", "prompt": "hello"},
        {"model": "qwen", "reason": "no field of a switch"},
        {"id": "a", "origin": {"topic": "t", "partition": 0, "offset": 0}, "outcome": "completed", "model": "qwen"},
        {"model": "qwen", "id": "a", "seq": 0},
    ],
)
def test_what_names_a_model_without_being_a_switch_is_none(value: dict):
    with pytest.raises(ValueError, match="type: missing"):
        parse_control(value)


def test_what_a_switch_says_needs_no_type():
    bare = {"model": "qwen", "mode": "drain", "drain_timeout": 3, "hold": "forever", "target": "pool", "id": "e1"}
    event = parse_control(bare)
    assert isinstance(event, Switch)
    assert event.model_dump(exclude={"issued", "type", "leftover"}) == bare


def test_a_message_is_not_read_as_one_of_another_kind():
    written = {
        "result": codec.encode_result("t", result()),
        "chunk": codec.encode_chunk("t", Chunk(id="r1", seq=0)),
        "usage": codec.encode_usage("t", usage_of(result(), tenant="blue")),
        "status": codec.encode_status("t", Status(worker="w", state=StatusState.COMPLETED, kind="switch", at=1.0)),
        "request": codec.encode_request("t", {"model": "qwen"}, id_="r1"),
        "control": codec.encode_control("t", parse_control({"model": "qwen"})),
    }
    readers = {
        "result": codec.decode_result,
        "chunk": codec.decode_chunk,
        "usage": codec.decode_usage,
        "status": codec.decode_status,
        "presence": codec.decode_presence,
        "control": codec.decode_control,
    }
    for kind, outgoing in written.items():
        assert codec.kind_of(as_read(outgoing)) == kind
        for expected, read in readers.items():
            if kind != expected:
                with pytest.raises(ValueError):  # noqa: PT011 - any ValueError is explained
                    read(as_read(outgoing))


def test_a_forged_body_under_another_kinds_type_is_not_read():
    """A record with a result's fields that says it is a control event, and the other way round."""
    forged = codec.encode_result("t", result())
    headers = [("ce_type", b"gearshift.control.switch")]
    with pytest.raises(ValueError, match="says it is a control"):
        codec.decode_result(as_read(Outgoing("t", forged.key, forged.value, headers)))
    with pytest.raises(ValueError, match="says it is a result"):
        codec.decode_control(control({"type": "switch", "model": "qwen"}, tuple(forged.headers)))


def result(**changes: object) -> Result:
    values = {
        "id": "r1",
        "origin": Origin(topic="requests", partition=1, offset=2),
        "outcome": Outcome.COMPLETED,
        "status": 200,
        "model": "qwen",
        "body": {"choices": [{"message": {"content": "hi", "tool_calls": None}}]},
        "timing": Timing(received=1.0, finished=2.0, freezes=(Freeze(tokens=3, seconds=0.5, model="llama"),)),
        "worker": "w1",
        "correlation_id": "c1",
    }
    return Result(**{**values, **changes})


def test_a_result_is_read_as_it_was_written_and_keyed_by_its_request():
    written = codec.encode_result("results", result())
    headers = dict(written.headers)
    assert written.key == b"r1"
    assert headers["ce_type"] == b"gearshift.result.completed"
    assert headers["correlation-id"] == b"c1"
    assert codec.decode_result(as_read(written)) == result()


def test_nulls_inside_an_answer_stay_as_the_server_wrote_them():
    written = codec.encode_result("results", result())
    assert json.loads(written.value)["body"]["choices"][0]["message"]["tool_calls"] is None


def test_a_chunk_is_read_as_it_was_written():
    chunk = Chunk(id="r1", seq=4, data={"choices": []})
    assert codec.decode_chunk(as_read(codec.encode_chunk("chunks", chunk))) == chunk


def test_a_status_carries_its_switch_with_the_fields_that_people_know():
    report = SwitchReport(from_model="a", to_model="b", mode=SwitchMode.KEEP, drain_s=0.5)
    status = Status(worker="w", state=StatusState.COMPLETED, kind="switch", at=1.0, control_id="e", switch=report)
    written = codec.encode_status("status", status)
    known = json.loads(written.value)["switch"]
    for name in ("switched", "drain_s", "reconfigure_s", "switch_s", "memory_before_mb", "freed_memory_mb"):
        assert name in known
    assert codec.decode_status(as_read(written)) == status


def test_a_presence_is_read_as_it_was_written_and_a_tombstone_is_none():
    presence = Presence(
        worker="w", pool="p", at=1.0, interval_s=3.0, contexts=(ContextInfo(alias="a", tier=Tier.PARKED),)
    )
    assert codec.decode_presence(as_read(codec.encode_presence("workers", presence))) == presence
    assert codec.decode_presence(as_read(codec.tombstone("workers", "w"))) is None


def test_a_dead_letter_keeps_the_original_bytes_and_headers():
    original = Record("requests", 3, 9, 1.0, b"k", b"\xff\x00", (("ce_id", b"r1"), ("tenant", b"blue")))
    written = codec.encode_dead_letter(
        "dead-letters",
        original,
        id_="r1",
        failure=FailureClass.UNDECODABLE,
        error=ErrorObject(message="no"),
        attempts=2,
    )
    headers = dict(written.headers)
    assert written.value == b"\xff\x00"
    assert headers["tenant"] == b"blue"
    assert (headers["dl-class"], headers["dl-origin"], headers["dl-attempts"]) == (
        b"undecodable",
        b"requests/3/9",
        b"2",
    )


@pytest.mark.parametrize(
    ("body", "prompt", "cached", "generated"),
    [
        (
            {"usage": {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}},
            7,
            4,
            3,
        ),
        ({"usage": {"input_tokens": 7, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 4}}}, 7, 4, 3),
        ({"usage": {"input_tokens": 3, "output_tokens": 3, "cache_read_input_tokens": 4}}, 7, 4, 3),
        ({"usage": {"input_tokens": 3, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 2}}, 9, 4, 0),
        ({"usage": {"input_tokens": 3, "output_tokens": 1, "cache_read_input_tokens": None}}, 3, 0, 1),
        ({"usage": {"input_tokens": (1 << 53) - 1, "cache_read_input_tokens": (1 << 53) - 1}}, 0, (1 << 53) - 1, 0),
        ({"usage": {"prompt_tokens": 7, "prompt_tokens_details": None}}, 7, 0, 0),
        ({"usage": {"completion_tokens": 5}}, 0, 0, 5),
        ({"usage": {"prompt_tokens": 4, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 2}}}, 4, 2, 2),
        ({"usage": None}, 0, 0, 0),
        ({"usage": {"prompt_tokens": -1, "completion_tokens": "3", "prompt_tokens_details": [4]}}, 0, 0, 0),
        ({"usage": {"prompt_tokens": 1 << 60}}, 0, 0, 0),
        ({}, 0, 0, 0),
        (None, 0, 0, 0),
    ],
)
def test_an_answer_s_tokens_are_found_under_the_names_of_its_endpoint(body, prompt, cached, generated):
    assert tokens_of(body) == {"prompt_tokens": prompt, "cached_tokens": cached, "generated_tokens": generated}


def test_any_mapping_may_say_what_an_answer_has_cost():
    body = MappingProxyType({"usage": OrderedDict(prompt_tokens=3, completion_tokens=2)})
    assert tokens_of(body) == {"prompt_tokens": 3, "cached_tokens": 0, "generated_tokens": 2}


def test_what_a_result_has_cost_leaves_out_the_time_in_which_it_was_frozen():
    freezes = (Freeze(tokens=1, seconds=2.0), Freeze(tokens=3, seconds=1.5))
    timing = Timing(
        received=10.0, finished=20.0, waited_s=4.0, latency_s=10.0, waited_for={"switch": 0.5}, freezes=freezes
    )
    usage = usage_of(result(timing=timing), tenant="blue")
    read = codec.decode_usage(as_read(codec.encode_usage("t", usage)))
    assert (read.at, read.tenant, read.running_s, read.switch_s) == (20.0, "blue", 2.5, 0.5)
    assert read.model_dump() == Usage.model_validate(usage).model_dump()


def test_what_is_made_unchecked_is_what_pydantic_would_have_made():
    timing = {"received": 1.0, "finished": 2.0, "waited_for": {"turn": 0.5}, "first_token_s": None}
    said = {
        "id": "a",
        "origin": Origin("requests", 0, 1),
        "outcome": Outcome.COMPLETED,
        "status": 200,
        "body": {"a": 1},
    }
    checked = Result(**said, timing=Timing(**timing))
    made = unchecked(Result, **said, timing=unchecked(Timing, **timing))
    assert made == checked
    assert (repr(made), made.model_dump_json(), made.model_fields_set) == (
        repr(checked),
        checked.model_dump_json(),
        checked.model_fields_set,
    )
    assert made.model_copy(update={"status": 500}).status == 500
    with pytest.raises(ValidationError, match="frozen"):
        made.status = 500
    again = unchecked(Result, **said, timing=unchecked(Timing, **timing))
    assert again.model_fields_set is not made.model_fields_set
    assert again.attempt == Attempt()


def asked_request(word: str) -> Record:
    body = {"model": "qwen", "messages": [{"role": "user", "content": f"my secret is {word}"}]}
    return as_read(codec.encode_request("requests", body, id_=word))


READ = {
    "request": (partial(codec.decode_request, max_bytes=1 << 20), asked_request),
    "result": (codec.decode_answer, lambda word: as_read(codec.encode_result("results", result(id=word)))),
    "chunk": (codec.decode_answer, lambda word: as_read(codec.encode_chunk("chunks", Chunk(id=word, seq=1)))),
    "control": (codec.decode_control, lambda word: control({"type": "cancel", "request": word})),
    "stored": (
        codec.decode_stored,
        lambda word: as_read(codec.encode_stored("files", BatchEnded(id=word, at=1.0, end=BatchEnd.FAILED))),
    ),
}


@pytest.mark.parametrize("kind", READ)
def test_what_was_read_is_not_kept(kind: str):
    """pydantic would keep the last 16,384 short strings, ids and prompts among them: more memory for hours."""
    decode, made = READ[kind]
    records = [made(f"{n:08d}-{kind}-{n * 7919:08d}") for n in range(4000)]
    for record in records[:1000]:
        decode(record)
    gc.collect()
    tracemalloc.start()
    try:
        for record in records[1000:]:
            decode(record)
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 50_000
