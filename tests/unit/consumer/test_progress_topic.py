"""What is kept of unfinished answers: whose it is, what strangers write there, and that no result fails with it."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import KafkaError
from structlog.testing import capture_logs

from schemas.base import Outgoing, Record
from schemas.codec import decode_progress, encode_progress
from schemas.progress import Begun, Part, Progress, Said
from service.consumer.ledger import Ledger
from service.consumer.ledgers_topic import LedgersTopic
from service.consumer.progress_topic import MOST_BYTES, Found, PartitionProgress, ProgressTopic
from service.consumer.transactions import OutcomeUnknown, PartitionTransactions, Refused
from service.consumer.writer import LedgerWriter, ReadLedger
from service.errors import BrokerUnavailable
from service.settings import Settings, load
from tests.support.virtual_time import virtual_time

PARTITION = TopicPartition("requests", 3)
KEY = b"the pool's"
MOST = 1 << 16
ROWS = [[(7, -0.5, 1, " a"), (8, -9999.0, None, None)]]
PROGRESS = Progress(
    call="c" * 32,
    engine="e",
    requests=(Begun(id="r", prompt="p", sequences=(Said(tokens=[7], logprobs=ROWS),), cached=4),),
    events=2,
)


class Written(ProgressTopic):
    """A topic with these records in it."""

    def __init__(self, *records: Record, settings: Settings) -> None:
        super().__init__(settings=settings)
        self.records = list(records)
        self.undecided: list[Record] = []
        """Behind these, of transactions that may have been aborted."""

    async def read(self, partition: TopicPartition, found: Found) -> None:
        wanted = {self._key(partition): found}
        for record in self.records:
            self._take(record, wanted)
        for record in self.undecided:
            self._take(record, wanted, decided=False)


async def there(topic: ProgressTopic, *, offsets: Sequence[int] = range(10), **how: Any) -> dict[int, Progress]:
    """What who takes the partition over finds there."""
    progress = PartitionProgress(topic, PARTITION, most=MOST)
    await progress.read(how.pop("ledger", Ledger()), **how)
    return {offset: found for offset in offsets if (found := progress.take(offset)) is not None}


def read(written: Outgoing) -> Record:
    return Record("progress", 0, 0, 1.0, written.key, written.value, written.headers)


def record(value: bytes | None, key: bytes = b"g/requests/3/5") -> Record:
    return Record("progress", 0, 0, 1.0, key, value)


GOOD = PROGRESS.model_dump_json().encode()
SETTINGS = load(group_id="g")


async def test_what_was_written_last_is_found_until_it_is_taken_back() -> None:
    topic = Written(settings=SETTINGS)
    topic.records.append(read(topic.record(PARTITION, 5, PROGRESS.model_copy(update={"events": 1}))))
    topic.records.append(read(topic.record(PARTITION, 5, PROGRESS)))
    topic.records.append(read(topic.record(TopicPartition("requests", 4), 6, PROGRESS)))
    assert await there(topic) == {5: PROGRESS}
    topic.records.append(read(topic.gone(PARTITION, 5)))
    assert await there(topic) == {}


async def test_what_was_said_of_a_topic_that_has_been_made_anew_is_nobody_s() -> None:
    topic = Written(settings=SETTINGS)
    for topic_id in ("first", "second"):
        topic.topic_ids["requests"] = topic_id
        topic.records.append(read(topic.record(PARTITION, 5, PROGRESS.model_copy(update={"engine": topic_id}))))
    for topic_id in ("first", "second"):
        found = await there(topic, topic_id=topic_id)
        assert {offset: progress.engine for offset, progress in found.items()} == {5: topic_id}
    assert await there(topic, topic_id="third") == {}


@pytest.mark.parametrize(
    "stranger",
    [
        record(GOOD, b""),
        record(GOOD, b"\xff/5"),
        record(GOOD, b"other/requests/3/5"),
        record(GOOD, b"g/requests/3/-5"),
        record(GOOD, b"g/requests/3/" + b"9" * 10_000),
        record(GOOD, b"g/requests/3/\xd9\xa5"),
        record(b""),
        record(b"\xff"),
        record(b"[" * 100_000),
        record(b'{"call": "c", "engine": "e", "events": -1}'),
        record(b'{"call": "' + b"c" * 1000 + b'", "engine": "e"}'),
        record(GOOD.replace(b"-0.5", b"NaN")),
        record(GOOD.replace(b"[7]", b"[7.5]")),
        Record("progress", 0, 0, 1.0, b"g/requests/3/5", None, damage="unknown codec 7"),
    ],
)
async def test_what_is_no_progress_is_passed_over_and_hides_none(stranger: Record) -> None:
    topic = Written(settings=SETTINGS)
    topic.records = [read(topic.record(PARTITION, 4, PROGRESS)), stranger]
    assert await there(topic) == {4: PROGRESS}


async def test_where_the_pool_has_a_key_only_what_it_signed_is_gone_on_with(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_bytes(KEY)
    topic = Written(settings=load(group_id="g", pool_key_file=keys))
    signed = read(topic.record(PARTITION, 5, PROGRESS))
    moved = Record("progress", 0, 0, 1.0, b"g/requests/3/6", signed.value, signed.headers)
    topic.records = [signed, moved, record(GOOD, b"g/requests/3/5"), record(GOOD, b"g/requests/3/7")]
    topic.records.append(read(encode_progress("progress", "g/requests/3/8", PROGRESS, keys=[b"a stranger's"])))
    assert await there(topic) == {5: PROGRESS}
    assert decode_progress(signed, keys=[KEY]) == PROGRESS


class Away(ProgressTopic):
    """A topic that can't be read: it fails, or nothing ever comes."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__(settings=SETTINGS)
        self._error = error

    async def read(self, partition: TopicPartition, found: Found) -> None:
        found.add(5, read(self.record(partition, 5, PROGRESS)))
        if self._error is None:
            await asyncio.Event().wait()
        raise self._error or AssertionError


