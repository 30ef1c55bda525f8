"""The contract for everyone else: JSON Schema for each kind of message, and an AsyncAPI 3 document with examples.

Both are generated from the messages themselves. A schema allows fields that it does not name, as the messages do.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import TypeAdapter
from pydantic.json_schema import models_json_schema

from schemas import headers as h
from schemas.base import MAX_ATTRIBUTE, Message
from schemas.batches import Stored
from schemas.control import Command, Desired
from schemas.examples import Example, Kind, examples
from schemas.progress import Progress
from schemas.requests import Endpoint
from schemas.results import Chunk, Result
from schemas.status import Presence, Status
from schemas.usage import Usage

DIALECT = "https://json-schema.org/draft/2020-12/schema"
ASYNCAPI = "3.0.0"
_MODELS: dict[Kind, type[Message]] = {
    Kind.RESULT: Result,
    Kind.USAGE: Usage,
    Kind.CHUNK: Chunk,
    Kind.STATUS: Status,
    Kind.PRESENCE: Presence,
    Kind.PROGRESS: Progress,
}
_EVENTS: dict[Kind, Any] = {Kind.CONTROL: Desired, Kind.COMMAND: Command, Kind.STORED: Stored}
_KEYS: dict[Kind, str] = {
    Kind.REQUEST: "Any, or none.",
    Kind.CONTROL: "TARGET/SUBJECT: the latest event per key counts. A bare switch may have any key.",
    Kind.COMMAND: "TARGET/SUBJECT.",
    Kind.RESULT: "The request's id.",
    Kind.USAGE: "The tenant, empty where a request has none.",
    Kind.STORED: "The id, and for what is known of a batch beside it ID/WHAT: the latest per key counts.",
    Kind.CHUNK: "The request's id.",
    Kind.STATUS: "The worker's id.",
    Kind.PRESENCE: "The worker's id; a record without a value takes its presence back.",
    Kind.PROGRESS: (
        "GROUP/TOPIC/PARTITION/OFFSET of the request; a record without a value comes with its result. Of a session, "
        "GROUP/TOPIC/PARTITION/session/DIGEST; one comes when it is over."
    ),
    Kind.DEAD_LETTER: "The request's id.",
}
_SAYS: dict[Kind, str] = {
    Kind.REQUEST: "What a producer asks for: the body of one of OpenAI's endpoints, as vLLM's server takes it.",
    Kind.CONTROL: "What an operator wants to be so: desired state, compacted by key.",
    Kind.COMMAND: "What an operator wants done once.",
    Kind.RESULT: "The one terminal result of a request, committed with its offset.",
    Kind.USAGE: "What a result has cost, committed with it; sums over these are sums over results.",
    Kind.STORED: "A file of the batch API, or what was asked of a batch, how far it is, and its end.",
    Kind.CHUNK: "A piece of a streamed answer; a preview, only the result is truth.",
    Kind.STATUS: "A step of what a worker did about a control event, or its end.",
    Kind.PRESENCE: "A worker as it stands; the latest per worker counts.",
    Kind.PROGRESS: (
        "What a running request has said so far, or a session has come to, for its next owner. It is text: for workers "
        "only."
    ),
    Kind.DEAD_LETTER: "A request that can't succeed as it is: its own bytes and headers, and why it failed.",
}
_HEADERS: dict[str, str] = {
    "ce_id": "The request's id, 256 bytes of printable text at most, not . or ..; without it, TOPIC/PARTITION/OFFSET.",
    h.ENDPOINT: "Where the body leaves a doubt: the endpoint's path.",
    h.DEADLINE: "When the answer stops being wanted: RFC 3339 with a time zone, or seconds since the epoch.",
    h.TTL: "The same, in seconds from the broker's timestamp.",
    h.PRIORITY: "A whole number; a smaller one runs earlier.",
    h.REQUEST_CLASS: "Which of its model's classes it is of; their objectives are in models.yaml.",
    h.TTFT: "Seconds to the first token that will do, where its objective promises fewer.",
    h.TPOT: "The same per further token.",
    h.REPLY_TO: "The topic for the result, where the workers' setting reply_topics allows it.",
    h.REPLY_PARTITION: "The partition of that topic for the result and chunks; where it is missing, results.",
    h.CORRELATION_ID: "Printable text that comes back with the result; a cancel may name it.",
    h.TENANT: "Whose request it is, as printable text; tenants share a model's queue fairly.",
    h.SESSION: "A prompt that arrives in several records: they share this name, and their key.",
    h.PART: "Which of them this is, counted from 0; needed beside the session.",
    h.FINAL: "false on all of them but the last; true, or nothing, there.",
    h.REDRIVE_OF: "The id of the failed request that this one repeats.",
    h.TRACEPARENT: "W3C trace context.",
    h.TRACESTATE: "W3C trace context.",
}
_RESULT_HEADERS: dict[str, str] = {
    h.CORRELATION_ID: "The request's.",
    h.REPLY_FAILED: "On a result in the topic of all: why it is not where the request wanted it.",
}
_LETTER_HEADERS: dict[str, str] = {
    "dl-id": "The request's id.",
    "dl-class": "The class of failure.",
    "dl-origin": "TOPIC/PARTITION/OFFSET of the request.",
    "dl-attempts": "How many runs it had.",
    "dl-at": "When, in seconds since the epoch.",
    "dl-error": "OpenAI's error object, as JSON.",
}


@dataclass(frozen=True, slots=True)
class Channel:
    """A topic as the document shows it. ``alias`` in the address stands for a model's."""

    kind: Kind
    address: str
    action: Literal["send", "receive"]
    """What a worker does with it."""
    partitions: int = 1
    configs: Mapping[str, str] = field(default_factory=dict)
    besides: tuple[Kind, ...] = ()
    """Further kinds of message that it has."""
    answered_in: str | None = None
    """The channel of the answers, where several have their kind."""


