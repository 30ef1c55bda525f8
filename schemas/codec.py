"""Between Kafka records and messages. Decoding a stranger's record never raises: it gives a request or a refusal."""

import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import to_json

from schemas import headers as h
from schemas.base import MAX_ATTRIBUTE, Headers, Origin, Outgoing, Record, read_json
from schemas.batches import Stored, key_of, parse_stored
from schemas.control import MAX_CONTROL_BYTES, Control, parse_control
from schemas.errors import ErrorObject, FailureClass, nearest
from schemas.marks import Keys, Marks, believed, check_signed, claimed, signed, written
from schemas.progress import Progress
from schemas.requests import PATHS, Endpoint, Refusal, Request
from schemas.results import Chunk, Result
from schemas.status import Presence, Status
from schemas.usage import Usage
from schemas.words import is_name

_BY_BODY: tuple[tuple[frozenset[str], Endpoint], ...] = (
    (frozenset({"messages"}), Endpoint.CHAT),
    (frozenset({"prompt"}), Endpoint.COMPLETIONS),
    (frozenset({"query", "documents"}), Endpoint.RERANK),
    (frozenset({"text_1", "text_2"}), Endpoint.SCORE),
    (frozenset({"input", "instructions"}), Endpoint.RESPONSES),
    (frozenset({"input", "max_output_tokens"}), Endpoint.RESPONSES),
    (frozenset({"input", "previous_response_id"}), Endpoint.RESPONSES),
    (frozenset({"input", "encoding_format"}), Endpoint.EMBEDDINGS),
    (frozenset({"input", "dimensions"}), Endpoint.EMBEDDINGS),
    (frozenset({"tokens"}), Endpoint.DETOKENIZE),
)


_SPELT = {h.canonical(name): name for name in (*h.OURS, h.CONTENT_TYPE, h.SIGNATURE, h.SIGNED_AT, h.POOL_SIGNATURE)}
_SPELT |= {"id": "ce_id", "type": "ce_type"}
_LONGEST_REASON = 500
_LONGEST_NUMBER = 9
_FARTHEST = 1e12 - 1
"""Of a number in a header, in either direction; seconds since the epoch are far below it."""
_RELATIVE = (".", "..")
"""Parts of a path that are no name."""
_SESSIONS = (Endpoint.CHAT, Endpoint.COMPLETIONS)