@pytest.mark.parametrize(
    "error", [BrokerUnavailable("away"), KafkaError("no"), OSError("gone"), TimeoutError(), KeyError(3), None]
)
async def test_a_partition_is_taken_over_though_not_all_can_be_read_that_was_said(error: Exception | None) -> None:
    topic = Away(error)
    progress = PartitionProgress(topic, PARTITION, most=MOST, within_s=0.01)
    await asyncio.wait_for(progress.read(Ledger()), 5)
    assert [progress.take(offset) for offset in (4, 5)] == [None, PROGRESS]
    assert progress.records([], [4]) == [topic.gone(PARTITION, 4)], "there may have been something"


async def test_the_last_record_of_a_request_is_the_only_one_that_is_parsed() -> None:
    topic = Written(settings=SETTINGS)
    topic.records = [record(b"no progress", b"g/requests/3/4"), read(topic.record(PARTITION, 4, PROGRESS))]
    with capture_logs() as logs:
        assert await there(topic) == {4: PROGRESS}
        assert logs == []
        topic.records.reverse()
        assert await there(topic) == {}
    assert [entry["event"] for entry in logs] == ["progress.malformed"]


async def test_nothing_is_held_of_requests_that_are_finished_or_here_already_nor_more_than_some_bytes() -> None:
    topic = Written(settings=SETTINGS)
    written = [read(topic.record(PARTITION, offset, PROGRESS)) for offset in range(6)]
    topic.records = [*written, written[2]]
    assert list(await there(topic, ledger=Ledger(2), delivered=[3])) == [2, 4, 5]
    found = Found(Ledger(), most=2 * written[0].size)
    await topic.read(PARTITION, found)
    assert [offset for offset in range(6) if found.pop(offset)] == [2, 5], "what was written last"
    assert found.offsets == set(range(6)), "all is taken back with its result"
    small = Found(Ledger(), most=written[0].size - 1)
    await topic.read(PARTITION, small)
    assert not any(small.pop(offset) for offset in range(6))