def json_schemas() -> dict[Kind, dict[str, Any]]:
    """A schema per kind of message, each complete in itself."""
    found = {kind: schema for kind in Kind if (schema := _schema(kind, "#/$defs/{model}")) is not None}
    return {
        kind: {"$schema": DIALECT, "$id": f"urn:gearshift:{kind.value}", **schema, "description": _SAYS[kind]}
        for kind, schema in found.items()
    }


def asyncapi(channels: Mapping[str, Channel], *, version: str) -> dict[str, Any]:
    """The AsyncAPI document over ``channels`` by name, from a worker's point of view."""
    shown = examples()
    payloads, definitions = _components()
    return {
        "asyncapi": ASYNCAPI,
        "info": {
            "title": "Gearshift",
            "version": version,
            "description": "Inference requests in, results out, and models switched by events. "
            "Fields that this document does not name are kept or passed over, never an error.",
            "license": {"name": "Apache-2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"},
        },
        "defaultContentType": "application/json",
        "channels": {name: _channel(channel) for name, channel in channels.items()},
        "operations": {
            f"{channel.action}-{name}": _operation(name, channel, channels) for name, channel in channels.items()
        },
        "components": {
            "messages": {kind.value: _message(kind, [one for one in shown if one.kind is kind]) for kind in Kind},
            "schemas": {**payloads, **definitions},
        },
    }


# --- payloads -----------------------------------------------------------------------------------------------------


def _schema(kind: Kind, template: str) -> dict[str, Any] | None:
    """The schema of a kind's value; None for a dead letter, whose bytes are a stranger's."""
    if kind is Kind.REQUEST:
        return _request()
    if kind in _EVENTS:
        return _event_schema(_EVENTS[kind], template, bare=kind is Kind.CONTROL)
    return _MODELS[kind].model_json_schema(ref_template=template) if kind in _MODELS else None


def _request() -> dict[str, Any]:
    return {
        "title": "Request",
        "type": "object",
        "properties": {
            "model": {
                "type": "string",
                "minLength": 1,
                "maxLength": MAX_ATTRIBUTE,
                "description": "An alias, or the name of a LoRA adapter. May be left out on a model's own topic.",
            },
            "stream": {"type": ["boolean", "null"], "description": "Publish the answer in chunks besides."},
        },
        "additionalProperties": True,
    }


def _event_schema(union: Any, template: str, *, bare: bool) -> dict[str, Any]:
    """One of the events by its ``type``; ``bare``: or an object that names a model and nothing else of ours."""
    title = "What is stored" if union is Stored else "Control event"
    schema = TypeAdapter(union).json_schema(ref_template=template)
    kinds = schema.pop("anyOf")
    for definition in schema["$defs"].values():
        if "type" in definition.get("properties", {}):
            definition["required"] = sorted({"type", *definition.get("required", ())})
    if bare:
        model = {"model": {"type": "string"}}
        switch = {"type": "object", "required": ["model"], "properties": model, "not": {"required": ["type"]}}
        kinds = [*kinds, switch]
    return {"title": title, "oneOf": kinds, **schema}


