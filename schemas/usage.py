"""What a result has cost: one record for each, in the transaction that publishes the result."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from schemas.base import Message, Origin
from schemas.results import Outcome, Result

Tokens = Annotated[int, Field(ge=0, lt=1 << 53)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Usage(Message):
    """What one result has cost, whatever its outcome. ``at`` is the result's moment, in seconds since the epoch."""

    id: str
    origin: Origin
    """The result's; exactly one usage exists for it."""
    at: float = Field(allow_inf_nan=False)
    outcome: Outcome
    tenant: str = ""
    model: str | None = None
    endpoint: str | None = None
    prompt_tokens: Tokens = 0
    cached_tokens: Tokens = 0
    """Those of the prompt that the prefix cache had."""
    generated_tokens: Tokens = 0
    running_s: Seconds = 0.0
    """How long it ran on the device, beside whatever else ran there; frozen it does not run."""
    switch_s: Seconds = 0.0
    """How long it waited for a switch of the model."""
    worker: str = ""


def usage_of(result: Result, *, tenant: str) -> dict[str, Any]:
    """What a result has cost, by what it says of its tokens and its times: the fields of a ``Usage``.

    Not validated, for there is one of each result, and it is made of what is.
    """
    timing, origin = result.timing, result.origin
    return {
        "id": result.id,
        "origin": {"topic": origin.topic, "partition": origin.partition, "offset": origin.offset},
        "at": timing.finished,
        "outcome": str(result.outcome),
        "tenant": tenant,
        "model": result.model,
        "endpoint": result.endpoint,
        **tokens_of(result.body),
        "running_s": max(0.0, timing.latency_s - timing.waited_s - timing.frozen_s),
        "switch_s": max(0.0, timing.waited_for.get("switch", 0.0)),
        "worker": result.worker,
    }


def tokens_of(body: Mapping[str, Any] | None) -> dict[str, int]:
    """The tokens that an answer says it has cost, by our names; 0 for what it does not say."""
    said = _mapping(_mapping(body).get("usage"))
    details = _mapping(said.get("prompt_tokens_details", said.get("input_tokens_details")))
    cached = _count(said.get("cache_read_input_tokens"))  # Anthropic's: such tokens are not among its input_tokens
    beside = cached + _count(said.get("cache_creation_input_tokens"))
    prompt = _count(said.get("prompt_tokens", said.get("input_tokens"))) + beside
    return {
        "prompt_tokens": _count(prompt),
        "generated_tokens": _count(said.get("completion_tokens", said.get("output_tokens"))),
        "cached_tokens": _count(details.get("cached_tokens")) or cached,
    }


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, (dict, Mapping)) else {}


def _count(value: Any) -> int:
    return value if isinstance(value, int) and 0 <= value < 1 << 53 else 0
