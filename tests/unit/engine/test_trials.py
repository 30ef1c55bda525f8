"""Trials of constraints as processes: what ends them, and what is said of one that something else has ended."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from service.engine.processes.trial import Limits, Trials, Verdict
from tests.support.trials import WITHIN_S, configuration, under_way

pytest.importorskip("vllm")

LIMITS = Limits(cpu_s=30, memory_bytes=1 << 30)


@pytest.fixture(scope="module")
def shared() -> Iterator[Trials]:
    trials = Trials()
    trials.add("quick", configuration(sleeps=False))
    trials.add("sleeping", configuration(sleeps=True))
    yield trials
    trials.close()


@pytest.fixture
def trials(shared: Trials) -> Trials:
    assert shared.judge("quick", None, LIMITS) is Verdict.FIT
    return shared


def test_one_that_waits_for_the_machine_for_too_long_is_no_verdict(trials: Trials) -> None:
    with pytest.raises(RuntimeError, match="can't be tried now"):
        trials.judge("sleeping", None, Limits(cpu_s=30, memory_bytes=1 << 30, wait_s=1))


def test_one_that_somebody_kills_is_no_verdict(trials: Trials) -> None:
    with ThreadPoolExecutor() as threads:
        judged = threads.submit(trials.judge, "sleeping", None, LIMITS)
        under_way(trials)[1].kill()
        with pytest.raises(RuntimeError, match="can't be tried now"):
            judged.result(WITHIN_S)


def test_one_that_is_under_way_is_gone_after_close(trials: Trials) -> None:
    with ThreadPoolExecutor() as threads:
        judged = threads.submit(trials.judge, "sleeping", None, LIMITS)
        found = under_way(trials)
        trials.close()
        _, left = psutil.wait_procs(found, timeout=10)
        assert left == []
        with pytest.raises(RuntimeError, match="can't be tried now"):
            judged.result(WITHIN_S)