def _components() -> tuple[dict[str, Any], dict[str, Any]]:
    """The payloads by kind, and the definitions that they share."""
    template = "#/components/schemas/{model}"
    payloads, definitions = {}, {}
    for kind in (Kind.REQUEST, *_EVENTS):
        schema = _schema(kind, template) or {}
        definitions.update(schema.pop("$defs", {}))
        payloads[f"{kind.value}-value"] = schema
    _, models = models_json_schema([(model, "validation") for model in _MODELS.values()], ref_template=template)
    definitions.update(models["$defs"])
    return payloads, definitions


# --- the document -------------------------------------------------------------------------------------------------


def _payload(kind: Kind) -> dict[str, Any]:
    if kind is Kind.DEAD_LETTER:
        return {"description": "The request's own bytes."}
    name = _MODELS[kind].__name__ if kind in _MODELS else f"{kind.value}-value"
    return _ref("schemas", name)


def _message(kind: Kind, shown: list[Example]) -> dict[str, Any]:
    return {
        "name": kind.value,
        "contentType": "application/json",
        "summary": _SAYS[kind],
        "headers": _header_schema(kind),
        "payload": _payload(kind),
        "bindings": {"kafka": {"key": {"type": "string", "description": _KEYS[kind]}}},
        "examples": [
            {
                "name": example.name,
                "summary": example.summary,
                **({"headers": example.headers} if example.headers else {}),
                "payload": example.value,
            }
            for example in shown
        ],
    }


def _header_schema(kind: Kind) -> dict[str, Any]:
    """Headers are text of bounded length. They may also be written as CloudEvents extensions (``ce_replyto``)."""
    named = {Kind.REQUEST: _HEADERS, Kind.RESULT: _RESULT_HEADERS, Kind.DEAD_LETTER: _LETTER_HEADERS}.get(kind, {})
    properties: dict[str, Any] = {name: {"type": "string", "description": says} for name, says in named.items()}
    if kind is Kind.REQUEST:
        for name, shown in properties.items():
            shown["maxLength"] = h.MAX_TRACESTATE if name == h.TRACESTATE else MAX_ATTRIBUTE
        properties[h.ENDPOINT]["examples"] = [endpoint.value for endpoint in Endpoint]
    return {"type": "object", "properties": properties, "additionalProperties": {"type": "string"}}


def _channel(channel: Channel) -> dict[str, Any]:
    configs: dict[str, Any] = dict(channel.configs)
    if "cleanup.policy" in configs:
        configs["cleanup.policy"] = configs["cleanup.policy"].split(",")
    kafka = {"topic": channel.address, "partitions": channel.partitions}
    shown = {
        "address": channel.address,
        "description": _SAYS[channel.kind],
        "messages": {kind.value: _ref("messages", kind.value) for kind in (channel.kind, *channel.besides)},
        "bindings": {"kafka": {**kafka, "topicConfiguration": {name: _number(configs[name]) for name in configs}}},
    }
    if "{alias}" in channel.address:
        shown["parameters"] = {"alias": {"description": "A model's name in models.yaml."}}
    return shown


def _operation(name: str, channel: Channel, channels: Mapping[str, Channel]) -> dict[str, Any]:
    place = {"$ref": f"#/channels/{name}"}
    operation: dict[str, Any] = {"action": channel.action, "channel": place, "summary": _SAYS[channel.kind]}
    replies = {Kind.REQUEST: Kind.RESULT, Kind.CONTROL: Kind.STATUS, Kind.COMMAND: Kind.STATUS}
    wanted = replies.get(channel.kind)
    for other, answer in channels.items():
        if answer.kind is wanted and channel.answered_in in {None, other}:
            operation["reply"] = {"channel": {"$ref": f"#/channels/{other}"}}
    if channel.kind is Kind.REQUEST:
        operation["reply"]["address"] = {"location": f"$message.header#/{h.REPLY_TO}"}
    return operation


def _number(value: Any) -> Any:
    return int(value) if isinstance(value, str) and value.isdigit() else value


def _ref(part: str, name: str) -> dict[str, str]:
    return {"$ref": f"#/components/{part}/{name}"}
