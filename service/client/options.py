"""What can be said of a request beside its body, and the record that says both."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from opentelemetry import propagate

from schemas import headers as h
from schemas.base import Outgoing
from schemas.codec import encode_request
from schemas.requests import Endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Any of these names goes into any call of the client.

    ``timeout_s`` becomes the request's deadline: the worker drops what is not wanted any more. A smaller
    ``priority`` runs earlier. A request with the ``request_id`` of one that this client has asked, and whose result is
    still to be had here, is not sent again.
    ``request_class`` is one of its model's classes; ``ttft_s`` and ``tpot_s`` are the times that will do, where its
    objective promises shorter ones.
    ``topic_of`` is an alias: the request is written to that model's own topic, which is otherwise chosen by ``model``.
    ``key`` is its record's, by default its ``request_id``. One with neither is written to any partition: the ids that
    a client makes lead to one, and with them as keys whatever it asks of a model would be one worker's to do.
    ``headers`` are the caller's own, written as they are; the worker passes over them, and names that it looks at are
    a ValueError. ``session``, ``part`` and ``final`` are ``Client.session``'s to say.
    """

    request_id: str | None = None
    timeout_s: float | None = None
    priority: int | None = None
    request_class: str | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    correlation_id: str | None = None
    tenant: str | None = None
    topic_of: str | None = None
    key: str | None = None
    session: str | None = None
    part: int | None = None
    final: bool = True
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.headers:
            if h.canonical(name) in h.KNOWN:
                raise ValueError(f"headers: {name!r} is one that the worker looks at, and none of the caller's own")


_NAMES = frozenset(option.name for option in fields(Options))


def split(rest: Mapping[str, Any]) -> tuple[Options, dict[str, Any]]:
    """Our options and the body's fields, out of one call's keywords."""
    options = {name: value for name, value in rest.items() if name in _NAMES}
    return Options(**options), {name: value for name, value in rest.items() if name not in _NAMES}


def request_record(
    topic: str,
    body: Mapping[str, Any],
    *,
    request_id: str,
    endpoint: Endpoint | None,
    options: Options,
    timeout_s: float | None,
    reply: Mapping[str, str | int],
) -> Outgoing:
    """The record to send, with the trace that the caller is in."""
    trace: dict[str, str] = {}
    propagate.inject(trace)
    ours: dict[str, Any] = {
        "endpoint": endpoint.value if endpoint else None,
        "deadline": None if timeout_s is None else time.time() + timeout_s,
        "priority": options.priority,
        "request_class": options.request_class,
        "ttft": options.ttft_s,
        "tpot": options.tpot_s,
        **reply,
        "correlation_id": options.correlation_id,
        "tenant": options.tenant,
        "session": options.session,
        "part": options.part,
        "final": None if options.final else "false",
    }
    key = options.key or options.session or options.request_id
    return encode_request(
        topic,
        body,
        id_=request_id,
        key=None if key is None else key.encode(),
        besides=[(name, value.encode()) for name, value in options.headers.items()],
        **{**ours, **trace},
    )
