"""What a request has said before it was finished, or a session: all that another worker needs to go on with it."""

from pydantic import Field, FiniteFloat, NonNegativeInt

from schemas.base import MAX_ATTRIBUTE, Message, Value

Alternative = tuple[int, FiniteFloat, int | None, str | None]
"""A token that could have come: its id, log-probability, rank and text."""


class Said(Value):
    """What one sequence has said: token ids and, where asked for, each one's log-probabilities, its own first."""

    tokens: list[int] = Field(default_factory=list, repr=False)
    logprobs: list[list[Alternative]] | None = Field(default=None, repr=False)


class Begun(Value):
    """One request to the engine, of which a call makes one per prompt; ``sequences`` are its samples, in their order.

    ``prompt`` is a digest of the prompt's token ids, images and adapter: a template may say today's date, which makes
    another prompt of it.
    """

    id: str
    prompt: str
    sequences: tuple[Said, ...] = ()
    cached: NonNegativeInt = 0
    """Prompt tokens that were found in the cache, for the usage."""

    @property
    def tokens(self) -> int:
        return sum(len(said.tokens) for said in self.sequences)


class Part(Value):
    """A part of a session that was answered, in token ids; ``said`` lacks the last one, which was never computed."""

    prompt: list[int] = Field(repr=False)
    said: list[int] = Field(default_factory=list, repr=False)
    text: str | None = Field(default=None, repr=False)
    """The prompt's, where it came as text."""


class Progress(Message):
    """What a call has said so far. Whoever goes on with it gives its call the same id, ``call``.

    ``engine`` is a digest of what said it: vLLM's version, the model's configuration and its checkpoint. Of a session
    there are ``parts`` instead of requests, and none once it is over; its digest is of the adapter as well.
    """

    call: str = Field(min_length=1, max_length=MAX_ATTRIBUTE)
    engine: str
    requests: tuple[Begun, ...] = ()
    events: NonNegativeInt = 0
    """How many events of its stream have told this."""

    continued: tuple[NonNegativeInt, ...] = ()
    """How many tokens it had each time that a run went on with what another one had said."""

    parts: tuple[Part, ...] = ()
    """Of a session: those that were answered. The next one has their number."""

    @property
    def tokens(self) -> int:
        """Tokens that need not be generated again."""
        return sum(begun.tokens for begun in self.requests)

    def of(self, request_id: str) -> Begun | None:
        """What one of the call's engine requests has said."""
        return next((begun for begun in self.requests if begun.id == request_id), None)
