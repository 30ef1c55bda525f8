"""The exported contract: valid by the ecosystem's validators, true of what is written, current, and read for ever.

``asyncapi-3.0.0.json`` is AsyncAPI's own schema of its documents (npm's @asyncapi/specs 6.11.1, Apache-2.0).
``golden`` has the examples of each released version, as they were; when the version changes, copy
``schemas/contract/examples.json`` there.
"""

import copy
import importlib.metadata
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from faststream.specification.asyncapi.v3_0_0.schema import ApplicationSchema
from jsonschema import Draft7Validator, Draft202012Validator
from pydantic import BaseModel

from schemas import codec
from schemas import headers as h
from schemas.base import Record
from schemas.control import CONTROL_TYPES, DESIRED_TYPES, Switch
from schemas.examples import Example, Kind, examples
from schemas.requests import Request
from schemas.results import Outcome
from schemas.status import StatusState
from service.cli.contract import documents
from service.settings import TopicSettings

HERE = Path(__file__).parent
COMMITTED = HERE.parents[2] / "schemas" / "contract"
GOLDEN = HERE / "golden"
VERSION = importlib.metadata.version("gearshift")
CURRENT = {example.kind + "/" + example.name: example for example in examples()}
DOCUMENTS = dict(documents(TopicSettings()))
SCHEMAS = {Kind(name.removesuffix(".schema.json")): each for name, each in DOCUMENTS.items() if ".schema." in name}


def goldens() -> dict[str, Example]:
    """The records of every released version."""
    found = {}
    for path in GOLDEN.glob("*.json"):
        for each in json.loads(path.read_text()):
            example = Example(**{**each, "kind": Kind(each["kind"])})
            found[f"{path.stem}: {example.kind}/{example.name}"] = example
    return found


def decoded(example: Example) -> Any:
    """A record's message, as a consumer of its topic decodes it."""
    record = example.record()
    match example.kind:
        case Kind.REQUEST | Kind.DEAD_LETTER:
            return codec.decode_request(record, max_bytes=1 << 20)
        case Kind.CONTROL | Kind.COMMAND:
            return codec.decode_control(record)
        case Kind.RESULT:
            return codec.decode_result(record)
        case Kind.CHUNK:
            return codec.decode_chunk(record)
        case Kind.USAGE:
            return codec.decode_usage(record)
        case Kind.STORED:
            return codec.decode_stored(record)
        case Kind.STATUS:
            return codec.decode_status(record)
        case Kind.PRESENCE:
            return codec.decode_presence(record)
        case Kind.PROGRESS:
            return codec.decode_progress(record)


def missing(written: Any, read: Any, where: str = "") -> list[str]:
    """The places of ``written`` that ``read`` lacks or has otherwise."""
    if isinstance(written, dict):
        return [
            problem
            for name, part in written.items()
            for problem in (
                missing(part, read[name], f"{where}.{name}")
                if isinstance(read, dict) and name in read
                else [f"{where}.{name}"]
            )
        ]
    if isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        return [
            problem
            for n, (one, other) in enumerate(zip(written, read, strict=True))
            for problem in missing(one, other, f"{where}[{n}]")
        ]
    return [] if written == read else [f"{where}: {written!r} is {read!r}"]


MAPS = {"waited_for", "phases_ms", "partitions", "queues", "metadata"}
"""Objects whose names are not fields, but reasons, phases, topics, models, and what who asked calls them."""
IDENTITIES = {"origin"}
"""Objects that are the same where their fields are, and so will never have others."""


def with_fields_of_tomorrow(value: Any, name: str = "") -> Any:
    """The same with a field that nobody knows in each object."""
    if isinstance(value, dict):
        own = {key: with_fields_of_tomorrow(part, key) for key, part in value.items()}
        return own if name in MAPS | IDENTITIES else {**own, "tomorrow": {"is": [1]}}
    return [with_fields_of_tomorrow(part) for part in value] if isinstance(value, list) else value


# --- the documents ---


def test_the_committed_files_are_what_the_command_writes():
    committed = {path.name: path.read_text(encoding="utf-8") for path in COMMITTED.iterdir()}
    written = {name: json.dumps(each, indent=2, ensure_ascii=False) + "\n" for name, each in DOCUMENTS.items()}
    assert committed == written, "run: gearshift schemas export schemas/contract"


def test_the_document_is_valid_by_asyncapis_own_schema():
    validator = Draft7Validator(json.loads((HERE / "asyncapi-3.0.0.json").read_text()))
    document = DOCUMENTS["asyncapi.json"]
    assert [error.message for error in validator.iter_errors(document)] == []
    wrong = copy.deepcopy(document)
    wrong["operations"]["receive-requests"]["action"] = "read"
    assert not validator.is_valid(wrong)


def test_another_tool_reads_the_document():
    read = ApplicationSchema.model_validate(DOCUMENTS["asyncapi.json"])
    assert set(read.channels) == set(DOCUMENTS["asyncapi.json"]["channels"])


def test_every_reference_in_the_document_leads_somewhere():
    document = DOCUMENTS["asyncapi.json"]

    def references(part: Any) -> list[str]:
        if isinstance(part, dict):
            own = [part["$ref"]] if isinstance(part.get("$ref"), str) else []
            return own + [found for inner in part.values() for found in references(inner)]
        return [found for inner in part for found in references(inner)] if isinstance(part, list) else []

    for reference in references(document):
        place = document
        for step in reference.removeprefix("#/").split("/"):
            place = place[step]