async def test_what_was_found_goes_when_its_request_is_settled_or_its_partition_lost() -> None:
    topic = Written(settings=SETTINGS)
    topic.records = [read(topic.record(PARTITION, offset, PROGRESS)) for offset in range(3)]
    progress = PartitionProgress(topic, PARTITION, most=MOST)
    await progress.read(Ledger())
    progress.records([1], [0])
    progress.committed([0])
    assert [progress.take(offset) for offset in (0, 1)] == [None, PROGRESS]
    progress.close()
    assert progress.take(2) is None


class Transactions(PartitionTransactions):
    """Of a broker that takes everything, but for what some topic does not."""

    def __init__(self, refusing: str = "") -> None:
        ledgers = LedgersTopic(settings=SETTINGS)
        super().__init__(settings=SETTINGS, partition=PARTITION, ledgers_topic=ledgers)
        self.refusing = refusing
        self.committed: list[Outgoing] = []

    async def fence(self) -> int:
        return 1

    async def commit(self, records: Sequence[Outgoing], _offset: int, _metadata: str) -> None:
        if refused := {index: "no" for index, one in enumerate(records) if one.topic == self.refusing}:
            raise Refused(refused)
        self.committed += records


async def empty() -> Ledger:
    return Ledger()


def writer(transactions: Transactions, topic: ProgressTopic | None = None, ledger: ReadLedger = empty) -> LedgerWriter:
    return LedgerWriter(
        partition=PARTITION,
        transactions=transactions,
        read_ledger=ledger,
        progress=PartitionProgress(topic or Written(settings=SETTINGS), PARTITION, most=MOST),
        acquired=lambda _writer, _taken: None,
        fenced=lambda: None,
        pause_s=0.0,
        mark_delay_s=0.0,
        max_record_bytes=MOST,
    )


async def run(one: LedgerWriter) -> "asyncio.Task[None]":
    life = asyncio.create_task(one.run())
    await one.flushed()
    for offset in range(4):
        one.ledger.deliver(offset)
    return life


@pytest.mark.parametrize("together", [True, False])
async def test_no_result_fails_because_what_others_say_can_not_be_kept(together: bool) -> None:
    transactions = Transactions(refusing="progress")
    one = writer(transactions)
    life = await run(one)
    one.keep(0, lambda: PROGRESS)
    if not together:
        await one.flushed()
    result = Outgoing("results", b"k", b"v")
    assert await one.settle(1, [result])
    one.keep(2, lambda: PROGRESS)
    await one.flushed()
    assert [each for each in transactions.committed if each.topic != "ledgers"] == [result]
    life.cancel()


async def test_it_is_taken_back_with_the_result_by_whoever_has_it() -> None:
    topic = Written(settings=SETTINGS)
    topic.records = [read(topic.record(PARTITION, offset, PROGRESS)) for offset in (1, 3)]
    transactions = Transactions()
    one = writer(transactions, topic)
    life = await run(one)
    assert [one.take_progress(offset) for offset in (0, 1)] == [None, PROGRESS]
    one.keep(2, lambda: PROGRESS)
    await one.flushed()
    one.keep(2, lambda: PROGRESS)
    one.keep(9, lambda: PROGRESS)
    assert all(await asyncio.gather(*(one.settle(offset, []) for offset in (0, 1, 2))))
    told = [(each.key, each.value is None) for each in transactions.committed if each.topic == "progress"]
    assert told == [(b"g/requests/3/2", False), (b"g/requests/3/1", True), (b"g/requests/3/2", True)]
    life.cancel()


async def test_what_is_too_large_to_be_written_is_left_out() -> None:
    transactions = Transactions()
    one = writer(transactions)
    life = await run(one)
    said = Said(tokens=[1000] * (1 << 14))
    long = PROGRESS.model_copy(update={"requests": (Begun(id="r", prompt="p", sequences=(said,)),)})
    one.keep(0, lambda: long)
    await one.flushed()
    assert [each for each in transactions.committed if each.topic == "progress"] == []
    life.cancel()


