"""Whether a request got what it was to get, and what kept it from that. Pure."""

import math

from schemas.objectives import Attainment, Miss, Objective
from schemas.results import Outcome, Timing


def attainment(objective: Objective, request_class: str, outcome: Outcome, timing: Timing, tokens: int) -> Attainment:
    """By how a request ended and where its time went; ``tokens`` are those of its answer, of several the longest one's.

    Of one token or none only the time to the first one is judged.
    """
    missed = _missed(objective, outcome, timing, tokens)
    return Attainment(
        ttft_s=objective.ttft_s,
        tpot_s=objective.tpot_s,
        request_class=request_class,
        met=missed is None,
        missed_by=missed,
    )


def _missed(objective: Objective, outcome: Outcome, timing: Timing, tokens: int) -> Miss | None:
    if outcome is Outcome.FAILED:
        return Miss.FAILED
    first_s = timing.latency_s if timing.first_token_s is None else timing.waited_s + timing.first_token_s
    if timing.first_token_s is None and outcome is not Outcome.COMPLETED:
        return _longest_before(first_s, timing)
    if first_s > objective.ttft_s:
        return _longest_before(first_s, timing)
    may_s = objective.ttft_s + (tokens - 1) * objective.tpot_s if tokens > 1 else math.inf
    if timing.latency_s <= may_s and outcome is Outcome.COMPLETED:
        return None
    frozen_s = timing.frozen_s - timing.frozen_first_s
    if outcome is not Outcome.COMPLETED:  # it had no time to be late: was it behind its pace?
        may_s -= objective.ttft_s - first_s
    return Miss.FROZEN if frozen_s > 0 and timing.latency_s - frozen_s <= may_s else Miss.DECODE


def _longest_before(first_s: float, timing: Timing) -> Miss:
    """What most of the time to the first token went into; frozen before it, a request waits for its model's turn."""
    spent = {Miss(reason): seconds for reason, seconds in timing.waited_for.items()}
    spent[Miss.TURN] = spent.get(Miss.TURN, 0.0) + timing.frozen_first_s
    spent[Miss.PREFILL] = first_s - timing.waited_s - timing.frozen_first_s
    return max(spent, key=lambda miss: spent[miss])
