"""An upgrade in small, between two versions, and what is counted of pauses."""

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy.local.broker import Broker, LocalBroker
from schemas.results import Outcome
from service.client import Client
from service.errors import RequestFailed
from service.kafka.topics import ensure_topics
from tests.support.bus import until
from tests.support.pool import delete_topics, settings_for
from tests.support.process import working
from tests.upgrade.older import NoHistory, missing, unpack
from tests.upgrade.pauses import Phase, longest_pause, pauses, waits

BEFORE, AFTER = Phase("before", 100, 110), Phase("after", 110, 120)


def test_a_pause_is_told_by_the_phase_in_which_it_was() -> None:
    moments = [119.0, 101, 104, 108, 113, 116, 99, 130]
    assert pauses(moments, [BEFORE, AFTER]) == {"before": 4, "after": 3}
    assert longest_pause(moments, [BEFORE, AFTER]) == 5, "from 108 to 113, over the border"


def test_nothing_at_all_is_a_pause_of_the_whole_phase() -> None:
    assert pauses([], [BEFORE]) == {"before": 10}


def test_a_wait_counts_where_it_began() -> None:
    asked = {"a": 101.0, "b": 109.0, "c": 110.0, "unanswered": 112.0}
    assert waits(asked, {"a": 101.5, "b": 114.0, "c": 112.0}, [BEFORE, AFTER]) == {"before": 5, "after": 2}
    assert waits({}, {}, [BEFORE]) == {"before": 0}


def test_a_commit_that_is_not_here_is_said_to_be_missing(tmp_path: Path) -> None:
    nowhere = "0" * 40
    assert "history is missing here" in (missing(nowhere) or "")
    with pytest.raises(NoHistory, match="history is missing here"):
        unpack(tmp_path, nowhere)


@pytest.mark.broker
@pytest.mark.long
@pytest.mark.timeout(900)
async def test_a_pool_is_upgraded_part_by_part_and_nothing_is_lost_or_repeated(tmp_path: Path) -> None:
    told = await upgraded(tmp_path, "--workers=1", "--quiet=1", "--rate=20")
    done = {"worker 0 is replaced": 1, "a broker is replaced": 1, "partitions are added": 1}
    assert told["faults_by_kind"] == done
    assert set(told["results_by_worker"]) == {"worker-0", "worker-1"}
    assert told["answered_in_new_partitions"] > 0
    assert told["results_in_new_partitions"] > 0
    assert told["pauses_s"].keys() == told["waits_s"].keys() > done.keys()
    assert told["pause_max_s"] >= max(told["pauses_s"].values()) > 0


@pytest.mark.broker
@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_a_pool_of_two_versions_is_handed_over_both_ways_and_nothing_is_lost_or_repeated(tmp_path: Path) -> None:
    if reason := missing():
        pytest.skip(f"needs an earlier commit: {reason}")
    told = await upgraded(tmp_path, "--older", "--rate=20", "--quiet=3")
    assert list(told["faults_by_kind"].values()) == [1] * 4
    assert set(told["results_by_worker"]) == {f"worker-{number}" for number in range(4)}


@pytest.mark.broker
@pytest.mark.long
async def test_what_an_older_worker_can_not_do_is_as_the_guide_says(tmp_path: Path, broker: Broker) -> None:
    if reason := missing():
        pytest.skip(f"needs an earlier commit: {reason}")
    settings = settings_for(broker.bootstrap)
    await ensure_topics(settings, ["llama", "qwen"])
    given: dict[str, Any] = {"max_wait_s": 2, "session_timeout_s": 6}
    body = {"model": "llama", "prompt": "hello", "max_tokens": 3}
    throttled = settings.topics.named(settings.topics.throttled)
    async with Client(settings=settings, timeout_s=60) as client:

        async def topics_of(worker: str) -> set[str]:
            """What it reads, by what it says of itself, once it reads anything."""
            found: set[str] = set()

            async def said() -> bool:
                found.update(*(one.partitions for one in await client.presences() if one.worker == worker))
                return bool(found)

            await until(said)
            return found

        async with working(settings, checkout=unpack(tmp_path), worker_id="old", **given) as old:
            classed = await client.result(await client.submit(body, request_class="no such class"), timeout_s=60)
            assert (classed.worker, classed.outcome) == ("old", Outcome.COMPLETED), "it does not know the header"
            assert throttled not in await topics_of("old")
            session = client.session(model="llama", max_tokens=3)
            await session.complete("Once upon a time")
            async with working(settings, worker_id="new", **given):
                assert throttled in await topics_of("new")
                old.process.process.kill()
                with pytest.raises(RequestFailed, match="This session is not here"):
                    await session.complete(" there was", final=True)
                classed = await client.result(await client.submit(body, request_class="no such class"), timeout_s=60)
                assert (classed.worker, classed.outcome, classed.status) == ("new", Outcome.FAILED, 400)
    await delete_topics(settings)


async def upgraded(folder: Path, *options: str) -> dict[str, Any]:
    """The figures of a run on brokers of its own, which was good."""
    if reason := LocalBroker.missing():
        pytest.skip(f"needs brokers that may be stopped: {reason}")
    figures = folder / "figures.json"
    command = ["-m", "tests.upgrade", f"--json={figures}", f"--logs={folder}", *options]
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=asyncio.subprocess.DEVNULL)
    try:
        code = await process.wait()
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)  # it ends its workers and its brokers
            await process.wait()
    told: dict[str, Any] = json.loads(figures.read_text())["figures"]
    wrong = {name: examples for name, examples in told["examples"].items() if examples}
    assert (wrong, told["ends_by_record"], code) == ({}, [], 0)
    assert told["results"] == told["sent"] == sum(told["outcomes"].values())
    return told
