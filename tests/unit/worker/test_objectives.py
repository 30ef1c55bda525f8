"""Whether a request got what its model's objective says, by its result alone."""

import pytest

from schemas.base import Origin
from schemas.results import Outcome, Result, Timing
from service.models_file import Objective
from service.worker.metrics import meets

OBJECTIVE = Objective(ttft_s=2.0, tpot_s=0.1)


@pytest.mark.parametrize(
    ("waited_s", "first_token_s", "latency_s", "tokens", "met"),
    [
        (1.0, 1.0, 3.0, 11, True),
        (1.0, 1.1, 3.0, 11, False),
        (1.0, 1.0, 3.1, 11, False),
        (0.0, 2.0, 2.0, 1, True),
        (0.5, None, 2.0, 0, True),
        (0.5, None, 2.1, 0, False),
    ],
)
def test_an_answer_meets_its_objective_by_its_first_token_and_its_pace(
    waited_s: float, first_token_s: float | None, latency_s: float, tokens: int, met: bool
) -> None:
    timing = Timing(received=0, finished=0, waited_s=waited_s, first_token_s=first_token_s, latency_s=latency_s)
    body = {"usage": {"prompt_tokens": 5, "completion_tokens": tokens}}
    origin = Origin(topic="requests", partition=0, offset=0)
    result = Result(id="r", origin=origin, outcome=Outcome.COMPLETED, status=200, body=body, timing=timing)
    assert meets(result, OBJECTIVE) is met
    assert not meets(result.model_copy(update={"outcome": Outcome.EXPIRED}), OBJECTIVE)
