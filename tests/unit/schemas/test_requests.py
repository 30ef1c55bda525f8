"""What a producer may write, and what becomes of what it should not have written."""

import json

import pytest
from cloudevents.core.bindings.kafka import from_kafka_event, to_binary_event, to_structured_event
from cloudevents.core.v1.event import CloudEvent
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.base import Record
from schemas.codec import decode_request, encode_request
from schemas.errors import FailureClass
from schemas.requests import Endpoint, Refusal, Request

CHAT = {"model": "llama", "messages": [{"role": "user", "content": "hello"}]}


def record(value: object = CHAT, headers: dict[str, str] | None = None, *, topic: str = "requests") -> Record:
    raw = value if isinstance(value, bytes) or value is None else json.dumps(value).encode()
    pairs = [(name, text.encode()) for name, text in (headers or {}).items()]
    return Record(topic=topic, partition=2, offset=7, timestamp=1000.0, key=None, value=raw, headers=pairs)


def decode(given: Record, **options: object) -> Request | Refusal:
    return decode_request(given, **{"max_bytes": 10_000, **options})


def accepted(given: Record, **options: object) -> Request:
    request = decode(given, **options)
    assert isinstance(request, Request), request
    return request


def refused(given: Record, **options: object) -> Refusal:
    refusal = decode(given, **options)
    assert isinstance(refusal, Refusal), refusal
    return refusal


def test_a_plain_body_from_a_console_producer_is_a_valid_request():
    request = accepted(record())
    assert request.id == "requests/2/7"
    assert request.endpoint is Endpoint.CHAT
    assert request.model == "llama"
    assert request.received == 1000.0
    assert request.deadline is None


@pytest.mark.parametrize("final", [False, "false", True, "true"])
def test_whether_a_part_is_the_last_is_a_boolean_or_its_word_in_a_structured_event(final):
    said = {"id": "e1", "session": "s1", "part": 0, "final": final, "data": {"model": "llama", "prompt": "Once"}}
    part = accepted(record(said, {"content-type": "application/cloudevents+json"}))
    assert (part.session, part.part, part.final) == ("s1", 0, final in {True, "true"})
    other = refused(record({**said, "final": 0}, {"content-type": "application/cloudevents+json"}))
    assert other.error.param == "final"


def test_headers_say_what_the_body_does_not():
    request = accepted(
        record(
            headers={
                "ce_id": "r1",
                "deadline": "1970-01-01T01:00:00+01:00",
                "priority": "-3",
                "Reply-To": "answers",
                "ce_correlationid": "c1",
                "tenant": "blue",
                "traceparent": "00-aa-bb-01",
            }
        )
    )
    assert (request.id, request.deadline, request.priority) == ("r1", 0.0, -3)
    assert (request.reply_to, request.correlation_id, request.tenant) == ("answers", "c1", "blue")
    assert request.traceparent == "00-aa-bb-01"


def test_a_part_of_a_session_says_which_one_it_is_and_whether_it_is_the_last():
    part = accepted(record(headers={"session": "s1", "part": "2", "final": "false"}))
    assert (part.session, part.part, part.final) == ("s1", 2, False)
    assert accepted(record(headers={"session": "s1", "part": "3"})).final
    assert accepted(record()).session is None


def test_a_time_to_live_counts_from_the_brokers_timestamp():
    assert accepted(record(headers={"ttl": "30"})).deadline == 1030.0


@pytest.mark.parametrize(
    ("body", "endpoint"),
    [
        ({"prompt": "x"}, Endpoint.COMPLETIONS),
        ({"query": "q", "documents": ["d"]}, Endpoint.RERANK),
        ({"text_1": "a", "text_2": "b"}, Endpoint.SCORE),
        ({"input": "x", "max_output_tokens": 3}, Endpoint.RESPONSES),
        ({"input": "x", "encoding_format": "float"}, Endpoint.EMBEDDINGS),
        ({"tokens": [1]}, Endpoint.DETOKENIZE),
    ],
)
def test_a_body_that_leaves_no_doubt_tells_its_endpoint(body, endpoint):
    assert accepted(record({"model": "m", **body})).endpoint is endpoint


@pytest.mark.parametrize("name", ["/v1/embeddings", "v1/embeddings", "embeddings", "/embeddings"])
def test_an_endpoint_may_be_written_as_people_write_it(name):
    request = accepted(record({"model": "m", "input": "x"}, {"endpoint": name}))
    assert request.endpoint is Endpoint.EMBEDDINGS


@pytest.mark.parametrize(
    ("name", "endpoint"),
    [("/v1/score", Endpoint.SCORE), ("/v1/rerank", Endpoint.RERANK), ("/v2/rerank", Endpoint.RERANK)],
)
def test_an_endpoint_is_known_by_every_path_that_a_door_has_for_it(name, endpoint):
    assert accepted(record({"model": "m", "query": "x"}, {"endpoint": name})).endpoint is Endpoint(name) is endpoint


@pytest.mark.parametrize(
    ("name", "endpoint"),
    [
        (None, Endpoint.CHAT),
        ("/v1/messages", Endpoint.MESSAGES),
        ("messages", Endpoint.MESSAGES),
        ("messages/count_tokens", Endpoint.COUNT_TOKENS),
    ],
)
def test_a_body_with_messages_is_anthropics_where_the_header_says_so(name, endpoint):
    body = {"model": "m", "messages": [], "max_tokens": 1}
    assert accepted(record(body, {} if name is None else {"endpoint": name})).endpoint is endpoint
    if endpoint is not Endpoint.CHAT:
        in_a_session = {"endpoint": name, "session": "s", "part": "0"}
        assert "has no sessions" in refused(record(body, in_a_session)).error.message


