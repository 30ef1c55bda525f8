"""Every job from its admission to its end; the one place where a job's phase changes."""

import asyncio
import math
import time
from collections.abc import Callable, Collection, Iterable
from functools import partial

import structlog

from schemas.base import Origin, Record
from schemas.requests import Refusal
from schemas.results import Freeze
from service.ports import Answer
from service.scheduling.queues import Waiting
from service.scheduling.scheduler import Scheduler
from service.worker.active_time import ActiveTime, waited_for
from service.worker.cancellations import Cancellations
from service.worker.expiries import Expiries
from service.worker.jobs import IDLE, Ending, Job, Jobs, Phase, Why
from service.worker.publisher import Publisher
from service.worker.runner import Died, Over, Ran, Repeat, Runner
from service.worker.runs import Runs
from service.worker.suspects import Given, Suspects
from service.worker.tasks import Tasks
from service.worker.throttle import Throttle

log = structlog.get_logger(__name__)


class Lifecycle:
    """Admits, starts, freezes and ends jobs.

    ``end`` is the one way for a job to end, whatever asks for it and whatever phase it is in; the first reason counts.
    ``changed`` is set when there is something to decide anew.
    """

    def __init__(
        self,
        *,
        jobs: Jobs,
        scheduler: Scheduler[Job],
        runner: Runner,
        publisher: Publisher,
        active_time: ActiveTime,
        tasks: Tasks,
        throttle: Throttle,
    ) -> None:
        self.jobs = jobs
        self._scheduler = scheduler
        self._runner = runner
        self._publisher = publisher
        self._active_time = active_time
        self._tasks = tasks
        self.throttle = throttle
        self._suspects = Suspects()
        self.runs = Runs(runner=runner, active_time=active_time, tasks=tasks)
        self.cancellations = Cancellations()
        self.changed = asyncio.Event()
        self._expiries = Expiries(partial(self.end, why=Why.EXPIRED))

    # --- what is there ---

    def given(self, alias: str) -> Given:
        """The jobs that take a model's slots: from their start until their result is committed."""
        return self.runs.of(alias)

    def held(self, alias: str) -> Collection[Job]:
        """The suspects that have their model's turn, and wait until they may start."""
        return tuple(self._suspects.held(alias))

    def closed(self, alias: str) -> bool:
        """Whether nothing else may start on a model: a suspect runs alone there, or is about to."""
        return self._suspects.closed(alias, self.given(alias))

    # --- a job begins ---

    def refuse(self, refusal: Refusal, record: Record) -> None:
        """Answer a record that is no request."""
        self._tasks.spawn(f"refuse {refusal.id}", self._publisher.refuse, refusal, record)

    def admit(self, job: Job) -> None:
        """Take a job, and let it wait for its model; first for its tenant's quota, where it must."""
        self.jobs.add(job)
        self._expiries.add(job)
        self._queue(job)

    def release(self) -> None:
        """Let those go on whose tenants may have more now."""
        for job in self.throttle.released():
            job.waited_for["quota"] = job.waited_for.get("quota", 0.0) + time.monotonic() - job.taken
            self._wait(job)

    def turn_down(self, job: Job, why: Ending) -> None:
        """Take a job that ends at once."""
        self.jobs.add(job)
        job.ending = why
        self._settle_soon(job)

    def start(self, alias: str, now: float) -> None:
        """Start what waits for a model, as much as there is room for; nothing while a switch is under way.

        What is held starts once the model takes steps.
        """
        if self.runs.dead or self.runs.switching:
            return
        limit, given = self._scheduler.slots(alias), self.given(alias)
        if self.runs.has_turn(alias):
            while len(given) < limit and (job := self._suspects.release(alias, given)) is not None:
                self._start(job, now)
        while (room := limit - len(given)) > 0 and not self.closed(alias):
            taken = self._scheduler.take(alias, room, now)
            if not taken:
                return
            for waiting in taken:
                self._start_or_hold(waiting.payload, now)

    # --- a job ends ---

    def end(self, job: Job, why: Ending) -> bool:
        """End a job; whatever it has by now is its result. False: it has ended already.

        What is being written just now (a start mark, a move) is finished first; whoever does it looks for ``ending``.
        """
        if job.phase is Phase.SETTLING or job.ending is not None:
            return False
        job.ending = why
        if job.phase in IDLE:
            self._end_wait(job)
            self._withdraw(job)
            self._settle_soon(job)
        elif job.phase is Phase.RUNNING:
            self._thaw(job)
            self._tasks.spawn(f"abort {job.request.id}", self._runner.abort, job)
        return True

    def lose(self, origin: Origin) -> None:
        """A request is another worker's now. It is forgotten at once: it may be read here again."""
        job = self.jobs.at(origin)
        if job is None:
            return
        self._publisher.lost(job)
        if not self.end(job, Why.LOST):
            job.ending = Why.LOST  # whatever it was to end with: that is not ours to say
        self._forget(job)

    def give_up(self, origin: Origin) -> None:
        """Nobody waits for a request any more."""
        job = self.jobs.at(origin)
        if job is not None:
            self.end(job, Why.CANCELLED)

    def end_waiting(self, alias: str, why: Callable[[Job], Ending], *, frozen: bool = False) -> None:
        """End what has not been started on a model; what is ``frozen`` too, where it does not come back."""
        for job in self.jobs:
            if job.alias == alias and (job.phase in IDLE or (frozen and job.phase is Phase.RUNNING)):
                self.end(job, why(job))

    def stop(self) -> None:
        """The worker ends: what has not begun is left to the next one."""
        for job in self.jobs:
            if job.phase in IDLE:
                self.end(job, Why.STOPPED)

    def keep(self, due: Callable[[Job], bool]) -> None:
        """Keep what those that run and are due have said, for whoever has their partitions next."""
        for job in self._saying():
            if due(job):
                self._runner.keep(job)

    def hand_over(self) -> None:
        """Keep what all that run have said: they may be another worker's in a moment."""
        self.keep(lambda _job: True)

    def abandon(self) -> None:
        """The worker does not wait any longer: what runs or is being written is left to the next one, unblamed.

        That one goes on with what they have said.
        """
        log.warning("worker.withdraws", requests=[job.request.id for job in self.jobs])
        for job in self._saying():
            self._runner.keep_last(job)
        for job in self.jobs:
            job.ending = job.ending or Why.STOPPED
            self._runner.withdraw(job)
            self._publisher.dropped(job)
            if job.task is not None:
                job.task.cancel()

    # --- a job waits elsewhere ---

    def move(self, job: Job, topic: str, key: bytes | None = None) -> None:
        """Send a waiting job to another topic, under its own key or this one; refused there, it waits on here."""
        self._end_wait(job)
        job.taken = time.monotonic()
        self._withdraw(job)
        job.phase = Phase.MOVING
        job.task = self._tasks.spawn(f"move {job.request.id}", self._move, job, topic, key)

    def make_room(self) -> None:
        """Let those wait elsewhere whose tenants' lines would hold up everybody else's partitions."""
        for job in self.throttle.overflowing():
            self.move(job, self.throttle.topic, job.request.tenant.encode())

    # --- what a switch does to jobs ---

    def stall(self, active: str) -> None:
        """The engine takes no step until it has gone to ``active``: what runs is frozen, and nobody is alone."""
        now = time.monotonic()
        self._active_time.leave(now)
        self._freeze(self.jobs.running(), active, now)
        self.runs.look()

    def go_on(self, active: str) -> None:
        """``active`` is the model that runs from now on; what runs of all others is frozen."""
        now = time.monotonic()
        self._active_time.enter(active, now)
        for job in self.jobs.running(active):
            self._thaw(job)
        self._freeze((job for job in self.jobs.running() if job.alias != active), active, now)
        self.runs.look()

    # --- inside ---

    def _freeze(self, jobs: Iterable[Job], active: str, now: float) -> None:
        for job in jobs:
            if job.frozen_at is None:
                job.frozen_at, job.frozen_for = now, active

    def _thaw(self, job: Job) -> None:
        """It goes on, or has ended."""
        if job.frozen_at is not None:
            seconds, tokens = time.monotonic() - job.frozen_at, self._runner.tokens(job)
            freeze = Freeze(tokens=tokens, seconds=seconds, model=job.frozen_for, began=time.time() - seconds)
            job.freezes.append(freeze)
            job.frozen_at = None

    def _saying(self) -> list[Job]:
        """Those whose run is wanted as far as it comes."""
        return [job for job in self.jobs.running() if job.ending is None]

    def _queue(self, job: Job) -> None:
        """Let a job wait: for its tenant's quota where it must, then for its model."""
        if self.throttle.passes(job):
            self._wait(job)
        else:
            job.phase = Phase.THROTTLED
            self.changed.set()

    def _wait(self, job: Job) -> None:
        now = time.monotonic()
        job.phase = Phase.WAITING
        job.snapshot = self._active_time.snapshot(job.alias, now)
        job.taken = now
        self._scheduler.queues.admit(waiting(job, now))
        self.changed.set()

    def _withdraw(self, job: Job) -> None:
        """Take a job from where it waits."""
        if job.phase is Phase.THROTTLED:
            self.throttle.withdraw(job)
        elif job.phase is Phase.WAITING:
            self._scheduler.queues.remove(str(job.origin))
        elif job.phase is Phase.HELD:
            self._suspects.withdraw(job)
        elif job.retry is not None:
            job.retry.cancel()
        self.changed.set()

    def _start_or_hold(self, job: Job, now: float) -> None:
        given = self.given(job.alias)
        away = job.suspect and not self.runs.has_turn(job.alias)
        if away or self.closed(job.alias) or not self._suspects.may_start(job, given):
            job.phase = Phase.HELD
            self._suspects.hold(job)
        else:
            self._start(job, now)

    def _end_wait(self, job: Job) -> None:
        """It ends before it was given to the engine: say what it has waited for."""
        now = time.monotonic()
        if job.phase is Phase.THROTTLED:
            job.waited_for["quota"] = job.waited_for.get("quota", 0.0) + now - job.taken
        elif job.phase is not Phase.BACKING_OFF:
            self._note_wait(job, now, self._active_time.snapshot(job.alias, now))

    def _note_wait(self, job: Job, now: float, snapshot: tuple[float, float]) -> None:
        """Divide what it has waited since it came into its model's queue by its reasons."""
        for reason, seconds in waited_for(now - job.taken, job.snapshot, snapshot).items():
            job.waited_for[reason] = job.waited_for.get(reason, 0.0) + seconds

    def _start(self, job: Job, now: float) -> None:
        snapshot = self._active_time.snapshot(job.alias, now)
        job.began = snapshot[0]
        self._note_wait(job, now, snapshot)
        job.phase = Phase.STARTING
        self.runs.add(job)
        job.task = self._tasks.spawn(f"request {job.request.id}", self._live, job)

    async def _live(self, job: Job) -> None:
        """One run of a job, and what follows from it."""
        structlog.contextvars.bind_contextvars(request_id=job.request.id, alias=job.alias)
        try:
            if job.ending is None and not self.runs.dead and not await self._runner.mark(job):
                self._begin_nothing(job)
            if job.suspect and job.ending is None and not self.runs.dead and not self.runs.has_turn(job.alias):
                self._unmark(job)  # its model's turn is over: a death beside a switch would tell nothing
                job.task = None
                self._wait(job)
            elif job.ending is None and not self.runs.dead:
                job.phase = Phase.RUNNING
                ran = await self._runner.run(job)
                self._thaw(job)
                await self._follow(job, ran)
            elif job.ending is not None:
                self._unmark(job)
                await self._settle(job)
        finally:
            if job.phase is Phase.STARTING:
                self._unmark(job)  # the engine died, or the worker ends, before it could begin
            self.runs.remove(job)
            self.changed.set()

    def _begin_nothing(self, job: Job) -> None:
        """Whose it is runs it: what it does here, a death above all, could be written down nowhere."""
        if job.ending is not Why.LOST:
            self.lose(job.origin)

    async def _follow(self, job: Job, ran: Ran) -> None:
        """Do what follows from a run."""
        if isinstance(ran, Died):
            self.runs.engine_died()
        elif isinstance(ran, Over):
            job.ending = job.ending or ran.ending
            await self._settle(job, ran.answer)
        else:
            await self._repeat(job, ran)

    async def _repeat(self, job: Job, ran: Repeat) -> None:
        """A new attempt waits for its turn, unless the job was ended meanwhile. Nobody died of the last one."""
        self._unmark(job)
        if job.ending is not None:
            await self._settle(job)
            return
        self._publisher.repeated(job, why=ran.why)
        job.attempt = job.attempt.model_copy(update={"n": job.attempt.n + 1})
        job.started = job.task = None
        job.freezes.clear()
        job.kept_s = 0.0
        if ran.after_s:
            job.phase = Phase.BACKING_OFF
            job.retry = asyncio.get_running_loop().call_later(ran.after_s, self._wait, job)
        else:
            self._wait(job)

    async def _move(self, job: Job, topic: str, key: bytes | None) -> None:
        if await self._publisher.move(job, topic, key):
            self._forget(job)
        elif job.ending is None:
            self._queue(job)
        else:
            await self._settle(job)

    def _settle_soon(self, job: Job) -> None:
        if job.unsettled:
            self._drop(job)
        else:
            job.phase = Phase.SETTLING
            job.task = self._tasks.spawn(f"settle {job.request.id}", self._settle, job)

    async def _settle(self, job: Job, partial: Answer | None = None) -> None:
        """Publish how a job ended, and forget it."""
        if job.unsettled:
            self._drop(job)
            return
        job.phase = Phase.SETTLING
        await self._publisher.settle(job, partial)
        self._forget(job)
        self.cancellations.settled(job.request.id)

    def _drop(self, job: Job) -> None:
        job.phase = Phase.SETTLING
        self._publisher.dropped(job)
        self._forget(job)

    def _forget(self, job: Job) -> None:
        self.jobs.remove(job)
        self._expiries.discard(job)
        self.throttle.forget(job)
        self.changed.set()

    def _unmark(self, job: Job) -> None:
        """Nobody died of its run. The mark of one that is lost is its new owner's, which may be this worker again."""
        if job.ending is not Why.LOST:
            self._runner.withdraw(job)


def waiting(job: Job, now: float) -> Waiting[Job]:
    """A job as its model's queue has it; ``now`` is on the monotonic clock."""
    request = job.request
    ahead = now - time.time()
    return Waiting(
        id=str(job.origin),
        alias=job.alias,
        payload=job,
        arrived=now,
        tokens=job.tokens,
        priority=request.priority,
        deadline=None if job.deadline is None else job.deadline + ahead,
        tenant=request.tenant,
        first_by=None if job.objective is None else request.received + job.objective.ttft_s + ahead,
        ttft_s=math.inf if job.objective is None else job.objective.ttft_s,
        tpot_s=job.tpot_s,
        prompt=job.prompt_tokens,
    )
