"""What a result's body is, in the types that the openai package gives it.

That package takes longer to import than all of a worker, so it is imported when the first answer is asked for.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from schemas.requests import Endpoint
from schemas.results import Outcome, Result
from service.errors import RequestFailed


@cache
def _answers() -> Mapping[str, Any]:
    from openai import types
    from openai.types import audio, chat, responses

    return {
        Endpoint.CHAT: chat.ChatCompletion,
        Endpoint.COMPLETIONS: types.Completion,
        Endpoint.RESPONSES: responses.Response,
        Endpoint.EMBEDDINGS: types.CreateEmbeddingResponse,
        Endpoint.TRANSCRIPTIONS: audio.Transcription,
        Endpoint.TRANSLATIONS: audio.Translation,
    }


@cache
def _pieces() -> Mapping[str, Any]:
    from openai import types
    from openai.types import chat

    return {Endpoint.CHAT: chat.ChatCompletionChunk, Endpoint.COMPLETIONS: types.Completion}


def answer_of(result: Result) -> Any:
    """The typed body of a completed result; a plain dict for endpoints that the openai package has no type for.

    Built without validation, as the openai client does: what vLLM adds to OpenAI's fields is there as attributes.
    Raises RequestFailed for any other outcome.
    """
    if result.outcome is not Outcome.COMPLETED:
        raise RequestFailed.of(result)
    body = result.body or {}
    kind = _answers().get(result.endpoint or "")
    return body if kind is None else kind.construct(**body)


def piece_of(endpoint: Endpoint | None, data: Mapping[str, Any]) -> Any:
    """A streamed piece in its type, where the openai package has one."""
    kind = _pieces().get(endpoint or "")
    return data if kind is None else kind.construct(**data)
