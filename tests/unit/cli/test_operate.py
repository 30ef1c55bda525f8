"""``gearshift switch`` and ``control``: whom an event is for."""

import pytest

from schemas.status import Presence
from service.cli.operate import why_silent

THERE = [Presence(worker=worker, pool="gearshift", at=0.0, interval_s=1.0) for worker in ("node-1", "node-2")]


@pytest.mark.parametrize("target", ["*", "gearshift", "node-2"])
def test_an_event_for_somebody_who_is_there_is_just_waited_for(target: str) -> None:
    assert why_silent(target, THERE) is None


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("gearshfit", "'gearshfit' (did you mean 'gearshift'?)"),
        ("node-3", "'node-3' (did you mean 'node-"),
        ("q", "'q': waiting"),
    ],
)
def test_an_event_for_nobody_is_told_at_once_with_the_nearest_name(target: str, said: str) -> None:
    assert said in (why_silent(target, THERE) or "")


@pytest.mark.parametrize("target", ["*", "gearshift"])
def test_an_event_without_any_worker_is_told_at_once(target: str) -> None:
    assert why_silent(target, []) == "no worker is there: waiting for one"