class Slow(Transactions):
    """Of a broker that does not take progress in time; it keeps what each transaction had of that."""

    def __init__(self, *, slow: bool = True) -> None:
        super().__init__()
        self._slow = slow
        self.sizes: list[int] = []

    async def commit(self, records: Sequence[Outgoing], offset: int, metadata: str) -> None:
        said = [len(each.value or b"") for each in records if each.topic == "progress"]
        if said and self._slow:
            raise OutcomeUnknown("too late")
        self.sizes.append(sum(said))
        await super().commit(records, offset, metadata)


async def test_results_do_not_wait_for_what_can_not_be_written_in_time() -> None:
    one = writer(Slow())
    life = await run(one)
    one.keep(0, lambda: PROGRESS)
    settled = one.settle(1, [Outgoing("results", b"k", b"v")])
    assert await asyncio.wait_for(settled, 5)
    life.cancel()


async def test_results_do_not_wait_for_what_can_neither_be_read_nor_written() -> None:
    """Not even for the word that what they had said is over; where something is there, that is written later."""
    one = writer(Slow(), Away(BrokerUnavailable("away")))
    life = await run(one)
    for offset in (1, 2):
        assert await asyncio.wait_for(one.settle(offset, [Outgoing("results", b"k", b"v")]), 5)
    life.cancel()


async def test_what_was_finished_while_nothing_was_written_is_taken_back_later() -> None:
    topic = Written(settings=SETTINGS)
    topic.records = [read(topic.record(PARTITION, 4, PROGRESS))]
    progress = PartitionProgress(topic, PARTITION, most=MOST)
    await progress.read(Ledger())
    progress.leave_out()
    assert not progress.keep(5, lambda: PROGRESS)
    assert progress.records([], [4]) == []
    progress.committed([4])
    progress._left_out_until = 0.0
    assert progress.records([], [6]) == [topic.gone(PARTITION, 4)]
    progress.committed([6])
    assert progress.records([], [7]) == []


async def test_much_is_written_in_several_transactions_and_all_of_it_where_that_is_waited_for() -> None:
    transactions = Slow(slow=False)
    one = writer(transactions)
    life = await run(one)
    said = Said(tokens=[1000] * 10_000)
    long = PROGRESS.model_copy(update={"requests": (Begun(id="r", prompt="p", sequences=(said,)),)})
    for offset in range(4, 100):
        one.ledger.deliver(offset)
        one.keep(offset, lambda: long)
    await asyncio.wait_for(one.flushed(), 5)
    assert len([each for each in transactions.committed if each.topic == "progress"]) == 96
    assert max(transactions.sizes) <= MOST_BYTES < sum(transactions.sizes)
    life.cancel()


class Asked:
    """What a run has said, and how often that was asked."""

    def __init__(self, progress: Progress | None = PROGRESS) -> None:
        self.progress = progress
        self.times = 0

    def __call__(self) -> Progress | None:
        self.times += 1
        return self.progress


async def test_a_run_is_asked_what_it_has_said_once_it_is_written_and_only_then() -> None:
    transactions = Transactions()
    one = writer(transactions)
    life = await run(one)
    asked, silent, settled, elsewhere = Asked(), Asked(None), Asked(), Asked()
    for offset, say in ((0, asked), (0, asked), (1, silent), (2, settled), (9, elsewhere)):
        one.keep(offset, say)
    assert await one.settle(2, [])
    assert [each.times for each in (asked, silent, settled, elsewhere)] == [1, 1, 0, 0]
    await one.flushed()
    assert asked.times == 1, "what is written waits no longer"
    assert [each.key for each in transactions.committed if each.topic == "progress"] == [b"g/requests/3/0"]
    life.cancel()


async def test_nobody_is_asked_what_the_broker_does_not_take() -> None:
    one = writer(Transactions(refusing="progress"))
    life = await run(one)
    asked = Asked()
    one.keep(0, asked)
    await one.flushed()
    assert asked.times == 1
    one.keep(0, asked)
    await one.flushed()
    assert asked.times == 1
    life.cancel()


