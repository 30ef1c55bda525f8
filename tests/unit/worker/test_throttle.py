"""A tenant that asks for more than its quota waits in order; the others wait as if it were not there."""

import asyncio
import itertools
import json
import math
import random
import time
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiokafka import TopicPartition

from schemas.base import Origin
from schemas.control import Cancel
from schemas.results import Outcome, Result
from schemas.status import Presence, TenantShare
from schemas.usage import tokens_of
from service import settings as settings_module
from service.errors import ConfigError
from service.models_file import ModelsFile
from service.ports import Bus
from service.quotas_file import WatchedQuotas
from service.scheduling.quotas import Quotas
from service.worker.jobs import Job, Phase
from service.worker.quotas import OwnUsage
from service.worker.worker import ModelsSource, Observers, Worker
from tests.support.bus import until
from tests.support.fake_bus import FakeBus
from tests.support.fake_engine import FakeEngine
from tests.support.fake_kafka import LIMITS
from tests.support.virtual_time import virtual_time

BLUE, RED = 0, 1
"""The tenants' partitions: their names are the keys of their requests."""


def no_models() -> ModelsFile:
    raise ConfigError("there is no models.yaml here")


class Pool:
    """One worker on virtual time, and what its tenants ask. ``shared``: both of them in one partition."""

    def __init__(self, folder: Path, quotas: str, *, shared: bool = False, **given: Any) -> None:
        (folder / "quotas.yaml").write_text(quotas)
        (folder / "key").write_text("secret")
        files = {"quotas_file": folder / "quotas.yaml", "pool_key_file": folder / "key"}
        settings = settings_module.load(worker_id="w1", **files, **given)
        self._partitions = {"blue": BLUE, "red": BLUE if shared else RED}
        self.bus = FakeBus(limits=replace(LIMITS, requests=settings.worker.max_waiting), keys=[b"secret"])
        self.engine = FakeEngine(step_s=0.01)
        counted = Quotas(WatchedQuotas(settings.worker.quotas_file))
        self.worker = Worker(
            engine=self.engine,
            bus=Bus(source=self.bus, settlements=self.bus, control=self.bus, announcements=self.bus),
            settings=settings,
            models=ModelsSource(no_models),
            observers=Observers((OwnUsage(counted),)),
            quotas=counted,
        )

    def ask(self, tenant: str, *, tokens: int = 10, words: str = "hello", **headers: str) -> Origin:
        body = {"model": "llama", "prompt": words, "max_tokens": tokens}
        named = [("tenant", tenant.encode()), *((name, value.encode()) for name, value in headers.items())]
        return self.bus.broker.append("requests", json.dumps(body).encode(), named, partition=self._partitions[tenant])

    async def ask_often(self, tenant: str, *, per_s: float, seconds: float) -> list[Origin]:
        origins = []
        dice = random.Random(tenant)
        for _ in range(round(per_s * seconds)):
            origins.append(self.ask(tenant, tokens=dice.randint(5, 35)))
            await asyncio.sleep(1 / per_s)
        return origins

    def results(self, origins: list[Origin]) -> list[Result]:
        """Those that there are, as they came, wherever the requests were answered from."""
        records = itertools.chain.from_iterable(self.bus.settled.values())
        results = [self.bus.decoded(record) for record in records if record.topic == "results"]
        found = {result.origin: result for result in results}
        assert len(found) == len(results), "one result each"
        return [found[origin] for origin in origins if origin in found]

    async def answered(self, count: int) -> None:
        """Wait until so many requests have results."""
        await until(
            lambda: sum(records[0].topic == "results" for records in self.bus.settled.values()) >= count, within_s=600
        )

    async def running(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Do something while the worker runs."""
        stop = asyncio.Event()
        done = asyncio.create_task(self.worker.run(stop))
        try:
            return await work
        finally:
            stop.set()
            await done
            await self.engine.close()


def waits(results: list[Result]) -> list[float]:
    return sorted(result.timing.latency_s for result in results)


def p95(values: list[float]) -> float:
    return values[math.ceil(0.95 * len(values)) - 1]


@pytest.mark.parametrize(
    ("crowd", "shared"),
    [
        (1000, True),
        pytest.param(1000, False, marks=pytest.mark.long),
        pytest.param(4096, True, marks=pytest.mark.long),
        pytest.param(4096, False, marks=pytest.mark.long),
    ],
)
def test_a_tenant_at_ten_times_its_rate_gets_its_rate_and_anothers_waits_stay(tmp_path, crowd, shared):
    """``crowd``: how many requests the worker may hold, of which the tenant asks for far more."""
    minutes, per_s = 3, 20
    rate = round(per_s * (20 + 1) * 60 / 10)  # an answer has 20 tokens on average, its prompt one
    given = {"seconds": 60 * minutes, "max_waiting": crowd, "shared": shared}
    red_alone = asked_by_red(tmp_path, "", blue=None, **given)[1]
    quota = f"tenants: {{blue: {{tokens_per_minute: {rate}}}}}"
    blue, red = asked_by_red(tmp_path, quota, blue=per_s, **given)
    tokens = sum(sum(list(tokens_of(result.body).values())[:2]) for result in blue)
    assert tokens == pytest.approx(minutes * rate, rel=0.05)
    assert len(red) == len(red_alone) == 60 * minutes
    assert p95(waits(red)) <= max(1.1 * p95(waits(red_alone)), p95(waits(red_alone)) + 0.05)
    order = [result.origin.offset for result in sorted(blue, key=began)]
    assert order == sorted(order)
    assert max(result.timing.waited_for.get("quota", 0.0) for result in blue) > 60
    assert all("quota" not in result.timing.waited_for for result in red)


def began(result: Result) -> float:
    return result.timing.finished - result.timing.latency_s + result.timing.waited_s


def asked_by_red(
    folder: Path, quotas: str, *, blue: float | None, seconds: float, **given: Any
) -> tuple[list[Result], list[Result]]:
    with virtual_time() as loop:

        async def both() -> tuple[list[Result], list[Result]]:
            pool = Pool(folder, quotas, **given)

            async def ask() -> tuple[list[Result], list[Result]]:
                red = asyncio.create_task(pool.ask_often("red", per_s=1, seconds=seconds))
                blues = [] if blue is None else await pool.ask_often("blue", per_s=blue, seconds=seconds)
                found = pool.results(blues)
                reds = await red
                await asyncio.sleep(2)
                return found, pool.results(reds)

            return await pool.running(ask())

        return loop.run_until_complete(both())


def in_virtual_time(folder: Path, quotas: str, work: Any, **given: Any) -> None:
    with virtual_time() as loop:

        async def run() -> None:
            pool = Pool(folder, quotas, **given)
            await pool.running(work(pool))

        loop.run_until_complete(run())


def test_no_more_run_at_a_time_than_may_and_those_that_wait_can_be_cancelled_and_expire(tmp_path):
    async def ask(pool: Pool) -> None:
        first = [pool.ask("blue", tokens=100) for _ in range(5)]
        cancelled = pool.ask("blue", ce_id="c1")
        expires = pool.ask("blue", ttl="0.5")
        last = pool.ask("blue")
        most = 0
        pool.bus.command(Cancel(request="c1"))
        asked = [*first, cancelled, expires, last]
        await until(lambda: pool.worker.standing().held == 7)  # one was cancelled before it was read
        assert pool.worker.standing().throttled == 5
        while not all(origin in pool.bus.settled for origin in asked):
            most = max(most, len(pool.worker.jobs.running()))
            await asyncio.sleep(0.005)
        assert most == 2
        outcomes = [result.outcome for result in pool.results(asked)]
        assert outcomes == [*[Outcome.COMPLETED] * 5, Outcome.CANCELLED, Outcome.EXPIRED, Outcome.COMPLETED]
        assert pool.worker.standing().presence.tenants == {}
        assert pool.worker.standing().throttled == 0

    in_virtual_time(tmp_path, "default: {concurrent: 2}", ask)


def test_what_other_workers_have_counts_until_they_have_gone(tmp_path):
    async def ask(pool: Pool) -> None:
        other = Presence(worker="w2", pool="gearshift", at=0, interval_s=3, tenants={"blue": TenantShare(under_way=9)})
        pool.bus.presences.append(other)
        await asyncio.sleep(2)
        asked = [pool.ask("blue", tokens=1000) for _ in range(9)]
        await asyncio.sleep(2)
        assert len(pool.worker.jobs.running()) == 4
        assert pool.worker.standing().presence.tenants["blue"].under_way == 4
        pool.bus.presences.remove(other)
        await asyncio.sleep(3)
        assert len(pool.worker.jobs.running()) == 8
        await until(lambda: all(origin in pool.bus.settled for origin in asked), within_s=600)

    in_virtual_time(tmp_path, "default: {concurrent: 8}", ask)


def test_of_a_tenant_that_has_too_many_bytes_no_more_is_read(tmp_path):
    async def ask(pool: Pool) -> None:
        asked = [pool.ask("blue", tokens=40, words="x" * 1000) for _ in range(1000)]
        await asyncio.sleep(5)
        here = len(pool.worker.jobs)
        assert here < 600, "what was read in the first turns"
        assert pool.worker.standing().presence.trouble is None
        other = pool.ask("red")
        await asyncio.sleep(0.5)
        assert other in pool.bus.settled
        await pool.answered(len(asked) + 1)
        assert pool.worker.standing().presence.tenants == {}

    in_virtual_time(tmp_path, "tenants: {blue: {concurrent: 10, waiting_bytes: 100000}}", ask)


def test_a_long_wait_for_a_quota_is_no_standstill(tmp_path):
    async def ask(pool: Pool) -> None:
        first, second = pool.ask("blue", tokens=1000), pool.ask("blue")
        await asyncio.sleep(600)
        assert first in pool.bus.settled
        assert second not in pool.bus.settled
        (job,) = pool.worker.jobs
        assert job.phase is Phase.THROTTLED
        assert pool.worker.standing().presence.trouble is None
        await asyncio.sleep(600)
        assert second in pool.bus.settled

    in_virtual_time(tmp_path, "default: {tokens_per_minute: 60}", ask, exit_after_stall_s=30, stall_after_s=20)


def test_a_clock_that_is_set_back_shuts_no_tenant_out(tmp_path):
    async def ask(pool: Pool) -> None:
        first = pool.ask("blue", tokens=100)
        await asyncio.sleep(5)
        assert first in pool.bus.settled
        ahead = time.time
        time.time = lambda: ahead() - 3600.0
        second = pool.ask("blue")
        await asyncio.sleep(300)
        assert second in pool.bus.settled

    in_virtual_time(tmp_path, "default: {tokens_per_minute: 60}", ask)


def test_a_limit_that_is_raised_lets_go_who_waits(tmp_path):
    async def ask(pool: Pool) -> None:
        asked = [pool.ask("blue", tokens=50) for _ in range(20)]
        await asyncio.sleep(0.3)
        assert len(pool.worker.jobs.running()) == 1
        (tmp_path / "quotas.yaml").write_text("default: {concurrent: 20, waiting_bytes: 1000000}")
        await asyncio.sleep(3)
        assert all(origin in pool.bus.settled for origin in asked)

    in_virtual_time(tmp_path, "default: {concurrent: 1}", ask)


def test_a_worker_that_stops_leaves_what_waits_to_the_next_one(tmp_path):
    async def ask(pool: Pool) -> None:
        asked = [pool.ask("blue", tokens=50) for _ in range(20)]
        await asyncio.sleep(0.3)
        assert len(pool.worker.jobs) == len(asked)

    in_virtual_time(tmp_path, "default: {concurrent: 1}", ask)


def test_a_part_of_a_session_and_what_the_bus_refuses_elsewhere_wait_in_their_line(tmp_path):
    """Of the others nothing is read, as they would take everybody's room."""

    async def ask(pool: Pool) -> None:
        parts = [pool.ask("blue", tokens=100, session=f"s{n}", part="0") for n in range(600)]
        await asyncio.sleep(5)
        assert pool.worker.standing().throttled < 300
        assert pool.worker.standing().throttled_moved == 0
        await pool.answered(len(parts))
        pool.bus.refuse.add("throttled")
        asked = [pool.ask("blue", tokens=100) for _ in range(300)]
        await pool.answered(len(parts) + len(asked))
        moved = pool.worker.standing().throttled_moved
        assert 0 < moved <= len(asked), "none is tried again"
        assert {result.outcome for result in pool.results(asked)} == {Outcome.COMPLETED}
        assert pool.worker.standing().presence.tenants == {}
        pool.bus.refuse.clear()

    in_virtual_time(tmp_path, "tenants: {blue: {concurrent: 2}}", ask, max_waiting=600)


def test_once_those_that_were_moved_are_done_the_others_are_answered_from_where_they_are(tmp_path):
    async def ask(pool: Pool) -> None:
        flood = [pool.ask("blue", tokens=10) for _ in range(300)]
        await pool.answered(len(flood))
        moved = pool.worker.standing().throttled_moved
        assert moved > 200
        later = pool.ask("blue", tokens=10)
        await until(lambda: later in pool.bus.settled)
        assert pool.worker.standing().throttled_moved == moved
        assert [result.origin for result in pool.results([later])] == [later]

    in_virtual_time(tmp_path, "tenants: {blue: {concurrent: 2}}", ask, max_waiting=600)


def test_what_was_moved_outlives_its_worker_and_waits_for_its_quota_as_its_result_says(tmp_path):
    """Twice the partitions are another's for a while, with all that is moved, being moved and under way."""

    async def ask(pool: Pool) -> None:
        asked = [pool.ask("blue", tokens=20, ce_id=f"b{n}") for n in range(400)]
        for _ in range(2):
            await asyncio.sleep(3)
            pool.bus.rebalance()
        await pool.answered(len(asked))
        results = pool.results(asked)
        assert {result.outcome for result in results} == {Outcome.COMPLETED}
        assert [result.id for result in results] == [f"b{n}" for n in range(400)]
        assert results[-1].timing.waited_for["quota"] > 0.9 * results[-1].timing.waited_s
        assert pool.worker.standing().presence.tenants == {}

    in_virtual_time(tmp_path, "tenants: {blue: {concurrent: 2}}", ask, max_waiting=600)


def test_a_long_line_is_moved_in_pieces_and_keeps_its_order(tmp_path):
    """One transaction has all that is moved at once, and results wait for it."""

    async def ask(pool: Pool) -> None:
        throttle, pieces, held = pool.worker.lifecycle.throttle, [], []
        whole = throttle.overflowing

        def overflowing() -> list[Job]:
            pieces.append(len(moving := whole()))
            none_is_back = ("throttled", 0) not in throttle._lines["blue"].partitions if throttle.waiting else False
            if moving and none_is_back:  # there is room in its quota now, and all that went are before it
                throttle._quotas.end("blue", 0.0)
                assert throttle.released() == []
                assert throttle.next_s() == 1.0, "looked at over and over it would not go sooner"
                throttle._quotas.begin("blue", 0, time.monotonic())
                held.append(throttle.waiting)
            return moving

        throttle.overflowing = overflowing
        asked = [pool.ask("blue", tokens=5) for _ in range(1400)]
        await pool.answered(len(asked))
        assert sum(pieces) == pool.worker.standing().throttled_moved > 1000
        assert max(pieces) <= 500
        assert held
        results = pool.results(asked)
        order = [result.origin.offset for result in sorted(results, key=began)]
        assert order == sorted(order)

    in_virtual_time(tmp_path, "tenants: {blue: {concurrent: 1}}", ask, max_waiting=4096)


def test_what_comes_behind_those_that_were_moved_follows_them_though_another_worker_has_them(tmp_path):
    async def ask(pool: Pool) -> None:
        first = pool.ask("blue", tokens=10)
        pool.bus.assign([TopicPartition("requests", BLUE)])
        flood = [pool.ask("blue", tokens=10) for _ in range(300)]
        await asyncio.sleep(30)
        assert first in pool.bus.settled
        moved = pool.worker.standing().throttled_moved
        assert moved > 200
        later = pool.ask("blue", tokens=10)
        await asyncio.sleep(5)
        assert [record.topic for record in pool.bus.settled[later]] == ["throttled"]
        assert len(pool.results([first, *flood])) == 1 + len(flood) - moved

    in_virtual_time(tmp_path, "tenants: {blue: {concurrent: 2}}", ask, max_waiting=600)
