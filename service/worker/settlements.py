"""From what happened to a request to its settlement: pure, and the same for every way a request can end."""

import time

from schemas.base import Record
from schemas.errors import ErrorObject, FailureClass
from schemas.requests import Attempt, Refusal
from schemas.results import Outcome, Result, Timing
from service.ports import Answer, Settlement
from service.worker.jobs import Ending, Job

CLIENT_CLOSED_REQUEST = 499
REQUEST_TIMEOUT = 408
_FAILURES = {
    400: FailureClass.INVALID,
    404: FailureClass.UNKNOWN_MODEL,
    413: FailureClass.TOO_LARGE,
    422: FailureClass.INVALID,
}
_ENDED = {
    Ending.CANCELLED: (Outcome.CANCELLED, CLIENT_CLOSED_REQUEST, "The request was cancelled"),
    Ending.SWITCHED: (Outcome.CANCELLED, CLIENT_CLOSED_REQUEST, "The request was aborted by a switch of the model"),
    Ending.EXPIRED: (Outcome.EXPIRED, REQUEST_TIMEOUT, "The request's deadline passed"),
    Ending.HOPELESS: (Outcome.EXPIRED, REQUEST_TIMEOUT, "The request's deadline can't be met by what waits before it"),
}


def answered(job: Job, answer: Answer, *, worker: str) -> Settlement:
    """The settlement of a job that the engine answered, in whole or, if it was ended, in part."""
    if job.ending in _ENDED or answer.aborted:
        return ended(job, job.ending or Ending.SWITCHED, worker=worker, partial=answer)
    if answer.status < 400:
        return _settle(job, Outcome.COMPLETED, answer.status, worker=worker, answer=answer)
    error = _error_of(answer)
    failure = _FAILURES.get(answer.status)
    return _settle(job, Outcome.FAILED, answer.status, worker=worker, answer=answer, error=error, failure=failure)


def ended(job: Job, ending: Ending, *, worker: str, partial: Answer | None = None) -> Settlement:
    """The settlement of a job that was cancelled or expired, with what it had by then."""
    outcome, status, message = _ENDED[ending]
    error = ErrorObject(message=message, type=ending.value, code=status)
    if partial is not None and partial.status < 400 and not partial.aborted:
        # It finished before the abort reached it: the whole answer is what it has.
        return _settle(job, Outcome.COMPLETED, partial.status, worker=worker, answer=partial)
    answer = partial if partial is not None and partial.status < 400 else None
    return _settle(job, outcome, status, worker=worker, answer=answer, error=error)


def failed(job: Job, failure: FailureClass, message: str, *, status: int, worker: str, kind: str) -> Settlement:
    """The settlement of a job that can't be run, or not again."""
    error = ErrorObject(message=message, type=kind, code=status)
    return _settle(job, Outcome.FAILED, status, worker=worker, error=error, failure=failure)


def unknown_model(job: Job, *, worker: str, hint: str = "") -> Settlement:
    """OpenAI's 404, in the words of vLLM's server."""
    error = ErrorObject(
        message=f"The model `{job.request.model}` does not exist.{hint}", type="NotFoundError", param="model", code=404
    )
    return _settle(job, Outcome.FAILED, 404, worker=worker, error=error, failure=FailureClass.UNKNOWN_MODEL)


def refused(refusal: Refusal, record: Record, *, worker: str) -> Settlement:
    """The settlement of a record that is no valid request."""
    now = time.time()
    result = Result(
        id=refusal.id,
        origin=refusal.origin,
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
    return Settlement(result=result, reply_to=refusal.reply_to, dead=record)


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
    result = Result(
        id=request.id,
        origin=request.source,
        outcome=outcome,
        status=status,
        model=request.model,
        endpoint=request.endpoint,
        body=None if answer is None or answer.status >= 400 else answer.body,
        error=error,
        failure=failure,
        attempt=job.attempt,
        timing=Timing(
            received=request.received,
            finished=now,
            waited_s=(job.started or now) - request.received,
            waited_for={reason: round(seconds, 6) for reason, seconds in job.waited_for.items()},
            first_token_s=None if answer is None else answer.first_token_s,
            latency_s=now - request.received,
            freezes=tuple(job.freezes),
        ),
        worker=worker,
        correlation_id=request.correlation_id,
    )
    return Settlement(result=result, reply_to=request.reply_to, dead=None if failure is None else job.record)


def _error_of(answer: Answer) -> ErrorObject:
    found = answer.body.get("error", answer.body)
    message = found.get("message") if isinstance(found, dict) else None
    if not isinstance(message, str):
        return ErrorObject(message=f"The engine answered with status {answer.status}", type="InternalServerError")
    return ErrorObject.model_validate(found)