async def test_what_was_asked_for_while_a_transaction_was_written_waits_for_the_next() -> None:
    topic = Written(settings=SETTINGS)
    progress = PartitionProgress(topic, PARTITION, most=MOST)
    progress.keep(0, Asked())
    assert len(progress.records([0], [])) == 1
    progress.keep(0, Asked())
    progress.committed([])
    assert progress.waits
    assert len(progress.records([0], [])) == 1
    progress.committed([])
    assert not progress.waits


# --- sessions ---

NAME, OTHER = "5e" * 32, "0e" * 32
KEPT = b"g/requests/3/session/" + NAME.encode()


def come_to(parts: int, *, tokens: int = 1) -> Progress:
    """What a session has come to after so many parts."""
    return Progress(call="c", engine="e", parts=tuple(Part(prompt=[part] * tokens, said=[7]) for part in range(parts)))


def sessions(*, keys: Path | None = None, idle_s: float = 60.0) -> Written:
    return Written(settings=load(group_id="g", session_idle_s=idle_s, pool_key_file=keys))


async def owned(topic: Written, *, most: int = MOST) -> PartitionProgress:
    """A new owner's, who has read what is there."""
    progress = PartitionProgress(topic, PARTITION, most=most)
    await progress.read(Ledger())
    return progress


def answer(progress: PartitionProgress, offset: int, *, part: int, parts: int, name: str = NAME) -> None:
    """A part of a session, after which it has come to so many parts; 0: it is over."""
    progress.session(offset, name, part)
    progress.keep_session(offset, come_to(parts))


def commit(progress: PartitionProgress, topic: Written, *finishing: int) -> list[Outgoing]:
    """A transaction, and what it writes."""
    written = progress.records([], finishing)
    progress.committed(finishing)
    topic.records += map(read, written)
    return written


async def test_a_session_is_kept_from_part_to_part_for_the_next_owner_until_it_is_over() -> None:
    topic = sessions()
    first = await owned(topic)
    for part in range(3):
        assert first.session(part, NAME, part) == (come_to(part) if part else None)
        first.keep_session(part, come_to(part + 1))
        commit(first, topic, part)
    second = await owned(topic)
    assert second.session(5, OTHER, 3) is None
    assert [second.session(6, NAME, part) for part in range(5)] == [None, None, None, come_to(3), None]
    answer(second, 6, part=3, parts=0)
    assert commit(second, topic, 6) == [topic.session_gone(PARTITION, NAME)]
    assert (await owned(topic)).session(7, NAME, 3) is None


async def test_a_record_that_may_have_been_aborted_hides_none_that_was_not() -> None:
    topic = sessions()
    found = Found(Ledger())
    for parts, decided in ((1, True), (2, False)):
        found.add_session(NAME, read(topic.session(PARTITION, NAME, come_to(parts))), decided=decided)
    assert [topic.progress(each) for each in found.session(NAME)] == [come_to(2), come_to(1)]
    found.add_session(NAME, read(topic.session(PARTITION, NAME, come_to(3))))
    assert [topic.progress(each) for each in found.session(NAME)] == [come_to(3)]
    found.drop_session(NAME)
    assert (found.session(NAME), found.sessions) == ([], set())


async def test_a_session_of_one_part_leaves_no_record() -> None:
    topic = sessions()
    progress = await owned(topic)
    answer(progress, 0, part=0, parts=0)
    assert commit(progress, topic, 0) == []


async def test_parts_that_are_settled_together_are_written_in_their_order() -> None:
    topic = sessions()
    progress = await owned(topic)
    for part in range(3):
        answer(progress, part, part=part, parts=(part + 1) % 3)
    written = commit(progress, topic, 2, 0, 1)
    assert [each.value is None for each in written] == [False, False, True]
    assert (await owned(topic)).session(3, NAME, 2) is None


async def test_a_result_that_says_nothing_of_its_session_leaves_what_is_kept() -> None:
    topic = sessions()
    progress = await owned(topic)
    answer(progress, 0, part=0, parts=1)
    commit(progress, topic, 0)
    progress.session(1, NAME, 1)
    assert commit(progress, topic, 1) == []
    assert (await owned(topic)).session(2, NAME, 1) == come_to(1)


