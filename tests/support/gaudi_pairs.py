"""The pairs of models that vllm-gaudi's authors measure their switching with, by their shapes: no weights, no files.

The numbers are those of the published configurations.
"""

from dataclasses import dataclass

GIB = 1 << 30
CARDS = {"Gaudi 2": 96 * GIB, "Gaudi 3": 128 * GIB}


@dataclass(frozen=True)
class Shape:
    """A dense decoder with what it sees by; ``linear_bytes`` are those of a weight of its linear layers."""

    name: str
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


LLAMA_GUARD = Shape("meta-llama/Llama-Guard-4-12B", 5120, 8192, 48, 40, 8, 202048, vision_parameters=870_000_000)
GRANITE_GUARDIAN = Shape("ibm-granite/granite-guardian-3.3-8b", 4096, 12800, 40, 32, 8, 49160, tied=True)
_QWEN = {"vision_parameters": 600_000_000, "linear_bytes": 1}
QWEN_INSTRUCT = Shape("Qwen/Qwen3-VL-32B-Instruct-FP8", 5120, 25600, 64, 64, 8, 151936, **_QWEN)
QWEN_THINKING = Shape("Qwen/Qwen3-VL-32B-Thinking-FP8", 5120, 25600, 64, 64, 8, 151936, **_QWEN)
PAIRS = ((LLAMA_GUARD, GRANITE_GUARDIAN), (QWEN_INSTRUCT, QWEN_THINKING))
