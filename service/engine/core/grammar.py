"""In the core: a grammar that takes too long for one token ends its own request, and no step after that waits for it.

What a grammar costs grows with what was said under it: nested counted repetitions compile at once, and take seconds for
the fiftieth token. No trial beforehand finds all of that, so it is measured where it happens. Time is the thread's own:
a busy machine makes no grammar slow.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from service.engine.system.constraints import ONE_TOKEN_S, TOO_SLOW

LOGGERS = ("vllm.v1.core.sched.scheduler", "vllm.v1.structured_output")
"""Which say what tokens a grammar has refused."""


def hide_tokens(record: logging.LogRecord) -> bool:
    """A filter of ``LOGGERS``: vLLM's lines about refused tokens quote the answer. They then name the request alone."""
    if isinstance(record.args, tuple) and record.args and "grammar" in str(record.msg) and "token" in str(record.msg):
        record.args = ("<hidden>", *record.args[1:])
    return True


class TimedGrammar(StructuredOutputGrammar):
    """vLLM's grammar of one request, with a watch. Once it was too slow it takes no token: vLLM ends the request.

    To vLLM it then looks as one whose answer is complete: drafts do not go through it, and whatever is sampled next is
    masked by nothing. The call that was too slow itself counts: what it has advanced by, a rollback takes back.
    """

    def __init__(self, grammar: StructuredOutputGrammar, request: Any) -> None:
        self._grammar = grammar
        self._request = request
        self._slow = False

    @contextmanager
    def _timed(self, tokens: int) -> Iterator[None]:
        began = time.thread_time()
        yield
        if time.thread_time() - began > ONE_TOKEN_S * max(1, tokens):
            self._slow = True

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        if self._slow:
            self._request.stop_reason = TOO_SLOW
            return False
        with self._timed(len(tokens)):
            return self._grammar.accept_tokens(request_id, tokens)

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        if self._slow:
            return []
        with self._timed(len(tokens)):
            return self._grammar.validate_tokens(tokens)

    def rollback(self, num_tokens: int) -> None:
        self._grammar.rollback(num_tokens)

    def fill_bitmask(self, bitmask: Any, batch_index: int) -> None:
        with self._timed(1):
            self._grammar.fill_bitmask(bitmask, batch_index)

    def is_terminated(self) -> bool:
        return self._slow or self._grammar.is_terminated()

    def reset(self) -> None:
        self._grammar.reset()
