"""The state machine of a switch."""

import pytest

from schemas.contexts import SwitchMode, SwitchPhase
from service.engine.models.switching import SwitchProgress
from service.ports import Transition


def progress(seen: list[Transition]) -> SwitchProgress:
    return SwitchProgress(asked=0.0, observe=seen.append, from_model="a", to_model="b", mode=SwitchMode.KEEP)


def test_each_transition_is_told_with_the_report_as_it_stands() -> None:
    seen: list[Transition] = []
    switch = progress(seen)
    switch.to(SwitchPhase.ACCEPTED)
    switch.lap("drain")
    switch.to(SwitchPhase.SWITCHING, aborted=2)
    switch.to(SwitchPhase.COMPLETED, switched=True)
    assert [transition.phase for transition in seen] == ["accepted", "switching", "completed"]
    assert [transition.report.aborted for transition in seen] == [0, 2, 2]
    assert [transition.report.switched for transition in seen] == [False, False, True]
    assert seen[-1].report == switch.report
    assert switch.report.switched
    assert "drain" in switch.report.phases_ms


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (None, SwitchPhase.SWITCHING),
        (SwitchPhase.ACCEPTED, SwitchPhase.COMPLETED),
        (SwitchPhase.ACCEPTED, SwitchPhase.ROLLED_BACK),
    ],
)
def test_a_phase_that_can_not_follow_is_an_error(first: SwitchPhase | None, then: SwitchPhase) -> None:
    switch = progress([])
    if first is not None:
        switch.to(first)
    with pytest.raises(ValueError, match="can't go from"):
        switch.to(then)


def test_nothing_follows_an_end() -> None:
    for end in (SwitchPhase.NO_OP, SwitchPhase.FAILED):
        switch = progress([])
        switch.to(SwitchPhase.ACCEPTED)
        switch.to(end)
        for phase in SwitchPhase:
            with pytest.raises(ValueError, match="can't go from"):
                switch.to(phase)
