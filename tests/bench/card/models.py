"""Checkpoints of real shape with random weights, and the engine arguments that a device wants for them.

The shapes are those that the models' publishers state. The tokenizer is the small models' own: what is asked and
answered are token ids, of which it need not know all.
"""

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ALIASES = ("llama", "qwen", "third")
MIB = 1 << 20
_SHARD = 4 << 30

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _shape(
    positions: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions if hidden >= 1024 else 4096,
    }


def _llama(*numbers: int, **more: Any) -> tuple[str, dict[str, Any]]:
    rope = {"rope_theta": 500000.0, **more.pop("rope", {"rope_type": "default"})}
    return "llama", {**_shape(131072, *numbers), "rope_parameters": rope, "tie_word_embeddings": False, **more}


def _qwen3(*numbers: int, **more: Any) -> tuple[str, dict[str, Any]]:
    rope = {"rope_theta": 1000000.0, "rope_type": "default"}
    return "qwen3", {
        **_shape(40960, *numbers),
        "head_dim": 128,
        "rope_parameters": rope,
        "rms_norm_eps": 1e-6,
        **more,
    }


_QWEN3_06B = _qwen3(1024, 3072, 28, 16, 8, 151936, tie_word_embeddings=True)


@dataclass(frozen=True)
class Shape:
    """Models by their architectures and sizes, and what each may take of a device for its KV cache."""

    models: Mapping[str, tuple[str, dict[str, Any]]]
    kv_bytes: int
    max_model_len: int
    cpu_dtype: str = "float32"

    @property
    def dtype(self) -> str:
        """What its weights are made in and run in on the device that is here."""
        return self.cpu_dtype if on_cpu() else "bfloat16"


SHAPES = {
    "small": Shape(
        {
            "llama": _llama(256, 512, 4, 8, 2, 1024, head_dim=32),
            "qwen": _qwen3(256, 768, 4, 4, 2, 1024, tie_word_embeddings=False),
            "third": _llama(128, 256, 2, 4, 1, 512, head_dim=32),
        },
        kv_bytes=64 * MIB,
        max_model_len=1024,
    ),
    "real": Shape(
        {
            "llama": _llama(1024, 2816, 4, 16, 8, 32000, head_dim=64),
            "qwen": _qwen3(1024, 3072, 12, 16, 8, 151936, tie_word_embeddings=True),
        },
        kv_bytes=512 * MIB,
        max_model_len=2048,
        cpu_dtype="bfloat16",
    ),
    "lending": Shape(
        {"llama": _llama(512, 1024, 4, 8, 8, 4096, head_dim=64)},
        kv_bytes=64 * MIB,
        max_model_len=256,
    ),
    "0.6b": Shape(dict.fromkeys(ALIASES, _QWEN3_06B), kv_bytes=4 << 30, max_model_len=8192),
    "8b": Shape(
        {
            "llama": _llama(4096, 14336, 32, 32, 8, 128256, rope=_LLAMA3_ROPE),
            "qwen": _qwen3(4096, 12288, 36, 32, 8, 151936, tie_word_embeddings=False),
            "third": _QWEN3_06B,
        },
        kv_bytes=16 << 30,
        max_model_len=8192,
    ),
}


def on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def arguments(path: Path, shape: Shape, *, eager: bool, **more: Any) -> Any:
    """Engine arguments of one model on the device that is here.

    Without prefix caching, so that a prompt is computed in the same way each time: bfloat16 keeps its tokens then.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    if current_platform.is_cuda():
        more.setdefault("attention_backend", "FLASH_ATTN")  # FlashInfer would compile its kernels
    return AsyncEngineArgs(
        model=str(path),
        dtype=shape.dtype,
        max_model_len=shape.max_model_len,
        max_num_seqs=64,
        enforce_eager=eager,
        enable_prefix_caching=False,
        use_tqdm_on_load=False,
        kv_cache_memory_bytes=shape.kv_bytes,
        **more,
    )


def ensure(folder: Path, name: str) -> dict[str, Path]:
    """The checkpoints of a shape below ``folder``, made where they are missing; their paths by alias."""
    paths, shape = {}, SHAPES[name]
    for seed, (alias, (architecture, numbers)) in enumerate(shape.models.items(), start=1):
        path = paths[alias] = folder / name / alias
        recipe = json.dumps([architecture, numbers, seed, shape.dtype])
        if (path / "recipe").is_file() and (path / "recipe").read_text() == recipe:
            continue
        path.mkdir(parents=True, exist_ok=True)
        make(path, architecture, numbers, seed, shape.dtype)
        (path / "recipe").write_text(recipe)
    return paths


def make(path: Path, architecture: str, numbers: Mapping[str, Any], seed: int, dtype_name: str) -> None:
    """Write a checkpoint: the weights that the architecture names, drawn on the device that is here."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    from deploy.local import models as small

    config = AutoConfig.for_model(architecture, **numbers, eos_token_id=small.EOS)
    config.architectures = [{"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[architecture]]
    dtype = getattr(torch, dtype_name)
    config.dtype = dtype
    config.save_pretrained(path)
    small.train_tokenizer(small.SPEAKERS[0], random.Random(seed)).save_pretrained(path)
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config)
    for number, shard in enumerate(_shards(network, dtype, seed), start=1):
        save_file(shard, path / f"model-{number:05}.safetensors", metadata={"format": "pt"})


def _shards(network: Any, dtype: Any, seed: int) -> Iterator[dict[str, Any]]:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dice = torch.Generator(device).manual_seed(seed)
    shard: dict[str, Any] = {}
    for name, meta in network.named_parameters():  # tied ones come once
        if name.endswith("norm.weight"):
            drawn = torch.ones(meta.shape, dtype=dtype)
        else:
            drawn = torch.empty(meta.shape, device=device).normal_(0, 0.02, generator=dice).to("cpu", dtype)
        if shard and sum(each.nbytes for each in shard.values()) + drawn.nbytes > _SHARD:
            yield shard
            shard = {}
        shard[name] = drawn
    yield shard
