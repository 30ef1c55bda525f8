"""One message of each kind as it travels: what the contract shows, and what every later version must still read.

The records are written by the codec, so that they can't differ from what a client or a worker writes. Ids and times
are fixed.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from schemas import codec
from schemas import headers as h
from schemas.base import Headers, Origin, Outgoing, Record
from schemas.batches import (
    BatchAsked,
    BatchCancelled,
    BatchEnd,
    BatchEnded,
    BatchProgress,
    Stored,
    StoredFile,
    UnfinishedFile,
)
from schemas.contexts import ContextInfo, SwitchMode, SwitchReport, Tier
from schemas.control import Control, parse_control
from schemas.errors import ErrorObject, FailureClass
from schemas.objectives import Attainment, Miss
from schemas.progress import Begun, Part, Progress, Said
from schemas.requests import Attempt
from schemas.results import Chunk, Freeze, Outcome, Result, Timing
from schemas.status import Presence, QueueInfo, Status, StatusState
from schemas.usage import Usage

AT = 1_760_000_000.0
"""The moment of everything here, in seconds since the epoch."""
_TIME = b"2025-10-09T08:53:20+00:00"
_ORIGIN = Origin(topic="requests", partition=3, offset=1042)
_CHAT = {"model": "llama", "messages": [{"role": "user", "content": "Where are you?"}], "max_tokens": 32}


class Kind(StrEnum):
    """The kinds of message; each has one topic, except that requests of one model have another besides."""

    REQUEST = "request"
    CONTROL = "control"
    COMMAND = "command"
    RESULT = "result"
    USAGE = "usage"
    STORED = "stored"
    CHUNK = "chunk"
    STATUS = "status"
    PRESENCE = "presence"
    PROGRESS = "progress"
    DEAD_LETTER = "dead-letter"


@dataclass(frozen=True, slots=True)
class Example:
    """A record of a kind. ``value`` is its JSON; ``key`` and ``headers`` are text."""

    kind: Kind
    name: str
    summary: str
    key: str | None
    headers: dict[str, str]
    value: Any

    def record(self, *, topic: str = "") -> Record:
        """The record that a consumer of the topic would read."""
        return Record(
            topic=topic or self.kind.value,
            partition=3,
            offset=1042,
            timestamp=AT,
            key=None if self.key is None else self.key.encode(),
            value=None if self.value is None else json.dumps(self.value).encode(),
            headers=[(name, value.encode()) for name, value in self.headers.items()],
        )


def examples() -> tuple[Example, ...]:
    """All of them, the simplest of a kind first."""
    return (
        *_requests(),
        *_controls(),
        *_results(),
        *_usages(),
        *_stored(),
        *_chunks(),
        *_statuses(),
        *_presences(),
        *_progresses(),
        *_dead_letters(),
    )


def _requests() -> Iterator[Example]:
    yield Example(Kind.REQUEST, "plain", "The body alone, as a console producer writes it.", None, {}, _CHAT)
    full = codec.encode_request(
        "requests",
        {"model": "minilm", "input": "a llama"},
        id_="order-17",
        endpoint="/v1/embeddings",
        deadline="2025-10-09T09:00:00+00:00",
        priority=-1,
        request_class="batch",
        ttft=30,
        tenant="blue",
        reply_to="results.shop",
        reply_partition=3,
        correlation_id="shop-4",
        traceparent="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    )
    yield _of(Kind.REQUEST, "with-headers", "All that can be said beside the body; CloudEvents in binary mode.", full)
    message = codec.encode_request("requests", _CHAT, id_="note-2", endpoint="/v1/messages", correlation_id="notes")
    yield _of(Kind.REQUEST, "message", "Anthropic's: without the header it would be a chat's.", message)
    part = codec.encode_request(
        "requests",
        {"model": "llama", "prompt": "And then?", "max_tokens": 16},
        id_="story-1",
        key=b"story",
        session="story",
        part=1,
        final="false",
    )
    yield _of(Kind.REQUEST, "part", "The second part of a prompt that arrives in several; they share their key.", part)
    event = {
        "specversion": "1.0",
        "id": "order-18",
        "source": "/shop",
        "type": "shop.question",
        "priority": "4",
        "data": {"model": "qwen", "prompt": "The sea", "max_tokens": 8},
    }
    yield Example(
        Kind.REQUEST,
        "structured",
        "CloudEvents in structured mode.",
        None,
        {h.CONTENT_TYPE: h.CLOUDEVENT_JSON},
        event,
    )


_CONTROLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Freeze what runs, and stay for a minute.", {"type": "switch", "model": "qwen", "mode": "keep", "hold": 60}),
    (
        "Finish what runs within ten seconds, abort the rest, and stay until told otherwise.",
        {"type": "switch", "model": "qwen", "drain_timeout": 10, "leftover": "abort", "hold": "forever"},
    ),
    ("Start no further requests.", {"type": "pause"}),
    ("Start them again.", {"type": "resume"}),
    ("Give a model's memory back.", {"type": "sleep", "level": 1, "model": "lynx"}),
    ("Bring back what slept.", {"type": "wake", "model": "lynx"}),
    ("Keep a model's context resident.", {"type": "pin", "model": "llama"}),
    ("Let it be parked again.", {"type": "unpin", "model": "llama"}),
    ("Load an adapter from below lora_root.", {"type": "lora.add", "model": "llama", "name": "sql", "path": "sql-v2"}),
    ("Unload it.", {"type": "lora.remove", "model": "llama", "name": "sql"}),
    ("Keep it in memory.", {"type": "lora.pin", "model": "llama", "name": "sql"}),
    ("Cancel a request, also one that was not read yet.", {"type": "cancel", "request": "order-17"}),
    ("Cancel all requests of a correlation id.", {"type": "cancel", "correlation_id": "shop-4"}),
    ("What users are to get of a model.", {"type": "objective", "model": "llama", "ttft_s": 2, "tpot_s": 0.1}),
    (
        "The same for a class of its requests.",
        {"type": "objective", "model": "llama", "request_class": "batch", "ttft_s": 600, "tpot_s": 1, "share": 0.99},
    ),
)
_COMMANDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Which adapters are loaded?", {"type": "lora.list"}),
    ("Forget a model's prefix cache.", {"type": "reset_cache", "model": "llama"}),
    ("Start vLLM's profiler.", {"type": "profile", "action": "start"}),
    ("Where does a request stand?", {"type": "query", "request": "order-17"}),
    ("Read models.yaml again.", {"type": "reload"}),
    ("Load a model while another one serves.", {"type": "preload", "model": "lynx"}),
)


def _controls() -> Iterator[Example]:
    summary = "A model alone is a switch, for everyone; any key will do."
    yield Example(Kind.CONTROL, "plain", summary, "any", {}, {"model": "qwen"})
    for kind, table in ((Kind.CONTROL, _CONTROLS), (Kind.COMMAND, _COMMANDS)):
        for number, (summary, value) in enumerate(table):
            name = f"{value['type']}-{number}"
            event: Control = parse_control({**value, "id": name, "target": "gearshift", "issued": AT})
            yield _of(kind, name, summary, codec.encode_control(kind.value, event))


def _results() -> Iterator[Example]:
    timing = Timing(
        received=AT,
        finished=AT + 1.5,
        waited_s=0.25,
        waited_for={"read": 0.01, "turn": 0.2, "switch": 0.01, "queue": 0.03},
        first_token_s=0.05,
        latency_s=1.5,
        freezes=(Freeze(tokens=12, seconds=0.4, model="qwen"),),
    )
    common = {"id": "order-16", "origin": _ORIGIN, "model": "llama", "timing": timing, "worker": "host-1"}
    attempt = Attempt(epoch=5, n=1)
    answer = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": int(AT),
        "model": "llama",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "Above the valley."}, "finish_reason": "stop"}
        ],
        "usage": {"prompt_tokens": 12, "total_tokens": 17, "completion_tokens": 5},
    }
    ended: dict[Outcome, dict[str, Any]] = {
        Outcome.COMPLETED: {"status": 200, "body": answer},
        Outcome.FAILED: {
            "status": 404,
            "error": ErrorObject(
                message="The model `lama` does not exist.", type="NotFoundError", param="model", code=404
            ),
            "failure": FailureClass.UNKNOWN_MODEL,
        },
        Outcome.CANCELLED: {
            "status": 499,
            "body": answer,
            "error": ErrorObject(message="The request was cancelled", type="cancelled", code=499),
        },
        Outcome.EXPIRED: {
            "status": 408,
            "error": ErrorObject(message="The request's deadline passed", type="expired", code=408),
        },
    }
    for outcome, rest in ended.items():
        missed = Miss.TURN if outcome is Outcome.EXPIRED else None
        reached = Attainment(ttft_s=2, tpot_s=0.1, met=missed is None, missed_by=missed)
        result = Result(
            objective=reached if outcome in {Outcome.COMPLETED, Outcome.EXPIRED} else None,
            outcome=outcome,
            attempt=attempt,
            endpoint="/v1/chat/completions",
            correlation_id="shop-4",
            **{**common, **rest},
        )
        summary = f"A request that {'is' if outcome is Outcome.CANCELLED else 'has'} {outcome.value}."
        yield _of(Kind.RESULT, outcome.value, summary, codec.encode_result("results", result))


def _usages() -> Iterator[Example]:
    usage = Usage(
        id="order-16",
        origin=_ORIGIN,
        at=AT + 1,
        outcome=Outcome.COMPLETED,
        tenant="blue",
        model="llama",
        endpoint="/v1/chat/completions",
        prompt_tokens=14,
        cached_tokens=8,
        generated_tokens=32,
        running_s=0.75,
        switch_s=0.02,
        worker="host-1",
    )
    yield _of(Kind.USAGE, "completed", "What a whole answer has cost.", codec.encode_usage("usage", usage.model_dump()))


def _stored() -> Iterator[Example]:
    asked = BatchAsked(
        id="batch_1",
        file="file-1",
        endpoint="/v1/chat/completions",
        lines=3,
        at=AT + 1,
        window_s=86400,
        metadata={"night": "12"},
        headers=(("tenant", "blue"),),
    )
    source = StoredFile(
        id="file-1",
        filename="questions.jsonl",
        purpose="batch",
        at=AT,
        size=1234,
        partition=2,
        first=7,
        last=7,
        blocks=1,
        lines=3,
        endpoints=("/v1/chat/completions",),
    )
    output = source.model_copy(
        update={"id": "file-2", "filename": "batch_1_output.jsonl", "purpose": "batch_output", "batch": "batch_1"}
    )
    known: dict[str, tuple[str, Stored]] = {
        "file": ("A file that was uploaded.", source),
        "asked": ("A batch that is to be worked on.", asked),
        "progress": ("How far it is.", BatchProgress(id="batch_1", at=AT + 2, completed=1, failed=0)),
        "cancelled": ("Somebody wants it to end.", BatchCancelled(id="batch_1", at=AT + 3)),
        "writing": ("Its answers are being written.", UnfinishedFile(id="file-2", at=AT + 3, partition=2, first=8)),
        "output": ("What it has answered.", output),
        "ended": (
            "Its end, and its files.",
            BatchEnded(id="batch_1", at=AT + 4, end=BatchEnd.COMPLETED, completed=3, output="file-2"),
        ),
    }
    for name, (summary, stored) in known.items():
        yield _of(Kind.STORED, name, summary, codec.encode_stored("batches", stored))


def _chunks() -> Iterator[Example]:
    piece = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": int(AT),
        "model": "llama",
        "choices": [{"index": 0, "delta": {"content": "Above"}, "finish_reason": None}],
    }
    first = Chunk(id="order-16", seq=0, origin=_ORIGIN, attempt=Attempt(epoch=5, n=1), data=piece)
    yield _of(Kind.CHUNK, "piece", "One event of vLLM's server.", codec.encode_chunk("chunks", first))
    last = Chunk(id="order-16", seq=1, origin=_ORIGIN, attempt=Attempt(epoch=5, n=1), final=True)
    yield _of(Kind.CHUNK, "end", "The end of an attempt.", codec.encode_chunk("chunks", last))


def _contexts() -> tuple[ContextInfo, ...]:
    size = {"weights_bytes": 16 << 30, "kv_bytes": 4 << 30}
    return (
        ContextInfo(alias="qwen", tier=Tier.RESIDENT, active=True, **size),
        ContextInfo(alias="llama", tier=Tier.RESIDENT, unfinished=3, loras=("sql",), **size),
        ContextInfo(alias="lynx", tier=Tier.PARKED, host_bytes=15 << 30),
    )


def _statuses() -> Iterator[Example]:
    report = SwitchReport(
        from_model="llama",
        to_model="qwen",
        mode=SwitchMode.KEEP,
        tier_found=Tier.RESIDENT,
        ms=4.2,
        stall_ms=0.5,
        phases_ms={"finish_step": 3.1, "core": 0.2, "worker": 0.3},
        kept=3,
        memory_before_mb=40960,
        memory_after_mb=40960,
        core_pid=4711,
        worker_pids=(4712,),
    )
    for state in StatusState:
        about = {"switch": report} if state in {StatusState.SWITCHING, StatusState.COMPLETED} else {}
        reason = {
            StatusState.FAILED: "qwen did not load: no file /models/qwen/config.json",
            StatusState.ROLLED_BACK: "qwen did not load: out of memory",
            StatusState.REJECTED: "unknown model 'qwem' (did you mean 'qwen'?)",
        }.get(state)
        contexts = _contexts() if state is StatusState.COMPLETED else ()
        status = Status(
            worker="host-1",
            state=state,
            kind="cancel" if state is StatusState.TOO_LATE else "switch",
            at=AT + 2,
            control_id="switch-0",
            model=None if state is StatusState.TOO_LATE else "qwen",
            reason=reason,
            contexts=contexts,
            **about,
        )
        yield _of(Kind.STATUS, state.value, "A step, or the end, of a control event.", codec.encode_status("", status))
    answer = {"loras": {"llama": ["sql"]}}
    listed = Status(
        worker="host-1", state=StatusState.COMPLETED, kind="lora.list", at=AT, control_id="lora.list-0", answer=answer
    )
    yield _of(Kind.STATUS, "answer", "A question's answer.", codec.encode_status("", listed))


def _presences() -> Iterator[Example]:
    presence = Presence(
        worker="host-1",
        pool="gearshift",
        at=AT,
        interval_s=3,
        version="0.1.0",
        active="qwen",
        host="host",
        pid=4700,
        http="http://host:8000",
        contexts=_contexts(),
        queues={"llama": QueueInfo(waiting=2, running=3, tokens=700, oldest_s=1.5), "qwen": QueueInfo(running=5)},
        partitions={"requests": (0, 3), "requests.llama": (1,)},
        costs={"switch": {"llama->qwen": 0.004}},
    )
    yield _of(Kind.PRESENCE, "there", "A worker as it stands.", codec.encode_presence("workers", presence))
    yield _of(Kind.PRESENCE, "gone", "A worker that has left: a tombstone.", codec.tombstone("workers", "host-1"))


def _progresses() -> Iterator[Example]:
    said = Said(tokens=[791, 4062], logprobs=[[(791, -0.25, 1, "The")], [(4062, -1.5, 2, " quick")]])
    begun = Begun(id="chatcmpl-4f2a", prompt="9f86d081", sequences=(said,), cached=16)
    progress = Progress(call="4f2a", engine="60303ae2", requests=(begun,), events=3)
    key = f"gearshift/{_ORIGIN}"
    yield _of(Kind.PROGRESS, "said", "What an answer had so far.", codec.encode_progress("progress", key, progress))
    part = Part(prompt=[128000, 15546], said=[791, 4062], text="Who")
    session = Progress(call="4f2a", engine="60303ae2", parts=(part,))
    where = f"gearshift/{_ORIGIN.topic}/{_ORIGIN.partition}/session/{'9f86d081' * 8}"
    record = codec.encode_progress("progress", where, session)
    yield _of(Kind.PROGRESS, "session", "What a session has come to after its first part.", record)
    yield _of(Kind.PROGRESS, "settled", "A tombstone, written with the result.", codec.tombstone("progress", key))


def _dead_letters() -> Iterator[Example]:
    wrong = {**_CHAT, "model": "lama"}
    record = Record("requests", 3, 1042, AT, None, json.dumps(wrong).encode(), [("ce_id", b"order-15")])
    error = ErrorObject(message="The model `lama` does not exist.", type="NotFoundError", param="model", code=404)
    letter = codec.encode_dead_letter(
        "dead-letters", record, id_="order-15", failure=FailureClass.UNKNOWN_MODEL, error=error, attempts=1
    )
    yield _of(Kind.DEAD_LETTER, "unknown-model", "A request as it was, and why it failed.", letter)


def _of(kind: Kind, name: str, summary: str, written: Outgoing) -> Example:
    """What was written, with fixed times in its headers."""
    written = replace(written, headers=_timeless(written.headers))
    return Example(
        kind=kind,
        name=name,
        summary=summary,
        key=None if written.key is None else written.key.decode(),
        headers={header: (value or b"").decode() for header, value in written.headers},
        value=None if written.value is None else json.loads(written.value),
    )


def _timeless(headers: Headers) -> Headers:
    now = {"ce_time": _TIME, "dl-at": repr(AT).encode()}
    return [(name, now.get(name, value)) for name, value in headers]
