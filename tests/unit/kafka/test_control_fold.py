"""What a worker that starts now is asked to be, from all that operators said before."""

import time
from collections.abc import AsyncIterator

import pytest

from schemas.base import Record
from schemas.control import Cancel, LoraAdd, LoraRemove, Pause, Pin, Query, Resume, Sleep, Switch, Unpin, Wake
from service.errors import ConfigError
from service.kafka.control import CANCELS_LIVE_S, ControlTopics, fold, outgoing, read_event
from service.ports import ControlRecord
from service.settings import TopicSettings, load, read_keys

NOW = 1_000_000.0
NAMES = {"*", "pool", "w1"}


def said(*events, key=None):
    """Control records as they are read, each under its own key unless one is given."""
    return [
        ControlRecord(
            event,
            Record("control", 0, n, NOW, key or f"{event.target}/{event.subject}".encode(), b"{}"),
        )
        for n, event in enumerate(events)
    ]


def tombstone(key):
    return ControlRecord(None, Record("control", 0, 99, NOW, key, None))


def folded(*events):
    return fold(said(*events), names=NAMES, now=NOW)


def test_the_latest_switch_counts_whoever_of_our_names_it_was_addressed_to():
    asked = folded(
        Switch(model="a", target="w1", issued=NOW), Switch(model="b", issued=NOW), Switch(model="c", target="w2")
    )
    assert [event.model for event in asked] == ["b"]


def test_a_worker_hears_what_is_meant_for_its_pool_and_not_what_is_meant_for_others():
    asked = folded(Pause(target="pool"), Pin(model="a", target="elsewhere"))
    assert [event.type for event in asked] == ["pause"]


def test_a_switch_outlives_its_hold_but_then_holds_for_nothing():
    (asked,) = folded(Switch(model="a", hold=60, issued=NOW - 100))
    assert (asked.model, asked.hold) == ("a", 0)


def test_of_a_hold_under_way_the_rest_is_left():
    (asked,) = folded(Switch(model="a", hold=60, issued=NOW - 20))
    assert asked.hold == 40


@pytest.mark.parametrize("hold", ["forever", "drained", None])
def test_a_hold_without_a_length_does_not_run_out(hold):
    (asked,) = folded(Switch(model="a", hold=hold, issued=NOW - 10**6))
    assert asked.hold == hold


def test_cancels_stand_until_no_request_they_mean_can_be_left():
    young, old = Cancel(request="x", issued=NOW - 10), Cancel(request="y", issued=NOW - CANCELS_LIVE_S - 1)
    assert folded(young, old) == (young,)
    assert fold(said(young), names=NAMES, now=NOW, cancels_live_s=5) == ()


@pytest.mark.parametrize(("ttl_s", "live_s"), [(None, CANCELS_LIVE_S), (60, CANCELS_LIVE_S), (1e6, 1e6)])
async def test_a_worker_that_restarts_knows_cancels_of_requests_whose_own_deadline_is_later_than_its_ttl(
    monkeypatch, ttl_s: float | None, live_s: float
):
    now = time.time()

    async def backlog() -> AsyncIterator[Record]:
        for request, age_s in (("old", live_s + 60), ("young", live_s - 60)):
            out = outgoing(Cancel(request=request), TopicSettings())
            yield Record("control", 0, 0, now - age_s, out.key, out.value, out.headers)

    control = ControlTopics(settings=load(ttl_s=ttl_s))
    monkeypatch.setattr(control._tail, "backlog", backlog)
    assert [event.request for event in await control.desired()] == ["young"]


def test_what_undoes_itself_leaves_nothing_to_do():
    assert folded(Pause(), Resume(), Sleep(level=2), Wake()) == ()


def test_one_models_sleep_is_not_another_ones():
    asked = folded(Sleep(model="a"), Sleep(model="b", level=2), Wake(model="a"))
    assert [(event.type, event.model) for event in asked] == [("sleep", "b")]
    assert len({outgoing(event, TopicSettings()).key for event in (Sleep(model="a"), Sleep(model="b"), Sleep())}) == 3


def test_everyones_sleep_or_wake_ends_what_was_said_of_single_models():
    assert folded(Sleep(model="a"), Wake()) == ()
    asked = folded(Sleep(model="a"), Sleep(level=2), Wake(model="b"))
    assert [(event.type, event.model) for event in asked] == [("sleep", None), ("wake", "b")]


def test_one_models_pause_is_not_another_ones_and_everyones_ends_both():
    asked = folded(Pause(model="a"), Pause(model="b"), Resume(model="a"))
    assert [(event.type, event.model) for event in asked] == [("pause", "b")]
    assert folded(Pause(model="a"), Resume()) == ()
    asked = folded(Pause(model="a"), Pause(), Resume(model="b"))
    assert [(event.type, event.model) for event in asked] == [("pause", None), ("resume", "b")]


def test_subjects_do_not_replace_each_other():
    asked = folded(
        Pin(model="a"),
        Pin(model="b"),
        Unpin(model="a"),
        LoraAdd(model="a", name="x", path="x"),
        LoraRemove(model="a", name="y"),
    )
    assert [event.type for event in asked] == ["pin", "unpin", "lora.add", "lora.remove"]


def test_a_tombstone_takes_back_what_its_key_said():
    records = said(Pause(), Switch(model="a"))
    assert [event.type for event in fold([*records, tombstone(b"*/paused/*")], names=NAMES, now=NOW)] == ["switch"]


def test_a_tombstone_of_an_older_key_leaves_the_newer_word_alone():
    records = [*said(Switch(model="a"), key=b"old"), *said(Switch(model="b"), key=b"new"), tombstone(b"old")]
    assert [event.model for event in fold(records, names=NAMES, now=NOW)] == ["b"]


def test_a_bare_switch_under_any_key_replaces_the_one_before_it():
    bare = said(Switch(model="b"), key=b"whatever")
    assert [event.model for event in fold([*said(Switch(model="a")), *bare], names=NAMES, now=NOW)] == ["b"]


def test_commands_and_malformed_records_are_no_state():
    malformed = ControlRecord(None, Record("control", 0, 9, NOW, b"k", b"{"), "not JSON")
    assert fold([*said(Query()), malformed], names=NAMES, now=NOW) == ()


def test_desired_state_goes_to_the_compacted_topic_and_commands_do_not():
    assert outgoing(Switch(model="a"), TopicSettings(topic_prefix="p.")).topic == "p.control"
    assert outgoing(Query(), TopicSettings(topic_prefix="p.")).topic == "p.control.commands"


@pytest.mark.parametrize("value", [b"{", b"[]", b'{"type": "nonsense"}', b'{"type": "switch"}', b"\xff"])
def test_what_is_no_control_event_is_told_with_the_reason(value):
    found = read_event(Record("control", 0, 0, NOW, b"k", value), ())
    assert found.event is None
    assert found.problem


def test_an_empty_key_file_is_no_key(tmp_path):
    (tmp_path / "key").write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        read_keys(tmp_path / "key", "control_key_file")