class _Refused(Exception):
    """A record that is no valid request, on its way to becoming a refusal."""

    def __init__(self, failure: FailureClass, message: str, *, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.failure = failure
        self.status = status
        # As vLLM's server calls the errors of bodies that are no request.
        kind = {400: "Bad Request", 404: "Not Found"}.get(status, "BadRequestError")
        self.error = ErrorObject(message=message, type=kind, param=param, code=status)


# --- requests -----------------------------------------------------------------------------------------------------


def encode_request(
    topic: str,
    body: Mapping[str, Any] | bytes,
    *,
    id_: str | None = None,
    key: bytes | None = None,
    besides: Headers = (),
    **ours: object,
) -> Outgoing:
    """A request as a client writes it. ``ours`` are our headers by their Python names (``reply_to=...``), ``besides``
    are the producer's own."""
    value = body if isinstance(body, bytes) else _dump(body)
    headers: list[tuple[str, bytes | None]] = [(h.CONTENT_TYPE, h.JSON)]
    if id_ is not None:
        headers = h.event_headers(id_=id_, source="/gearshift/client", kind="request")
    headers += besides
    headers += [(name.replace("_", "-"), str(given).encode()) for name, given in ours.items() if given is not None]
    return Outgoing(topic=topic, key=key, value=value, headers=headers)


def decode_request(
    record: Record,
    *,
    max_bytes: int,
    alias: str | None = None,
    otherwise: str | None = None,
    keys: Keys = (),
) -> Request | Refusal:
    """The request in a record, or the refusal to answer it with.

    A body that names no model means ``alias``, the model of a per-model topic, or ``otherwise``; ``max_bytes`` bounds
    the value. With ``keys``, the pool's, a record that a worker moved here is the request that it was before.
    """
    found = h.attributes(record.headers)
    marks, claim = believed(record, found, keys), claimed(found, keys)
    try:
        _refuse_unreadable(record, found, max_bytes)
        data = _payload(record, found)
        return _request(record, found, data, alias or otherwise, marks, claim)
    except _Refused as refused:
        return _refusal(record, found, refused, marks, claim)


def encode_moved(
    record: Record, request: Request, topic: str, *, deaths: int, key: bytes | None = None, keys: Keys = ()
) -> Outgoing:
    """The same request for another topic: the same bytes, and what its new record would not tell.

    Readers believe it where ``keys`` are the pool's. Without a ``key`` it keeps the one that it has.
    """
    source = request.source if keys else request.says_moved_from or request.source
    marks = Marks(moved_from=source, received=request.received, deaths=deaths)
    ours = (h.TTL, h.DEADLINE, h.MOVED_FROM, h.RECEIVED, h.DEATHS, h.POOL_SIGNATURE, "id")
    dropped = {h.canonical(name) for name in ours}
    headers = [(name, value) for name, value in record.headers if h.canonical(name) not in dropped]
    headers += [("ce_id", request.id.encode()), *written(marks)]
    if request.deadline is not None:
        headers.append((h.DEADLINE, repr(request.deadline).encode()))
    moved = Outgoing(topic=topic, key=record.key if key is None else key, value=record.value, headers=headers)
    return signed(moved, keys)


def _refuse_unreadable(record: Record, found: h.Attributes, max_bytes: int) -> None:
    """Refuse what is not worth a look: damaged, out of bounds, empty, too large. Before anything is parsed."""
    if record.damage is not None:
        raise _Refused(FailureClass.MALFORMED, f"The record can't be read: {record.damage}")
    if found.beyond:
        raise _beyond(min(found.beyond))
    if record.value is None:
        raise _Refused(FailureClass.UNDECODABLE, "The record has no value; a request is a JSON object")
    if len(record.value) > max_bytes:
        raise _Refused(
            FailureClass.TOO_LARGE,
            f"The request has {len(record.value)} bytes; at most {max_bytes} are taken",
            status=413,
        )


def _beyond(plain: str) -> _Refused:
    name = _SPELT.get(plain, plain)
    return _Refused(FailureClass.INVALID, f"{name!r} must have at most {MAX_ATTRIBUTE} bytes", param=name)


def _payload(record: Record, found: h.Attributes) -> Any:
    try:
        data = read_json(record.value or b"", allow_inf_nan=False)
    except ValueError as error:
        raise _Refused(FailureClass.UNDECODABLE, f"The value is not JSON: {error}") from None
    if (found.get(h.CONTENT_TYPE) or "").startswith(h.CLOUDEVENT_JSON):
        return _unwrap(data, found)
    return data


def _unwrap(event: Any, found: h.Attributes) -> Any:
    """The data of a structured CloudEvent; its attributes join the headers'."""
    if not isinstance(event, dict) or not isinstance(event.get("data"), dict):
        raise _Refused(
            FailureClass.UNDECODABLE, "A structured CloudEvent must be a JSON object with an object as 'data'"
        )
    for name, value in event.items():
        if name != "data" and isinstance(value, str | int | float | bool):
            found.put(name, str(value).lower() if isinstance(value, bool) else str(value))
    if found.beyond:
        raise _beyond(min(found.beyond))
    return event["data"]


def _request(
    record: Record,
    found: h.Attributes,
    data: Any,
    otherwise: str | None,
    marks: Marks | None,
    claim: Origin | None,
) -> Request:
    if not isinstance(data, dict):
        raise _Refused(FailureClass.INVALID, f"The body must be a JSON object, not {_kind(data)}")
    named = data.get("model")
    model = otherwise if named is None or named == "" else named
    if model is None:
        raise _Refused(FailureClass.INVALID, "The body names no model", param="model")
    if not isinstance(model, str):
        raise _Refused(FailureClass.INVALID, f"'model' must be a string, not {_kind(model)}", param="model")
    if len(model) > MAX_ATTRIBUTE or len(model.encode()) > MAX_ATTRIBUTE:
        raise _beyond("model")
    if not is_name(model):
        raise _unprintable("model")
    received = record.timestamp if marks is None else marks.received
    origin, endpoint = record.origin, _endpoint(found, data)
    return Request(
        id=_id(origin, found),
        origin=origin,
        model=model,
        endpoint=endpoint,
        body=data if model is named else {**data, "model": model},
        received=received,
        size=record.size,
        deadline=_deadline(found, received),
        priority=_priority(found, data),
        request_class=_word(found, h.REQUEST_CLASS) or "",
        ttft_s=_seconds(found, h.TTFT),
        tpot_s=_seconds(found, h.TPOT),
        tenant=_word(found, h.TENANT) or "",
        reply_to=_word(found, h.REPLY_TO),
        reply_partition=_reply_partition(found),
        correlation_id=_word(found, h.CORRELATION_ID),
        traceparent=found.get(h.TRACEPARENT),
        tracestate=found.get(h.TRACESTATE),
        **_session(found, endpoint),
        moved_from=None if marks is None else marks.moved_from,
        says_moved_from=claim,
        deaths=0 if marks is None else marks.deaths,
    )


def _refusal(
    record: Record, found: h.Attributes, refused: _Refused, marks: Marks | None, claim: Origin | None
) -> Refusal:
    try:
        id_ = _id(record.origin, found)
    except _Refused:
        id_ = str(record.origin)
    return Refusal(
        id=id_,
        origin=record.origin,
        received=record.timestamp,
        failure=refused.failure,
        error=refused.error,
        status=refused.status,
        reply_to=_printable(found, h.REPLY_TO),
        reply_partition=_natural(found.get(h.REPLY_PARTITION)),
        correlation_id=_printable(found, h.CORRELATION_ID),
        moved_from=None if marks is None else marks.moved_from,
        says_moved_from=claim,
    )


def _id(origin: Origin, found: h.Attributes) -> str:
    given = found.get("id")
    if given is None:
        return str(origin)
    if not is_name(given) or given in _RELATIVE:
        raise _Refused(FailureClass.INVALID, "ce_id must be printable, and neither '.' nor '..'", param="ce_id")
    return given


def _unprintable(name: str) -> _Refused:
    return _Refused(FailureClass.INVALID, f"{name!r} must be printable", param=name)


def _word(found: h.Attributes, name: str) -> str | None:
    """What people are shown: a line break or a control in it would be read as somebody else's words."""
    given = found.get(name)
    if given is not None and not is_name(given):
        raise _unprintable(name)
    return given


def _printable(found: h.Attributes, name: str) -> str | None:
    given = found.get(name)
    return given if given is not None and is_name(given) else None


def _endpoint(found: h.Attributes, body: Mapping[str, Any]) -> Endpoint:
    given = found.get(h.ENDPOINT)
    if given is None:
        for keys, endpoint in _BY_BODY:
            if keys <= body.keys():
                return endpoint
        raise _Refused(
            FailureClass.INVALID,
            "The body does not tell its endpoint ('messages' or 'prompt' would); give it in the header 'endpoint', "
            f"one of {', '.join(Endpoint)}",
            param=h.ENDPOINT,
        )
    path = "/" + given.strip("/")
    for candidate in (path, f"/v1{path}", path.removeprefix("/v1")):
        if candidate in PATHS:
            return PATHS[candidate]
    hint = nearest(path, PATHS, cutoff=0.4)
    raise _Refused(FailureClass.INVALID, f"Unknown endpoint {given!r}{hint}", param=h.ENDPOINT, status=404)


def _number(found: h.Attributes, name: str) -> float | None:
    raw = found.get(name)
    if raw is None:
        return None
    try:
        value = float(raw)
    except ValueError:
        raise _Refused(FailureClass.INVALID, f"The header {name!r} must be a number, got {raw!r}", param=name) from None
    if not abs(value) <= _FARTHEST:  # also false for nan
        raise _Refused(FailureClass.INVALID, f"The header {name!r} is out of range: {raw!r}", param=name)
    return value


def _seconds(found: h.Attributes, name: str) -> float | None:
    value = _number(found, name)
    if value is not None and value <= 0:
        raise _Refused(FailureClass.INVALID, f"The header {name!r} must be above 0 seconds, got {value:g}", param=name)
    return value


def _deadline(found: h.Attributes, received: float) -> float | None:
    ttl = _number(found, h.TTL)
    raw = found.get(h.DEADLINE)
    if raw is None:
        return None if ttl is None else max(-_FARTHEST, min(received + ttl, _FARTHEST))  # a producer's clock may lie
    try:
        moment = datetime.fromisoformat(raw)
    except ValueError:
        return _number(found, h.DEADLINE)
    if moment.tzinfo is None:
        raise _Refused(FailureClass.INVALID, f"The deadline {raw!r} names no time zone", param=h.DEADLINE)
    return moment.timestamp()


def _reply_partition(found: h.Attributes) -> int | None:
    raw = found.get(h.REPLY_PARTITION)
    number = _natural(raw)
    if raw is not None and number is None:
        raise _Refused(
            FailureClass.INVALID, "The header 'reply-partition' must be a partition's number", param=h.REPLY_PARTITION
        )
    return number


def _natural(raw: str | None) -> int | None:
    """A partition's number in plain digits; None for anything else."""
    return int(raw) if raw is not None and raw.isascii() and raw.isdigit() and len(raw) <= _LONGEST_NUMBER else None


def _priority(found: h.Attributes, body: Mapping[str, Any]) -> int:
    given = _number(found, h.PRIORITY)
    if given is not None:
        return int(given)
    inside = body.get("priority", 0)
    return int(inside) if isinstance(inside, int) and abs(inside) < 2**31 else 0


def _session(found: h.Attributes, endpoint: Endpoint) -> dict[str, Any]:
    """The place in a session. Without its number a part could begin a lost session anew, as if nothing were missing."""
    session, part = found.get(h.SESSION), _number(found, h.PART)
    if session is None:
        return {}
    if endpoint not in _SESSIONS:
        raise _Refused(
            FailureClass.INVALID, f"{endpoint} has no sessions; {' and '.join(_SESSIONS)} have", param=h.SESSION
        )
    if part is None or part < 0 or part != int(part):
        raise _Refused(
            FailureClass.INVALID, "A part of a session needs the header 'part': 0, then 1, 2 and so on", param=h.PART
        )
    return {"session": session, "part": int(part), "final": _final(found)}


def _final(found: h.Attributes) -> bool:
    """A word that is neither would end the session for a producer who meant that it goes on."""
    given = found.get(h.FINAL) or "true"
    if given not in {"true", "false"}:
        raise _Refused(
            FailureClass.INVALID, f"The header 'final' must be 'true' or 'false', got {given!r}", param=h.FINAL
        )
    return given == "true"


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")


# --- results, chunks, dead letters --------------------------------------------------------------------------------


def encode_result(
    topic: str, result: Result, *, trace: Headers = (), partition: int | None = None, reply_failed: str | None = None
) -> Outgoing:
    """A terminal result; keyed by the request's id, so that a consumer finds one request in one partition.

    ``reply_failed``: why it is not where the request wanted it.
    """
    headers = h.event_headers(
        id_=result.id, source=f"/gearshift/{result.worker}", kind=f"result.{result.outcome}", subject=result.model
    )
    if result.correlation_id is not None:
        headers.append((h.CORRELATION_ID, result.correlation_id.encode()))
    if reply_failed is not None:
        headers.append((h.REPLY_FAILED, reply_failed.encode()))
    headers += trace
    return Outgoing(topic=topic, key=result.id.encode(), value=_json(result), headers=headers, partition=partition)


_ANSWERS: Mapping[str, type[Result] | type[Chunk]] = {"result": Result, "chunk": Chunk}


def kind_of(record: Record) -> str | None:
    """What a record says it is by its CloudEvents type: ``result``, ``chunk``, ``status``; None where it does not."""
    type_ = h.attribute(record.headers, "type")
    return None if type_ is None else type_.removeprefix("gearshift.").partition(".")[0]


def _check_kind(record: Record, expected: str) -> None:
    """Raises ValueError for a record that says it is something else. Nothing is guessed from its fields."""
    kind = kind_of(record)
    if kind not in {None, expected}:
        raise ValueError(f"a {expected} is expected, and this says it is a {kind[:40]}")


def decode_answer(record: Record) -> Result | Chunk:
    """A result or a piece of a stream, as the record says. Raises ValueError, as for results."""
    kind = kind_of(record) or "result"
    if kind not in _ANSWERS:
        raise ValueError(f"a result or a chunk is expected, and this says it is a {kind[:40]}")
    return _ANSWERS[kind].model_validate_json(record.value or b"")


def decode_result(record: Record) -> Result:
    """Raises ValueError (pydantic's ValidationError is one) for a record that is no result."""
    _check_kind(record, "result")
    return Result.model_validate_json(record.value or b"")


_OF_USAGE = (("ce_type", b"gearshift.usage"), (h.CONTENT_TYPE, h.JSON))


def encode_usage(topic: str, usage: Mapping[str, Any], *, keys: Keys = ()) -> Outgoing:
    """What a result has cost; keyed by its tenant, so that a consumer finds all of one tenant in one partition.

    ``usage`` has the fields of a ``Usage``. With ``keys``, the pool's, it is signed.
    """
    value = to_json(usage, exclude_none=True)
    return signed(Outgoing(topic=topic, key=usage["tenant"].encode(), value=value, headers=_OF_USAGE), keys)


def decode_usage(record: Record, *, keys: Keys = ()) -> Usage:
    """Raises ValueError, as for results, and with ``keys`` for what the pool did not sign."""
    _check_kind(record, "usage")
    check_signed(record, keys)
    return Usage.model_validate_json(record.value or b"")


def encode_stored(topic: str, stored: Stored) -> Outgoing:
    """What is known of a file or a batch; of each key the latest counts."""
    headers = h.event_headers(id_=key_of(stored), source="/gearshift", kind=f"stored.{stored.type}", subject=stored.id)
    return Outgoing(topic=topic, key=key_of(stored).encode(), value=_json(stored), headers=headers)


def decode_stored(record: Record) -> Stored:
    """Raises ValueError, as for results; also where the key is another one's."""
    _check_kind(record, "stored")
    found = parse_stored(record.value or b"")
    if record.key != key_of(found).encode("utf-8", "replace"):
        raise ValueError("the key is not that of what the record says")
    return found


def encode_chunk(topic: str, chunk: Chunk, *, trace: Headers = (), partition: int | None = None) -> Outgoing:
    """A piece of a streamed answer, keyed like its result, which keeps the pieces of one request in order."""
    headers = [("ce_type", b"gearshift.chunk"), (h.CONTENT_TYPE, h.JSON), *trace]
    return Outgoing(topic=topic, key=chunk.id.encode(), value=_json(chunk), headers=headers, partition=partition)


def decode_chunk(record: Record) -> Chunk:
    """Raises ValueError, as for results."""
    _check_kind(record, "chunk")
    return Chunk.model_validate_json(record.value or b"")


def encode_dead_letter(
    topic: str, record: Record, *, id_: str, failure: FailureClass, error: ErrorObject, attempts: int
) -> Outgoing:
    """A failed request's original bytes and headers, with the class of failure beside them."""
    headers = [(name, value) for name, value in record.headers if not name.startswith(h.DEAD_LETTER)]
    ours = {
        "id": id_,
        "class": failure.value,
        "origin": str(record.origin),
        "attempts": str(attempts),
        "at": repr(time.time()),
        "error": error.model_dump_json(),
    }
    headers += [(h.DEAD_LETTER + name, value.encode()) for name, value in ours.items()]
    return Outgoing(topic=topic, key=id_.encode(), value=record.value, headers=headers)


# --- control, status, presence ------------------------------------------------------------------------------------


def encode_control(topic: str, event: Control) -> Outgoing:
    """A control event under ``target/subject``: on the compacted topic the latest per key counts."""
    headers = h.event_headers(id_=event.id, source="/gearshift/client", kind=f"control.{event.type}")
    return Outgoing(topic=topic, key=f"{event.target}/{event.subject}".encode(), value=_json(event), headers=headers)


def decode_control(record: Record) -> Control:
    """The control event in a record. A bare ``{"model": "qwen"}`` is a switch; a missing id is the record's origin.

    A record that says it is a result, a request or anything else is none.

    Raises ValueError (pydantic's ValidationError is one) with what is wrong.
    """
    if record.damage is not None:
        raise ValueError(f"the record can't be read: {record.damage}")
    if len(record.value or b"") > MAX_CONTROL_BYTES:
        raise ValueError(f"a control event has at most {MAX_CONTROL_BYTES} bytes")
    data = read_json(record.value or b"null", allow_inf_nan=False)
    if not isinstance(data, dict):
        raise ValueError(f"a control event is a JSON object, not {_kind(data)}")  # noqa: TRY004 - bad data, not a bug
    found = h.attributes(record.headers)
    if (found.get("type") or "").startswith("gearshift."):
        _check_kind(record, "control")
    if (found.get(h.CONTENT_TYPE) or "").startswith(h.CLOUDEVENT_JSON) and isinstance(data.get("data"), dict):
        data = {"id": data.get("id"), "type": data.get("type"), **data["data"]}
    kind = data.get("type") or found.get("type")
    if isinstance(kind, str):
        data["type"] = kind.removeprefix("gearshift.").removeprefix("control.")
    if data.get("id") is None:
        data["id"] = found.get("id") or str(record.origin)
    data.setdefault("issued", record.timestamp)
    return parse_control(data)


def explain(error: ValueError) -> str:
    """One line of what is wrong with a message, without repeating its content; at most 500 characters."""
    if isinstance(error, ValidationError):
        text = "; ".join(
            ": ".join(filter(None, (".".join(map(str, e["loc"])), e["msg"].removeprefix("Value error, "))))
            for e in error.errors(include_input=False)
        )
    else:
        text = str(error)
    return text[:_LONGEST_REASON]


def encode_status(topic: str, status: Status) -> Outgoing:
    """A step of what a worker did, keyed by the worker: its steps stay in order."""
    headers = h.event_headers(
        id_=f"{status.control_id or status.kind}/{status.state}/{status.at}",
        source=f"/gearshift/{status.worker}",
        kind=f"status.{status.state}",
        subject=status.model,
    )
    return Outgoing(topic=topic, key=status.worker.encode(), value=_json(status), headers=headers)


def decode_status(record: Record) -> Status:
    """Raises ValueError, as for results."""
    _check_kind(record, "status")
    return Status.model_validate_json(record.value or b"")


def encode_presence(topic: str, presence: Presence) -> Outgoing:
    """A worker's presence; the latest per worker counts."""
    return Outgoing(
        topic=topic, key=presence.worker.encode(), value=_json(presence), headers=[(h.CONTENT_TYPE, h.JSON)]
    )


def decode_presence(record: Record) -> Presence | None:
    """None for a tombstone. Raises ValueError, as for results."""
    _check_kind(record, "presence")
    return None if record.value is None else Presence.model_validate_json(record.value)


def encode_progress(topic: str, key: str, progress: Progress, *, keys: Keys = ()) -> Outgoing:
    """What a request has said so far, for the workers of its pool alone; signed, where these have a key."""
    headers = [(h.CONTENT_TYPE, h.JSON)]
    return signed(Outgoing(topic=topic, key=key.encode(), value=_json(progress), headers=headers), keys)


def check_progress(record: Record, *, keys: Keys = ()) -> None:
    """Raises ValueError for what can't be read, and for a value that the pool, where it has a key, did not sign."""
    if record.damage is not None:
        raise ValueError(f"the record can't be read: {record.damage}")
    if record.value is not None:
        check_signed(record, keys)


def decode_progress(record: Record, *, keys: Keys = ()) -> Progress | None:
    """None for a tombstone. Raises ValueError, as for results and as ``check_progress`` does."""
    check_progress(record, keys=keys)
    return None if record.value is None else Progress.model_validate_json(record.value)


def tombstone(topic: str, key: str) -> Outgoing:
    """Forget what a compacted topic says of ``key``."""
    return Outgoing(topic=topic, key=key.encode(), value=None)


def _json(message: BaseModel) -> bytes:
    return to_json(message, exclude_none=True)


def _dump(body: Mapping[str, Any]) -> bytes:
    return to_json(body)
