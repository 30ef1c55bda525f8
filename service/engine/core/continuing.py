"""In the core: a request that was begun elsewhere is a waiting one that already has outputs.

It is then prefilled, prompt and answer together, as one that was preempted is. Its status stays WAITING: what is
PREEMPTED, model runner V1 would look for among the requests that it knows.
"""

from collections.abc import Callable
from typing import Any

from service.engine.core.grammar import TimedGrammar
from service.engine.versions import vllm_progress


def begin(request: Any) -> None:
    """Give the core's new Request what it has said before. Of its prompt's prefill, the usage was told then.

    Where a step fails, vLLM logs the parameters of its requests: they must not tell the text.
    """
    if said := vllm_progress.said_of(request.sampling_params):
        request.append_output_token_ids(list(said))
        request.prefill_stats = None
        request.sampling_params.extra_args[vllm_progress.SAID] = vllm_progress.Unshown(said)


def create_grammar(original: Callable[..., Any], self: Any, request: Any) -> Any:
    """StructuredOutputManager._create_grammar, in its own thread: it is timed, and stands where the answer does.

    What is raised here ends this request only.
    """
    grammar = TimedGrammar(original(self, request), request)
    if said := vllm_progress.said_of(request.sampling_params):
        vllm_progress.replay(self, grammar, request, said)
    return grammar
