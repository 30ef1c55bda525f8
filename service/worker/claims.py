"""What a request may cost in tokens, as far as its record says it: before it has run, nobody knows."""

from typing import Any

from schemas.requests import Endpoint, Request

_BYTES_PER_TOKEN = 4
_ANSWER_TOKENS = 256
"""Where no limit is asked for."""
_MOST_ANSWER, _MOST_SAMPLES = 1 << 20, 1 << 10
"""More than any model answers: what is above is no limit."""
_LARGE = 1 << 12
"""Bytes of a record from which on pictures and sounds are looked for in it."""
_MEDIA = frozenset({"data", "file", "file_data", "image_url", "url"})
_GENERATES = frozenset(
    {
        *(Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.RESPONSES, Endpoint.MESSAGES),
        *(Endpoint.TRANSCRIPTIONS, Endpoint.TRANSLATIONS),
    }
)


def prompt_tokens(request: Request) -> int:
    """The size of its record says something of the prompt; that of a picture or a sound in it does not."""
    media = _media_bytes(request.body) if request.size >= _LARGE else 0
    return max(0, request.size - media) // _BYTES_PER_TOKEN


def answer_tokens(request: Request) -> int:
    """Its limit says something of the answer, for all samples together; what only reads its prompt has none."""
    if request.endpoint not in _GENERATES:
        return 0
    body = request.body
    limits = (body.get(key) for key in ("max_completion_tokens", "max_tokens", "max_output_tokens"))
    most = next((limit for limit in limits if isinstance(limit, int) and 0 < limit < _MOST_ANSWER), _ANSWER_TOKENS)
    return most * samples(request)


def samples(request: Request) -> int:
    """How many answers it asks for at once."""
    n = request.body.get("n")
    return n if isinstance(n, int) and 0 < n < _MOST_SAMPLES else 1


def _media_bytes(body: dict[str, Any]) -> int:
    """What base64 takes of a body, by the keys that OpenAI and Anthropic have for it: none of them holds a prompt."""
    found = 0
    left: list[Any] = [body]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif isinstance(value, dict):
            left += value.values()
            found += sum(len(each) for key, each in value.items() if key in _MEDIA and isinstance(each, str))
    return found
