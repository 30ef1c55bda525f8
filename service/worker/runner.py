"""One job's run: given to the engine, streamed, answered, settled. An exception that leaves here is fatal."""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import structlog

from schemas.base import Origin
from schemas.errors import FailureClass
from schemas.results import Chunk
from service.errors import EngineDied, HandedBack
from service.ports import (
    Announcements,
    Answer,
    Call,
    ChunkSink,
    Engine,
    Moved,
    RecordRefused,
    Settlement,
    Settlements,
    Turn,
    Watcher,
)
from service.settings import WorkerSettings
from service.worker import settlements
from service.worker.jobs import Ending, Job, Jobs, Phase
from service.worker.tracing import Tracing

log = structlog.get_logger(__name__)


class Runner:
    """Runs jobs and settles them; ``requeue`` is called with a job that is to be run again."""

    def __init__(
        self,
        *,
        engine: Engine,
        settlements: Settlements,
        announcements: Announcements,
        jobs: Jobs,
        watcher: Watcher,
        worker: WorkerSettings,
        tracing: Tracing,
    ) -> None:
        self._engine = engine
        self._settlements = settlements
        self._announcements = announcements
        self._jobs = jobs
        self._watcher = watcher
        self._worker = worker
        self._tracing = tracing
        self.requeue: Callable[[Job], None] = lambda _job: None
        self.answered: Callable[[Job, Answer], None] = lambda _job, _answer: None
        self.settled: Callable[[Job], None] = lambda _job: None

    async def run(self, job: Job) -> None:
        """From the start mark to the committed result.

        Cancelled because the worker stops, it withdraws its mark: the run was not to blame. Otherwise the mark
        stays, and the run counts.
        """
        structlog.contextvars.bind_contextvars(request_id=job.request.id, alias=job.alias)
        try:
            answer = await self._answer(job)
        except HandedBack as back:
            log.info("request.handed_back", reason=str(back))
            self._settlements.withdraw(job.origin)
            if job.ending is None:
                self._watcher.repeated(job.alias, why="handed_back")
                self._again(job)
            elif job.ending not in {Ending.LOST, Ending.STOPPED}:
                await self.settle(job, settlements.ended(job, job.ending, worker=self._worker.worker_id))
        except EngineDied:
            return  # its mark stays: this run counts
        except asyncio.CancelledError:
            if job.ending is Ending.STOPPED:
                self._settlements.withdraw(job.origin)
            raise
        else:
            await self._finish(job, answer)

    async def joined(self, job: Job) -> None:
        """Others run beside it from now on: a death would not be surely its own doing."""
        await self._settlements.started(job.origin)

    async def settle(self, job: Job, settlement: Settlement) -> None:
        """Publish a job's end, and forget it."""
        job.phase = Phase.SETTLING
        ready = time.monotonic()
        settlement = replace(settlement, trace=self._tracing.headers(job))
        if await self.publish(job.origin, settlement, alias=job.alias):
            self._tracing.published(job, settlement.result, took_s=time.monotonic() - ready)
        else:
            self._tracing.dropped(job)
        self._jobs.remove(job)
        self.settled(job)

    async def move(self, job: Job) -> None:
        """Send a job's request to its model's own topic; if the broker refuses that, it waits on here."""
        try:
            await self._settlements.settle(job.origin, Moved(job.record, job.request, job.alias, job.deaths))
        except RecordRefused as refused:
            log.warning("request.unparked", reason=str(refused), request_id=job.request.id)
            job.phase = Phase.WAITING
            self.requeue(job)
        else:
            self._tracing.dropped(job)
            self._jobs.remove(job)

    async def publish(self, origin: Origin, settlement: Settlement, *, alias: str = "") -> bool:
        """Publish a settlement in the transaction that finishes its origin; False when that is another worker's now."""
        ready = time.monotonic()
        settled = await self._settlements.settle(origin, settlement)
        if settled is None:
            return False
        took = time.monotonic() - ready
        self._watcher.settled(settled.result, alias=alias, dead=settled.dead is not None, publish_s=took)
        return True

    async def _answer(self, job: Job) -> Answer:
        await self._settlements.started(job.origin, alone=job.suspect)
        job.started = time.time()
        request = job.request
        call = Call(
            id=job.new_call(),
            alias=job.alias,
            endpoint=request.endpoint,
            body=request.body,
            priority=request.priority,
            trace_headers=self._tracing.engine_begins(job),
            turn=Turn(request.session, request.part, request.final) if request.session is not None else None,
        )
        try:
            return await self._engine.answer(call, self._sink(job) if request.stream else None)
        finally:
            self._tracing.engine_ends(job)

    def _sink(self, job: Job) -> ChunkSink:
        async def sink(data: dict[str, Any]) -> None:
            await self._chunk(job, data=data)

        return sink

    async def _chunk(self, job: Job, *, data: dict[str, Any] | None) -> None:
        chunk = Chunk(id=job.request.id, seq=job.chunks, attempt=job.attempt, final=data is None, data=data)
        job.chunks += 1
        await self._announcements.chunk(job.origin, chunk)

    async def _finish(self, job: Job, answer: Answer) -> None:
        if job.ending is Ending.LOST:
            self._tracing.dropped(job)
            return  # another worker's now
        self.answered(job, answer)
        if job.request.stream:
            await self._chunk(job, data=None)
        if answer.retriable and job.ending is None:
            job.failures += 1
            if job.failures < self._worker.max_attempts:
                self._back_off(job, answer)
                return
            message = f"Failed {job.failures} times; the last time: {answer.body.get('error', {}).get('message', '')}"
            settlement = settlements.failed(
                job,
                FailureClass.RETRIES_EXHAUSTED,
                message,
                status=answer.status,
                worker=self._worker.worker_id,
                kind="InternalServerError",
            )
        else:
            settlement = settlements.answered(job, answer, worker=self._worker.worker_id)
        await self.settle(job, settlement)

    def _back_off(self, job: Job, answer: Answer) -> None:
        self._settlements.withdraw(job.origin)  # it failed, and nobody died of it
        delay = min(self._worker.retry_backoff_max_s, self._worker.retry_backoff_s * 2 ** (job.failures - 1))
        delay *= random.uniform(0.5, 1.5)
        log.warning("request.retry", attempt=job.attempt.n, in_s=round(delay, 3), status=answer.status)
        job.phase = Phase.WAITING
        self._watcher.repeated(job.alias, why="failed")
        asyncio.get_running_loop().call_later(delay, self._again, job)

    def _again(self, job: Job) -> None:
        """A new attempt waits for its turn, unless the job was ended meanwhile."""
        if job.ending is not None or self._jobs.at(job.origin) is not job:
            return
        job.attempt = job.attempt.model_copy(update={"n": job.attempt.n + 1})
        job.phase = Phase.WAITING
        job.chunks = 0
        job.started = None
        self.requeue(job)
