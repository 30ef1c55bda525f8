"""What aiokafka's own consumers read, as our records."""

from typing import Any

from schemas.base import Record
from service.kafka.records import moment_of


def as_record(message: Any) -> Record:
    return Record(
        topic=message.topic,
        partition=message.partition,
        offset=message.offset,
        timestamp=moment_of(message.timestamp, message.timestamp_type),
        key=message.key,
        value=message.value,
        headers=message.headers,
    )
