"""What becomes of a record that was just read, as a value: a refusal, a job that ends at once, or one that waits."""

import math
import time
from dataclasses import replace

import structlog

from schemas import headers as h
from schemas.base import Record, immutable
from schemas.codec import decode_request
from schemas.errors import ErrorObject, FailureClass, nearest
from schemas.marks import left
from schemas.objectives import Objective
from schemas.requests import Attempt, Refusal, Request
from service.ports import Delivery, Engine
from service.scheduling.quotas import Quotas
from service.scheduling.scheduler import Scheduler
from service.settings import Inactive, Settings, read_keys
from service.worker import settlements
from service.worker.cancellations import Cancellations
from service.worker.claims import answer_tokens, prompt_tokens
from service.worker.jobs import Ending, Failed, Job, Why
from service.worker.lifecycle import waiting
from service.worker.model_states import ModelStates

log = structlog.get_logger(__name__)
CONVICTING = 2
"""The evidence that makes a request poison: an engine that died before its worker's eyes, or two workers that were
gone, each while it ran alone. Who was in company, or was alone when a worker was killed, may be an innocent."""


@immutable
class Refuse:
    """The record is no request; it is answered and kept as a dead letter."""

    refusal: Refusal
    record: Record


@immutable
class End:
    """The request is not to be run: cancelled, expired, poisonous, or for no model of ours."""

    job: Job
    why: Ending


@immutable
class Admit:
    """The request waits for its model."""

    job: Job


Verdict = Refuse | End | Admit


