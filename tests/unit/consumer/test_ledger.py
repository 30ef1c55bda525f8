"""What a commit's metadata remembers, whatever the order in which requests finish."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from schemas.requests import Attempt
from service.consumer.ledger import MAX_METADATA, Ledger, UnknownLedger


def again(ledger: Ledger, finishing: tuple[int, ...] = ()) -> Ledger:
    """The ledger as its next owner reads it."""
    return Ledger.decode(*ledger.encode(finishing))


def read(ledger: Ledger, *offsets: int) -> list[int]:
    return [offset for offset in offsets if ledger.deliver(offset) is not None]


def test_the_watermark_follows_the_lowest_unfinished_offset() -> None:
    ledger = Ledger(10)
    read(ledger, *range(10, 15))
    ledger.finish(11)
    assert ledger.watermark == 10
    ledger.finish(10)
    assert ledger.watermark == 12


def test_gaps_that_have_no_record_are_stepped_over() -> None:
    ledger = Ledger(0)
    read(ledger, 3, 7)
    assert ledger.watermark == 3
    ledger.finish(3)
    assert ledger.watermark == 7
    ledger.finish(7)
    assert ledger.reach(9) == 1
    assert ledger.watermark == 9


def test_an_offset_is_delivered_once_and_finished_once() -> None:
    ledger = Ledger(0)
    assert read(ledger, 0, 1, 0, 1) == [0, 1]
    assert [ledger.finish(1), ledger.finish(1)] == [True, False]


def test_what_is_finished_above_the_watermark_is_not_delivered_to_the_next_owner() -> None:
    ledger = Ledger(0)
    read(ledger, *range(10))
    for offset in (2, 3, 8):
        ledger.finish(offset)
    assert read(again(ledger), *range(12)) == [0, 1, 4, 5, 6, 7, 9, 10, 11]


def test_what_is_being_finished_is_in_the_commit_and_not_yet_in_the_ledger() -> None:
    ledger = Ledger(0)
    read(ledger, 0, 1, 2)
    assert again(ledger, (0, 1)).watermark == 2
    assert ledger.watermark == 0
    assert ledger.pending == {0, 1, 2}


def test_what_was_picked_ahead_is_still_to_be_settled_when_retention_overtakes_it() -> None:
    ledger = Ledger(0)
    assert ledger.pick(5) is not None
    ledger.start(5)
    assert ledger.reach(8) == 7
    assert (ledger.watermark, ledger.position, ledger.pending) == (5, 8, {5})
    assert dict(ledger.marks) == {5: 1}
    assert ledger.finish(5)
    assert (ledger.watermark, ledger.pending) == (8, set())


def test_runs_that_were_started_are_counted_and_can_be_withdrawn() -> None:
    first = Ledger(5, epoch=1)
    for offset in (5, 6, 7):
        attempt = first.deliver(offset)
        assert attempt == Attempt(epoch=1, n=1)
        first.start(offset)
    first.withdraw(6)
    first.finish(7)
    second = again(first)
    assert dict(second.marks) == {5: 1}
    assert [second.deliver(offset) for offset in (5, 6)] == [Attempt(epoch=1, n=2), Attempt(epoch=1, n=1)]


def died(ledger: Ledger, offset: int, *, times: int = 1, alone: bool = False, witnessed: bool = False) -> Ledger:
    """The ledger after so many owners have died with a run of ``offset``."""
    for _ in range(times):
        read(ledger, offset)
        ledger.start(offset, alone=alone)
        if witnessed:
            ledger.engine_died(offset if alone else None)
        ledger = again(ledger)
    return ledger


def test_withdrawing_a_run_leaves_the_earlier_ones() -> None:
    ledger = died(Ledger(0), 0, times=2)
    read(ledger, 0)
    ledger.start(0)
    ledger.withdraw(0)
    assert dict(again(ledger).marks) == {0: 2}
    ledger.withdraw(0)
    assert dict(again(ledger).marks) == {0: 2}, "what others started is not ours to take back"


def test_a_run_that_is_tried_again_here_is_one_run() -> None:
    ledger = Ledger(0)
    read(ledger, 0)
    for _ in range(3):
        ledger.start(0)
        ledger.withdraw(0)
    ledger.start(0)
    assert dict(again(ledger).marks) == {0: 1}


def test_a_death_says_nothing_in_company_more_alone_and_most_where_the_worker_lived_to_see_it() -> None:
    ledger = died(Ledger(0), 3, times=2, witnessed=True)
    assert (ledger.marks[3], ledger.evidence(3)) == (2, 0)
    once = died(ledger, 3, alone=True)
    assert (once.marks[3], once.evidence(3)) == (3, 1)
    assert died(once, 3).evidence(3) == 1
    assert died(once, 3, alone=True).evidence(3) == 2
    assert died(ledger, 3, alone=True, witnessed=True).evidence(3) == 2


def test_a_run_that_gets_company_is_not_alone_any_more_and_still_one() -> None:
    ledger = Ledger(0)
    read(ledger, 0)
    ledger.start(0, alone=True)
    assert again(ledger).evidence(0)
    ledger.start(0)
    assert (again(ledger).marks[0], again(ledger).evidence(0)) == (1, 0)


def test_a_witness_accuses_nobody_that_was_withdrawn_or_is_finished() -> None:
    ledger = Ledger(0)
    read(ledger, 0, 1, 2)
    for offset in (1, 2):
        ledger.start(offset, alone=True)
    ledger.withdraw(1)
    ledger.finish(2)
    for culprit in (1, 2):
        ledger.engine_died(culprit)
        assert dict(again(ledger).marks) == {}


def test_a_witness_clears_all_but_the_culprit() -> None:
    ledger = Ledger(0)
    read(ledger, 0, 1)
    for offset in (0, 1):
        ledger.start(offset, alone=True)
    ledger.engine_died(1)
    assert [again(ledger).evidence(offset) for offset in (0, 1)] == [0, 2]
    ledger.engine_died(None)
    assert [again(ledger).evidence(offset) for offset in (0, 1)] == [0, 0]


def test_a_mark_that_was_withdrawn_here_is_no_death_when_the_ledger_is_taken_over_again() -> None:
    ledger = Ledger(0)
    read(ledger, 0)
    ledger.start(0, alone=True)
    stored = again(ledger)
    ledger.withdraw(0)
    ledger.adopt(stored)
    assert dict(ledger.marks) == {}


def test_runs_that_end_without_a_death_are_not_blamed_and_those_of_earlier_owners_still_are() -> None:
    first = Ledger(0)
    read(first, 0, 1)
    first.start(0)
    second = again(first)
    for offset in (0, 1):
        assert second.deliver(offset) is not None
        second.start(offset, alone=True)
    unblamed = Ledger.decode(*second.encode(own_marks=False))
    assert (dict(unblamed.marks), unblamed.evidence(0)) == ({0: 1}, 0)
    assert dict(again(second).marks) == {0: 2, 1: 1}


@pytest.mark.parametrize("metadata", [None, "", "consumer-7@host", "gs", "gs1.!!!", "gs1.A", "gs1.AAEB"])
def test_empty_foreign_or_damaged_metadata_is_an_empty_ledger(metadata: str | None) -> None:
    ledger = Ledger.decode(42, metadata)
    assert (ledger.watermark, ledger.position, dict(ledger.marks)) == (42, 42, {})
    assert read(ledger, 42, 43) == [42, 43]


def test_a_ledger_of_a_later_version_is_refused_rather_than_forgotten() -> None:
    with pytest.raises(UnknownLedger, match="version 2"):
        Ledger.decode(0, "gs2.AAAA")


def test_taking_over_learns_what_others_finished_and_keeps_what_runs_here() -> None:
    mine = Ledger(0)
    read(mine, *range(6))
    mine.finish(1)
    stored = again(mine)
    read(stored, *range(6))
    for offset in (0, 3):
        stored.finish(offset)
    stored.start(4)
    assert mine.adopt(again(stored)) == {0, 3}
    assert mine.pending == {2, 4, 5}
    assert mine.watermark == 2
    assert mine.position == 6
    assert mine.marks[4] == 1


def test_reading_pauses_before_the_metadata_could_overflow() -> None:
    ledger = Ledger(0)
    while ledger.takes(1):
        ledger.deliver(ledger.position)
    assert len(ledger.pending) > 2000
    for offset in range(1, ledger.position, 2):
        ledger.finish(offset)
    for offset in sorted(ledger.pending):
        ledger.start(offset)
    assert len(ledger.encode()[1]) <= MAX_METADATA
    assert set(read(again(ledger), *range(ledger.position))) == set(range(0, ledger.position, 2))


def test_the_watermark_may_pass_the_position_over_what_an_earlier_owner_finished() -> None:
    first = Ledger(0)
    read(first, *range(10))
    for offset in range(1, 10):
        first.finish(offset)
    second = again(first)
    read(second, 0)
    second.finish(0)
    assert (second.watermark, second.position) == (10, 10)
    assert second.takes(1)


def test_one_hung_request_does_not_stop_thousands_behind_it() -> None:
    ledger = Ledger(0)
    read(ledger, 0)
    for offset in range(1, 1_000_000, 499):
        assert ledger.takes(256)
        ledger.deliver(offset)
        ledger.finish(offset)
    assert len(ledger.encode()[1]) < 100


offsets = st.integers(0, 400)


def with_runs(ledger: Ledger, runs: dict[int, tuple[int, bool]]) -> Ledger:
    """The ledger with so many runs of each offset, all alone or none, and one of the latest to blame for a death."""
    culprit = next((offset for offset, (_, alone) in runs.items() if alone), None)
    while runs:
        for offset, (_, alone) in runs.items():
            ledger.start(offset, alone=alone)
        runs = {offset: (count - 1, alone) for offset, (count, alone) in runs.items() if count > 1}
        if runs:
            ledger = again(ledger)
    ledger.engine_died(culprit)
    return ledger


@given(
    watermark=st.integers(0, 2**60),
    epoch=st.integers(0, 2**31),
    finished=st.sets(offsets),
    runs=st.dictionaries(offsets, st.tuples(st.integers(1, 9), st.booleans())),
)
def test_encoding_and_decoding_give_the_same_ledger(
    watermark: int, epoch: int, finished: set[int], runs: dict[int, tuple[int, bool]]
) -> None:
    ledger = Ledger(watermark, epoch=epoch)
    read(ledger, *range(watermark, watermark + 402))
    for offset in finished:
        ledger.finish(watermark + offset)
    ledger = with_runs(ledger, {watermark + offset: run for offset, run in runs.items()})
    copy = again(ledger)
    assert copy.watermark == ledger.watermark
    assert dict(copy.marks) == dict(ledger.marks)
    assert [copy.evidence(offset) for offset in copy.marks] == [ledger.evidence(offset) for offset in copy.marks]
    assert copy.epoch == epoch
    everywhere = range(watermark, watermark + 402)
    assert [copy.finished(offset) for offset in everywhere] == [ledger.finished(offset) for offset in everywhere]


class Owners(RuleBasedStateMachine):
    """Owner after owner of one partition, each dying at any moment; beside them a plain set that forgets nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.finished: set[int] = set()
        self.exists: list[int] = []

    @initialize(gaps=st.lists(st.integers(1, 5), min_size=1, max_size=120))
    def log(self, gaps: list[int]) -> None:
        at = 0
        for gap in gaps:
            at += gap
            self.exists.append(at)
        self.commit = (0, "")
        self.ledger = Ledger.decode(*self.commit)
        self.next = 0
        self.durable: set[int] = set()

    @precondition(lambda self: self.next < len(self.exists) and self.ledger.takes(1))
    @rule()
    def deliver(self) -> None:
        offset = self.exists[self.next]
        self.next += 1
        expected = offset not in self.durable | self.ledger.pending
        assert (self.ledger.deliver(offset) is not None) == expected

    @precondition(lambda self: self.next < len(self.exists) and self.ledger.takes(1, upto=self.exists[-1] + 1))
    @rule(data=st.data())
    def pick_one_ahead(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(self.exists[self.next :]))
        expected = offset not in self.durable | self.ledger.pending
        assert (self.ledger.pick(offset) is not None) == expected

    @precondition(lambda self: bool(self.ledger.pending))
    @rule(data=st.data())
    def start_one(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.ledger.pending)))
        self.ledger.start(offset, alone=data.draw(st.booleans()))
        if data.draw(st.booleans()):
            self.ledger.engine_died(data.draw(st.sampled_from([None, offset])))

    @precondition(lambda self: bool(self.ledger.pending))
    @rule(data=st.data())
    def settle_some_and_commit(self, data: st.DataObject) -> None:
        some = data.draw(st.sets(st.sampled_from(sorted(self.ledger.pending)), min_size=1))
        self.commit = self.ledger.encode(some)
        for offset in some:
            assert self.ledger.finish(offset)
            assert offset not in self.durable, "finished twice"
        self.durable |= some

    @rule()
    def die_and_be_replaced(self) -> None:
        self.ledger = Ledger.decode(*self.commit)
        self.next = next((i for i, at in enumerate(self.exists) if at >= self.ledger.watermark), len(self.exists))

    @rule()
    def doubt_and_read_back(self) -> None:
        assert self.ledger.adopt(Ledger.decode(*self.commit)) == frozenset()

    @invariant()
    def what_is_committed_fits_and_says_the_truth(self) -> None:
        assert len(self.commit[1]) <= MAX_METADATA
        stored = Ledger.decode(*self.commit)
        assert {offset for offset in self.exists if offset < self._read_up_to() and stored.finished(offset)} <= (
            self.durable
        )
        assert all(stored.finished(offset) for offset in self.durable)

    def _read_up_to(self) -> int:
        return self.exists[self.next - 1] + 1 if self.next else 0


Owners.TestCase.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
TestOwners = Owners.TestCase
