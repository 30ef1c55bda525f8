"""From a settlement to the records of the transaction that finishes its request's offset."""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace

import structlog

from schemas.base import Origin, Outgoing
from schemas.codec import encode_dead_letter, encode_moved, encode_result
from schemas.errors import ErrorObject, FailureClass
from schemas.results import Outcome, Result, Timing
from service.errors import Stalled
from service.ports import Moved, RecordRefused, Settled, Settlement
from service.settings import TopicSettings

log = structlog.get_logger(__name__)


async def settle_in_turn(
    origin: Origin,
    settlement: Settled,
    topics: TopicSettings,
    commit: Callable[[Sequence[Outgoing]], Awaitable[bool]],
    *,
    secret: bytes | None = None,
) -> Settled | None:
    """Commit the first form of a settlement that the broker takes, and return that; None: ``origin`` is not ours.

    ``secret`` is the pool's key, which signs what a moved request has behind it. ``commit`` publishes records and
    finishes the origin, both or none; it raises RecordRefused for records that the broker does not take, and so does
    this for a request that can't be moved. Raises Stalled where not even a result of constant size is taken.
    """
    reason = ""
    for form in forms(settlement):
        try:
            committed = await commit(records(form, topics, secret))
        except (RecordRefused, ValueError) as refused:  # a ValueError: it can't be encoded
            reason = str(refused)
            log.warning("settlement.refused", origin=str(origin), reason=reason)
        else:
            return form if committed else None
    if isinstance(settlement, Moved):
        raise RecordRefused(reason)
    raise Stalled(f"the broker refuses every result of {origin}: {reason}")


def forms(settlement: Settled) -> Iterator[Settled]:
    """What to try in turn: all of it, the result without its dead letter, and an error in the result's place."""
    yield settlement
    if isinstance(settlement, Settlement):
        if settlement.dead is not None:
            yield replace(settlement, dead=None)
        yield replace(settlement, result=_unpublished(settlement.result), reply_to=None, dead=None, trace=())


def records(settlement: Settlement | Moved, topics: TopicSettings, secret: bytes | None = None) -> list[Outgoing]:
    """What to publish. Raises ValueError for what can't be encoded."""
    if isinstance(settlement, Moved):
        topic = topics.for_alias(settlement.alias)
        return [encode_moved(settlement.record, settlement.request, topic, deaths=settlement.deaths, secret=secret)]
    wanted, result = settlement.reply_to, settlement.result
    topic = wanted if wanted is not None and topics.allows_reply(wanted) else topics.named(topics.results)
    found = [encode_result(topic, result, trace=settlement.trace)]
    if settlement.dead is not None and result.error is not None and result.failure is not None:
        found.append(
            encode_dead_letter(
                topics.named(topics.dead_letters),
                settlement.dead,
                id_=result.id,
                failure=result.failure,
                error=result.error,
                attempts=result.attempt.n,
            )
        )
    return found


def _unpublished(result: Result) -> Result:
    """What is said of a result that the broker refused: nothing of it that may be long is left."""
    error = ErrorObject(
        message="The broker refused the result: it is too large, or its topic does not allow it",
        type="InternalServerError",
        code=500,
    )
    timing = result.timing
    return Result(
        id=result.id,
        origin=result.origin,
        outcome=Outcome.FAILED,
        status=500,
        error=error,
        failure=FailureClass.TOO_LARGE,
        attempt=result.attempt,
        timing=Timing(received=timing.received, finished=timing.finished, latency_s=timing.latency_s),
        worker=result.worker,
        correlation_id=_bounded(result.correlation_id),
    )


_LONGEST = 256
"""Bytes of an attribute that the last form of a result still carries."""


def _bounded(attribute: str | None) -> str | None:
    too_long = attribute is not None and len(attribute.encode(errors="replace")) > _LONGEST
    return None if too_long else attribute
