"""Which chunk continues what a stream has given out."""

import pytest

from schemas.requests import Attempt
from schemas.results import Chunk
from service.client.stream import Order
from service.errors import StreamBroken


def chunk(seq, *, epoch=1, n=1, final=False):
    return Chunk(id="r", seq=seq, attempt=Attempt(epoch=epoch, n=n), final=final, data=None if final else {})


def test_chunks_are_taken_in_their_order_and_once():
    order = Order()
    assert [order.admits(chunk(seq)) for seq in (0, 1, 1, 0, 2)] == [True, True, False, False, True]


def test_a_missing_chunk_breaks_the_stream():
    order = Order()
    order.admits(chunk(0))
    with pytest.raises(StreamBroken, match="chunk 1 is missing"):
        order.admits(chunk(2))


def test_a_stream_that_was_heard_from_its_middle_is_broken():
    with pytest.raises(StreamBroken, match="chunk 0 is missing"):
        Order().admits(chunk(3))


def test_a_new_attempt_after_something_was_given_out_breaks_the_stream():
    order = Order()
    order.admits(chunk(0, n=1))
    with pytest.raises(StreamBroken, match="started again"):
        order.admits(chunk(0, n=2))


def test_an_attempt_that_goes_on_after_what_was_given_out_is_the_same_stream():
    order = Order()
    assert [order.admits(chunk(0)), order.admits(chunk(1))] == [True, True]
    assert [order.admits(each) for each in (chunk(2, n=2), chunk(2), chunk(3, n=2))] == [True, False, True]


def test_an_attempt_that_goes_on_from_earlier_tells_again_what_was_given_out():
    order = Order()
    order.admits(chunk(0))
    order.admits(chunk(1))
    with pytest.raises(StreamBroken, match="started again"):
        order.admits(chunk(1, n=2))


def test_chunks_of_an_attempt_that_is_over_are_passed_over():
    order = Order()
    assert order.admits(chunk(0, epoch=2))
    assert not order.admits(chunk(1, epoch=1, n=3))
    assert order.admits(chunk(1, epoch=2))


def test_what_is_whole_of_one_attempt_is_not_what_a_later_one_has_said():
    order = Order()
    first, second, later = (Attempt(epoch=epoch, n=n) for epoch, n in ((1, 1), (1, 2), (2, 1)))
    order.admits(chunk(0))
    assert not order.is_whole(first)
    order.admits(chunk(1, final=True))
    assert [order.is_whole(attempt) for attempt in (first, second, later)] == [True, False, False]
    order.admits(chunk(2, n=2))
    assert not any(order.is_whole(attempt) for attempt in (first, second, later))
    order.admits(chunk(3, n=2, final=True))
    assert [order.is_whole(attempt) for attempt in (first, second, later)] == [True, True, False]
