"""A production trace as traffic, and the contest on it."""

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.scheduling.simulator import Arrival, Trace
from tests.bench.baselines import PUBLISHED, contest
from tests.bench.production import AEGAEON, OBJECTIVE, drawn, machine, read, traffic
from tests.bench.schedule_trace import measure

HEADER = "arrival_s,service,context_tokens,generated_tokens"


def written(folder: Path, lines: int) -> Path:
    """A trace with a conversation every second and a completion every other."""
    rows = [f"{n},{'code' if n % 3 == 0 else 'conv'},{500 + n % 7 * 300},{20 + n % 5 * 50}" for n in range(lines)]
    file = folder / "trace.csv"
    file.write_text("\n".join([HEADER, *rows]), encoding="utf-8")
    return file


def test_popularity_is_zipf_within_each_service(tmp_path: Path):
    records = read(written(tmp_path, 6000))
    picks = drawn(records, "abcd", seed=1)
    for service in ("conv", "code"):
        seen = Counter(pick for record, pick in zip(records, picks, strict=True) if record.service == service)
        counts = [count for _, count in seen.most_common()]
        total = sum(1 / rank for rank in range(1, 5))
        for rank, count in enumerate(counts, start=1):
            assert abs(count / sum(counts) - 1 / rank / total) < 0.03
    assert picks == drawn(records, "abcd", seed=1) != drawn(records, "abcd", seed=2)


def test_a_rate_makes_requests_come_faster_and_changes_nothing_else(tmp_path: Path):
    records = read(written(tmp_path, 50))
    slow, fast = (traffic(records, machine(2), OBJECTIVE, rate=rate).arrivals for rate in (1.0, 2.0))
    assert [arrival.at for arrival in slow] == [2 * arrival.at for arrival in fast]
    assert [(a.alias, a.prompt, a.output) for a in slow] == [(a.alias, a.prompt, a.output) for a in fast]


@st.composite
def bursts(draw: st.DrawFn) -> Trace:
    on, now, arrivals = machine(4, AEGAEON), 0.0, []
    for _ in range(draw(st.integers(1, 40))):
        now += draw(st.floats(0, 3))
        alias = draw(st.sampled_from(tuple(on.models)))
        prompt, output = draw(st.integers(1, 4000)), draw(st.integers(1, 400))
        arrivals.append(Arrival(now, alias, prompt, output, objective=OBJECTIVE, claim=256))
    return Trace("bursts", on, tuple(arrivals))


@given(bursts())
@settings(deadline=None, max_examples=12)
def test_every_schedule_answers_or_refuses_each_request_once(made: Trace):
    for who in (*PUBLISHED, "gearshift"):
        outcome = contest(made, who)
        assert outcome.met + sum(outcome.missed.values()) == len(made.arrivals), who


def test_a_trace_that_could_be_served_at_once_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="too few"):
        measure(written(tmp_path, 5), counts=(2,))


def test_the_figures_of_the_bar_stand_first_and_the_rate_is_where_the_bound_meets_its_share(tmp_path: Path):
    figures = measure(written(tmp_path, 800), counts=(2,), strictness={"as published": 1.0})
    assert list(figures)[:4] == [
        "goodput_ours_over_best_online",
        "goodput_ours_over_best_policy",
        "goodput_over_offline_bound",
        "wait_max_over_bound",
    ]
    assert json.loads(json.dumps(figures)) == figures
    for name, setting in figures["settings"].items():
        assert abs(setting["offline_bound"] - 0.9) < 0.02, name
        rivals = [*setting["with_their_costs"].values(), *setting["with_our_costs"].values(), setting["ours"]]
        assert all(row["goodput"] <= setting["offline_bound"] for row in rivals)