async def test_a_session_that_begins_anew_under_its_name_does_not_go_on_with_the_old_one() -> None:
    topic = sessions()
    progress = await owned(topic)
    answer(progress, 0, part=0, parts=1)
    commit(progress, topic, 0)
    assert progress.session(5, NAME, 0) is None
    assert progress.session(6, NAME, 1) is None, "its part 0 is under way"


async def test_a_part_that_comes_twice_does_not_go_on_from_what_the_first_has_left_behind() -> None:
    topic = sessions()
    progress = await owned(topic)
    answer(progress, 0, part=0, parts=1)
    commit(progress, topic, 0)
    answer(progress, 1, part=1, parts=2)
    assert progress.session(2, NAME, 1) is None
    assert (await owned(topic)).session(1, NAME, 1) == come_to(1), "it was never committed"


def test_a_session_that_waits_for_too_long_is_taken_back_and_one_that_is_answered_is_not() -> None:
    with virtual_time() as loop:
        loop.run_until_complete(_wait_for_too_long(loop))


async def _wait_for_too_long(loop: asyncio.AbstractEventLoop) -> None:
    topic = sessions(idle_s=60)
    first = await owned(topic)
    assert first.next_end is None
    for offset, name in enumerate((NAME, OTHER)):
        answer(first, offset, part=0, parts=1, name=name)
    commit(first, topic, 0, 1)
    await asyncio.sleep(50)
    second = await owned(topic)  # who has it now lets it wait as long again: it may have been away itself
    assert second.next_end == loop.time() + 60
    second.session(2, OTHER, 1)
    await asyncio.sleep(61)
    assert commit(second, topic) == [topic.session_gone(PARTITION, NAME)]
    assert second.session(3, NAME, 1) is None
    assert second.next_end is None, "what is left is being answered"
    assert commit(second, topic, 2) == []
    assert second.next_end == loop.time() + 60


class Taking(Transactions):
    """Of a broker that says when something is taken back."""

    def __init__(self) -> None:
        super().__init__()
        self.taken_back = asyncio.Event()

    async def commit(self, records: Sequence[Outgoing], offset: int, metadata: str) -> None:
        await super().commit(records, offset, metadata)
        if any(record.value is None for record in records):
            self.taken_back.set()


async def test_the_writer_takes_back_by_itself_what_waits_for_too_long() -> None:
    transactions = Taking()
    one = writer(transactions, sessions(idle_s=0.01))
    life = await run(one)
    answer(one, 0, part=0, parts=1)
    one.keep_session(9, come_to(1))
    assert await one.settle(0, [])
    await asyncio.wait_for(transactions.taken_back.wait(), 10)
    told = [(each.key, each.value is None) for each in transactions.committed if each.topic == "progress"]
    assert told == [(KEPT, False), (KEPT, True)]
    life.cancel()


@pytest.mark.parametrize("together", [True, False])
async def test_no_result_fails_because_its_session_can_not_be_kept(together: bool) -> None:
    transactions = Transactions(refusing="progress")
    one = writer(transactions, sessions(idle_s=0.001))
    life = await run(one)
    for offset in range(2 if together else 1):
        answer(one, offset, part=offset, parts=offset + 1)
    result = Outgoing("results", b"k", b"v")
    assert all(await asyncio.gather(*(one.settle(offset, [result]) for offset in range(2))))
    await one.flushed()
    assert [each for each in transactions.committed if each.topic != "ledgers"] == [result, result]
    life.cancel()


async def test_who_may_not_write_there_does_not_try_to_take_sessions_back() -> None:
    topic = sessions()
    topic.records = [read(topic.session(PARTITION, NAME, come_to(1)))]
    progress = await owned(topic)
    assert progress.next_end is not None
    progress.refused({0: "no"}, first=0)
    assert progress.next_end is None


async def test_results_do_not_wait_for_a_session_that_can_not_be_written_in_time() -> None:
    one = writer(Slow(), sessions())
    life = await run(one)
    answer(one, 0, part=0, parts=1)
    assert await asyncio.wait_for(one.settle(0, [Outgoing("results", b"k", b"v")]), 5)
    life.cancel()


