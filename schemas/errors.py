"""Errors as OpenAI's API gives them, and the classes under which failures are kept as dead letters."""

import difflib
from collections.abc import Iterable
from enum import StrEnum

from schemas.base import Value


class FailureClass(StrEnum):
    """Why a request can never succeed as it is; dead letters are listed and redriven by it."""

    UNDECODABLE = "undecodable"
    INVALID = "invalid"
    UNKNOWN_MODEL = "unknown_model"
    TOO_LARGE = "too_large"
    LOAD_FAILED = "load_failed"
    POISON = "poison"
    RETRIES_EXHAUSTED = "retries_exhausted"
    MALFORMED = "malformed"
    """The bytes are no whole record, or the worker stumbled over it."""


class ErrorObject(Value):
    """OpenAI's error object. ``code`` is the HTTP status that vLLM's server answers with, or a word."""

    message: str
    type: str = "BadRequestError"
    param: str | None = None
    code: int | str | None = None


LONGEST_WORD = 64
"""Comparing words takes the product of their lengths: longer ones are no typing errors."""


def nearest(word: str, known: Iterable[str], *, cutoff: float = 0.5) -> str:
    """A hint that names the nearest known word, or an empty string: `` (did you mean 'qwen'?)``."""
    if len(word) > LONGEST_WORD:
        return ""
    close = difflib.get_close_matches(word, [one for one in known if len(one) <= LONGEST_WORD], n=1, cutoff=cutoff)
    return f" (did you mean {close[0]!r}?)" if close else ""