class Admission:
    """Judges records. It changes nothing."""

    def __init__(
        self,
        *,
        engine: Engine,
        scheduler: Scheduler[Job],
        states: ModelStates,
        cancellations: Cancellations,
        quotas: Quotas,
        settings: Settings,
    ) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._states = states
        self._cancellations = cancellations
        self._quotas = quotas
        self._settings = settings
        self._throttled = settings.topics.named(settings.topics.throttled)
        self._calls = settings.topics.named(settings.topics.calls)
        self._keys = read_keys(settings.worker.pool_key_file, "pool_key_file")

    def judge(self, delivery: Delivery) -> Verdict:
        """What becomes of a delivery. What this stumbles over, which is a fault of ours, is refused and kept."""
        try:
            return self._judge(delivery)
        except Exception:
            log.exception("request.malformed", origin=str(delivery.record.origin))
            return Refuse(_stumbled(delivery.record), delivery.record)

    def _judge(self, delivery: Delivery) -> Verdict:
        record = delivery.record
        decoded = self._decode(record, active_meant=delivery.active_meant)
        if not self._reply_allowed(decoded):
            decoded = _refuse_reply(decoded) if isinstance(decoded, Request) else _without_reply(decoded)
        if isinstance(decoded, Refusal):
            return Refuse(decoded, record)
        job = self._job(decoded, delivery)
        why = self._ended(job, evidence=delivery.evidence)
        return Admit(job) if why is None else End(job, why)

    def due(self, record: Record) -> float:
        """When a parked request is to be answered, whoever has the turn; in seconds since the epoch."""
        try:
            request = self._decode(record)
            if isinstance(request, Refusal):
                return math.inf
            if self._cancellations.wanted(request):
                return 0.0
            deadline = self._deadline(request)
        except Exception:
            log.exception("request.malformed", origin=str(record.origin))
            return 0.0  # ``judge`` answers it
        return math.inf if deadline is None else deadline

    def _job(self, request: Request, delivery: Delivery) -> Job:
        attempt = delivery.attempt
        if request.deaths:
            attempt = Attempt(epoch=attempt.epoch, n=attempt.n + request.deaths)
        alias = self._resolve(request.model) or ""
        prompt = prompt_tokens(request)
        job = Job(
            request=request,
            record=delivery.record,
            alias=alias,
            attempt=attempt,
            taken=time.monotonic(),
            deaths=attempt.n - 1,
            tokens=prompt + answer_tokens(request),
            prompt_tokens=prompt,
            objective=self._objective(request, alias),
            deadline=self._deadline(request),
            waited_for={self._waited_in(request, delivery.record): max(0.0, time.time() - request.received)},
        )
        if not delivery.evidence and not job.suspect:  # else going on may be what kills
            job.progress = delivery.progress
        if job.suspect:
            log.warning("request.suspected", origin=str(job.origin), deaths=job.deaths, evidence=delivery.evidence)
        return job

    def _ended(self, job: Job, *, evidence: int) -> Ending | None:
        """How a request ends at once; None if it may run."""
        if evidence >= CONVICTING:
            message = (
                f"The engine or its worker died {job.deaths} times while this request was running, "
                "the last time with nothing beside it"
            )
            return Failed(FailureClass.POISON, message, 500, "InternalServerError")
        if self._cancellations.wanted(job.request):
            return Why.CANCELLED
        if job.deadline is not None and job.deadline <= time.time():
            return Why.EXPIRED
        if (unknown := self._unknown(job)) is not None:
            return unknown
        if self._settings.worker.inactive is Inactive.REFUSE and job.alias != self._engine.active:
            return settlements.unknown_model(job.request.model)
        now = time.monotonic()
        context = self._states.latest.get(job.alias)
        met = job.deadline is None or self._scheduler.can_meet(waiting(job, now), now, context)
        return None if met else Why.HOPELESS

    def _unknown(self, job: Job) -> Failed | None:
        """What a request names that there is not: its model, or the class of that."""
        wanted = job.request.request_class
        if not job.alias:
            known = self._known()
            hint = f"{nearest(job.request.model, known)} Valid aliases: {', '.join(known)}."
            return settlements.unknown_model(job.request.model, hint=hint)
        if not wanted or job.objective is not None:
            return None
        classes = [name for name in self._scheduler.objectives(job.alias) if name]
        hint = f"{nearest(wanted, classes)}; it has {', '.join(classes)}" if classes else "; it has none"
        message = f"The model `{job.alias}` has no class {wanted!r}{hint}"
        return Failed(FailureClass.INVALID, message, 400, "BadRequestError", h.REQUEST_CLASS)

    def _objective(self, request: Request, alias: str) -> Objective | None:
        """What it is to get. Its tenant and its headers may ask for less, and for no more."""
        found = self._scheduler.objective(alias, request.request_class)
        if found is None:
            return None
        most = self._quotas.limits.now.of(request.tenant)
        return found.loosened(most.ttft_s, most.tpot_s).loosened(request.ttft_s, request.tpot_s)

    def _deadline(self, request: Request) -> float | None:
        ttl = self._settings.worker.ttl_s
        return request.received + ttl if request.deadline is None and ttl is not None else request.deadline

    def _reply_allowed(self, asked: Request | Refusal) -> bool:
        """Whether its answer may go where it wants it.

        Answers of durable calls are written for those alone. One that was moved is known by the pool's signature;
        without a key it looks like any other record there, and all of those are allowed.
        """
        topics = self._settings.topics
        if asked.reply_to != topics.named(topics.answers):
            return asked.reply_to is None or topics.allows_reply(asked.reply_to)
        source = asked.source.topic
        return source == topics.named(topics.calls) or (not self._keys and topics.takes_moved(source))

    def _waited_in(self, request: Request, record: Record) -> str:
        """What a request has waited for until it was read."""
        if record.topic == self._throttled:
            return "quota"
        return "read" if request.moved_from is None else "park"

    def _resolve(self, model: str) -> str | None:
        """The alias that answers for a model's name: an alias, or the one that has a LoRA of this name."""
        if model in self._engine.aliases:
            return model
        return next((alias for alias in self._engine.aliases if model in self._engine.loras(alias)), None)

    def _known(self) -> list[str]:
        return [*self._engine.aliases, *(lora for alias in self._engine.aliases for lora in self._engine.loras(alias))]

    def _decode(self, record: Record, *, active_meant: bool = False) -> Request | Refusal:
        """Of a call that names no model the active one is meant, as by whatever comes over HTTP."""
        most, topic = self._settings.worker.max_request_bytes, record.topic
        if topic == self._throttled:  # whose records may name no model, as where they came from
            topic = left(h.attributes(record.headers)) or topic
        alias = self._settings.topics.alias_of(topic)
        otherwise = self._engine.active if active_meant or topic == self._calls else None
        return decode_request(record, max_bytes=most, alias=alias, otherwise=otherwise, keys=self._keys)


def _stumbled(record: Record) -> Refusal:
    message = "The worker failed to take this record in; its bytes are kept as a dead letter"
    return Refusal(
        id=str(record.origin),
        origin=record.origin,
        received=record.timestamp,
        failure=FailureClass.MALFORMED,
        error=ErrorObject(message=message, type="InternalServerError", code=500),
        status=500,
    )


def _without_reply(refusal: Refusal) -> Refusal:
    return replace(refusal, reply_to=None, reply_partition=None)


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
        moved_from=request.moved_from,
        says_moved_from=request.says_moved_from,
    )
