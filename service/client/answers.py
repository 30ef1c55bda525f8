"""What a result's body is, in the types that the openai package gives it."""

from collections.abc import Mapping
from typing import Any

from openai import BaseModel
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.audio import Transcription, Translation
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response

from schemas.requests import Endpoint
from schemas.results import Outcome, Result
from service.errors import RequestFailed

_ANSWERS: dict[str, type[BaseModel]] = {
    Endpoint.CHAT: ChatCompletion,
    Endpoint.COMPLETIONS: Completion,
    Endpoint.RESPONSES: Response,
    Endpoint.EMBEDDINGS: CreateEmbeddingResponse,
    Endpoint.TRANSCRIPTIONS: Transcription,
    Endpoint.TRANSLATIONS: Translation,
}
_PIECES: dict[str, type[BaseModel]] = {Endpoint.CHAT: ChatCompletionChunk, Endpoint.COMPLETIONS: Completion}


def answer_of(result: Result) -> Any:
    """The typed body of a completed result; a plain dict for endpoints that the openai package has no type for.

    Built without validation, as the openai client does: what vLLM adds to OpenAI's fields is there as attributes.
    Raises RequestFailed for any other outcome.
    """
    if result.outcome is not Outcome.COMPLETED:
        raise RequestFailed.of(result)
    body = result.body or {}
    kind = _ANSWERS.get(result.endpoint or "")
    return body if kind is None else kind.construct(**body)


def piece_of(endpoint: Endpoint, data: Mapping[str, Any]) -> Any:
    """A streamed piece in its type, where the openai package has one."""
    kind = _PIECES.get(endpoint)
    return data if kind is None else kind.construct(**data)
