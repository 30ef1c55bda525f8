"""What strangers write to the topics that workers and clients read besides requests: passed over, and never obeyed."""

import json

import pytest
from aiokafka import TopicPartition

from schemas.base import Record
from schemas.status import Presence
from service.consumer.ledger import Ledger, UnknownLedger
from service.consumer.ledgers_topic import LedgersTopic
from service.errors import UnknownDeadLetter
from service.kafka.cancels import OldCancels
from service.kafka.control import fold, read_event
from service.kafka.dead_letters import collect, read_dead_letter, redrive
from service.kafka.presence import Roster
from service.settings import load

CANCEL = json.dumps({"type": "cancel", "request": "r", "issued": 1.0}).encode()
KEYS = (b"key",)


def test_a_signature_without_a_value_is_a_wrong_one():
    for value in (None, b"", b"\xff", b"x" * 100_000):
        found = read_event(Record("control", 0, 0, 1.0, b"k", CANCEL, [("signature", value)]), KEYS)
        assert (found.event, found.problem) == (None, "the signature is missing or wrong")


def test_a_damaged_record_takes_nothing_back():
    pause = Record("control", 0, 0, 1.0, b"*/paused", b'{"type": "pause"}')
    damaged = Record("control", 0, 1, 1.0, b"*/paused", None, damage="unknown codec 7")
    tombstone = Record("control", 0, 2, 1.0, b"*/paused", None)

    def folded(*records: Record) -> int:
        return len(fold([read_event(record, ()) for record in records], names={"*"}, now=2.0))

    assert (folded(pause), folded(pause, damaged), folded(pause, tombstone)) == (1, 1, 0)
    assert read_event(damaged, KEYS).problem == "the record can't be read: unknown codec 7"


def test_cancels_with_long_keys_are_not_kept_in_memory():
    cancels = OldCancels(60.0)
    cancels.note(read_event(Record("control", 0, 0, 1.0, b"k" * (1 << 20), CANCEL), ()))
    cancels.note(read_event(Record("control", 0, 1, 1.0, b"short", CANCEL), ()))
    assert cancels.take(1e9) == [b"short"]


@pytest.mark.parametrize("key", [None, b"", b"other", b"\xff\xfe", b"w1" * 1000])
def test_a_presence_under_a_key_that_is_not_its_workers_is_no_presence(key):
    value = Presence(worker="w1", pool="p", at=1.0, interval_s=1.0).model_dump_json().encode()
    roster = Roster()
    roster.hear([Record("workers", 0, 0, 1.0, key, value)], live=True)
    assert roster.present() == roster.gone() == ()


@pytest.mark.parametrize("interval", ["NaN", "Infinity", "-1", "1e999"])
def test_a_presence_that_would_never_grow_stale_is_no_presence(interval):
    value = f'{{"worker": "w1", "pool": "p", "at": 1, "interval_s": {interval}}}'.encode()
    roster = Roster()
    roster.hear([Record("workers", 0, 0, 1.0, b"w1", value)], live=True)
    assert roster.present() == ()


LEDGERS = [
    None,
    b"",
    b"[" * 100_000,
    b"\xff",
    b"[]",
    b'{"offset": "7", "metadata": ""}',
    b'{"offset": -1, "metadata": ""}',
    b'{"offset": 1e3, "metadata": ""}',
    b'{"offset": true, "metadata": ""}',
    b'{"offset": 99999999999999999999999, "metadata": ""}',
    b'{"offset": 7, "metadata": 7}',
    b'{"offset": 7}',
]


@pytest.mark.parametrize("value", LEDGERS)
def test_what_is_no_ledger_is_not_remembered(value):
    ledgers = LedgersTopic(settings=load(group_id="g"))
    for key in (b"g/requests/0", b"g/\xff"):
        ledgers._take(Record("ledgers", 0, 0, 1.0, key, value))
    assert ledgers._found == {}


def test_with_the_pools_key_only_what_it_signed_is_remembered(tmp_path):
    """A stranger's ledger would have the pool leave out requests that nobody has answered."""
    for name in ("pool", "other"):
        (tmp_path / name).write_text(f"{name} secret")
    settings = {name: load(group_id="g", pool_key_file=str(tmp_path / name)) for name in ("pool", "other")}
    ledgers = LedgersTopic(settings=settings["pool"])
    here, other = TopicPartition("requests", 0), TopicPartition("requests", 1)
    ours = ledgers.record(here, 7, "", topic_id=None)

    def take(key=ours.key, value=ours.value, headers=ours.headers):
        ledgers._take(Record(ours.topic, 0, 0, 1.0, key, value, headers))

    def remembered():
        return {key: found.ledger.watermark for key, found in ledgers._found.items()}

    take()
    assert remembered() == {"g/requests/0": 7}
    take(headers=[])
    take(value=ours.value.replace(b"7", b"9", 1))
    take(value=b'{"offset": 9, "metadata": "gs2.x"}')
    take(key=ledgers.record(other, 7, "", topic_id=None).key)
    theirs = LedgersTopic(settings=settings["other"]).record(here, 9, "", topic_id=None)
    take(value=theirs.value, headers=theirs.headers)
    take(value=None)
    assert remembered() == {"g/requests/0": 7}


@pytest.mark.parametrize("text", ["gs1.é", "gs1.////", "gs1." + "_" * 4000, "gs1." + "f39_" * 900, "gs1.\x00", "gs1.A"])
def test_metadata_that_is_no_ledger_of_ours_is_an_empty_one(text):
    found = Ledger.decode(7, text)
    assert found.watermark < 1 << 62
    offset, metadata = found.encode()
    assert (offset, len(metadata) <= 4096) == (found.watermark, True)


def test_a_later_versions_ledger_is_told_when_it_is_asked_for_and_not_before():
    ledgers = LedgersTopic(settings=load(group_id="g"))
    ledgers._take(Record("ledgers", 0, 0, 1.0, b"g/requests/0", b'{"offset": 7, "metadata": "gs2.x"}'))
    assert isinstance(ledgers._found["g/requests/0"].ledger, UnknownLedger)


def test_a_dead_letter_of_nulls_is_shown_as_well_as_can_be():
    headers = [(f"dl-{name}", None) for name in ("id", "class", "origin", "attempts", "at", "error", "redriven-as")]
    for timestamp in (0.0, -9.2e15, 9.2e15):
        letter = read_dead_letter(
            Record("dead-letters", 0, 3, timestamp, None, None, [*headers, ("redrive-history", None)])
        )
        assert (letter.origin, letter.attempts, letter.history) == ("dead-letters/0/3", 0, ())
    assert len(collect([Record("dead-letters", 0, 3, 0.0, None, None, headers)])) == 1


async def test_a_dead_letter_that_somebody_forged_is_not_written_to_other_topics():
    headers = [("dl-origin", b"control/0/1"), ("dl-id", b"r1")]
    letter = read_dead_letter(Record("dead-letters", 0, 3, 0.0, b"k", b'{"type": "pause"}', headers))
    with pytest.raises(UnknownDeadLetter, match="'control'"):
        await redrive(load(bootstrap_servers="127.0.0.1:9"), [letter])
