"""Trials of constraints as processes: what ends them, and what is said of one that something else has ended."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from service.engine.processes import trial
from service.engine.processes.fork_server import server
from service.engine.processes.trial import Limits, Trials, Verdict
from tests.support.trials import WITHIN_S, configuration, under_way
from tests.support.waiting import PATIENCE_S

pytest.importorskip("vllm")

pytestmark = pytest.mark.usefixtures("one_import")

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
    assert trials._started is not None
    found = psutil.Process(trials._started.process.pid).children(recursive=True)
    assert psutil.wait_procs(found, timeout=PATIENCE_S)[1] == []


def test_one_that_somebody_kills_is_no_verdict(trials: Trials) -> None:
    with ThreadPoolExecutor() as threads:
        judged = threads.submit(trials.judge, "sleeping", None, LIMITS)
        under_way(trials)[1].kill()
        with pytest.raises(RuntimeError, match="can't be tried now"):
            judged.result(WITHIN_S)


def test_a_model_is_added_while_another_is_loaded(trials: Trials) -> None:
    with ThreadPoolExecutor() as threads, trials._lock:
        adding = threads.submit(trials.add, "late", configuration(sleeps=False))
        adding.result(WITHIN_S)


def test_a_model_that_is_added_again_is_loaded_again_and_one_that_is_removed_is_forgotten(trials: Trials) -> None:
    trials.add("changed", configuration(sleeps=False))
    assert trials.judge("changed", None, LIMITS) is Verdict.FIT
    trials.add("changed", configuration(sleeps=True))
    with pytest.raises(RuntimeError, match="can't be tried now"):
        trials.judge("changed", None, Limits(cpu_s=30, memory_bytes=1 << 30, wait_s=0.5))
    trials.remove("changed")
    with pytest.raises(RuntimeError, match="was removed"):
        trials.judge("changed", None, LIMITS)
    assert trials._started is not None
    assert "changed" not in trials._started._loaded


def test_a_process_that_can_not_be_started_leaves_nothing(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise BlockingIOError("no more processes")

    def held() -> tuple[int, int]:
        assert server._current is not None
        return server._current[0].users, len(list(Path("/proc/self/fd").iterdir()))

    before = held()
    monkeypatch.setattr(trial, "_start", refused)
    other = Trials()
    other.add("quick", configuration(sleeps=False))
    with pytest.raises(OSError, match="no more processes") as raised:
        other.judge("quick", None, LIMITS)
    assert held() == before, raised


def test_one_that_is_under_way_is_gone_after_close(trials: Trials) -> None:
    with ThreadPoolExecutor() as threads:
        judged = threads.submit(trials.judge, "sleeping", None, LIMITS)
        found = under_way(trials)
        trials.close()
        _, left = psutil.wait_procs(found, timeout=PATIENCE_S)
        assert left == []
        with pytest.raises(RuntimeError, match="can't be tried now"):
            judged.result(WITHIN_S)
