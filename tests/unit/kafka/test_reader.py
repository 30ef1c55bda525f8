"""A record as the client library has it becomes one of ours."""

import time

from aiokafka.structs import ConsumerRecord

from service.kafka.reader import as_record

CREATE_TIME, LOG_APPEND_TIME = 0, 1


def timestamp_of(moment: float, kind: int) -> float:
    return as_record(
        ConsumerRecord("requests", 0, 0, round(1000 * moment), kind, None, b"{}", None, -1, 2, ())
    ).timestamp


def test_a_producer_whose_clock_is_an_hour_fast_gains_no_time_to_live():
    now = time.time()
    assert now <= timestamp_of(now + 3600, CREATE_TIME) <= time.time()
    assert timestamp_of(now - 3600, CREATE_TIME) < now - 3599


def test_the_brokers_time_is_taken_as_it_is_though_our_clock_is_behind():
    ahead = round(time.time()) + 5.0
    assert timestamp_of(ahead, LOG_APPEND_TIME) == ahead
