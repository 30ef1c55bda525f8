"""Where requests come in: decoded, refused with a reason, or admitted to their model's queue."""

import asyncio
import math
import time
from collections.abc import Callable, Collection, Coroutine
from typing import Any

import structlog

from schemas.base import Origin, Record
from schemas.codec import decode_request
from schemas.control import Cancel
from schemas.errors import ErrorObject, FailureClass, nearest
from schemas.requests import Attempt, Refusal, Request
from service.ports import Delivery, Engine, RequestSource, Settlement, Watcher
from service.scheduling.queues import Queues, Waiting
from service.settings import Inactive, Settings
from service.worker import settlements
from service.worker.active_time import ActiveTime
from service.worker.cancellations import Cancellations
from service.worker.jobs import Ending, Job, Jobs, Phase
from service.worker.runner import Runner

log = structlog.get_logger(__name__)
Spawn = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]
BYTES_PER_TOKEN = 4
DEFAULT_ANSWER_TOKENS = 256
CONVICTING = 2
"""The evidence that makes a request poison: an engine that died before its worker's eyes, or two workers that were
gone, each while it ran alone. Who was in company, or was alone when a worker was killed, may be an innocent."""


class Admission:
    """Reads as long as it may, and ends what must not run: cancelled, expired, unknown, poisonous."""

    def __init__(
        self,
        *,
        source: RequestSource,
        engine: Engine,
        jobs: Jobs,
        queues: Queues[Job],
        runner: Runner,
        turns: ActiveTime,
        watcher: Watcher,
        settings: Settings,
        spawn: Spawn,
    ) -> None:
        self._source = source
        self._engine = engine
        self._jobs = jobs
        self._queues = queues
        self._runner = runner
        self._turns = turns
        self._watcher = watcher
        self._settings = settings
        self._spawn = spawn
        self._me = settings.worker.worker_id
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.cancellations = Cancellations()
        self.admitted: Callable[[Job], None] = lambda _job: None
        self.can_meet: Callable[[Job], bool] = lambda _job: True
        self.stopping = False

    async def run(self) -> None:
        """Read until told to stop."""
        self._source.sift(self._due)
        while not self.stopping:
            received = await self._source.receive()
            for origin in received.lost:
                self._lose(origin)
            for delivery in received.deliveries:
                self.take(delivery)

    def take(self, delivery: Delivery) -> None:
        """Decide what becomes of one delivery."""
        record = delivery.record
        decoded = self._decode(record, otherwise=self._engine.active if delivery.active_meant else None)
        if isinstance(decoded, Request) and not self._reply_allowed(decoded):
            decoded = _refuse_reply(decoded)
        if isinstance(decoded, Refusal):
            self._refuse(decoded, record)
            return
        deaths = delivery.attempt.n - 1 + decoded.deaths
        job = Job(
            request=decoded,
            record=record,
            alias=self._resolve(decoded.model) or "",
            attempt=Attempt(epoch=delivery.attempt.epoch, n=deaths + 1),
            taken=time.monotonic(),
            deaths=deaths,
            tokens=_tokens(decoded),
        )
        self._jobs.add(job)
        job.waited_for["read"] = max(0.0, time.time() - decoded.received)
        end = self._end(job, evidence=delivery.evidence)
        if end is None:
            self._watch_deadline(job)
            self.admit(job)
        else:
            self._spawn(self._runner.settle(job, end), f"settle {decoded.id}")

    def expect(self, cancel: Cancel) -> None:
        """Cancel what it means when it is read, parked requests at once."""
        self.cancellations.expect(cancel)
        self._source.sift(self._due)

    def _due(self, record: Record) -> float:
        """When a parked request is to be answered, whoever has the turn; in seconds since the epoch."""
        request = self._decode(record)
        if isinstance(request, Refusal):
            return math.inf
        if self.cancellations.wanted(request):
            return 0.0
        deadline = self._deadline(request)
        return math.inf if deadline is None else deadline

    async def follow(self, aliases: Collection[str]) -> None:
        """The models are these from now on. Raises TopicError, BrokerUnavailable."""
        await self._source.follow(aliases)

    def admit(self, job: Job) -> None:
        """Let a job wait for its model."""
        now = time.monotonic()
        job.snapshot = self._turns.snapshot(job.alias, now)
        job.taken = now
        self._queues.admit(_waiting(job, now))
        if job.request.deadline is not None and not self.can_meet(job):
            self.cancel(job, Ending.HOPELESS)
        else:
            self.admitted(job)

    def cancel(self, job: Job, ending: Ending = Ending.CANCELLED) -> None:
        """End a job from outside; whatever it has by now is its result."""
        if job.ending is not None or job.phase is Phase.SETTLING:
            return
        job.ending = ending
        if job.phase is Phase.RUNNING:
            self._spawn(self._engine.abort(job.call_id), f"abort {job.request.id}")
            return
        self._queues.remove(str(job.origin))
        settlement = settlements.ended(job, ending, worker=self._me)
        self._spawn(self._runner.settle(job, settlement), f"settle {job.request.id}")

    def forget(self, job: Job) -> None:
        """A job leaves without a settlement of ours."""
        job.ending = Ending.LOST
        self._queues.remove(str(job.origin))
        self._jobs.remove(job)

    def _end(self, job: Job, *, evidence: int) -> Settlement | None:
        """How a request that was just read ends at once; None if it may run."""
        request = job.request
        if evidence >= CONVICTING:
            message = (
                f"The engine or its worker died {job.deaths} times while this request was running, "
                "the last time with nothing beside it"
            )
            return settlements.failed(
                job, FailureClass.POISON, message, status=500, worker=self._me, kind="InternalServerError"
            )
        if self.cancellations.wanted(request):
            return settlements.ended(job, Ending.CANCELLED, worker=self._me)
        deadline = self._deadline(request)
        if deadline is not None and deadline <= time.time():
            return settlements.ended(job, Ending.EXPIRED, worker=self._me)
        if not job.alias:
            known = self._known()
            hint = f"{nearest(request.model, known)} Valid aliases: {', '.join(known)}."
            return settlements.unknown_model(job, worker=self._me, hint=hint)
        if self._settings.worker.inactive is Inactive.REFUSE and job.alias != self._engine.active:
            return settlements.unknown_model(job, worker=self._me)
        return None

    def _watch_deadline(self, job: Job) -> None:
        deadline = self._deadline(job.request)
        if deadline is not None:
            left = max(0.0, deadline - time.time())
            job.timer = asyncio.get_running_loop().call_later(left, self.cancel, job, Ending.EXPIRED)

    def _deadline(self, request: Request) -> float | None:
        ttl = self._settings.worker.ttl_s
        return request.received + ttl if request.deadline is None and ttl is not None else request.deadline

    def _lose(self, origin: Origin) -> None:
        """Its partition is another worker's now: stop working on it."""
        job = self._jobs.at(origin)
        if job is None:
            return
        log.info("request.lost", request_id=job.request.id, origin=str(origin))
        self._watcher.lost(job.alias)
        running = job.phase is Phase.RUNNING
        self.forget(job)
        if running:
            self._spawn(self._engine.abort(job.call_id), f"abort {job.request.id}")

    def _refuse(self, refusal: Refusal, record: Record) -> None:
        log.info("request.refused", request_id=refusal.id, failure=refusal.failure.value, reason=refusal.error.message)
        settlement = settlements.refused(refusal, record, worker=self._me)
        self._spawn(self._publish(record.origin, settlement), f"refuse {refusal.id}")

    async def _publish(self, origin: Origin, settlement: Settlement) -> None:
        await self._runner.publish(origin, settlement)

    def _reply_allowed(self, request: Request) -> bool:
        return request.reply_to is None or self._settings.topics.allows_reply(request.reply_to)

    def _resolve(self, model: str) -> str | None:
        """The alias that answers for a model's name: an alias, or the one that has a LoRA of this name."""
        if model in self._engine.aliases:
            return model
        return next((alias for alias in self._engine.aliases if model in self._engine.loras(alias)), None)

    def _known(self) -> list[str]:
        return [*self._engine.aliases, *(lora for alias in self._engine.aliases for lora in self._engine.loras(alias))]

    def _decode(self, record: Record, *, otherwise: str | None = None) -> Request | Refusal:
        most, alias = self._settings.worker.max_request_bytes, self._settings.topics.alias_of(record.topic)
        return decode_request(record, max_bytes=most, alias=alias, otherwise=otherwise)


def _waiting(job: Job, now: float) -> Waiting[Job]:
    request = job.request
    return Waiting(
        id=str(job.origin),
        alias=job.alias,
        payload=job,
        arrived=now,
        tokens=job.tokens,
        priority=request.priority,
        deadline=None if request.deadline is None else now + request.deadline - time.time(),
        tenant=request.tenant,
    )


def _tokens(request: Request) -> int:
    """What a request may cost: its size says something of the prompt, its limit something of the answer."""
    wanted = request.body.get("max_completion_tokens") or request.body.get("max_tokens")
    answer = wanted if isinstance(wanted, int) and 0 < wanted < 1 << 20 else DEFAULT_ANSWER_TOKENS
    return request.size // BYTES_PER_TOKEN + answer


def _refuse_reply(request: Request) -> Refusal:
    message = f"The reply-to topic {request.reply_to!r} is not one that this worker may write to"
    return Refusal(
        id=request.id,
        origin=request.origin,
        received=request.received,
        failure=FailureClass.INVALID,
        error=ErrorObject(message=message, param="reply-to", code=400),
        model=request.model,
        correlation_id=request.correlation_id,
    )
