"""The loop that gives the engine its work: asks the scheduler what runs next, switches, and starts what fits."""

import asyncio
import math
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import structlog

from schemas.contexts import Tier
from schemas.errors import FailureClass
from schemas.status import QueueInfo
from service.models_file import Scheduling
from service.ports import Engine
from service.scheduling.costs import Costs
from service.scheduling.estimate import Forecast
from service.scheduling.scheduler import Context, Scheduler
from service.settings import Inactive, WorkerSettings
from service.worker import settlements
from service.worker.active_time import ActiveTime, waited_for
from service.worker.admission import Spawn
from service.worker.jobs import Job, Jobs, Phase
from service.worker.runner import Runner
from service.worker.suspects import Suspects
from service.worker.switcher import Switcher
from service.worker.throughput import Throughput
from service.worker.tiering import Tiering

log = structlog.get_logger(__name__)
_LAST = 0.1
"""The part of what was started that is taken to be left however long it has run."""


class Dispatcher:
    """Starts jobs on the active model, as many as fit, and moves on when the scheduler says so."""

    def __init__(
        self,
        *,
        engine: Engine,
        jobs: Jobs,
        scheduler: Scheduler[Job],
        switcher: Switcher,
        tiering: Tiering,
        runner: Runner,
        turns: ActiveTime,
        settings: WorkerSettings,
        spawn: Spawn,
    ) -> None:
        self._engine = engine
        self.jobs = jobs
        self._scheduler = scheduler
        self._switcher = switcher
        self._tiering = tiering
        self._runner = runner
        self._turns = turns
        self._settings = settings
        self._spawn = spawn
        self._wake = asyncio.Event()
        self._given: defaultdict[str, set[Job]] = defaultdict(set)
        self._suspects = Suspects()
        self._failures: Counter[str] = Counter()
        self._barred: dict[str, float] = {}
        self.tasks: dict[Job, asyncio.Task[None]] = {}
        self._seen: list[Context] = []
        """The contexts as the latest decision saw them; good enough for estimates."""
        self.pace = Throughput(scheduler.costs)
        self.paused = False

    @property
    def costs(self) -> Costs:
        return self._scheduler.costs

    def reschedule(self, models: Mapping[str, Scheduling]) -> None:
        """Take what a new models.yaml says of how requests are scheduled."""
        self._scheduler.models = models

    def wake(self) -> None:
        """Something changed: decide again."""
        self._wake.set()

    async def run(self) -> None:
        """Until the worker ends."""
        while True:
            self._wake.clear()
            until = await self._turn()
            await self._until(until)

    async def _turn(self) -> float | None:
        """One decision and what follows from it; returns when to decide again, on the monotonic clock."""
        now = time.monotonic()
        self._look(now)
        if self.paused:
            return None
        alone = self._suspects.alone
        if alone is not None and alone.alias == self._engine.active:
            return None
        if self._settings.inactive is Inactive.REFUSE:
            self._refuse_inactive()
        decision = self._scheduler.decide(now, self._contexts(now))
        self._tiering.follow(decision, self._seen, now)
        if decision.run != self._engine.active:
            self.pace.stop(now)
            log.debug("switch.decided", model=decision.run, why=decision.why)
            if (reason := await self._switcher.by_scheduler(decision.run)) is not None:
                self._failed_load(decision.run, reason)
            self._failures.pop(self._engine.active, None)
            return time.monotonic()
        self._start_all(decision.run)
        barred = min(self._barred.values(), default=None)
        return barred if decision.until is None else min(decision.until, barred or decision.until)

    def _contexts(self, now: float) -> list[Context]:
        """What the policy may choose from: models whose load has just failed are left out for a while."""
        for alias in [alias for alias, until in self._barred.items() if until <= now]:
            del self._barred[alias]
        tiers = {info.alias: info.tier for info in self._engine.contexts()}
        self._seen = [
            self._context(alias, tiers.get(alias, Tier.DROPPED), now)
            for alias in self._engine.aliases
            if alias not in self._barred
        ]
        return self._seen

    def _context(self, alias: str, tier: Tier, now: float) -> Context:
        unfinished = [*self._given[alias], *self._suspects.held(alias)]
        deadlines = [job.request.deadline for job in unfinished]
        dated = [deadline for deadline in deadlines if deadline is not None]
        return Context(
            alias=alias,
            tier=tier,
            unfinished=len(deadlines),
            unfinished_tokens=self._left_of(alias, now),
            unfinished_deadline=now + min(dated) - time.time() if dated else math.inf,
            unfinished_priority=min((job.request.priority for job in unfinished), default=None),
            undated=len(dated) < len(deadlines),
            ready_at=self._tiering.ready_at(alias),
        )

    def _left_of(self, alias: str, now: float) -> int:
        """The tokens that unfinished requests have yet to cost, by how long those of their model usually run."""
        held = sum(job.tokens for job in self._suspects.held(alias))
        started = self._given[alias]
        tokens = sum(job.tokens for job in started)
        if not tokens:
            return held
        served_s = self._turns.snapshot(alias, now)[0] - sum(job.tokens * job.began for job in started) / tokens
        usual_s = self.costs.pace(alias).request_s
        return held + int(tokens * max(_LAST, 1 - served_s / usual_s if usual_s else 0.0))

    def _start_all(self, alias: str) -> None:
        limit = self._scheduler.slots(alias)
        running = self._given[alias]
        while len(running) < limit and (held := self._suspects.release(alias, running)) is not None:
            self._start(held)
        while (room := limit - len(running)) > 0 and not self._suspects.closed(alias):
            taken = self._scheduler.queues.take(alias, room)
            if not taken:
                return
            for waiting in taken:
                self._start_or_hold(waiting.payload)

    def _start_or_hold(self, job: Job) -> None:
        running = self._given[job.alias]
        if self._suspects.closed(job.alias) or not self._suspects.may_start(job, running):
            self._suspects.hold(job)
        else:
            self._start(job)

    def _start(self, job: Job) -> None:
        if self._suspects.alone is not None:  # its model was left while it ran
            self._spawn(self._runner.joined(self._suspects.alone), f"joined {self._suspects.alone.request.id}")
            self._suspects.alone = None
        if job.suspect:
            self._suspects.alone = job
        now = time.monotonic()
        turns = self._turns.snapshot(job.alias, now)
        job.began = turns[0]
        waited = waited_for(now - job.taken, job.snapshot, turns)
        for reason, seconds in waited.items():
            job.waited_for[reason] = job.waited_for.get(reason, 0.0) + seconds
        job.phase = Phase.RUNNING
        self._given[job.alias].add(job)
        self._look(now)
        task = self._spawn(self._runner.run(job), f"request {job.request.id}")
        self.tasks[job] = task
        task.add_done_callback(lambda _task: self._ended(job))

    def _ended(self, job: Job) -> None:
        self.tasks.pop(job, None)
        if self._suspects.alone is job:
            self._suspects.alone = None
        self._given[job.alias].discard(job)
        self._look(time.monotonic())
        self.wake()

    def _look(self, now: float) -> None:
        """Keep what the engine is at for the models' pace; in the middle of a switch it is at nothing."""
        if not self._turns.switching:
            active = self._engine.active
            waiting = active in self._scheduler.queues.aliases
            self.pace.look(active, now, busy=bool(self._given[active]), waiting=waiting)

    def _failed_load(self, alias: str, reason: str) -> None:
        """Try again a little later; after a few times, say so to everyone who waits for it."""
        self._failures[alias] += 1
        delay = self._settings.retry_backoff_s * 2 ** (self._failures[alias] - 1)
        self._barred[alias] = time.monotonic() + min(delay, self._settings.retry_backoff_max_s)
        if self._failures[alias] < self._settings.max_attempts:
            return
        del self._failures[alias]
        for job in self._take_all(alias):
            settlement = settlements.failed(
                job,
                FailureClass.LOAD_FAILED,
                f"The model `{alias}` could not be loaded: {reason}",
                status=503,
                worker=self._settings.worker_id,
                kind="ServiceUnavailableError",
            )
            self._spawn(self._runner.settle(job, settlement), f"settle {job.request.id}")

    def refuse_removed(self) -> None:
        """What waited for a model that is no more is answered as a request for any unknown one."""
        for alias in set(self._scheduler.queues.aliases) - set(self._engine.aliases):
            self._refuse(alias)

    def _refuse(self, alias: str) -> None:
        for job in self._take_all(alias):
            settlement = settlements.unknown_model(job, worker=self._settings.worker_id)
            self._spawn(self._runner.settle(job, settlement), f"settle {job.request.id}")

    def _refuse_inactive(self) -> None:
        """What waited for a model that was switched away from is refused, as vllm-gaudi's server refuses it."""
        for alias in self._engine.aliases:
            if alias != self._engine.active:
                self._refuse(alias)

    def _take_all(self, alias: str) -> list[Job]:
        queued = self._scheduler.queues.take(alias, len(self._scheduler.queues))
        return [*self._suspects.drain(alias), *(waiting.payload for waiting in queued)]

    async def _until(self, moment: float | None) -> None:
        """Sleep until something changes, or until ``moment``."""
        left = None if moment is None else max(0.0, moment - time.monotonic())
        try:
            async with asyncio.timeout(left):
                await self._wake.wait()
        except TimeoutError:
            pass

    # --- what is asked about it ---

    def can_meet(self, job: Job) -> bool:
        """Whether a waiting job's deadline can be met at all; where it can't, it is refused at once."""
        return self._scheduler.can_meet(str(job.origin), time.monotonic(), self._seen)

    def queue_infos(self) -> dict[str, QueueInfo]:
        """What waits and runs per model."""
        now = time.monotonic()
        infos = {}
        for alias in self._engine.aliases:
            view = self._scheduler.queues.view(alias)
            oldest = now - view.oldest if view.requests else 0.0
            infos[alias] = QueueInfo(
                waiting=view.requests, running=len(self._given[alias]), tokens=view.tokens, oldest_s=oldest
            )
        return infos

    def describe(self, request: str | None) -> Mapping[str, Any]:
        """Where a request stands, or the whole state."""
        if request is None:
            queues = {alias: info.model_dump() for alias, info in self.queue_infos().items()}
            return {"active": self._engine.active, "paused": self.paused, "queues": queues}
        forecast = self._forecast()
        return {"request": request, "found": [self._place(job, forecast) for job in self.jobs.find(id_=request)]}

    def requests(self, most: int) -> list[dict[str, Any]]:
        """What runs and waits, without what it says: at most so many, those that run first."""
        jobs = sorted(self.jobs, key=lambda job: (job.phase is Phase.WAITING, job.request.received))[:most]
        found, forecast = [], self._forecast()
        for job in jobs:
            request = job.request
            place = self._place(job, forecast)
            place |= {"id": request.id, "endpoint": request.endpoint.value, "origin": str(job.origin)}
            place["age_s"] = time.time() - request.received
            found.append(place)
        return found

    def tokens(self) -> int:
        """Tokens that the running requests have generated so far."""
        return sum(self._engine.tokens(job.call_id) for job in self.jobs.running())

    def _forecast(self) -> Forecast:
        now = time.monotonic()
        return self._scheduler.forecast(now, self._contexts(now))

    def _place(self, job: Job, forecast: Forecast) -> dict[str, Any]:
        place: dict[str, Any] = {"phase": job.phase.value, "model": job.alias, "attempt": job.attempt.n}
        if job.phase is Phase.WAITING:
            estimate = self._scheduler.estimate(str(job.origin), forecast)
            if estimate is not None:
                known = math.isfinite(estimate.turn_s)  # not while the operator holds another model without an end
                place["position"] = estimate.position
                place |= {"turn_s": estimate.turn_s, "expected_s": estimate.wait_s} if known else {"expected_s": None}
        else:
            place["tokens"] = self._engine.tokens(job.call_id)
            place["frozen"] = job.frozen_at is not None
        return place
