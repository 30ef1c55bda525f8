"""What vLLM's own StructuredOutputManager makes of a grammar that was too slow, drafts and all."""

import logging
import time
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from service.engine.core.grammar import LOGGERS, TimedGrammar, hide_tokens
from service.engine.processes.fork_server import server
from service.engine.system.constraints import ONE_TOKEN_S, TOO_SLOW

DRAFTS = [3, 4]
FULL = -1
NARROW = 7


class Slow(StructuredOutputGrammar):
    """A grammar that takes all, and too much processor time for the one call that ``slow`` names."""

    def __init__(self, slow: str) -> None:
        self.slow = slow
        self.said: list[int] = []

    def _work(self, name: str) -> None:
        if name == self.slow:
            until = time.thread_time() + ONE_TOKEN_S * len(DRAFTS) * 1.1
            while time.thread_time() < until:
                pass

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        self._work("accept_tokens")
        self.said += tokens
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        self._work("validate_tokens")
        return tokens

    def rollback(self, num_tokens: int) -> None:
        del self.said[len(self.said) - num_tokens :]

    def fill_bitmask(self, bitmask: Any, batch_index: int) -> None:
        self._work("fill_bitmask")
        bitmask[batch_index].fill_(NARROW)

    def is_terminated(self) -> bool:
        return False

    def reset(self) -> None:
        self.said.clear()


def manager() -> Any:
    import torch
    from vllm.v1.structured_output import StructuredOutputManager

    config = SimpleNamespace(
        model_config=SimpleNamespace(skip_tokenizer_init=True, is_diffusion=False),
        scheduler_config=SimpleNamespace(max_num_seqs=1),
        structured_outputs_config=SimpleNamespace(
            enable_in_reasoning=False, reasoning_parser="", reasoning_parser_plugin=""
        ),
        parallel_config=SimpleNamespace(distributed_executor_backend="mp"),
        num_speculative_tokens=len(DRAFTS),
    )
    made = StructuredOutputManager(config)
    made.backend = SimpleNamespace(allocate_token_bitmask=lambda rows: torch.zeros((rows, 2), dtype=torch.int32))
    return made


def request(slow: str) -> tuple[Any, Slow]:
    """A request under a grammar, of which one token was said."""
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams
    from vllm.v1.request import Request

    params = SamplingParams(max_tokens=8, structured_outputs=StructuredOutputsParams(regex="a"))
    made: Any = Request("r", [1, 2], params, None)
    inner = Slow(slow)
    made.structured_output_request.grammar = TimedGrammar(inner, made)
    return made, inner


@pytest.mark.parametrize("slow", ["fill_bitmask", "validate_tokens", "accept_tokens"])
def test_a_grammar_that_gets_slow_among_drafts_ends_its_request_at_the_next_token(slow: str) -> None:
    asked, inner = request(slow)
    grammar = asked.structured_output_request.grammar
    drafts = grammar.validate_tokens(DRAFTS)
    rows = manager().grammar_bitmask({"r": asked}, ["r"], {"r": drafts})
    assert inner.said == []
    assert (rows[1:] == FULL).all() or (rows[1:] == rows[0]).all()
    assert asked.stop_reason is None
    assert not grammar.accept_tokens("r", [5])
    assert asked.stop_reason == TOO_SLOW
    assert inner.said == []


@pytest.mark.parametrize(
    ("logger", "message", "refused"),
    [
        (LOGGERS[0], "Unexpected: grammar rejected tokens %s for request %s. Terminating request.", [4711, 4712]),
        (LOGGERS[1], "Unexpected: grammar terminated or rejected draft token %s for request %s.", 4711),
    ],
)
def test_what_a_grammar_refused_is_not_logged(logger: str, message: str, refused: Any) -> None:
    assert find_spec(logger) is not None
    record = logging.LogRecord(logger, logging.ERROR, "", 0, message, (refused, "r"), None)
    assert hide_tokens(record)
    assert "4711" not in record.getMessage()
    assert "for request r" in record.getMessage()


def test_other_lines_are_as_they_were() -> None:
    record = logging.LogRecord(LOGGERS[0], logging.INFO, "", 0, "%s requests", (3,), None)
    assert hide_tokens(record)
    assert record.getMessage() == "3 requests"


def said_in_a_core(answer: Any) -> None:
    from service.engine.processes.plugin import register

    register()
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    for name in LOGGERS:
        logging.getLogger(name).addHandler(handler)
        logging.getLogger(name).error("grammar rejected tokens %s", [4711])
    answer.send(lines)


@pytest.mark.usefixtures("one_import")
def test_a_core_hides_them() -> None:
    with server.lent() as context:
        assert context is not None
        assert context.ask(said_in_a_core, name="core") == ["grammar rejected tokens <hidden>"] * len(LOGGERS)
