"""A result's body in the openai package's types."""

import pytest
from openai.types import CreateEmbeddingResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response

from schemas.base import Origin
from schemas.errors import ErrorObject
from schemas.requests import Endpoint
from schemas.results import Outcome, Result, Timing
from service.client.answers import answer_of, piece_of
from service.errors import RequestCancelled, RequestExpired, RequestFailed

CHAT = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "stop_reason": 2}],
    "prompt_logprobs": None,
}


def result(endpoint, body, outcome=Outcome.COMPLETED, **more):
    origin = Origin(topic="requests", partition=0, offset=0)
    timing = Timing(received=0, finished=1)
    return Result(
        id="r", origin=origin, outcome=outcome, status=200, endpoint=endpoint, body=body, timing=timing, **more
    )


@pytest.mark.parametrize(
    ("endpoint", "body", "kind"),
    [
        (Endpoint.CHAT, CHAT, ChatCompletion),
        (Endpoint.EMBEDDINGS, {"data": [{"embedding": [1.0], "index": 0}]}, CreateEmbeddingResponse),
        (Endpoint.RESPONSES, {"id": "r", "output": []}, Response),
        (Endpoint.SCORE, {"data": []}, dict),
        ("/v1/of/a/later/version", {"x": 1}, dict),
    ],
)
def test_an_answer_has_the_type_of_its_endpoint(endpoint, body, kind):
    assert isinstance(answer_of(result(endpoint, body)), kind)


def test_what_vllm_adds_to_openais_fields_is_there():
    answer = answer_of(result(Endpoint.CHAT, CHAT))
    assert answer.choices[0].message.content == "hi"
    assert answer.choices[0].stop_reason == 2
    assert answer.prompt_logprobs is None


@pytest.mark.parametrize(
    ("outcome", "kind"),
    [
        (Outcome.FAILED, RequestFailed),
        (Outcome.CANCELLED, RequestCancelled),
        (Outcome.EXPIRED, RequestExpired),
    ],
)
def test_any_other_outcome_is_raised_with_what_there_was(outcome, kind):
    with pytest.raises(kind) as caught:
        answer_of(result(Endpoint.CHAT, CHAT, outcome, error=ErrorObject(message="no", code=400)))
    assert caught.value.error.code == 400
    assert caught.value.result.body == CHAT


def test_an_outcome_without_an_error_object_gets_one():
    assert "expired" in str(RequestFailed.of(result(Endpoint.CHAT, None, Outcome.EXPIRED)))


def test_a_piece_of_a_stream_is_typed_where_there_is_a_type():
    assert isinstance(piece_of(Endpoint.CHAT, {"choices": []}), ChatCompletionChunk)
    assert piece_of(Endpoint.RESPONSES, {"type": "response.created"}) == {"type": "response.created"}
