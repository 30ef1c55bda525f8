"""The index over durable calls: what the log says, in whatever order and however often it is folded, and no more."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from aiokafka import TopicPartition
from hypothesis import given
from hypothesis import strategies as st

from schemas.base import Origin, Record
from schemas.codec import encode_chunk, encode_result
from schemas.requests import Attempt
from schemas.results import Chunk, Outcome, Result, Timing
from service.kafka import folded as folded_module
from service.kafka.calls import CallIndex, Calls, fingerprint_of
from service.settings import TopicSettings, load

TOPICS = TopicSettings()


KEPT_S = TOPICS.calls_retention_s
HOUR_S = 3600.0


def call(offset: int, *, id_: str = "a", value: bytes | None = b"{}", at: float = 1.0, partition: int = 0) -> Record:
    return Record("calls", partition, offset, at, id_.encode(), value, [("endpoint", b"/v1/completions")])


def result(
    offset: int, *, id_: str = "a", origin: Origin | None = None, moved_from: Origin | None = None, at: float = 1.0
) -> Record:
    found = Result(
        id=id_,
        origin=origin or Origin(topic="calls", partition=0, offset=0),
        says_moved_from=moved_from,
        outcome=Outcome.COMPLETED,
        status=200,
        timing=Timing(received=0.0, finished=0.0),
    )
    out = encode_result("answers", found)
    return Record("answers", 1, offset, at, out.key, out.value, out.headers)


def chunk(offset: int, *, id_: str = "a", seq: int = 0) -> Record:
    origin = Origin(topic="calls", partition=0, offset=0)
    out = encode_chunk("answers", Chunk(id=id_, seq=seq, origin=origin, attempt=Attempt(), data={"n": seq}))
    return Record("answers", 1, offset, 1.0, out.key, out.value, out.headers)


def folded(*records: Record, keyed: bool = False) -> CallIndex:
    index = CallIndex(TOPICS, keyed=keyed)
    for record in records:
        index.fold(record)
    return index


def state(index: CallIndex, *ids: str) -> list[object]:
    return [(index.call(id_), index.answer(id_)) for id_ in ids]


def places(index: CallIndex) -> tuple[object, object] | None:
    """Where the pieces of the answer begin, and where its result lies, as partitions and offsets."""
    found = index.answer("a")
    return None if found is None else (found.pieces, found.result)


def test_the_first_record_of_an_id_counts_and_the_others_are_not_run():
    index = folded(call(0), call(1), call(2, id_="b"))
    assert [index.counts(call(offset)) for offset in (0, 1)] == [True, False]
    assert index.counts(call(2, id_="b"))
    assert index.counts(call(7, id_="unknown")), "one that is too old to be known stands for itself"


def test_an_answer_is_found_from_its_first_piece_to_its_result():
    index = folded(call(0), chunk(4), chunk(5, seq=1), result(6), result(9))
    assert places(index) == ((1, 4), (1, 6))


def test_a_result_counts_in_whatever_partition_the_first_of_them_is_found():
    """Of producers that have not yet heard that the topic has grown, each key leads to another partition."""
    elsewhere = replace(result(2), partition=3)
    for log in ([chunk(4), chunk(5, seq=1), elsewhere], [elsewhere, chunk(4), chunk(5, seq=1)]):
        index = folded(call(0), *log, result(6), replace(result(0), partition=0))
        assert places(index) == ((1, 4), (3, 2))
        assert index.unfinished == 0


def test_a_piece_that_comes_behind_its_result_in_the_same_partition_says_nothing_of_where_they_begin():
    assert places(folded(call(0), result(1), chunk(4), replace(chunk(0), partition=0))) == ((0, 0), (1, 1))
    assert places(folded(call(0), result(1), chunk(4))) == (None, (1, 1))


def test_pieces_that_come_behind_their_result_are_among_what_is_read_of_it():
    late = [chunk(7, seq=1), chunk(9, seq=2)]
    spans = folded(call(0), chunk(4), result(6), *late).spans("a", since=0, read_to=lambda _: 100)
    assert spans == [(1, 4, 10)]
    assert folded(call(0), result(6), *late).spans("a", since=8, read_to=lambda _: 100) == [(1, 8, 10)]
    apart = folded(call(0), replace(chunk(4), partition=0), result(6), *late).spans("a", since=0, read_to=lambda _: 100)
    assert apart == [(0, 4, 100), (1, 6, 10)]
    others = folded(call(0), chunk(4), result(6), chunk(7, id_="b"), replace(late[1], value=b"no chunk"))
    assert others.spans("a", since=0, read_to=lambda _: 100) == [(1, 4, 7)]


def test_a_strangers_result_in_another_partition_does_not_count():
    strange = replace(result(2, origin=Origin(topic="calls", partition=0, offset=9)), partition=3)
    assert places(folded(call(0), chunk(4), strange)) == ((1, 4), None)
    assert places(folded(call(0), chunk(4), strange, result(6))) == ((1, 4), (1, 6))


def test_what_is_deleted_has_no_answer_and_is_not_run_however_late_that_comes():
    tombstone = call(3, value=None)
    index = folded(call(0), result(1), tombstone, result(2))
    assert index.answer("a") is None
    assert index.deleted(b"a")
    assert not index.counts(call(0))
    assert not index.counts(tombstone)


@given(st.lists(st.integers(0, 9), max_size=30))
def test_reading_from_the_beginning_again_changes_nothing(again: list[int]):
    log = [call(0), call(1), chunk(0), call(2, id_="b"), result(1), call(3, id_="b", value=None), result(2, id_="b")]
    log += [call(4, id_="b"), replace(result(0), partition=3), replace(chunk(1), partition=3)]
    log += [chunk(3, seq=1), chunk(4, seq=2)]
    index = folded(*log)
    before = state(index, "a", "b")
    for number in sorted(again):
        index.fold(log[number])
    assert state(index, "a", "b") == before


@pytest.mark.parametrize(
    "origin",
    [
        Origin(topic="requests", partition=0, offset=0),
        Origin(topic="calls", partition=0, offset=1),
        Origin(topic="calls", partition=1, offset=0),
        Origin(topic="results", partition=0, offset=0),
    ],
)
def test_an_answer_to_another_record_is_none(origin: Origin):
    assert folded(call(0), result(1, origin=origin)).answer("a") is None


@pytest.mark.parametrize("topic", ["requests.qwen", "throttled"])
def test_without_a_key_a_call_that_was_moved_is_answered_from_there(topic: str):
    moved = result(1, origin=Origin(topic=topic, partition=3, offset=9))
    assert places(folded(call(0), moved)) == (None, (1, 1))
    assert folded(call(0), moved, keyed=True).answer("a") is None, "with one its answer has the call's own origin"


def test_a_result_under_another_ids_key_is_none():
    assert folded(call(0), replace(result(1, id_="b"), key=b"a")).answer("a") is None


def test_what_is_no_answer_does_not_keep_one_in_another_partition_from_being_found():
    strange = replace(chunk(1), partition=0, value=b"no chunk")
    assert places(folded(call(0), strange, chunk(4), result(5))) == ((1, 4), (1, 5))


def test_a_call_is_deleted_from_another_partition_wherever_it_lies_there():
    assert folded(call(7), replace(call(3, value=None), partition=1)).deleted(b"a")
    assert not folded(call(7), call(3, value=None)).deleted(b"a")


def test_what_is_older_than_is_kept_is_forgotten():
    now = time.time()
    index = folded(call(0, at=now - 100), call(1, id_="b", at=now))
    index.forget_before(now - 50)
    assert (index.call("a"), index.unfinished) == (None, 1)
    assert index.call("b") is not None


def test_a_call_is_forgotten_by_its_age_in_whatever_order_the_partitions_are_read():
    old, young, again = call(0, at=0.0), call(7, id_="b", at=KEPT_S, partition=1), call(9, at=KEPT_S + 1)
    index = folded(young, old)
    index.forget_before(1.0)
    assert (index.call("a"), index.unfinished) == (None, 1)
    index.fold(again)
    assert index.counts(again)
    assert not index.counts(old)


def test_an_id_that_is_used_again_when_its_call_is_kept_no_longer_is_that_of_the_new_call():
    """When a process starts, what Kafka has not yet deleted is folded first: its segments span half of the time."""
    log = [call(0, at=0.0), call(9, at=KEPT_S + 1)]
    answers = [result(3, at=HOUR_S), result(4, origin=log[1].origin, at=KEPT_S + HOUR_S)]
    for order in ([*log, *answers], [*answers, *log], [log[0], *answers, log[1]], [answers[0], *log, answers[1]]):
        index = folded(*order)
        assert [index.counts(one) for one in log] == [False, True]
        assert (places(index), index.unfinished) == ((None, (1, 4)), 0)
        index.forget_before(KEPT_S)
        assert places(index) == (None, (1, 4))


def test_an_id_that_is_used_again_too_early_is_that_of_the_first_call():
    index = folded(call(0, at=0.0), call(9, at=KEPT_S), result(3, origin=call(9).origin, at=KEPT_S))
    assert (index.counts(call(0)), index.counts(call(9)), index.answer("a")) == (True, False, None)


def test_an_answer_is_forgotten_with_its_call_and_is_not_that_of_the_next_one():
    again = call(9, at=KEPT_S + 2)
    index = folded(call(0, at=0.0), result(3, at=HOUR_S))
    index.forget_before(1.0)
    assert (index.call("a"), index.answer("a")) == (None, None)
    index.fold(again)
    index.fold(result(5, at=KEPT_S + 3))
    assert (index.answer("a"), index.unfinished) == (None, 1), "the first one's, once more"
    index.fold(result(6, origin=again.origin, at=KEPT_S + HOUR_S))
    index.forget_before(HOUR_S + 1)
    assert (places(index), index.unfinished) == ((None, (1, 6)), 0)


def test_the_answer_of_a_moved_call_is_that_of_the_call_that_it_names():
    moved, again = Origin(topic="throttled", partition=3, offset=9), call(9, at=KEPT_S + 1)
    answers = [
        result(3, origin=moved, moved_from=call(0).origin, at=HOUR_S),
        result(4, origin=moved, moved_from=again.origin, at=KEPT_S + HOUR_S),
    ]
    for order in ([call(0, at=0.0), again, *answers], [*answers, call(0, at=0.0), again]):
        assert places(folded(*order)) == (None, (1, 4))
    assert folded(result(3, origin=moved, at=HOUR_S), again).answer("a") is None, "it is older than the call"


def test_an_answer_that_is_read_before_its_call_is_forgotten_by_its_own_age():
    log = [result(3, at=5.0), result(4, id_="b", at=1.0)]
    index = folded(*log)
    index.forget_before(2.0)
    for record in (call(0), call(0, id_="b")):
        index.fold(record)
    assert (index.answer("b"), places(index)) == (None, (None, (1, 3)))


def test_a_tombstone_counts_that_is_read_before_its_call_from_another_partition():
    """The topic has grown, and its partitions are read in no order."""
    tombstone = call(3, value=None, partition=20, at=HOUR_S)
    for order in ([tombstone, call(7), result(4)], [result(4), tombstone, call(7)]):
        index = folded(*order)
        assert (index.deleted(b"a"), index.answer("a"), index.unfinished) == (True, None, 0)
        assert not index.counts(call(7))
    assert not folded(call(3, value=None), call(7)).deleted(b"a"), "in one partition it is that of an earlier call"


def test_a_tombstone_is_that_of_the_call_before_it_and_is_forgotten_when_it_is_old():
    first, again = call(7, at=0.0), call(9, at=KEPT_S + HOUR_S)
    of_first = call(3, value=None, partition=20, at=KEPT_S - HOUR_S)
    of_again = call(4, value=None, partition=20, at=KEPT_S + 2 * HOUR_S)
    for order in ([of_first, first, again], [first, of_first, again], [first, again, of_first]):
        assert not folded(*order).deleted(b"a")
    for order in ([of_first, of_again, first, again], [first, of_first, of_again, again]):
        assert folded(*order).deleted(b"a")
    index = folded(of_first)
    index.forget_before(KEPT_S)
    index.fold(call(7, at=KEPT_S - HOUR_S))
    assert not index.deleted(b"a")


def test_what_is_finished_deleted_or_forgotten_is_unfinished_no_more_whoever_is_read_first():
    mine, other = f"resp_{'1' * 16}a", f"resp_{'2' * 16}a"
    index = folded(call(0, id_=mine, at=1.0), call(1, id_=f"{mine}b", at=2.0), call(2, id_=other, at=3.0))
    assert (index.unfinished, index.unfinished_beside(mine), index.unfinished_beside(other)) == (3, 2, 1)
    index.fold(result(0, id_=mine))
    index.fold(result(0, id_=mine))
    index.fold(call(3, id_=other, value=None))
    assert (index.unfinished, index.unfinished_beside(mine), index.unfinished_beside(other)) == (1, 1, 0)
    index.forget_before(2.5)
    assert (index.unfinished, index.unfinished_beside(mine)) == (0, 0)
    assert folded(result(0), call(0)).unfinished == 0


def test_requests_differ_by_endpoint_and_by_body():
    one = call(0)
    others = [replace(one, value=b"{ }"), replace(one, headers=[("endpoint", b"/v1/embeddings")])]
    assert len({fingerprint_of(record) for record in (one, *others)}) == 3


def test_a_request_is_the_one_that_was_sent_whatever_its_record_has_more():
    sent = call(0)
    longer = replace(sent, value=b'{"more": 1}', headers=[*sent.headers, ("fingerprint", fingerprint_of(sent))])
    assert fingerprint_of(longer) == fingerprint_of(sent)
    strange = replace(sent, headers=[("fingerprint", b"\xff" * 100)])
    assert folded(strange).call("a") is not None


_HEADERS = st.lists(
    st.tuples(st.sampled_from(["ce_type", "endpoint", "ce_id", "x"]), st.none() | st.binary(max_size=300)), max_size=4
)


@given(
    st.sampled_from(["calls", "answers", "strange"]),
    st.none() | st.binary(max_size=300),
    st.none() | st.binary(max_size=200) | st.just(result(0).value),
    _HEADERS,
    st.none() | st.just("cut"),
)
def test_no_bytes_end_the_folding(topic, key, value, headers, damage):
    index = CallIndex(TOPICS, keyed=False)
    record = Record(topic, 0, 0, 1.0, key, value, headers, damage=damage)
    index.fold(record)
    assert index.counts(record) in {True, False}
    assert index.unfinished <= 1


def test_the_answers_of_a_finished_call_are_looked_for_no_further_than_its_result():
    """However many answers of others the partition has behind it: a repeated call looked through all of them."""

    def read_to(_partition: int) -> int:
        return 1_000_000

    def spans(index: CallIndex, since: int = 0) -> list[tuple[int, int, int]]:
        return index.spans("a", since=since, read_to=read_to)

    index = folded(call(0), chunk(10), chunk(12, seq=1))
    assert spans(index) == [(1, 10, 1_000_000)]
    assert spans(index, 11) == [(1, 11, 1_000_000)]
    index.fold(result(20))
    assert spans(index) == [(1, 10, 21)]
    assert spans(index, 21) == [(1, 21, 21)]
    assert spans(folded(call(0))) == []
    assert spans(folded(call(0), result(20))) == [(1, 20, 21)]


class Log:
    """The topic of answers in memory, all of it read. ``between`` gives what a partition has."""

    def __init__(self, *records: Record) -> None:
        self._records = records

    def read_to(self, where: TopicPartition) -> int:
        return max((one.offset + 1 for one in self._records if one.partition == where.partition), default=0)

    async def between(self, where: TopicPartition, first: int, end: int) -> AsyncIterator[Record]:
        for record in self._records:
            if record.partition == where.partition and first <= record.offset < end:
                yield record


@pytest.mark.parametrize("result_first", [False, True])
async def test_who_comes_late_finds_the_pieces_and_the_result_each_in_its_own_partition(
    monkeypatch: pytest.MonkeyPatch, result_first: bool
) -> None:
    pieces, end = [chunk(4), chunk(5, id_="b"), chunk(6, seq=1)], replace(result(2), partition=3)
    log = Log(*([end, *pieces] if result_first else [*pieces, end]), result(9, id_="b"))
    monkeypatch.setattr(folded_module, "FoldedLog", lambda **_: log)
    calls = Calls(settings=load())
    for record in (call(0), call(0, id_="b"), *log._records):
        calls._take(record)
    with calls.following("a") as following:
        async with asyncio.timeout(5):
            *said, last = [await following.next() for _ in range(3)]
    assert [piece.seq for piece in said if isinstance(piece, Chunk)] == [0, 1]
    assert await calls.result("a") == last
    assert [one.id async for one in calls.results(["a", "b", "c"])] == ["a", "b"]
