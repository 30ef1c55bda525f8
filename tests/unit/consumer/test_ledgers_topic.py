"""What is remembered is what somebody wrote: it is bounded, and without a key it stops nobody."""

import json
import time

import pytest
from aiokafka import TopicPartition
from structlog.testing import capture_logs

from schemas.base import Record
from service.consumer.ledger import MAX_METADATA, Ledger, UnknownLedger
from service.consumer.ledgers_topic import LedgersTopic
from service.consumer.positions import position_of
from service.settings import load

PARTITION = TopicPartition("requests", 12)


class Written(LedgersTopic):
    """A topic with these records."""

    def __init__(self, *metadata: str) -> None:
        super().__init__(settings=load(group_id="g"))
        values = [json.dumps({"offset": 7, "metadata": each}).encode() for each in metadata]
        self._records = [Record("ledgers", 0, n, 0.0, b"g/requests/12", value) for n, value in enumerate(values)]

    async def _read(self) -> None:
        for record in self._records:
            self._take(record)
        self._began = time.monotonic()


async def test_what_is_longer_than_any_commit_is_no_ledger() -> None:
    ledger = Ledger(7, epoch=3)
    with capture_logs() as logs:
        found = await Written(ledger.encode()[1], "gs1." + "A" * MAX_METADATA).ledger(PARTITION, topic_id=None)
    assert found is not None
    assert found.epoch == 3
    assert [entry["event"] for entry in logs] == ["ledgers_topic.malformed"]


async def test_without_a_key_a_ledger_of_another_version_is_passed_over_and_told() -> None:
    with capture_logs() as logs:
        assert await Written("gs2.").ledger(PARTITION, topic_id=None) is None
    assert [entry["event"] for entry in logs] == ["ledgers_topic.passed_over"]


def test_a_remembered_ledger_of_another_version_is_a_problem_that_is_shown() -> None:
    with pytest.raises(UnknownLedger) as unknown:
        Ledger.decode(7, "gs2.")
    assert "version 2" in (position_of(PARTITION, (0, 9), None, unknown.value).problem or "")
