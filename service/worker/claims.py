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
_MEDIA = ("image_url", "input_image", "image", "input_audio", "audio_url", "video_url")
"""Types of the pieces of a message that are no text, whatever they hold."""
_HEARD = (Endpoint.TRANSCRIPTIONS, Endpoint.TRANSLATIONS)
_GENERATES = frozenset(
    {
        *(Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.RESPONSES, Endpoint.MESSAGES),
        *_HEARD,
    }
)


def prompt_tokens(request: Request) -> int:
    """The size of its record says something of the prompt; that of a picture or a sound in it does not."""
    media = _media_bytes(request) if request.size >= _LARGE else 0
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
    """How many answers it asks for at once: to each of a completion's prompts as many as it says."""
    n, prompt = request.body.get("n"), request.body.get("prompt")
    prompts = len(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)) else 1
    return min(_MOST_SAMPLES, prompts * (n if isinstance(n, int) and 0 < n < _MOST_SAMPLES else 1))


def _media_bytes(request: Request) -> int:
    """What base64 takes of a body, where its endpoint reads no text: anywhere else it may be a prompt's."""
    body = request.body
    if request.endpoint in _HEARD:
        return _size(body.get("file"))
    said = [*_dicts(body.get("messages")), *_dicts(body.get("input"))]
    parts = (part for each in said for part in _dicts(each.get("content")) if part.get("type") in _MEDIA)
    held = (value for part in parts for value in part.values())
    return sum(_size(each) for value in held for each in (value.values() if isinstance(value, dict) else (value,)))


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str) else 0
