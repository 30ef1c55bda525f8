"""How large a model is, as far as its folder or its name tells, and what it costs on a device then."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from service.models_file import ModelSpec
from service.scheduling.machines import Card, ModelCosts, dense_model

_BILLIONS = re.compile(r"(?<![a-z0-9.])(?:(\d+)x)?(\d+(?:\.\d+)?)(b|m)(?![a-z0-9])", re.IGNORECASE)
_USUAL = 8.0
"""Billions of parameters, where nothing tells."""
_KV = ((1, 12e3), (4, 115e3), (13, 131e3))
"""Bytes of keys and values per token by billions of parameters, as models with grouped queries have them in 16 bit."""
_KV_LARGE = 164e3
_QUANTIZED = (
    (re.compile(r"awq|gptq|int4|4bit|w4a|nf4|fp4|bitsandbytes"), 0.5),
    (re.compile(r"fp8|int8|8bit|w8a"), 1.0),
)
_MAX_RUNNING = 64


@dataclass(frozen=True, slots=True)
class Size:
    """Parameters in billions, bytes of each, bytes of keys and values per token. ``known``: not merely assumed."""

    billions: float
    byte_per_weight: float
    kv_bytes_per_token: float
    known: bool = True


def size_of(model: str, arguments: Mapping[str, Any] | None = None) -> Size:
    """The size of a model by its folder's config.json, else by its name: ``qwen3-8b`` has 8 billion parameters."""
    arguments = arguments or {}
    said = " ".join(str(arguments.get(key, "")) for key in ("quantization", "quant_config", "dtype"))
    bytes_each = next((each for form, each in _QUANTIZED if form.search(f"{model} {said}".lower())), 2.0)
    if (config := _config(Path(model))) is not None and (size := _by_config(config, bytes_each)) is not None:
        return size
    found = _BILLIONS.findall(Path(model).name) or _BILLIONS.findall(model)
    for experts, number, unit in found[:1]:
        billions = float(number) * int(experts or 1) / (1 if unit.lower() == "b" else 1000)
        if billions > 0:
            return Size(billions, bytes_each, _kv(billions))
    return Size(_USUAL, bytes_each, _kv(_USUAL), known=False)


def costs_of(
    spec: ModelSpec, card: Card, *, row_tokens: float, billions: float | None = None
) -> tuple[ModelCosts, bool]:
    """What an alias costs on a device, and whether its size is known. ``row_tokens``: what a running request has.

    ``memory`` of models.yaml counts as it is given, and so does the smaller of its limits on running requests.
    """
    size = size_of(str(spec.engine_args["model"]), spec.engine_args)
    if billions is not None:
        size = Size(billions, size.byte_per_weight, _kv(billions))
    limits = (spec.scheduling.max_concurrency, spec.engine_args.get("max_num_seqs"))
    most = min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=_MAX_RUNNING)
    costs = dense_model(
        card,
        spec.alias,
        billions=size.billions,
        byte_per_weight=size.byte_per_weight,
        kv_bytes_per_token=size.kv_bytes_per_token,
        row_tokens=max(1, round(row_tokens)),
        max_running=most,
    )
    weights = size.billions * 1e9 * size.byte_per_weight
    if spec.scheduling.memory is not None:
        return replace(costs, device_bytes=float(spec.scheduling.memory)), size.known
    if weights < card.device_bytes < costs.device_bytes:
        rows = int((card.device_bytes - weights) / ((costs.device_bytes - weights) / most))
        return replace(costs, device_bytes=card.device_bytes, max_running=max(1, rows)), size.known
    return costs, size.known


def _kv(billions: float) -> float:
    return next((each for most, each in _KV if billions <= most), _KV_LARGE)


def _config(folder: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _by_config(config: Mapping[str, Any], bytes_each: float) -> Size | None:
    """A dense transformer's parameters, by what its config says; None where that is not one."""
    inner = config.get("text_config")
    if isinstance(inner, dict):
        config = inner
    names = ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size", "num_attention_heads")
    values = [_natural(config.get(name)) for name in names]
    if not all(values):
        return None
    hidden, layers, inside, words, heads = values
    shared = _natural(config.get("num_key_value_heads")) or heads
    width = _natural(config.get("head_dim")) or hidden // heads
    experts = _natural(config.get("num_experts")) or _natural(config.get("num_local_experts")) or 1
    attention = 2 * hidden * width * (heads + shared)
    tables = words * hidden * (1 if config.get("tie_word_embeddings") else 2)
    parameters = layers * (attention + 3 * hidden * inside * experts) + tables
    return Size(parameters / 1e9, bytes_each, 2.0 * layers * shared * width * 2)


def _natural(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0
