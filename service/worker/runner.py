"""One run of a job: marked as started, given to the engine, streamed. What follows from it is a value."""

import random
import time
from functools import partial
from typing import Any

import structlog

from schemas.base import immutable
from schemas.errors import FailureClass
from schemas.results import Chunk
from service.errors import EngineDied, HandedBack, NotContinued
from service.ports import Announcements, Answer, Call, ChunkSink, Engine, Settlements, Turn
from service.settings import WorkerSettings, read_keys
from service.worker.jobs import Answered, Failed, Job
from service.worker.salts import CacheSalts
from service.worker.settlements import error_of
from service.worker.throughput import Throughput
from service.worker.tracing import Tracing

log = structlog.get_logger(__name__)


@immutable
class Over:
    """The run is over, and so is its job. ``answer``: what the engine had, if anything."""

    ending: Answered | Failed
    answer: Answer | None = None


@immutable
class Repeat:
    """The run ended without anything to say: the job runs again after so many seconds. ``why``: a word for metrics."""

    after_s: float
    why: str


@immutable
class Died:
    """The engine died, and the worker ends. The start mark stays: this run counts."""


Ran = Over | Repeat | Died


class Runner:
    """Gives calls to the engine. A run that is cancelled leaves its start mark to whoever cancelled it."""

    def __init__(
        self,
        *,
        engine: Engine,
        settlements: Settlements,
        announcements: Announcements,
        pace: Throughput,
        tracing: Tracing,
        settings: WorkerSettings,
    ) -> None:
        self._salts = CacheSalts(read_keys(settings.pool_key_file, "pool_key_file"))
        self._engine = engine
        self._settlements = settlements
        self._announcements = announcements
        self._pace = pace
        self._tracing = tracing
        self._settings = settings

    async def mark(self, job: Job) -> bool:
        """Mark a run as started, or one under way as alone or in company; alone: returns when that is committed.

        False: the job is another worker's by now, though reading has not said so yet.
        """
        return await self._settlements.started(job.origin, alone=job.alone)

    def withdraw(self, job: Job) -> None:
        """Take a start mark back: the run did not end by a death."""
        self._settlements.withdraw(job.origin)

    async def marks_committed(self) -> None:
        """Return when all that was marked is committed, or the broker does not answer for too long."""
        await self._settlements.flush()

    async def abort(self, job: Job) -> None:
        """End a run; it returns with what it has."""
        await self._engine.abort(job.call_id)

    def keep(self, job: Job) -> None:
        """Keep what a run has said, for whoever runs its request next: as much as it is when that is written."""
        self._settlements.keep(job.origin, partial(self._engine.progress, job.call_id))

    def keep_last(self, job: Job) -> None:
        """The same, as much as it is now: the run is ended before anything is written."""
        progress = self._engine.progress(job.call_id)
        self._settlements.keep(job.origin, lambda: progress)

    def tokens(self, job: Job) -> int:
        """How many tokens a run has generated so far."""
        return self._engine.tokens(job.call_id)

    async def run(self, job: Job) -> Ran:
        """Run a job that is marked. Its stream ends with a final chunk, unless the run is repeated."""
        try:
            answer = await self._answer(job)
        except HandedBack as back:
            job.progress = back.progress
            self._settlements.keep(job.origin, lambda: job.progress)
            log.info(
                "request.handed_back", reason=str(back), tokens=0 if back.progress is None else back.progress.tokens
            )
            return Repeat(0.0, "handed_back")
        except NotContinued as reason:
            job.progress = None
            log.warning("request.begun_anew", reason=str(reason))
            return Repeat(0.0, "begun_anew")
        except EngineDied:
            return Died()
        if answer.session is not None and not job.unsettled:
            self._settlements.keep_session(job.origin, answer.session)
        self._pace.finished(job, answer)
        ran = self._judged(job, answer)
        if isinstance(ran, Over) and job.request.stream:
            await self._chunk(job, data=None)
        return ran

    def _judged(self, job: Job, answer: Answer) -> Over | Repeat:
        """What follows from an answer: an error that may pass is worth some more runs."""
        if not answer.retriable or job.ending is not None:
            return Over(Answered(answer), answer)
        job.failures += 1
        job.progress = None  # which may be what it fails by
        if job.failures < self._settings.max_attempts:
            delay = self._settings.retry_backoff_s * 2 ** min(job.failures - 1, 60)
            delay = min(self._settings.retry_backoff_max_s, delay) * random.uniform(0.5, 1.5)
            log.warning("request.retry", attempt=job.attempt.n, in_s=round(delay, 3), status=answer.status)
            return Repeat(delay, "failed")
        message = f"Failed {job.failures} times; the last time: {error_of(answer).message}"
        failed = Failed(FailureClass.RETRIES_EXHAUSTED, message, answer.status, "InternalServerError")
        return Over(failed, answer)

    async def _answer(self, job: Job) -> Answer:
        job.started = time.time()
        request, progress, turn = job.request, job.progress, _turn(job)
        job.chunks = 0 if progress is None else progress.events
        call = Call(
            id=job.new_call(),
            alias=job.alias,
            endpoint=request.endpoint,
            body=self._salts.body(request),
            priority=request.priority,
            trace_headers=self._tracing.engine_begins(job),
            turn=turn,
            tenant=request.tenant,
        )
        if turn is not None:
            progress = self._settlements.session(job.origin, turn.digest(job.alias), turn.part)
        self._pace.begun(job)
        try:
            return await self._engine.answer(call, self._sink(job) if request.stream else None, progress)
        finally:
            self._pace.ended(job)
            self._tracing.engine_ends(job)

    def _sink(self, job: Job) -> ChunkSink:
        async def sink(data: dict[str, Any]) -> None:
            await self._chunk(job, data=data)

        return sink

    async def _chunk(self, job: Job, *, data: dict[str, Any] | None) -> None:
        """Tell a piece, unless the request is another worker's to answer: an aborted run says that it has ended."""
        if job.unsettled:
            return
        request = job.request
        chunk = Chunk(
            id=request.id,
            seq=job.chunks,
            origin=request.source,
            says_moved_from=request.says_moved_from,
            attempt=job.attempt,
            final=data is None,
            data=data,
        )
        job.chunks += 1
        await self._announcements.chunk(job.origin, chunk, request.reply)


def _turn(job: Job) -> Turn | None:
    """Its place in a session, which is that of its tenant and its record's key alone."""
    request = job.request
    if request.session is None:
        return None
    owner = request.tenant, job.record.key
    return Turn(request.session, request.part, request.final, owner=owner, origin=job.origin)
