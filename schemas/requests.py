"""What a producer asks for: an OpenAI request body, and what its headers say about it."""

from dataclasses import field
from enum import StrEnum
from typing import Any

from schemas.base import Message, Origin, immutable
from schemas.errors import ErrorObject, FailureClass


class Endpoint(StrEnum):
    """The endpoints of vLLM's OpenAI-compatible server, by their paths."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"
    """Anthropic's. A body with messages is a chat's where the header 'endpoint' does not say that it is this one."""
    COUNT_TOKENS = "/v1/messages/count_tokens"
    EMBEDDINGS = "/v1/embeddings"
    SCORE = "/score"
    RERANK = "/rerank"
    CLASSIFY = "/classify"
    POOLING = "/pooling"
    TOKENIZE = "/tokenize"
    DETOKENIZE = "/detokenize"
    TRANSCRIPTIONS = "/v1/audio/transcriptions"
    TRANSLATIONS = "/v1/audio/translations"

    @classmethod
    def _missing_(cls, value: object) -> "Endpoint | None":
        """By another of its paths."""
        return OTHER_PATHS.get(value) if isinstance(value, str) else None


OTHER_PATHS = {
    "/v1/score": Endpoint.SCORE,
    "/v1/rerank": Endpoint.RERANK,
    "/v2/rerank": Endpoint.RERANK,
}
"""Further paths under which vLLM's server has an endpoint: ``Endpoint(path)`` takes these, too."""
PATHS = {endpoint.value: endpoint for endpoint in Endpoint} | OTHER_PATHS
"""Every endpoint by every path that it has."""


@immutable
class ReplyTo:
    """Where a request wants its result and chunks; without ``partition``, where their key leads."""

    topic: str
    partition: int | None = None

    def __str__(self) -> str:
        return self.topic if self.partition is None else f"{self.topic}/{self.partition}"


class Attempt(Message):
    """One run of a request: the owner epoch of its partition, and how many runs it has had, this one included."""

    epoch: int = 0
    n: int = 1

    @property
    def rank(self) -> tuple[int, int]:
        """Greater for what ran later."""
        return self.epoch, self.n


@immutable
class Request:
    """A decoded request.

    ``received`` and ``deadline`` are seconds since the epoch: when the broker took the request, and when its
    answer stops being wanted. A smaller ``priority`` runs earlier, as in vLLM.
    """

    id: str
    origin: Origin
    model: str
    endpoint: Endpoint
    body: dict[str, Any] = field(repr=False)
    received: float
    size: int
    deadline: float | None = None
    priority: int = 0
    request_class: str = ""
    """Whose objective it wants, of its model's classes."""
    ttft_s: float | None = None
    """The time to its first token that will do, in seconds; a shorter one than its objective's changes nothing."""
    tpot_s: float | None = None
    """The same per further token."""
    tenant: str = ""
    reply_to: str | None = None
    reply_partition: int | None = None
    correlation_id: str | None = None
    traceparent: str | None = None
    tracestate: str | None = None
    session: str | None = None
    """The session whose prompt this goes on with, as its ``part``-th piece; ``final`` ends it."""
    part: int = 0
    final: bool = True
    moved_from: Origin | None = None
    """Where the producer wrote it, if it has been moved to its model's own topic since."""
    says_moved_from: Origin | None = None
    """The same as its record says it, where the pool has no key to know that by; anybody may have written that."""
    deaths: int = 0
    """How many workers or engines had died with it before it was moved."""

    @property
    def source(self) -> Origin:
        """The producer's own record: exactly one result exists for it."""
        return self.moved_from or self.origin

    @property
    def reply(self) -> ReplyTo | None:
        """Where its answers go; None: to the topics of all."""
        return None if self.reply_to is None else ReplyTo(self.reply_to, self.reply_partition)

    @property
    def stream(self) -> bool:
        return self.body.get("stream") is True


@immutable
class Refusal:
    """A record that is no valid request: what to answer, and under which class to keep it."""

    id: str
    origin: Origin
    received: float
    failure: FailureClass
    error: ErrorObject
    status: int = 400
    model: str | None = None
    reply_to: str | None = None
    reply_partition: int | None = None
    correlation_id: str | None = None
    moved_from: Origin | None = None
    says_moved_from: Origin | None = None

    @property
    def source(self) -> Origin:
        """As a request's."""
        return self.moved_from or self.origin

    @property
    def reply(self) -> ReplyTo | None:
        """As a request's."""
        return None if self.reply_to is None else ReplyTo(self.reply_to, self.reply_partition)
