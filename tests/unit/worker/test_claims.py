"""What a request is taken to cost before it has run."""

from typing import Any

import pytest

from schemas.base import Origin
from schemas.requests import Endpoint, Request
from service.worker.claims import answer_tokens, prompt_tokens, samples

TEXT = "one two three " * 1000
PICTURE = "data:image/png;base64," + "A" * 1_000_000
PIECES: list[Any] = [
    {"type": "image_url", "image_url": {"url": PICTURE}},
    {"type": "input_image", "image_url": PICTURE},
    {"type": "input_audio", "input_audio": {"data": "A" * 1_000_000, "format": "wav"}},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A" * 1_000_000}},
]


def request(body: dict[str, Any], *, endpoint: Endpoint = Endpoint.CHAT) -> Request:
    return Request(
        id="r",
        origin=Origin(topic="requests", partition=0, offset=0),
        model="llama",
        endpoint=endpoint,
        body=body,
        received=0.0,
        size=len(str(body)),
    )


def test_a_prompt_is_taken_for_as_long_as_its_text() -> None:
    assert prompt_tokens(request({"prompt": TEXT})) == pytest.approx(len(TEXT) / 4, rel=0.01)


@pytest.mark.parametrize("piece", PIECES, ids=lambda piece: piece["type"])
def test_the_bytes_of_pictures_and_sounds_are_no_tokens(piece: Any) -> None:
    content = [{"type": "text", "text": TEXT}, piece]
    assert prompt_tokens(request({"messages": [{"role": "user", "content": content}]})) == pytest.approx(
        len(TEXT) / 4, rel=0.02
    )


def test_what_is_heard_is_no_text() -> None:
    assert prompt_tokens(request({"file": "A" * 1_000_000}, endpoint=Endpoint.TRANSCRIPTIONS)) < 100


HIDDEN: list[dict[str, Any]] = [
    {"prompt": PICTURE},
    {"input": PICTURE},
    {"messages": [{"role": "user", "content": PICTURE}]},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"url": PICTURE}}}]},
    {"chat_template_kwargs": {"data": PICTURE}, "documents": [{"url": PICTURE}], "file": PICTURE},
    {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "text", "data": PICTURE}}]}]},
    {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": {"url": PICTURE}}]}]},
    {"messages": [{"content": [{"type": ["image"], "data": PICTURE}, "x", None]}, 1], "input": {"content": 1}},
]


@pytest.mark.parametrize("body", HIDDEN, ids=range(len(HIDDEN)))
def test_a_text_that_looks_like_a_picture_costs_its_tenant_what_it_is(body: dict[str, Any]) -> None:
    assert prompt_tokens(request(body)) > 200_000


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({}, 256),
        ({"max_tokens": 7}, 7),
        ({"max_tokens": 7, "max_completion_tokens": 9}, 9),
        ({"max_output_tokens": 11}, 11),
        ({"max_tokens": 7, "n": 4}, 28),
        ({"max_tokens": "many", "n": "some"}, 256),
        ({"max_tokens": -1, "n": 0}, 256),
        ({"max_tokens": 1 << 60, "n": 1 << 60}, 256),
    ],
)
def test_an_answer_is_taken_for_as_long_as_it_may_be(body: dict[str, Any], tokens: int) -> None:
    assert answer_tokens(request(body)) == tokens


@pytest.mark.parametrize("endpoint", [Endpoint.EMBEDDINGS, Endpoint.RERANK, Endpoint.SCORE, Endpoint.TOKENIZE])
def test_what_only_reads_its_prompt_is_not_answered_with_tokens(endpoint: Endpoint) -> None:
    assert answer_tokens(request({"input": "one", "max_tokens": 7}, endpoint=endpoint)) == 0


def test_samples_are_as_many_as_are_asked_for() -> None:
    assert [samples(request(body)) for body in ({}, {"n": 3}, {"n": None})] == [1, 3, 1]
    prompts = ("hello", ["a", "b"], [[1, 2], [3], [4]], [1, 2, 3], [])
    assert [samples(request({"prompt": prompt, "n": 2})) for prompt in prompts] == [2, 4, 6, 2, 2]
    assert [samples(request({"prompt": ["a"] * 2000, "n": n})) for n in (1, 3, 1 << 20)] == [1024] * 3
    assert samples(request({"n": 1 << 20})) == 1
