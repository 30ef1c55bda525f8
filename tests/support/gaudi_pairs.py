"""The pairs of models that vllm-gaudi's authors measure their switching with, by their shapes: no weights.

The numbers are those of the published configurations; ``arguments`` those that their scripts start the models with.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GIB = 1 << 30
CARDS = {"Gaudi 2": 96 * GIB, "Gaudi 3": 128 * GIB}


@dataclass(frozen=True)
class Shape:
    """A dense decoder with what it sees by; ``linear_bytes`` are those of a weight of its linear layers."""

    name: str
    architecture: str
    model_type: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool = False
    vision_parameters: int = 0
    linear_bytes: int = 2
    head_dim: int = 128
    text: Mapping[str, Any] = field(default_factory=dict)
    """What its text model's configuration says besides."""
    more: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """A checkpoint of which nothing is here but what it says of itself: its configuration, and its index."""
        folder.mkdir()
        text = {
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": 131072,
            **self.text,
        }
        parts = {"text_config": text, "vision_config": {}} if self.vision_parameters else text
        config = {"architectures": [self.architecture], "model_type": self.model_type, "dtype": "bfloat16"}
        (folder / "config.json").write_text(json.dumps({**config, **parts, **self.more}))
        shards = {"weight_map": {"w": "model-00001-of-00001.safetensors"}}
        index = {"metadata": {"total_size": self.weights_bytes}, **shards}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder

    @property
    def weights_bytes(self) -> int:
        """What its checkpoint's index says, but for norms and scales."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        linear = self.layers * (attention + 3 * self.hidden * self.inner)
        others = self.vision_parameters + self.vocabulary * self.hidden * (1 if self.tied else 2)
        return linear * self.linear_bytes + others * 2

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * 2


_BOTH = {"dtype": "bfloat16", "block_size": 128, "async_scheduling": True, "enable_prefix_caching": False}
_TEXT = {**_BOTH, "max_model_len": 131072, "max_num_seqs": 4}
_IMAGES = {"limit_mm_per_prompt": {"image": {"count": 20, "width": 864, "height": 480}}}
LLAMA_GUARD = Shape(
    "meta-llama/Llama-Guard-4-12B",
    "Llama4ForConditionalGeneration",
    "llama4",
    *(5120, 8192, 48, 40, 8, 202048),
    vision_parameters=870_000_000,
    text={"model_type": "llama4_text", "intermediate_size_mlp": 8192, "moe_layers": [], "num_local_experts": 0},
    arguments=_TEXT,
)
GRANITE_GUARDIAN = Shape(
    "ibm-granite/granite-guardian-3.3-8b",
    "GraniteForCausalLM",
    "granite",
    *(4096, 12800, 40, 32, 8, 49160),
    tied=True,
    arguments=_TEXT,
)
_QWEN: dict[str, Any] = {
    "vision_parameters": 600_000_000,
    "linear_bytes": 1,
    "text": {
        "model_type": "qwen3_vl_text",
        "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True},
    },
    "more": {
        "quantization_config": {
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "activation_scheme": "dynamic",
        }
    },
    "arguments": {**_BOTH, **_IMAGES, "max_model_len": 32768, "max_num_seqs": 8},
}
_QWEN_SHAPE = ("Qwen3VLForConditionalGeneration", "qwen3_vl", 5120, 25600, 64, 64, 8, 151936)
QWEN_INSTRUCT = Shape("Qwen/Qwen3-VL-32B-Instruct-FP8", *_QWEN_SHAPE, **_QWEN)
QWEN_THINKING = Shape("Qwen/Qwen3-VL-32B-Thinking-FP8", *_QWEN_SHAPE, **_QWEN)
PAIRS = ((LLAMA_GUARD, GRANITE_GUARDIAN), (QWEN_INSTRUCT, QWEN_THINKING))
