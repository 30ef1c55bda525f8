"""The whole worker under everything that may happen to it in any order, in virtual time.

What always holds: every request ends in one result, whatever was held, cancelled, lost, killed or moved; nobody waits
for its model longer than the bound, but for an operator's hold; and only what had the engine to itself is blamed.
"""

import asyncio
import logging
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import structlog
from aiokafka import TopicPartition
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from schemas.base import Origin, Outgoing
from schemas.contexts import Tier
from schemas.control import Cancel, Pause, Resume, Switch
from schemas.errors import FailureClass
from schemas.results import Outcome, Result
from service import settings as settings_module
from service.errors import ConfigError
from service.models_file import ModelsFile
from service.ports import Bus
from service.worker import jobs
from service.worker.worker import ModelsSource, Worker
from tests.support.fake_bus import FakeBus
from tests.support.fake_engine import POISON, FakeEngine
from tests.support.fake_kafka import FakeBroker
from tests.support.virtual_time import virtual_time

ALIASES = ("llama", "qwen", "lynx")
BROKEN = "broken"
MAX_WAIT_S = 5.0
SLACK_S = 3.0
"""What a bound on waiting may be exceeded by: the turn that is under way, the switches, a tick of the loops."""
SETTINGS = settings_module.load(
    worker_id="w1", max_wait_s=MAX_WAIT_S, park_after_s=1.0, max_running=4, presence_interval_s=1.0
)
models = st.sampled_from(ALIASES)


@dataclass
class Asked:
    """A request as the machine knows it."""

    model: str
    poison: bool
    disturbed: bool = False
    """Something happened to it that the bound on waiting does not cover."""
    may_be_aborted: bool = False
    """A switch was asked for that aborts what its model has begun."""
    deaths: int = 0
    """How often a worker or an engine was gone that had been given it."""
    deaths_alone: int = 0
    """How often it was the only one that took steps when that happened from outside."""


