"""The bound on what is delivered and not settled."""

from service.consumer.in_flight import InFlight, Limits

HERE, THERE = ("requests", 0), ("requests", 1)


def filled(requests: int, size: int = 1) -> InFlight:
    backlog = InFlight(Limits(requests=8, bytes=1000, tokens=200))
    for offset in range(requests):
        backlog.add(HERE, offset, size)
    return backlog


def test_it_is_full_at_the_limit_and_until_three_quarters_are_left() -> None:
    backlog = filled(8)
    assert backlog.full
    backlog.remove(HERE, 0)
    assert backlog.full
    backlog.remove(HERE, 1)
    backlog.remove(HERE, 2)
    assert not backlog.full


def test_bytes_and_tokens_count_too() -> None:
    assert not filled(2, 399).full
    assert filled(2, 400).full
    wide = InFlight(Limits(requests=8, bytes=1000, tokens=10_000))
    wide.add(HERE, 0, 1000)
    assert wide.full


def test_room_is_what_may_still_come() -> None:
    assert filled(5).room == 3
    assert filled(9).room == 0


def test_a_lost_partition_gives_all_of_its_room_back() -> None:
    backlog = filled(5, 10)
    backlog.add(THERE, 0, 7)
    backlog.drop(HERE)
    backlog.remove(HERE, 3)
    assert (backlog.requests, backlog.bytes) == (1, 7)