def test_a_models_own_topic_names_the_model():
    request = accepted(record({"prompt": "x"}, topic="requests.qwen"), alias="qwen")
    assert request.model == "qwen"
    assert request.body["model"] == "qwen"


@pytest.mark.parametrize("body", [{"prompt": "x"}, {"prompt": "x", "model": None}, {"prompt": "x", "model": ""}])
def test_a_body_that_names_no_model_means_what_its_door_says_if_it_says_anything(body):
    request = accepted(record(body, {"moved-from": "requests/3/9"}), otherwise="qwen")
    assert (request.model, request.body["model"], request.moved_from) == ("qwen", "qwen", None)
    assert "names no model" in refused(record(body)).error.message


@pytest.mark.parametrize(
    ("given", "failure", "status", "says"),
    [
        (record(None), FailureClass.UNDECODABLE, 400, "no value"),
        (record(b"{"), FailureClass.UNDECODABLE, 400, "not JSON"),
        (record(b"[" * 5000), FailureClass.UNDECODABLE, 400, "not JSON"),
        (record(b'{"model": NaN}'), FailureClass.UNDECODABLE, 400, "not JSON"),
        (record([1]), FailureClass.INVALID, 400, "must be a JSON object, not a list"),
        (record({"messages": []}), FailureClass.INVALID, 400, "names no model"),
        (record({"model": 3, "messages": []}), FailureClass.INVALID, 400, "must be a string, not a number"),
        (record({"model": "m"}), FailureClass.INVALID, 400, "header 'endpoint'"),
        (record({"model": "m", "input": "x"}), FailureClass.INVALID, 400, "header 'endpoint'"),
        (record(headers={"endpoint": "/v1/chat/completion"}), FailureClass.INVALID, 404, "/v1/chat/completions"),
        (record(headers={"priority": "high"}), FailureClass.INVALID, 400, "'priority' must be a number"),
        (record(headers={"deadline": "soon"}), FailureClass.INVALID, 400, "'deadline' must be a number"),
        (record(headers={"deadline": "2026-01-01T00:00:00"}), FailureClass.INVALID, 400, "no time zone"),
        (record(headers={"ttl": "nan"}), FailureClass.INVALID, 400, "out of range"),
        (record(headers={"session": "s"}), FailureClass.INVALID, 400, "header 'part'"),
        (record(headers={"session": "s", "part": "-1"}), FailureClass.INVALID, 400, "header 'part'"),
        (record(headers={"session": "s", "part": "0", "final": "False"}), FailureClass.INVALID, 400, "header 'final'"),
        (record(headers={"session": "s", "part": "0", "final": "maybe"}), FailureClass.INVALID, 400, "header 'final'"),
        (
            record({"model": "m", "input": "x"}, {"session": "s", "part": "0", "endpoint": "embeddings"}),
            FailureClass.INVALID,
            400,
            "/v1/embeddings has no sessions",
        ),
        (record(headers={"ce_id": "x" * 300}), FailureClass.INVALID, 400, "ce_id"),
        (record({"model": "m", "prompt": "x" * 10_000}), FailureClass.TOO_LARGE, 413, "at most 10000"),
    ],
)
def test_what_is_no_request_is_refused_with_the_reason(given, failure, status, says):
    refusal = refused(given)
    assert refusal.failure is failure
    assert refusal.status == status
    assert says in refusal.error.message
    assert refusal.origin == given.origin


def test_what_the_cloudevents_sdk_writes_is_read_in_both_modes():
    attributes = {
        "id": "e1",
        "source": "/test",
        "type": "test",
        "specversion": "1.0",
        "datacontenttype": "application/json",
    }
    event = CloudEvent(attributes={**attributes, "priority": "4"}, data=CHAT)
    for write in (to_binary_event, to_structured_event):
        message = write(event)
        pairs = [(name, value) for name, value in message.headers.items()]
        request = accepted(Record("requests", 0, 0, 1.0, message.key, message.value, pairs))
        assert (request.id, request.priority, request.model) == ("e1", 4, "llama")


def test_the_cloudevents_sdk_reads_what_a_client_writes():
    from cloudevents.core.bindings.kafka import KafkaMessage

    ours = encode_request("requests", CHAT, id_="r1", tenant="blue")
    event = from_kafka_event(KafkaMessage(headers=dict(ours.headers), key=ours.key, value=ours.value))
    assert event.get_id() == "r1"
    assert event.get_data() == CHAT


@given(
    value=st.none() | st.binary(max_size=300) | st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
            st.sampled_from(["model", "messages", "prompt", "input", "priority", "data"]) | st.text(max_size=5), inner
        ),
        max_leaves=12,
    ).map(lambda tree: json.dumps(tree).encode()),
    headers=st.lists(
        st.tuples(
            st.sampled_from(
                ["ce_id", "endpoint", "deadline", "ttl", "priority", "content-type", "received", "moved-from"]
            )
            | st.text(max_size=8),
            st.binary(max_size=40) | st.sampled_from([b"application/cloudevents+json", b"chat/completions", b"1e999"]),
        ),
        max_size=5,
    ),
    alias=st.none() | st.just("llama"),
)  # fmt: skip
@settings(max_examples=1000, deadline=None)
def test_nothing_that_a_stranger_writes_gets_past_the_decoder_as_an_exception(value, headers, alias):
    given = Record("requests", 0, 3, 1.0, None, value, headers)
    decoded = decode(given, alias=alias)
    assert isinstance(decoded, Request | Refusal)
    assert decoded.origin == given.origin
    assert decoded.id
