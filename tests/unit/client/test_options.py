"""What a call says beside its body, as it is written."""

from typing import Any

import pytest

from schemas.base import Outgoing
from service.client.options import Options, request_record


def written(**options: object) -> Outgoing:
    return request_record(
        "requests",
        {"model": "llama"},
        request_id="r1",
        endpoint=None,
        options=Options(**options),
        timeout_s=None,
        reply={},
    )


OWN = {"topic": "billing", "key": "k", "body": "b", "headers": "h", "my_header": "a_b", "X-Shop": "é"}


def test_the_callers_own_headers_are_written_as_they_are_whatever_their_names():
    record = written(headers=OWN, tenant="blue", request_class="batch")
    found = dict(record.headers)
    assert {name: found[name] for name in OWN} == {name: value.encode() for name, value in OWN.items()}
    assert (found["tenant"], found["request-class"], found["ce_id"]) == (b"blue", b"batch", b"r1")
    assert record.topic == "requests"


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({}, None),
        ({"request_id": "mine"}, b"mine"),
        ({"request_id": "mine", "key": "other"}, b"other"),
        ({"session": "s1"}, b"s1"),
    ],
)
def test_a_request_leads_where_its_caller_says_and_else_anywhere(options: dict[str, Any], key: bytes | None):
    assert written(**options).key == key


@pytest.mark.parametrize("name", ["tenant", "ce_id", "id_", "Reply_To", "content-type", "moved-from", "traceparent"])
def test_a_header_that_the_worker_looks_at_is_none_of_the_callers_own(name: str):
    with pytest.raises(ValueError, match=f"headers: '{name}' is one that the worker looks at"):
        Options(headers={name: "x"})