async def test_a_session_that_has_become_too_large_is_kept_no_longer() -> None:
    topic = sessions()
    progress = await owned(topic)
    answer(progress, 0, part=0, parts=1)
    commit(progress, topic, 0)
    progress.session(1, NAME, 1)
    progress.keep_session(1, come_to(2, tokens=MOST))
    assert commit(progress, topic, 1) == [topic.session_gone(PARTITION, NAME)]
    assert (await owned(topic)).session(2, NAME, 2) is None


async def test_one_transaction_has_only_so_much_of_sessions_and_an_owner_holds_only_so_much() -> None:
    topic = sessions()
    progress = await owned(topic, most=MOST_BYTES)
    names = [f"{number:064x}" for number in range(5)]
    for offset, name in enumerate(names):
        progress.session(offset, name, 0)
        progress.keep_session(offset, come_to(1, tokens=MOST_BYTES // 8))
    written = commit(progress, topic, *range(5))
    assert [len(each.value or b"") for each in written if each.value is None or len(each.value) < 1 << 20] == []
    assert 1 < len(written) < 5
    found = Found(Ledger(), most=2 * read(written[0]).size)
    topic.records = [read(topic.session(PARTITION, name, come_to(1, tokens=MOST_BYTES // 8))) for name in names]
    await topic.read(PARTITION, found)
    assert [name for name in names if found.session(name)] == names[3:]
    assert found.sessions == set(names)


@pytest.mark.parametrize(
    "stranger",
    [
        record(come_to(2).model_dump_json().encode(), b"g/requests/3/session/" + b"5E" * 32),
        record(come_to(2).model_dump_json().encode(), b"g/requests/3/session/5"),
        record(come_to(2).model_dump_json().encode(), b"g/requests/4/session/" + NAME.encode()),
        record(come_to(2).model_dump_json().encode(), b"other/requests/3/session/" + NAME.encode()),
        record(come_to(2).model_dump_json().encode(), b"g/requests/3/" + NAME.encode()),
    ],
)
async def test_what_is_no_session_is_passed_over(stranger: Record) -> None:
    topic = sessions()
    topic.records = [read(topic.session(PARTITION, NAME, come_to(1))), stranger]
    assert (await owned(topic)).session(0, NAME, 1) == come_to(1)
    assert (await owned(topic)).session(0, NAME, 2) is None
    found = Found(Ledger())
    await topic.read(PARTITION, found)
    assert found.sessions == {NAME}


@pytest.mark.parametrize("value", [b"", b"\xff", b'{"call": "c", "engine": "e", "parts": [{"prompt": [0.5]}]}'])
async def test_a_session_of_which_nonsense_is_written_is_not_gone_on_with(value: bytes) -> None:
    topic = sessions()
    topic.records = [record(value, KEPT)]
    with capture_logs() as logs:
        assert (await owned(topic)).session(0, NAME, 1) is None
    assert [entry["event"] for entry in logs] == ["progress.malformed"]


async def test_where_the_pool_has_a_key_only_a_session_that_it_signed_is_gone_on_with(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_bytes(KEY)
    topic = sessions(keys=keys)
    signed = read(topic.session(PARTITION, NAME, come_to(1)))
    place = f"g/requests/3/session/{NAME}"
    moved = Record("progress", 0, 0, 1.0, place.replace("5e", "6e").encode(), signed.value, signed.headers)
    topic.records = [signed, moved, record(come_to(2).model_dump_json().encode(), KEPT)]
    topic.records.append(read(encode_progress("progress", place, come_to(3), keys=[b"a stranger's"])))
    progress = await owned(topic)
    assert progress.session(0, NAME, 1) == come_to(1)
    assert progress.session(1, "6e" * 32, 1) is None
    assert [progress.session(2, NAME, part) for part in (2, 3)] == [None, None]


async def test_a_partition_that_is_anothers_is_forgotten_with_its_sessions() -> None:
    topic = sessions()
    topic.records = [read(topic.session(PARTITION, NAME, come_to(1)))]
    progress = await owned(topic)
    answer(progress, 0, part=1, parts=2)
    progress.close()
    assert progress.session(1, NAME, 1) is None
    assert progress.next_end is None
    assert commit(progress, topic, 0) == []


class Doubtful(Taking):
    """Of a broker that commits a session's part, and whose answer to that is lost."""

    def __init__(self, topic: Written) -> None:
        super().__init__()
        self.topic = topic
        self.stored = Ledger()

    async def commit(self, records: Sequence[Outgoing], offset: int, metadata: str) -> None:
        await super().commit(records, offset, metadata)
        self.topic.records += [read(each) for each in records if each.topic == "progress"]
        unheard = self.stored.watermark < offset and offset == 1
        self.stored = Ledger.decode(offset, metadata)
        if unheard:
            raise OutcomeUnknown("nobody knows")

    async def ledger(self) -> Ledger:
        return self.stored


async def test_a_part_that_is_committed_unheard_is_not_under_way_any_more() -> None:
    topic = sessions(idle_s=0.01)
    transactions = Doubtful(topic)
    one = writer(transactions, topic, transactions.ledger)
    life = await run(one)
    answer(one, 0, part=0, parts=1)
    assert await one.settle(0, [])
    assert one.session(1, NAME, 1) == come_to(1), "it goes on from what was committed"
    assert await one.settle(1, [])
    await asyncio.wait_for(transactions.taken_back.wait(), 10)  # and does not wait for ever
    life.cancel()


async def test_a_part_that_another_owner_finished_is_not_under_way_any_more() -> None:
    topic = sessions()
    progress = await owned(topic)
    for part in range(2):
        answer(progress, part, part=part, parts=part + 1)
    topic.records = [read(topic.session(PARTITION, NAME, come_to(2)))]
    await progress.read(Ledger(2), [0, 1, 2])
    assert progress.next_end is not None, "it waits for its next part"
    assert progress.session(2, NAME, 2) == come_to(2)
    assert commit(progress, topic, 0, 1) == [], "theirs is what was written"


async def test_what_may_have_been_committed_of_a_session_waits_though_that_can_not_be_read() -> None:
    progress = PartitionProgress(Away(OSError("gone")), PARTITION, most=MOST)
    answer(progress, 0, part=0, parts=1)
    await progress.read(Ledger(1), [0])
    assert progress.next_end is not None


async def test_a_part_that_was_sent_ahead_does_not_go_on_from_what_may_have_been_aborted() -> None:
    topic = sessions()
    progress = await owned(topic)
    answer(progress, 0, part=0, parts=1)
    commit(progress, topic, 0)
    assert progress.session(1, NAME, 1) == come_to(1)
    progress.keep_session(1, come_to(2))
    topic.undecided = [read(topic.session(PARTITION, NAME, come_to(2)))]
    await progress.read(Ledger(1), [1])
    assert progress.session(2, NAME, 2) is None, "it comes after part 1, which is under way"
    assert progress.session(3, NAME, 1) is None, "nor does that part go on twice"
    assert progress.session(1, NAME, 1) == come_to(1), "which itself goes on from what was committed"


class Once(Transactions):
    """Of a broker that refuses something once."""

    async def commit(self, records: Sequence[Outgoing], offset: int, metadata: str) -> None:
        try:
            await super().commit(records, offset, metadata)
        except Refused:
            self.refusing = ""
            raise


async def test_a_session_that_is_written_after_a_refused_transaction_is_told_to_who_asks() -> None:
    one = writer(Once(refusing="elsewhere"), sessions())
    life = await run(one)
    answer(one, 0, part=0, parts=1)
    results = Outgoing("results", b"k", b"v"), Outgoing("elsewhere", b"k", b"v")
    assert await asyncio.gather(*(one.settle(offset, [result]) for offset, result in enumerate(results))) == [
        True,
        True,
    ]
    assert one.session(2, NAME, 1) == come_to(1)
    life.cancel()
