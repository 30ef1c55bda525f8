"""The message that a stream of Anthropic's events tells, where vLLM makes no whole of the same tokens."""

from typing import Any

import pytest

from service.engine.answering.messages import ToldMessage

START = {"type": "message_start", "message": {"id": "m", "role": "assistant", "content": [], "stop_reason": None}}
END = {
    "type": "message_delta",
    "delta": {"stop_reason": "max_tokens", "stop_sequence": None},
    "usage": {"output_tokens": 9},
}


def told(*events: dict[str, Any]) -> ToldMessage:
    message = ToldMessage()
    for event in events:
        message.take(event)
    return message


def block(index: int, kind: str, **more: Any) -> dict[str, Any]:
    return {"type": "content_block_start", "index": index, "content_block": {"type": kind, **more}}


def delta(index: int, **said: str) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": {"type": "any", **said}}


def test_blocks_are_put_together_from_their_pieces() -> None:
    events = [
        START,
        *(block(0, "thinking", thinking=""), delta(0, thinking="We"), delta(0, thinking="ll"), delta(0, signature="s")),
        *(block(1, "text", text=""), delta(1, text="It is "), delta(1, text="rain.")),
        *(block(2, "tool_use", name="f", input={}), delta(2, partial_json='{"a": '), delta(2, partial_json="[1]}")),
        END,
    ]
    assert not told(*events).ended
    whole = told(*events, {"type": "message_stop"})
    assert whole.ended
    assert [part["type"] for part in whole.message["content"]] == ["thinking", "text", "tool_use"]
    thought, said, called = whole.message["content"]
    assert (thought["thinking"], thought["signature"], said["text"]) == ("Well", "s", "It is rain.")
    assert called["input"] == {"a": [1]}
    assert (whole.message["stop_reason"], whole.message["usage"]) == ("max_tokens", {"output_tokens": 9})


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"city": "Os', {}),
        ('{"city": "Oslo", "day', {"city": "Oslo"}),
        ('{"a": {"b": 1', {"a": {"b": 1}}),
        ("false", {}),
        ("[1", {}),
        ("f", {}),
        ("", {}),
    ],
)
def test_an_input_that_is_cut_short_is_an_object_as_far_as_it_goes(text: str, found: dict[str, Any]) -> None:
    pieces = [delta(0, partial_json=piece) for piece in text]
    assert told(START, block(0, "tool_use", input={}), *pieces).message["content"][0]["input"] == found


def test_events_of_other_endpoints_tell_nothing() -> None:
    other = told({"choices": []}, {"type": "response.created", "response": {}}, {"type": "response.completed"})
    assert (other.message, other.ended) == ({}, False)
