"""OpenAI's batch file format, and what an interrupted run left behind."""

import json
import time

import pytest

from schemas.base import Origin
from schemas.errors import ErrorObject
from schemas.requests import Endpoint
from schemas.results import Outcome, Result, Timing
from service.client.batch import begun, new_batch_id
from service.errors import BatchInvalid
from service.kafka.batch_lines import AnswerFiles, check_file, output_line, parse_line, read_lines

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


def test_two_lines_of_one_custom_id_are_refused_before_anything_is_asked(tmp_path):
    file = tmp_path / "in.jsonl"
    file.write_text(f"{json.dumps(LINE)}\n\n{json.dumps(LINE)}\n")
    with pytest.raises(BatchInvalid, match="line 3: custom_id 'a' is that of line 1"):
        check_file(file)


def test_an_empty_file_and_a_missing_one_are_no_batch(tmp_path):
    (tmp_path / "empty").write_text("\n")
    for name in ("empty", "missing"):
        with pytest.raises(BatchInvalid, match=name):
            check_file(tmp_path / name)


def test_lines_are_numbered_as_an_editor_shows_them(tmp_path):
    file = tmp_path / "in.jsonl"
    file.write_text(f"\n{json.dumps(LINE)}\n")
    assert [line.number for line in read_lines(file)] == [2]


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


def test_answers_and_failures_go_to_their_files_and_once(tmp_path):
    with AnswerFiles(tmp_path / "out.jsonl") as files:
        assert files.write("a", result(body={}))
        assert not files.write("a", result(body={}))
        assert files.write("b", result(Outcome.FAILED, status=400))
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 1
    assert len((tmp_path / "out.errors.jsonl").read_text().splitlines()) == 1


def test_half_a_line_at_the_end_is_cut_off_and_its_request_is_not_done(tmp_path):
    out = tmp_path / "out.jsonl"
    whole = json.dumps({"custom_id": "a"}) + "\n"
    out.write_text(whole + '{"custom_id": "b", "resp')
    with AnswerFiles(out) as files:
        assert files.done == {"a"}
        assert files.completed == 1
        files.write("b", result(body={}))
    first, second = out.read_text().splitlines(keepends=True)
    assert first == whole
    assert json.loads(second)["custom_id"] == "b"


def test_a_file_of_something_else_is_not_written_to(tmp_path):
    (tmp_path / "out.jsonl").write_text("precious notes\n")
    with pytest.raises(BatchInvalid, match="something else"), AnswerFiles(tmp_path / "out.jsonl"):
        pass
    assert (tmp_path / "out.jsonl").read_text() == "precious notes\n"


def test_a_batchs_id_tells_when_it_was_begun():
    assert abs(begun(new_batch_id()) - time.time()) < 5
    with pytest.raises(BatchInvalid):
        begun("something")
