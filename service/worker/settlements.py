"""From what happened to a request to its settlement: pure, and the same for every way a request can end."""

import math
import time

from schemas.base import Record, unchecked
from schemas.errors import ErrorObject, FailureClass
from schemas.requests import Attempt, Refusal
from schemas.results import Outcome, Result, Timing
from schemas.usage import tokens_of, usage_of
from service.ports import Answer, Settlement
from service.worker.attainment import attainment
from service.worker.jobs import Answered, Failed, Job, Why

CLIENT_CLOSED_REQUEST = 499
REQUEST_TIMEOUT = 408
_FAILURES = {
    400: FailureClass.INVALID,
    404: FailureClass.UNKNOWN_MODEL,
    413: FailureClass.TOO_LARGE,
    422: FailureClass.INVALID,
}
_ENDED = {
    Why.CANCELLED: (Outcome.CANCELLED, CLIENT_CLOSED_REQUEST, "The request was cancelled"),
    Why.SWITCHED: (Outcome.CANCELLED, CLIENT_CLOSED_REQUEST, "The request was aborted by a switch of the model"),
    Why.EXPIRED: (Outcome.EXPIRED, REQUEST_TIMEOUT, "The request's deadline passed"),
    Why.HOPELESS: (Outcome.EXPIRED, REQUEST_TIMEOUT, "The request's deadline can't be met by what waits before it"),
}


def settlement(job: Job, *, worker: str, partial: Answer | None = None) -> Settlement:
    """The settlement of a job by its ending. ``partial``: what the engine had by then, where it was ended meanwhile."""
    match job.ending:
        case Answered(answer):
            return _answered(job, answer, worker=worker)
        case Failed(failure, message, status, kind, param):
            error = ErrorObject(message=message, type=kind, param=param, code=status)
            return _settle(job, Outcome.FAILED, status, worker=worker, error=error, failure=failure)
        case Why() as why:
            return _ended(job, why, worker=worker, partial=partial)
        case None:
            raise ValueError(f"{job.origin} has not ended")


def unknown_model(model: str, *, hint: str = "") -> Failed:
    """OpenAI's 404, in the words of vLLM's server."""
    message = f"The model `{model}` does not exist.{hint}"
    return Failed(FailureClass.UNKNOWN_MODEL, message, 404, "NotFoundError", "model")


def _answered(job: Job, answer: Answer, *, worker: str) -> Settlement:
    if answer.aborted:
        return _ended(job, Why.SWITCHED, worker=worker, partial=answer)
    if answer.status < 400:
        return _settle(job, Outcome.COMPLETED, answer.status, worker=worker, answer=answer)
    error = error_of(answer)
    failure = _FAILURES.get(answer.status)
    return _settle(job, Outcome.FAILED, answer.status, worker=worker, answer=answer, error=error, failure=failure)


def _ended(job: Job, why: Why, *, worker: str, partial: Answer | None) -> Settlement:
    """A job that was cancelled or expired, with what it had by then."""
    if partial is not None and partial.status < 400 and not partial.aborted:
        # It finished before the abort reached it: the whole answer is what it has.
        return _settle(job, Outcome.COMPLETED, partial.status, worker=worker, answer=partial)
    outcome, status, message = _ENDED[why]
    error = ErrorObject(message=message, type=why.value, code=status)
    answer = partial if partial is not None and partial.status < 400 else None
    return _settle(job, outcome, status, worker=worker, answer=answer, error=error)


def refused(refusal: Refusal, record: Record, *, worker: str) -> Settlement:
    """The settlement of a record that is no valid request."""
    now = time.time()
    result = Result(
        id=refusal.id,
        origin=refusal.source,
        says_moved_from=refusal.says_moved_from,
        outcome=Outcome.FAILED,
        status=refusal.status,
        model=refusal.model,
        error=refusal.error,
        failure=refusal.failure,
        attempt=Attempt(n=0),
        timing=Timing(received=refusal.received, finished=now, latency_s=now - refusal.received),
        worker=worker,
        correlation_id=refusal.correlation_id,
    )
    return Settlement(result=result, reply=refusal.reply, dead=record, usage=usage_of(result, tenant=""))


def _settle(
    job: Job,
    outcome: Outcome,
    status: int,
    *,
    worker: str,
    answer: Answer | None = None,
    error: ErrorObject | None = None,
    failure: FailureClass | None = None,
) -> Settlement:
    now = time.time()
    request = job.request
    timing = unchecked(
        Timing,
        received=request.received,
        finished=now,
        waited_s=(job.started or now) - request.received,
        waited_for=job.waited_for,
        first_token_s=None if answer is None else answer.first_token_s,
        latency_s=now - request.received,
        freezes=tuple(job.freezes),
    )
    body = None if answer is None or answer.status >= 400 else answer.body
    reached = None
    if job.objective is not None and outcome is not Outcome.CANCELLED:
        tokens = tokens_of(body)["generated_tokens"]
        if job.samples > 1:  # they are said beside one another
            known = None if answer is None else answer.longest
            tokens = math.ceil(tokens / job.samples) if known is None else known
        reached = attainment(job.objective, request.request_class, outcome, timing, tokens)
    result = unchecked(
        Result,
        id=request.id,
        origin=request.source,
        says_moved_from=request.says_moved_from,
        outcome=outcome,
        status=status,
        model=request.model,
        endpoint=str(request.endpoint),
        body=body,
        error=error,
        failure=failure,
        attempt=job.attempt,
        continued=() if answer is None else answer.continued,
        timing=timing,
        objective=reached,
        worker=worker,
        correlation_id=request.correlation_id,
    )
    usage = usage_of(result, tenant=request.tenant)
    return Settlement(result=result, reply=request.reply, dead=None if failure is None else job.record, usage=usage)


def error_of(answer: Answer) -> ErrorObject:
    """The OpenAI error object of an answer that is no success."""
    found = answer.body.get("error", answer.body)
    message = found.get("message") if isinstance(found, dict) else None
    if not isinstance(found, dict) or not isinstance(message, str):
        return ErrorObject(message=f"The engine answered with status {answer.status}", type="InternalServerError")
    return ErrorObject.model_validate({"code": answer.status, **found})  # Anthropic's errors have none
