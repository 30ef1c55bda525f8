"""Every error this service raises on purpose. Whether trying again can help is an attribute, not a guess."""

from schemas.errors import ErrorObject
from schemas.progress import Progress
from schemas.results import Outcome, Result


class GearshiftError(Exception):
    """Base of all errors raised on purpose."""

    retriable = False
    exit_code = 1


class ConfigError(GearshiftError):
    """Settings or models.yaml say something that can't be; the message names file, alias and key."""

    exit_code = 2


class BrokerUnavailable(GearshiftError):
    """No broker answers, or it answers that it won't."""

    retriable = True


class RecordRefused(GearshiftError):
    """The broker won't take this record (too large, not allowed); the reason is the message."""


class TopicError(GearshiftError):
    """A topic is missing, or is not as it must be, and may not be created."""


class Fenced(GearshiftError):
    """Another owner has this partition's transactional id: what is unpublished here is the other's to do."""


class PositionLost(GearshiftError):
    """A position means nothing in its log: it lies beyond the end, or the topic was made anew."""


class Stalled(GearshiftError):
    """Work is there, and nothing moves."""


class SwitchFailed(GearshiftError, RuntimeError):
    """A switch did not happen; the previous model is active and serves. ``__cause__`` says why."""


class EngineDied(GearshiftError):
    """The engine core or a worker process is gone; nothing runs until a new one starts."""


class EngineRefused(GearshiftError):
    """The engine could not do what was asked of it, and goes on; ``__cause__`` is what it raised."""


class HandedBack(GearshiftError):
    """The engine gave a request back, under memory pressure; it may be run again, from its progress if there is any."""

    retriable = True

    def __init__(self, reason: str, progress: Progress | None = None) -> None:
        super().__init__(reason)
        self.progress = progress


class NotContinued(GearshiftError):
    """An answer that was begun elsewhere can't be gone on with; nothing of it was told, and it may begin anew."""

    retriable = True


class SessionLost(GearshiftError):
    """A session is not here, or has ended: this part of it can't be gone on with."""


class UnknownModel(GearshiftError):
    """No alias and no LoRA of this name."""


class LoraRefused(GearshiftError):
    """An adapter that can't be loaded: not below ``lora_root``, not an adapter, or its model takes none."""


class RequestFailed(GearshiftError):
    """A request's result is no answer. ``error`` is the OpenAI error object, ``result`` has the rest."""

    def __init__(self, result: Result) -> None:
        self.result = result
        self.status = result.status
        self.error = result.error or ErrorObject(message=f"the request is {result.outcome}", code=result.status)
        super().__init__(f"{self.error.message} (status {result.status}, request {result.id})")

    @staticmethod
    def of(result: Result) -> "RequestFailed":
        """The error for an outcome other than completed."""
        kinds = {Outcome.CANCELLED: RequestCancelled, Outcome.EXPIRED: RequestExpired}
        return kinds.get(result.outcome, RequestFailed)(result)


class RequestCancelled(RequestFailed):
    """The request was cancelled; ``result.body`` has what there was by then."""


class RequestExpired(RequestFailed):
    """The request's deadline passed; ``result.body`` has what there was by then."""


class NoAnswer(GearshiftError):
    """Nobody answered in time: the request or event may still be waiting, or being worked on."""

    retriable = True


class AlreadyAsked(GearshiftError):
    """A stream's id is that of a request that this client has asked: its pieces are another's, or there are none."""


class Unavailable(GearshiftError):
    """The HTTP server takes no requests: the worker is stopping, or has not started."""

    retriable = True


class CallConflict(GearshiftError):
    """A durable call's id is that of another request, or of one that was deleted."""


class FileLost(GearshiftError):
    """A file's content is not in the log as the file says."""


class Overloaded(GearshiftError):
    """As many requests are held by the HTTP server as it may hold."""

    retriable = True


class OverQuota(Overloaded):
    """A tenant has what it may have; some seconds later it may have more."""

    def __init__(self, reason: str, *, retry_after_s: float) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class UnknownDeadLetter(GearshiftError):
    """No dead letter of this id is kept."""


class GroupBusy(GearshiftError):
    """A group's offsets can't be set while its workers run."""


class BatchInvalid(GearshiftError):
    """A batch file, its output or a batch's id can't be worked with; the message names file and line."""

    exit_code = 2


class StreamBroken(GearshiftError):
    """The pieces of a stream no longer continue what was given out; the result has the whole answer."""
