"""OpenAI's batch file format."""

import json

import pytest

from schemas.base import Origin
from schemas.errors import ErrorObject
from schemas.requests import Endpoint
from schemas.results import Outcome, Result, Timing
from service.errors import BatchInvalid
from service.kafka.batch_lines import output_line, parse_line

LINE = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", "messages": []}}


def result(outcome=Outcome.COMPLETED, *, status=200, body=None, error=None):
    return Result(
        id="batch-1.1",
        origin=Origin(topic="requests", partition=0, offset=0),
        outcome=outcome,
        status=status,
        body=body,
        error=error,
        timing=Timing(received=0, finished=1),
    )


def test_a_line_says_what_to_ask():
    line = parse_line(3, json.dumps(LINE))
    assert (line.number, line.custom_id, line.endpoint) == (3, "a", Endpoint.CHAT)
    assert line.body == LINE["body"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("{", "line 7: not JSON"),
        ("[]", "line 7: not a JSON object"),
        ({"custom_id": 5}, "custom_id must be a string"),
        ({"method": "GET"}, "method must be POST, not 'GET'"),
        ({"url": "/v1/chat/completion"}, "did you mean '/v1/chat/completions'"),
        ({"body": "x"}, "body must be an object"),
        ({"body": {"stream": True}}, "no streams"),
    ],
)
def test_a_wrong_line_is_told_with_its_number(change, told):
    raw = change if isinstance(change, str) else json.dumps(LINE | change)
    with pytest.raises(BatchInvalid, match="line 7") as caught:
        parse_line(7, raw)
    assert told in str(caught.value)


def test_an_answer_is_a_line_of_the_output_file_in_openais_format():
    assert output_line("a", result(body={"x": 1})) == {
        "id": "batch-1.1",
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "batch-1.1", "body": {"x": 1}},
        "error": None,
    }


def test_a_failed_request_has_the_servers_answer_and_an_unanswered_one_an_error():
    failed = output_line("a", result(Outcome.FAILED, status=404, error=ErrorObject(message="no", code=404)))
    assert failed["response"]["status_code"] == 404
    assert failed["response"]["body"]["error"]["message"] == "no"
    expired = output_line("a", result(Outcome.EXPIRED, status=408, error=ErrorObject(message="late")))
    assert (expired["response"], expired["error"]) == (None, {"code": "batch_expired", "message": "late"})
