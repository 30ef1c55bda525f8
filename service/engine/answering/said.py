"""What a running request has said so far, read from where vLLM's frontend keeps it."""

import hashlib
import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from schemas.progress import Begun, Said
from service.engine.models.checkpoint import identity

_LEAST_LOGPROB = -9999.0
"""What vLLM's server says instead of minus infinity, which JSON does not have."""


def digest(token_ids: Iterable[int], adapter: Any = None, features: Iterable[str] = ()) -> str:
    """A prompt's, in place of its tokens; of its images as well, by their identifiers, and of vLLM's LoRARequest."""
    tuned = None
    if adapter is not None:
        tuned = [adapter.lora_name, Path(adapter.lora_path).name, identity(adapter.lora_path)]
    found = hashlib.sha256(array("q", token_ids).tobytes())
    found.update(json.dumps([tuned, list(features)]).encode())
    return found.hexdigest()


def features_of(request: Any) -> tuple[str, ...]:
    """The identifiers of what an EngineCoreRequest's placeholders stand for."""
    return tuple(feature.identifier for feature in request.mm_features or ())


def of_output(output: Any, told: Mapping[int, int]) -> tuple[Said, ...]:
    """Of a RequestOutput: of each sample as many tokens as were ``told``."""
    return _in_order(
        {each.index: _said(each.token_ids, each.logprobs, told.get(each.index, 0)) for each in output.outputs}
    )


def of_states(states: Iterable[Any]) -> tuple[Said, ...]:
    """Of the OutputProcessor's states of a request: its samples, those that have ended as well."""
    return _in_order(
        {
            state.request_index: _said(state.detokenizer.output_token_ids, state.logprobs_processor.logprobs)
            for state in states
        }
    )


def begun(request_id: str, prompt: str, sequences: tuple[Said, ...], cached: int) -> Begun:
    """Unchecked: the lists may be long, and are ours."""
    return Begun.model_construct(id=request_id, prompt=prompt, sequences=sequences, cached=cached)


def _in_order(sequences: Mapping[int, Said]) -> tuple[Said, ...]:
    return tuple(sequences.get(index) or Said() for index in range(max(sequences, default=-1) + 1))


def _said(tokens: Sequence[int], logprobs: Any, limit: int | None = None) -> Said:
    tokens = list(islice(tokens, limit))
    if logprobs is None:
        return Said.model_construct(tokens=tokens)
    rows = [
        [(token, max(each.logprob, _LEAST_LOGPROB), each.rank, each.decoded_token) for token, each in row.items()]
        for row in islice(logprobs, len(tokens))
    ]
    return Said.model_construct(tokens=tokens, logprobs=rows)
