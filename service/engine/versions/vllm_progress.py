"""What differs between the vLLM versions about an answer that is gone on with: draws, grammars, and how it travels."""

import hashlib
import json
from collections.abc import Sequence
from copy import copy
from typing import Any

from service.platforms import current

SAID = "gearshift_said"
"""Under this name a request's ``SamplingParams.extra_args`` carry what it has said before, from the frontend through
the core to the workers. ``vllm_xargs`` would reach the same place, so it must never come from outside."""


class Unshown(list[int]):
    """Token ids that nobody sees in a log."""

    def __repr__(self) -> str:
        return f"<{len(self)} tokens>"


def said_of(params: Any) -> list[int]:
    """The token ids that a request had said before it came here."""
    return (getattr(params, "extra_args", None) or {}).get(SAID) or []


def fingerprint(config: Any, checkpoint: Sequence[Any]) -> str:
    """A digest of what says the tokens: vLLM's version, the model's own configuration, and which checkpoint it is."""
    import vllm

    model = config.model_config
    own = {name: value for name, value in model.hf_config.to_dict().items() if name != "_name_or_path"}
    said = [vllm.__version__, own, str(model.dtype), model.quantization, checkpoint]
    return hashlib.sha256(json.dumps(said, default=str, sort_keys=True).encode()).hexdigest()


def obstacle(config: Any, params: Any) -> str | None:
    """Why an answer with these sampling parameters is always begun anew; None where it can be gone on with."""
    from vllm.sampling_params import SamplingType

    if params is None:
        return "nothing is generated"
    if params.prompt_logprobs is not None:
        return "the log-probabilities of a prompt are told once"
    if params.sampling_type is not SamplingType.RANDOM_SEED:
        return None
    return _unknown_draws(config)


def more_than_tokens(prompt: Any, params: Any) -> bool:
    """Whether there is more to a part of a session than its tokens: images, embeddings, or a generator's draws."""
    from vllm.sampling_params import SamplingType

    return prompt.get("type", "token") != "token" or params.sampling_type is SamplingType.RANDOM_SEED


def _unknown_draws(config: Any) -> str | None:
    """Why nobody can say how often a request's generator was drawn from."""
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    if config.speculative_config is not None:
        return "how often a seed was drawn from is not known where tokens are drafted"
    if config.use_v2_model_runner or current().seeds_rewind:
        return None
    one_draw = "fused_gumbel_argmax" in TopKTopPSampler.forward_cpu.__code__.co_names  # not in 0.26
    if not one_draw or config.model_config.use_fp64_gumbel:
        return "this sampler draws from a seed as often as the vocabulary is long"
    return None


def advance(generator: Any, draws: int) -> None:
    """Bring a request's generator to where ``draws`` sampled tokens have left it.

    0.32's sampler on a CPU takes one integer per token. Elsewhere it takes a row of exponentials, which moves Philox by
    4: vLLM's own rewinding counts so.
    """
    import torch

    if generator.device.type == "cpu":
        torch.randint(0, 2**31, (draws,), generator=generator, dtype=torch.long)
    else:
        generator.set_offset(generator.get_offset() + 4 * draws)


def replay(manager: Any, grammar: Any, request: Any, said: Sequence[int]) -> None:
    """Bring a new grammar to where the answer ``said`` has left it. Raises ValueError where it takes no such answer.

    ``manager`` is the core's StructuredOutputManager. It would ask the request what was said before; of that nothing
    must be known here, and the request itself may have it by now.
    """
    structured = request.structured_output_request
    begun = copy(request)
    begun.all_token_ids = list(request.prompt_token_ids or ())
    start = _constrained_from(manager, begun, said)
    if start > len(said):
        return
    structured.reasoning_ended = True
    if said[start:] and not grammar.accept_tokens(request.request_id, list(said[start:])):
        raise ValueError("the grammar takes no such beginning")


def _constrained_from(manager: Any, begun: Any, said: Sequence[int]) -> int:
    """The index in ``said`` from which the grammar counts; beyond its end while the model still reasons."""
    if hasattr(manager, "_get_constraint_bounds"):
        start: int = manager._get_constraint_bounds(begun, list(said))[0]
        return start
    structured, reasoner = begun.structured_output_request, manager._get_reasoner(begun)  # 0.26
    if reasoner is None or manager.enable_in_reasoning or structured.reasoning_ended:
        return 0
    if structured.reasoning_ended is None:
        structured.reasoning_ended = reasoner.is_reasoning_end(begun.prompt_token_ids or [])
    if structured.reasoning_ended:
        return 0
    for index, token in enumerate(said):
        begun.all_token_ids.append(token)
        if reasoner.is_reasoning_end_streaming(begun.all_token_ids, [token]):
            return index + 1
    return len(said) + 1
