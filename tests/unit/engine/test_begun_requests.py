"""What a core and a frontend make of a request that was begun elsewhere, on vLLM's own Request and OutputProcessor."""

from types import SimpleNamespace
from typing import Any

import pytest

from schemas.progress import Said
from service.engine.answering.continuing import _feed
from service.engine.core import continuing
from service.engine.versions import vllm_progress

pytest.importorskip("vllm")

SAID = [101, 102, 103]
INTERVAL = 4


def request(extra: dict[str, Any] | None) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    params = SamplingParams(max_tokens=8, extra_args=extra)
    return Request("r", [1, 2], params, None)


def test_it_is_a_waiting_one_that_has_outputs() -> None:
    begun = request({vllm_progress.SAID: SAID})
    continuing.begin(begun)
    assert list(begun.output_token_ids) == SAID
    assert list(begun.all_token_ids) == [1, 2, *SAID]
    assert (begun.status.name, begun.num_computed_tokens, begun.prefill_stats) == ("WAITING", 0, None)


def test_its_parameters_do_not_tell_what_it_said_where_they_are_logged() -> None:
    begun = request({vllm_progress.SAID: SAID})
    continuing.begin(begun)
    assert "<3 tokens>" in repr(begun.sampling_params)
    assert not any(str(token) in repr(begun.sampling_params) for token in SAID)
    assert vllm_progress.said_of(begun.sampling_params) == SAID


def test_a_new_one_is_as_it_was() -> None:
    new = request(None)
    continuing.begin(new)
    assert (list(new.output_token_ids), new.prefill_stats is None) == ([], False)


@pytest.mark.parametrize("told", range(1, 3 * INTERVAL))
def test_a_stream_goes_on_with_the_first_token_that_was_not_told_wherever_that_was(told: int) -> None:
    """Where several tokens come at once, as with drafts, a piece may be longer than the interval, and end anywhere."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
    from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

    processor = OutputProcessor(None, log_stats=False, stream_interval=INTERVAL)
    params = SamplingParams(max_tokens=64, detokenize=False, output_kind=RequestOutputKind.DELTA)
    new = EngineCoreRequest("r", [1, 2], None, params, None, 0.0, None, None, None, external_req_id="r")
    queue = RequestOutputCollector(RequestOutputKind.DELTA, "r")
    processor.add_request(new, None, queue=queue)
    llm = SimpleNamespace(output_processor=processor, model_config=SimpleNamespace(max_model_len=128))
    answer = list(range(101, 101 + told + 2 * INTERVAL))
    _feed(llm, new, Said(tokens=answer[:told]), 0, queue)
    pieces = []
    for first in range(told, len(answer), 2):
        processor.process_outputs([EngineCoreOutput("r", answer[first : first + 2])])
        while (output := queue.get_nowait()) is not None:
            pieces.append(list(output.outputs[0].token_ids))
    fed = [piece for piece in pieces if piece[0] <= answer[told - 1]]
    assert [token for piece in fed for token in piece] == answer[:told], "nothing new is in what is not told again"
    assert [piece for piece in pieces if piece not in fed] == [answer[told : told + 4], answer[told + 4 :]]


def test_one_that_can_not_be_fed_is_forgotten_and_others_are_traced_as_before() -> None:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.output_processor import OutputProcessor

    processor = OutputProcessor(None, log_stats=False)
    processor.tracing_enabled = True
    params = SamplingParams(max_tokens=8, logprobs=1, detokenize=False)
    new = EngineCoreRequest("r", [1, 2], None, params, None, 0.0, None, None, None, external_req_id="r")
    processor.add_request(new, None)
    llm = SimpleNamespace(output_processor=processor, model_config=SimpleNamespace(max_model_len=64))
    with pytest.raises(StopIteration):
        _feed(llm, new, Said(tokens=SAID, logprobs=[[], [], []]), 0, None)
    assert (processor.tracing_enabled, dict(processor.request_states)) == (True, {})
