"""With a key, who publishes control events must have it; and what was signed is good for what it was signed for."""

import hashlib
import hmac
import json
import shutil
import subprocess
import time
from dataclasses import replace

import pytest

from schemas.base import Outgoing, Record
from schemas.codec import tombstone
from schemas.control import Pause, Switch
from service.kafka.control import fold, outgoing, read_event
from service.kafka.signatures import FRESH_S, Replays, sign
from service.settings import TopicSettings, read_keys

KEYS = (b"the key",)
PROBLEM = "the signature is missing or wrong"


def read(out: Outgoing, *, late_s: float = 0.0, offset: int = 0) -> Record:
    """As the broker took it so many seconds after now."""
    return Record(out.topic, 0, offset, time.time() + late_s, out.key, out.value, tuple(out.headers))


def event(keys=KEYS) -> Record:
    return read(outgoing(Switch(model="a"), TopicSettings(), keys))


def test_a_signed_event_is_obeyed():
    assert read_event(event(), KEYS).event.model == "a"


@pytest.mark.parametrize("keys", [(), (b"another",)])
def test_an_event_without_the_right_signature_is_no_event(keys):
    found = read_event(event(keys), KEYS)
    assert (found.event, found.problem) == (None, PROBLEM)


def test_keys_can_be_changed_one_after_the_other(tmp_path):
    (tmp_path / "keys").write_text("new\n\nold\n")
    keys = read_keys(tmp_path / "keys", "control_key_file")
    assert keys == (b"new", b"old")
    assert all(read_event(event((key,)), keys).event for key in keys)
    assert read_event(event(keys), (b"new",)).event
    assert read_event(event(keys), (b"old",)).problem == PROBLEM


@pytest.mark.parametrize(
    "change",
    [
        {"topic": "control.commands"},
        {"key": b"*/paused/*"},
        {"key": None},
        {"value": None},
        {"value": b'{"model": "b"}'},
    ],
)
def test_a_signature_is_good_for_one_topic_and_key_and_value(change):
    assert read_event(replace(event(), **change), KEYS).problem == PROBLEM


@pytest.mark.parametrize("name", ["ce_id", "ce_type", "content-type", "signed-at"])
def test_a_signature_is_good_for_what_the_headers_mean(name):
    good = event()
    names = [header for header, _ in good.headers]
    for value in (b"gearshift.control.pause", b"1.0", b"", None):
        others = [(header, given) for header, given in good.headers if header != name]
        assert read_event(replace(good, headers=[*others, (name, value)]), KEYS).problem == PROBLEM, (
            name,
            value,
            names,
        )


@pytest.mark.parametrize(
    ("late_s", "good"), [(-FRESH_S - 5, False), (-FRESH_S + 5, True), (FRESH_S - 5, True), (FRESH_S + 5, False)]
)
def test_what_was_signed_is_good_for_minutes_of_the_broker_s_clock(late_s, good):
    found = read_event(read(outgoing(Pause(), TopicSettings(), KEYS), late_s=late_s), KEYS)
    assert (found.event is not None) == good
    assert good or "s before it was written, and 300 are allowed" in found.problem


def test_an_unsigned_tombstone_takes_nothing_back_and_a_signed_one_does():
    pause = read(outgoing(Pause(), TopicSettings(), KEYS))
    erase = tombstone("control", "*/paused/*")

    def folded(*records: Record) -> int:
        return len(fold([read_event(record, KEYS) for record in records], names={"*"}, now=time.time()))

    assert read_event(read(erase), KEYS).problem == PROBLEM
    assert folded(pause, read(erase)) == 1
    assert folded(pause, read(sign(erase, KEYS, time.time()))) == 0
    assert folded(pause, read(sign(tombstone("control", "*/active"), KEYS, time.time()))) == 1


def test_what_is_written_once_more_is_known_while_it_is_fresh_and_forgotten_later():
    replays = Replays()
    first, second = event(), event()
    assert [replays.note(record) for record in (first, second, first, second)] == [False, False, True, True]
    later = replace(event(), timestamp=time.time() + 3 * FRESH_S)
    assert not replays.note(later)
    assert len(replays._seen) == 1


def test_line_breaks_do_not_shift_what_is_signed_into_the_next_line():
    keys = [b"a\nb", b"a%0Ab", b"a", b"a\n"]
    signed = {dict(sign(Outgoing("control", key, b"", []), KEYS, 1.0).headers)["signature"] for key in keys}
    assert len(signed) == len(keys)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_a_signature_can_be_made_with_openssl():
    value, at = json.dumps({"model": "a"}), str(int(time.time()))
    lines = """{ printf '%s\\n' control '*/active' '' '' '' "$1"; printf %s "$2"; }"""
    script = f'{lines} | openssl dgst -sha256 -hmac "$3" -r'
    command = ["sh", "-c", script, "sh", at, value, "the key"]
    made = subprocess.run(command, capture_output=True, check=True).stdout.split()[0]
    headers = [("signed-at", at.encode()), ("signature", made)]
    record = Record("control", 0, 0, time.time(), b"*/active", value.encode(), headers)
    assert read_event(record, KEYS).event.model == "a"
    lines = f"control\n*/active\n\n\n\n{at}\n{value}"
    assert made.decode() == hmac.new(KEYS[0], lines.encode(), hashlib.sha256).hexdigest()