class WorkerMachine(RuleBasedStateMachine):
    """Rules: produce, expire, hold, switch, thaw, cancel, kill, rebalance, park, pause, and time that passes."""

    @initialize()
    def open(self) -> None:
        self.stack = ExitStack()
        self.stack.enter_context(quiet_logs())
        self.results: dict[Origin, Result | None] = {}
        self.loop = self.stack.enter_context(virtual_time())
        self.broker = FakeBroker()
        self.before: dict[Origin, list[Outgoing]] = {}
        """What earlier workers settled."""
        self.asked: dict[Origin, Asked] = {}
        self.paused: set[str] = set()
        self.run(self.begin())

    async def begin(self) -> None:
        self.bus = FakeBus(broker=self.broker)
        await self.start()

    def run(self, work) -> None:
        self.loop.run_until_complete(work)

    async def start(self) -> None:
        """A worker with an engine of its own."""
        self.engine = FakeEngine((*ALIASES, BROKEN), step_s=0.01, switch_s=0.02, broken_loads=frozenset({BROKEN}))
        for alias in ALIASES:
            await self.engine.preload(alias)
        self.worker = Worker(
            engine=self.engine,
            bus=Bus(source=self.bus, settlements=self.bus, control=self.bus, announcements=self.bus),
            settings=SETTINGS,
            models=ModelsSource(_no_models),
        )
        for alias in ALIASES:
            for tier in Tier:
                self.worker.scheduler.costs.switched(None, alias, tier, 0.02)
        self.stop = asyncio.Event()
        self.done = asyncio.create_task(self.worker.run(self.stop))
        await asyncio.sleep(0.1)

    async def passes(self, seconds: float) -> None:
        """Time passes; a worker whose engine died is followed by another."""
        until = self.loop.time() + seconds
        while (left := until - self.loop.time()) > 0:
            await asyncio.wait({self.done}, timeout=left)
            if self.done.done():
                await self.follow()
        self.note_holds()

    @property
    def settled(self) -> dict[Origin, list[Outgoing]]:
        return self.before | self.bus.settled

    async def follow(self) -> None:
        """The worker is gone; another one reads what it left in the ledger."""
        if not self.done.cancelled():
            self.done.exception()
        self.gone()
        assert not self.before.keys() & self.bus.settled.keys(), "one result each"
        self.before |= self.bus.settled
        said = self.bus.presences
        self.bus = FakeBus(broker=self.broker)
        self.bus.presences = said
        await self.engine.close()
        self.paused = set()
        await self.start()

    def note_holds(self) -> None:
        """Whatever waits while an operator holds a model, or nothing may start, waits for that."""
        if self.paused or self.worker.switcher.asked or self.worker.switcher.hold_info() is not None:
            for origin, each in self.asked.items():
                if origin not in self.settled:
                    each.disturbed = True

    def produce(self, model: str, tokens: int, *, poison: bool = False, **headers: str) -> None:
        text = POISON if poison else "hello"
        body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": tokens}
        origin = self.bus.produce(body, {"ce_id": f"r{len(self.asked)}", **headers}, at=time.time())
        self.asked[origin] = Asked(model, poison, disturbed=poison or "ttl" in headers)

    # --- rules ---

    @rule(model=models, tokens=st.integers(1, 100), count=st.integers(1, 6))
    def requests(self, model: str, tokens: int, count: int) -> None:
        for _ in range(count):
            self.produce(model, tokens)
        self.run(self.passes(0.05))

    @rule(model=models, tokens=st.integers(1, 500), ttl=st.sampled_from(["0.01", "0.5", "3"]))
    def request_that_expires(self, model: str, tokens: int, ttl: str) -> None:
        self.produce(model, tokens, ttl=ttl)
        self.run(self.passes(0.05))

    @precondition(lambda self: sum(each.poison for each in self.asked.values()) < 2)
    @rule(model=models)
    def poison(self, model: str) -> None:
        self.produce(model, 10, poison=True)
        self.run(self.passes(0.05))

    @rule(seconds=st.sampled_from([0.0, 0.02, 0.3, 2.0, 20.0]))
    def time_passes(self, seconds: float) -> None:
        self.run(self.passes(seconds))

    @rule(
        model=st.sampled_from([*ALIASES, BROKEN]),
        hold=st.sampled_from([0, 0.5, 5.0, "drained", "forever"]),
        mode=st.sampled_from(["keep", "drain", "abort"]),
    )
    def switch(self, model: str, hold: float | str, mode: str) -> None:
        if model == BROKEN:
            self.run(self.passes(5.0))  # what was asked before is done
        before = self.worker.switcher.hold_info()
        for each in self.asked.values():
            each.may_be_aborted |= mode != "keep" and each.model != model
        self.bus.command(event := Switch(model=model, hold=hold, mode=mode, drain_timeout=2.0))
        self.run(self.passes(0.01))
        self.note_holds()
        if model == BROKEN:
            self.run(self.passes(3.0))
            after = self.worker.switcher.hold_info()
            assert after is None or after == before, "a failed switch changes no hold"
            assert self.worker.switcher.obeyed != event.id

    @precondition(lambda self: self.asked)
    @rule(n=st.integers(0, 1000))
    def cancel(self, n: int) -> None:
        n %= len(self.asked)
        list(self.asked.values())[n].disturbed = True
        self.bus.command(Cancel(request=f"r{n}"))
        self.run(self.passes(0.01))

    @rule()
    def rebalance(self) -> None:
        """Every partition goes and comes back: all is begun anew."""
        self.note_who_has_the_engine()
        self.gone()
        self.bus.rebalance()
        self.run(self.passes(0.3))

    @precondition(lambda self: self.asked)
    @rule(n=st.integers(0, 1000))
    def another_worker_answers(self, n: int) -> None:
        """A partition was another worker's for a while, which settled one of its requests."""
        origin = list(self.asked)[n % len(self.asked)]
        where = TopicPartition(origin.topic, origin.partition)
        if origin in self.settled or where not in self.bus.member.writers:
            return
        for each in self.asked.values():
            each.disturbed = True
        self.bus.lose(origin)
        self.before[origin] = []
        self.run(self.passes(0.3))
        assert self.worker.jobs.at(origin) is None

    @rule(paused=st.booleans(), model=st.sampled_from([None, *ALIASES]))
    def pause(self, paused: bool, model: str | None) -> None:
        said = set(ALIASES if model is None else (model,))
        self.paused = self.paused | said if paused else self.paused - said
        self.bus.command(Pause(model=model) if paused else Resume(model=model))
        self.run(self.passes(0.01))
        self.note_holds()

    @rule()
    def kill(self) -> None:
        """The worker and its engine are killed from outside, as by the kernel."""
        self.run(self.killed())

    async def killed(self) -> None:
        self.note_who_has_the_engine()
        self.done.cancel()
        await asyncio.wait({self.done})
        await self.follow()

    def note_who_has_the_engine(self) -> None:
        """It, or for all that the ledger can tell, is about to be gone, whatever runs there."""
        serving = None if self.engine._lock.locked() else self.engine._serving
        stepping = [call for call, run in self.engine._runs.items() if run.call.alias == serving]
        for job in self.worker.jobs:
            assert not job.alone or stepping == [job.call_id], "who is alone is the only one that takes steps"
            self.asked[job.origin].deaths_alone += stepping == [job.call_id]

    def gone(self) -> None:
        """The worker is gone, or its partitions are: whatever the engine was given has died with it."""
        for each in self.asked.values():
            each.disturbed = True
        for job in self.worker.jobs:
            self.asked[job.origin].deaths += job.phase is jobs.Phase.RUNNING

    # --- what holds ---

    @invariant()
    def nobody_waits_longer_than_the_bound(self) -> None:
        for origin, each in self.asked.items():
            if origin in self.settled and not each.disturbed and (result := self.result(origin)) is not None:
                assert result.timing.waited_for.get("turn", 0.0) <= MAX_WAIT_S + SLACK_S, result.timing
                aborted = each.may_be_aborted and result.outcome is Outcome.CANCELLED
                assert aborted or result.outcome is Outcome.COMPLETED

    @invariant()
    def only_the_guilty_are_poison(self) -> None:
        for origin, each in self.asked.items():
            if origin in self.settled and (result := self.result(origin)) is not None:
                wrongly = result.failure is FailureClass.POISON and not each.poison
                assert not wrongly or each.deaths_alone >= 2

    @invariant()
    def a_death_counts_once_and_for_what_ran(self) -> None:
        for job in self.worker.jobs:
            assert job.deaths <= self.asked[job.origin].deaths, job

    def result(self, origin: Origin) -> Result | None:
        """The result of a request, unless another worker has it, or it was moved to its model's own topic."""
        if origin not in self.results:
            records = self.settled[origin]
            own = not records or records[0].topic.startswith("requests.")
            self.results[origin] = None if own else self.bus.decoded(records[0])
        return self.results[origin]

    def teardown(self) -> None:
        if not hasattr(self, "stop"):
            return
        try:
            self.run(self.drained())
        finally:
            self.run(self.ended())
            self.stack.close()

    async def drained(self) -> None:
        """Once nothing is held and nobody dies of poison any more, everything is answered."""
        self.bus.command(Resume())
        self.bus.command(Switch(model="llama", hold=0))
        self.paused = set()
        for _ in range(120):
            await self.passes(10.0)
            if self.settled.keys() >= self.asked.keys():
                break
        left = self.asked.keys() - self.settled.keys()
        assert not left, f"{len(left)} requests are never answered: {[str(job) for job in self.worker.jobs][:3]}"
        self.nobody_waits_longer_than_the_bound()
        self.only_the_guilty_are_poison()
        self.a_death_counts_once_and_for_what_ran()
        assert len(self.worker.jobs) == 0
        assert self.worker.switcher.hold_info() is None
        assert not math.isinf(self.loop.time())

    async def ended(self) -> None:
        self.stop.set()
        await asyncio.wait({self.done}, timeout=1000)
        assert self.done.done()
        await self.engine.close()


@contextmanager
def quiet_logs() -> Iterator[None]:
    """Thousands of lines a second say nothing here."""
    before = structlog.get_config()["wrapper_class"]
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(wrapper_class=before)


def _no_models() -> ModelsFile:
    raise ConfigError("there is no models.yaml here")


TestWorkerMachine = WorkerMachine.TestCase
TestWorkerMachine.settings = settings(
    max_examples=40,
    stateful_step_count=20,
    deadline=None,
    database=None,
    phases=(Phase.generate, Phase.shrink),  # to explain a failure, each line would be traced
    suppress_health_check=list(HealthCheck),
)
