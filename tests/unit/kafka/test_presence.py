"""Who is there, by what was heard of them and when."""

from dataclasses import replace

from schemas.base import Record
from schemas.codec import encode_presence, tombstone
from schemas.marks import signed
from schemas.status import Presence
from service.kafka.presence import GONE_INTERVALS, STALE_INTERVALS, Roster


class Clocks:
    def __init__(self):
        self.now = 100.0

    def roster(self):
        return Roster(clock=lambda: self.now, wall=lambda: self.now + 5000)


def heard(worker, *, timestamp=0.0, **more):
    out = encode_presence("workers", Presence(worker=worker, pool="p", at=0, interval_s=2, **more))
    return Record("workers", 0, 0, timestamp, out.key, out.value)


def names(roster):
    return [presence.worker for presence in roster.present()]


def test_a_worker_is_there_until_it_misses_a_few_of_its_intervals():
    clocks = Clocks()
    roster = clocks.roster()
    roster.hear([heard("a")], live=True)
    clocks.now += 2 * STALE_INTERVALS
    assert names(roster) == ["a"]
    clocks.now += 0.1
    assert names(roster) == []
    assert roster.gone() == ()


def test_a_worker_that_has_left_is_not_there_but_is_remembered_until_it_is_taken_back():
    clocks = Clocks()
    roster = clocks.roster()
    roster.hear([heard("a"), heard("a", state="left")], live=True)
    assert names(roster) == []
    clocks.now += 2 * GONE_INTERVALS + 0.1
    assert roster.gone() == ("a",)


def test_what_was_learnt_last_is_remembered_whoever_has_started_or_is_gone_since():
    roster = Clocks().roster()
    assert roster.served("p") == ()
    roster.hear([heard("a", costs={"tokens_s": {"m": [1.0, 0.0, 1]}})], live=True)
    roster.hear([heard("b", costs={"tokens_s": {"m": [2.0, 0.0, 1]}})], live=True)
    gone = tombstone("workers", "b")
    roster.hear([heard("c", costs={"tokens_s": {}}), Record("workers", 0, 0, 0.0, gone.key, gone.value)], live=True)
    roster.hear([heard("b", state="starting")], live=True)
    assert [(one.worker, one.costs["tokens_s"]) for one in roster.served("p")] == [
        ("a", {"m": [1.0, 0.0, 1]}), ("b", {"m": [2.0, 0.0, 1]}), ("c", {})
    ]  # fmt: skip
    assert roster.served("another pool") == ()


def test_of_all_workers_that_ever_were_the_latest_are_remembered():
    roster = Clocks().roster()
    roster.hear([heard(f"w{n}") for n in range(1000)], live=True)
    assert [one.worker for one in roster.served("p")][-1] == "w999"
    assert len(roster.served("p")) < 300


def test_what_one_does_for_all_is_the_first_one_s_that_is_there():
    clocks = Clocks()
    roster = clocks.roster()
    assert roster.leads("only")
    roster.hear([heard("b"), heard("a"), heard("c")], live=True)
    assert [name for name in "abc" if roster.leads(name)] == ["a"]
    clocks.now += 1000
    roster.hear([heard("b")], live=True)
    assert roster.leads("b")


def test_a_worker_that_nobody_renews_is_gone():
    clocks = Clocks()
    roster = clocks.roster()
    roster.hear([heard("a")], live=True)
    clocks.now += 2 * GONE_INTERVALS + 0.1
    assert roster.gone() == ("a",)
    roster.hear([heard("a")], live=True)
    assert roster.gone() == ()


def test_another_hosts_clock_does_not_make_a_live_worker_stale():
    roster = Clocks().roster()
    roster.hear([heard("a", timestamp=1.0)], live=True)
    assert names(roster) == ["a"]


def test_what_was_there_before_us_is_as_old_as_its_record():
    clocks = Clocks()
    roster = clocks.roster()
    roster.hear(
        [heard("old", timestamp=clocks.now + 5000 - 60), heard("new", timestamp=clocks.now + 5000 - 1)], live=False
    )
    assert names(roster) == ["new"]
    assert roster.gone() == ("old",)


def test_a_tombstone_and_an_unreadable_record_take_a_worker_out():
    roster = Clocks().roster()
    roster.hear([heard("a"), heard("b")], live=True)
    out = tombstone("workers", "a")
    roster.hear([Record("workers", 0, 1, 0, out.key, out.value), Record("workers", 0, 2, 0, b"b", b"{")], live=True)
    assert names(roster) == []


def test_with_a_pools_key_only_its_workers_are_believed():
    """What a stranger says of a worker would bend the schedule: what models cost, and who is there."""

    def written(out, key: bytes, topic: str = "workers"):
        out = signed(out, [key] if key else [])
        return Record(topic, 0, 0, 0.0, out.key, out.value, tuple(out.headers))

    def presence(worker: str):
        return encode_presence("workers", Presence(worker=worker, pool="p", at=0, interval_s=2, costs={"x": worker}))

    roster = Roster(keys=[b"k" * 32])
    good = written(presence("a"), b"k" * 32)
    roster.hear([good, written(presence("b"), b""), written(presence("c"), b"another")], live=True)
    roster.hear([replace(good, key=b"d"), replace(good, topic="others")], live=True)
    roster.hear([written(tombstone("workers", "a"), b"")], live=True)
    assert (names(roster), [one.worker for one in roster.served("p")]) == (["a"], ["a"])
    roster.hear([written(tombstone("workers", "a"), b"k" * 32)], live=True)
    assert names(roster) == []