def test_each_kind_of_message_has_a_schema_but_the_bytes_of_strangers():
    assert set(SCHEMAS) == set(Kind) - {Kind.DEAD_LETTER}
    for schema in SCHEMAS.values():
        Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("example", CURRENT.values(), ids=CURRENT)
def test_an_example_satisfies_its_schema_and_is_decoded_to_the_last_field(example: Example):
    if example.kind in SCHEMAS and example.value is not None:
        validator = Draft202012Validator(SCHEMAS[example.kind])
        assert [error.message for error in validator.iter_errors(example.value)] == []
        assert not validator.is_valid([example.value])
    check_decodes(example)


def test_a_schema_refuses_what_the_decoder_refuses():
    validator = Draft202012Validator(SCHEMAS[Kind.CONTROL])
    for wrong in ({"type": "switch"}, {"type": "swich", "model": "a"}, {"model": "a", "type": "pause", "target": 3}):
        assert not validator.is_valid(wrong), wrong
        with pytest.raises(ValueError):  # noqa: PT011 - any ValueError is explained
            codec.decode_control(Record("control", 0, 0, 0.0, None, json.dumps(wrong).encode()))


def test_topics_are_named_by_the_settings():
    document = dict(documents(TopicSettings(topic_prefix="blue-", requests="asked")))["asyncapi.json"]
    addresses = {name: channel["address"] for name, channel in document["channels"].items()}
    assert addresses["requests"] == "blue-asked"
    assert addresses["model-requests"] == "blue-asked.{alias}"


# --- compatibility ---


def check_decodes(example: Example) -> None:
    message = decoded(example)
    if example.kind in {Kind.REQUEST, Kind.DEAD_LETTER}:
        assert isinstance(message, Request), message
        body = example.value.get("data", example.value)
        assert message.body == body
        assert message.id == (example.headers.get("ce_id") or example.value.get("id") or str(message.origin))
        assert (message.reply_to, message.correlation_id) == (
            example.headers.get("reply-to"),
            example.headers.get("correlation-id"),
        )
    elif example.value is None:
        assert message is None
    else:
        assert isinstance(message, BaseModel)
        assert missing(example.value, json.loads(message.model_dump_json())) == []


@pytest.mark.parametrize("example", goldens().values(), ids=goldens())
def test_the_messages_of_every_version_are_read(example: Example):
    check_decodes(example)


@pytest.mark.parametrize("example", goldens().values(), ids=goldens())
def test_fields_of_a_later_version_are_kept_wherever_they_are(example: Example):
    bare = example.kind is Kind.CONTROL and "type" not in example.value and "ce_type" not in example.headers
    if example.value is not None and not bare:  # what is no switch to the last field must say what it is
        changed = {name: getattr(example, name) for name in ("kind", "name", "summary", "key", "headers")}
        check_decodes(Example(**changed, value=with_fields_of_tomorrow(example.value)))


def test_an_origin_is_the_same_whatever_stands_beside_its_fields():
    example = next(each for each in CURRENT.values() if each.kind is Kind.RESULT)
    asked = {**example.value["origin"], "tomorrow": {"is": [1]}}
    result = decoded(replace(example, value={**example.value, "origin": asked}))
    assert result.origin == decoded(example).origin


def test_this_version_has_its_golden_messages():
    kept = {name for name in goldens() if name.startswith(f"{VERSION}: ")}
    assert kept >= {f"{VERSION}: {name}" for name in CURRENT}, "copy schemas/contract/examples.json to golden"


def test_there_is_an_example_of_everything():
    events = {decoded(each).type: each.kind for each in CURRENT.values() if each.kind in {Kind.CONTROL, Kind.COMMAND}}
    assert {kind for kind, on in events.items() if on is Kind.CONTROL} == DESIRED_TYPES
    assert events.keys() == CONTROL_TYPES
    assert {decoded(each).outcome for each in CURRENT.values() if each.kind is Kind.RESULT} == set(Outcome)
    assert {decoded(each).state for each in CURRENT.values() if each.kind is Kind.STATUS} == set(StatusState)


def test_what_an_example_says_reaches_the_program():
    switch = decoded(CURRENT["control/switch-1"])
    assert isinstance(switch, Switch)
    assert (switch.drain_timeout, switch.hold, switch.target) == (10, "forever", "gearshift")
    request = decoded(CURRENT["request/with-headers"])
    assert (request.priority, request.tenant, request.endpoint) == (-1, "blue", "/v1/embeddings")


def test_the_contract_names_every_header_that_a_producer_may_write_and_the_key_that_each_message_has():
    messages = DOCUMENTS["asyncapi.json"]["components"]["messages"]
    pools = {h.MOVED_FROM, h.RECEIVED, h.DEATHS}
    assert messages["request"]["headers"]["properties"].keys() >= h.OURS - pools
    usage = CURRENT["usage/completed"]
    said = messages["usage"]["bindings"]["kafka"]["key"]["description"]
    assert (usage.key, said) == (usage.value["tenant"], "The tenant, empty where a request has none.")
