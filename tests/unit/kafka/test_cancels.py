"""Which cancels the control topic need not keep any longer."""

from schemas.base import Record
from schemas.control import Cancel, Pause
from service.kafka.cancels import OldCancels
from service.ports import ControlRecord


def said(event, key=None):
    key = key or f"*/{event.subject}".encode()
    return ControlRecord(event, Record("control", 0, 0, 0.0, key, b"{}"))


def test_a_cancel_is_outdated_when_no_request_that_it_means_can_be_left():
    cancels = OldCancels(100.0)
    for event in (Cancel(request="a", issued=0.0), Pause(issued=0.0), Cancel(request="b", issued=50.0)):
        cancels.note(said(event))
    assert cancels.take(100.0) == []
    assert cancels.take(101.0) == [b"*/cancel/a"]
    assert cancels.take(151.0) == [b"*/cancel/b"]
    assert cancels.take(1e9) == []


def test_what_was_said_since_under_the_same_key_is_kept():
    cancels = OldCancels(100.0)
    cancels.note(said(Cancel(request="a", issued=0.0)))
    cancels.note(said(Cancel(request="a", issued=80.0)))
    assert cancels.take(101.0) == []
    cancels.note(ControlRecord(None, Record("control", 0, 0, 0.0, b"*/cancel/a", None), "no value"))
    assert cancels.take(1e9) == []
