"""A call that is written several times is run once, whoever reads it."""

from collections.abc import Callable

from schemas.base import Origin, Record
from service.consumer.asked_once import AskedOnce
from service.kafka.calls import CallIndex
from service.ports import Delivery
from service.settings import TopicSettings


class Log:
    """The index over so many offsets of the topic of calls."""

    topic = "calls"

    def __init__(self) -> None:
        self.index = CallIndex(TopicSettings(), keyed=False)
        self.read = 0
        self._woken: list[Callable[[], None]] = []

    def has_read(self, origin: Origin) -> bool:
        return origin.offset < self.read

    def watch(self, woken: Callable[[], None]) -> None:
        self._woken.append(woken)

    def reads(self, *records: Record) -> None:
        for record in records:
            self.index.fold(record)
            self.read = record.offset + 1
        for woken in self._woken:
            woken()


def call(offset: int, id_: str, value: bytes | None = b"{}") -> Record:
    return Record("calls", 0, offset, 1.0, id_.encode(), value)


def test_repeats_and_what_was_deleted_are_passed_over_once_the_index_has_come_that_far():
    log, passed, woken = Log(), [], []
    once = AskedOnce(calls=log, pass_over=passed.append, wake=lambda: woken.append(1))
    records = [call(0, "a"), call(1, "a"), call(2, "b"), call(3, "b", None), call(4, "c")]
    other = Delivery(Record("requests", 0, 0, 1.0, None, b"{}"))
    assert once.sift((other, *map(Delivery, records)), ()) == (other,)
    assert not passed
    log.reads(*records[:4])
    assert woken == [1]
    assert [one.record for one in once.sift((), ())] == [records[0]]
    assert [origin.offset for origin in passed] == [1, 2, 3]
    assert once.sift((), {call(4, "c").origin}) == ()
    log.reads(records[4])
    assert once.sift((), ()) == (), "it is another worker's now"
    assert woken == [1]
