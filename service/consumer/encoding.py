"""From a settlement to the records of the transaction that finishes its request's offset."""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, Protocol

import structlog

from schemas.base import Origin, Outgoing
from schemas.codec import encode_dead_letter, encode_moved, encode_result, encode_usage
from schemas.errors import ErrorObject, FailureClass
from schemas.marks import Keys
from schemas.requests import ReplyTo
from schemas.results import Outcome, Result, Timing
from service.errors import RecordRefused, Stalled
from service.kafka.reply_topics import Place
from service.ports import Moved, Settled, Settlement
from service.settings import TopicSettings

log = structlog.get_logger(__name__)


class Replies(Protocol):
    """Knows which reply topics there are; ``ReplyTopics`` does."""

    async def place(self, reply: ReplyTo | None) -> Place: ...

    async def gone(self, reply: ReplyTo) -> bool: ...


async def settle_in_turn(
    origin: Origin,
    settlement: Settled,
    topics: TopicSettings,
    commit: Callable[[Sequence[Outgoing]], Awaitable[bool]],
    replies: Replies,
    *,
    keys: Keys = (),
) -> Settled | None:
    """Commit the first form of a settlement that the broker takes, and return that; None: ``origin`` is not ours.

    ``keys`` are the pool's, which sign what a moved request has behind it. ``commit`` publishes records and
    finishes the origin, both or none; it raises RecordRefused for records that the broker does not take, and so does
    this for a request that can't be moved. Raises Stalled where not even a result of constant size is taken.
    """
    reason, gone = "", False
    place = await replies.place(settlement.reply) if isinstance(settlement, Settlement) else Place()
    for form, where in forms(settlement, place):
        if gone and where.reply is not None:
            continue
        try:
            committed = await commit(records(form, topics, where, keys))
        except (RecordRefused, ValueError) as refused:  # a ValueError: it can't be encoded
            reason = str(refused)
            log.warning("settlement.refused", origin=str(origin), reason=reason)
            gone = where.reply is not None and await replies.gone(where.reply)
        else:
            if committed and _usage_of(form) is not _usage_of(settlement):
                log.error("usage.lost", origin=str(origin), reason=reason)
            return form if committed else None
    if isinstance(settlement, Moved):
        raise RecordRefused(reason)
    raise Stalled(f"the broker refuses every result of {origin}: {reason}")


def forms(settlement: Settled, place: Place) -> Iterator[tuple[Settled, Place]]:
    """What to try in turn: all of it, the result without its dead letter, and an error in the result's place.

    First where its producer wants it, then in the topic of all. At last all of that without what the request has cost:
    no answer waits for a topic of usage that takes nothing.
    """
    if isinstance(settlement, Moved):
        yield settlement, place
        return
    places = [place]
    if place.reply is not None:
        places.append(Place(note=f"{place.reply}: it could not be written there"))
    charged = [settlement] if settlement.usage is None else [settlement, replace(settlement, usage=None)]
    for whole, where in product(charged, places):
        yield whole, where
        if whole.dead is not None:
            yield replace(whole, dead=None), where
        yield replace(whole, result=_unpublished(whole.result), dead=None, trace=()), where


def records(settlement: Settlement | Moved, topics: TopicSettings, place: Place, keys: Keys = ()) -> list[Outgoing]:
    """What to publish. Raises ValueError for what can't be encoded."""
    if isinstance(settlement, Moved):
        moved = settlement
        return [encode_moved(moved.record, moved.request, moved.topic, deaths=moved.deaths, key=moved.key, keys=keys)]
    result, reply = settlement.result, place.reply or ReplyTo(topics.named(topics.results))
    trace, note = settlement.trace, place.note
    found = [encode_result(reply.topic, result, trace=trace, partition=reply.partition, reply_failed=note)]
    if settlement.usage is not None and topics.usage_records:
        found.append(encode_usage(topics.named(topics.usage), settlement.usage, keys=keys))
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


def _usage_of(settled: Settled) -> Mapping[str, Any] | None:
    return settled.usage if isinstance(settled, Settlement) else None


def _unpublished(result: Result) -> Result:
    """What is said of a result that the broker refused. Of its producer's words only bounded ones are left."""
    error = ErrorObject(
        message="The broker refused the result: it is too large, or its topic does not allow it",
        type="InternalServerError",
        code=500,
    )
    timing = result.timing
    return Result(
        id=result.id,
        origin=result.origin,
        says_moved_from=result.says_moved_from,
        outcome=Outcome.FAILED,
        status=500,
        error=error,
        failure=FailureClass.TOO_LARGE,
        attempt=result.attempt,
        timing=Timing(received=timing.received, finished=timing.finished, latency_s=timing.latency_s),
        worker=result.worker,
    )
