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
from schemas.progress import Begun, Progress, Said
from service.consumer.ledger import Ledger
from service.consumer.ledgers_topic import LedgersTopic
from service.consumer.progress_topic import MOST_BYTES, Found, PartitionProgress, ProgressTopic
from service.consumer.transactions import OutcomeUnknown, PartitionTransactions, Refused
from service.consumer.writer import LedgerWriter
from service.errors import BrokerUnavailable
from service.settings import Settings, load

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

    async def read(self, partition: TopicPartition, found: Found) -> None:
        for record in self.records:
            self._take(record, {self._key(partition): found})


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


@pytest.mark.parametrize("error", [BrokerUnavailable("away"), KafkaError("no"), OSError("gone"), TimeoutError(), None])
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


def writer(transactions: Transactions, topic: ProgressTopic | None = None) -> LedgerWriter:
    return LedgerWriter(
        partition=PARTITION,
        transactions=transactions,
        read_ledger=empty,
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
