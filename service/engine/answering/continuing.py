"""An answer that another engine began is gone on with: a call's requests are told what they have said before.

Only a request's entry is special. Its own state in vLLM's OutputProcessor is fed the tokens as if the core had sent
them, so that detokenizer, stop strings, log-probabilities, usage and the handlers' parsers see one unbroken answer. The
tokens go along to the core (``core/continuing.py``) and the workers (``worker/continuing.py``).
"""

from collections import deque
from collections.abc import Iterator
from copy import copy
from typing import Any

from schemas.progress import Begun, Said
from service.engine.answering.runs import RUN, Run
from service.engine.answering.said import digest, features_of
from service.engine.versions import vllm_progress
from service.errors import NotContinued
from service.platforms import current


def teach(llm: Any) -> None:
    """Let an AsyncLLM's requests go on with what their call has said before, and let it be known what they say.

    Every request comes by ``OutputProcessor.add_request``; in 0.32, samples do not by ``AsyncLLM._add_request``.
    """
    processor = llm.output_processor
    add = processor.add_request

    def add_request(
        request: Any, prompt: Any, parent_req: Any = None, request_index: int = 0, queue: Any = None
    ) -> None:
        run = RUN.get()
        if run is None or run.session is not None:
            add(request, prompt, parent_req, request_index, queue)
            return
        begun = _begun(llm, request, run)
        said = Said() if begun is None or request_index >= len(begun.sequences) else begun.sequences[request_index]
        if said.tokens:
            params = request.sampling_params = copy(request.sampling_params)
            params.extra_args = {**(params.extra_args or {}), vllm_progress.SAID: said.tokens}
        if parent_req is not None:  # 0.26 names them one by one, and the first to end would seem to be the last
            names = (f"{each}_{parent_req.request_id}" for each in range(request_index, parent_req.n))
            parent_req.child_requests.update(names)
        add(request, prompt, parent_req, request_index, queue)
        state = processor.request_states[request.request_id]
        for each in run.requests:
            if each.id == request.external_req_id and state.detokenizer is not None:
                each.states.append(state)
                each.adapter, each.features = request.lora_request, features_of(request)
        if begun is not None:
            run.continued += len(said.tokens)
            _feed(llm, request, said, begun.cached, queue)

    processor.add_request = add_request


def _begun(llm: Any, request: Any, run: Run) -> Begun | None:
    """What a request has said before; None where it begins. Raises NotContinued."""
    begun = None if run.begun is None else run.begun.of(request.external_req_id)
    if run.streamed and not run.live and (begun is None or len(run.requests) > 1):
        raise NotContinued("several prompts are streamed")
    if begun is not None:
        _check(llm, request, begun)
    return begun


def _check(llm: Any, request: Any, begun: Begun) -> None:
    """Raises NotContinued."""
    params, config = request.sampling_params, llm.vllm_config
    for reason in (
        None if current().continues else "this device's runner knows nothing of a new request but its prompt",
        vllm_progress.obstacle(config, params),
        "its prompt is not made of tokens" if request.prompt_embeds is not None or request.resumable else None,
    ):
        if reason is not None:
            raise NotContinued(reason)
    if begun.prompt != digest(request.prompt_token_ids, request.lora_request, features_of(request)):
        raise NotContinued("its prompt is another one now")
    vocabulary = llm.model_config.get_vocab_size()
    if any(not 0 <= token < vocabulary for said in begun.sequences for token in said.tokens):
        raise NotContinued("this model has no such tokens")
    if params.num_logprobs is not None and not all(map(_rows_known, begun.sequences)):
        raise NotContinued("the log-probabilities of its first tokens are not known")


def _rows_known(said: Said) -> bool:
    """Whether each token has its log-probabilities, its own the first."""
    return [row[0][0] if row else None for row in said.logprobs or []] == said.tokens


def _feed(llm: Any, request: Any, said: Said, cached: int, queue: Any) -> None:
    """Feed a request's state what was said; one that had ended is not begun in the core."""
    from vllm.v1.engine import EngineCoreOutput

    processor, name = llm.output_processor, request.request_id
    state = processor.request_states[name]
    outputs: deque[Any] = deque()
    state.queue = None
    interval, state.stream_interval = state.stream_interval, 1  # what was told has its last token in any case
    traced, processor.tracing_enabled = processor.tracing_enabled, False  # a trace is made of times that nobody took
    try:
        ends = _ends(llm, request, said)
        for piece, rows in _pieces(state, said):
            for row in rows:
                state.logprobs_processor.logprobs.append(row)
                state.logprobs_processor.cumulative_logprob += next(iter(row.values())).logprob
            last = state.detokenizer.num_output_tokens() + len(piece) == len(said.tokens)
            output = EngineCoreOutput(name, piece, **(ends if last else {}))
            outputs.extend(processor.process_outputs([output]).request_outputs)
            if name not in processor.request_states:  # by a stop string, perhaps
                request.abort_immediately = True
                break
    except BaseException:
        processor.abort_requests([name], internal=True)
        raise
    finally:
        processor.tracing_enabled = traced
    state.stream_interval, state.sent_tokens_offset = interval, state.detokenizer.num_output_tokens()
    state.queue = queue
    state.is_prefilling = True  # else the seconds since the machine started count as those between two tokens
    state.num_cached_tokens = cached
    _repeat(queue, outputs)


def _ends(llm: Any, request: Any, said: Said) -> dict[str, Any]:
    """How an answer has ended with its last token, by vLLM's own rule; nothing where it has not."""
    from vllm.v1.core.sched.utils import check_stop
    from vllm.v1.request import Request

    core_request = Request.from_engine_core_request(request, None)
    core_request.append_output_token_ids(list(said.tokens))
    if not said.tokens or not check_stop(core_request, llm.model_config.max_model_len):
        return {}
    return {"finish_reason": core_request.get_finished_reason(), "stop_reason": core_request.stop_reason}


def _pieces(state: Any, said: Said) -> Iterator[tuple[list[int], list[Any]]]:
    """Tokens and their log-probabilities: one by one for a stream, as its parsers are used to, else all at once."""
    from vllm.logprobs import Logprob
    from vllm.sampling_params import RequestOutputKind

    size = 1 if state.output_kind is RequestOutputKind.DELTA else max(1, len(said.tokens))
    for first in range(0, len(said.tokens), size):
        asked = state.logprobs_processor.logprobs is not None
        rows = (said.logprobs or [])[first : first + size] if asked else []
        made = [{token: Logprob(logprob, rank, text) for token, logprob, rank, text in row} for row in rows]
        yield said.tokens[first : first + size], made


def _repeat(queue: Any, outputs: deque[Any]) -> None:
    """Let a request's queue give ``outputs`` before its own: AsyncLLM.generate always asks ``get_nowait`` first."""
    if hasattr(queue, "gearshift_repeated"):  # a further sample of the same request
        queue.gearshift_repeated.extend(outputs)
        return
    queue.gearshift_repeated, original = outputs, queue.get_nowait
    queue.get_nowait = lambda: outputs.popleft() if outputs else original()
