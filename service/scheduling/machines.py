"""What models cost on a machine, for the simulator: measured here, and computed for devices by their figures."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from schemas.contexts import Tier

GB = 1e9


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """One model on one machine. Seconds, bytes, and tokens per second.

    A step of ``n`` running requests takes ``step_s + n * row_s`` and gives each of them a token.
    """

    alias: str
    device_bytes: float
    """Weights and KV cache together: what being resident takes."""
    resident_s: float
    parked_s: float
    dropped_s: float
    step_s: float
    row_s: float
    prefill_tokens_s: float
    max_running: int = 64
    row_back_s: float | None = None
    """What a row's keys and values take to come back with a parked model; None: all that it has is prefilled again."""

    def again_s(self, tokens: float) -> float:
        """Seconds before the next step that a running request costs when its model comes back from being parked.

        ``tokens``: its prompt, and what it has said.
        """
        return tokens / self.prefill_tokens_s if self.row_back_s is None else self.row_back_s

    def switch_s(self, tier: Tier) -> float:
        """The time without a step that a switch to this model takes from a tier."""
        return {Tier.RESIDENT: self.resident_s, Tier.PARKED: self.parked_s, Tier.DROPPED: self.dropped_s}[tier]

    def alone_s(self, prompt: int, output: int, *, batch: int = 1) -> float:
        """Device seconds that one request costs in a batch of this size."""
        return prompt / self.prefill_tokens_s + output * (self.step_s / batch + self.row_s)


@dataclass(frozen=True, slots=True)
class Machine:
    """A device with its models."""

    name: str
    device_bytes: float
    models: Mapping[str, ModelCosts]


LINK = 64 * GB * 0.82
"""Bytes per second into a Gaudi 3: PCIe Gen5 and the share of it that copies get."""
_DISK = 3 * GB


@dataclass(frozen=True, slots=True)
class Card:
    """A kind of device by its published figures: bytes for models; per second bytes read, operations, bytes copied."""

    name: str
    device_bytes: float
    read_s: float
    operations_s: float
    link_s: float = LINK
    keeps_blocks: bool = True
    """Whether running requests keep their keys and values there while their model is parked."""


GAUDI3 = Card("gaudi3", 120 * GB, read_s=3.7e12 * 0.6, operations_s=1.8e15 * 0.5, keeps_blocks=False)
"""128 GB, less what the runtime and graphs keep; the published 3.7 TB/s, of which 60 % is what kernels get; the
published dense operations (bf16 and fp8 are the same), halved."""
CARDS: Mapping[str, Card] = {
    card.name: card
    for card in (
        GAUDI3,
        # 80 GB, 3.35 TB/s and 989 TFLOPS (SXM, bf16), cut as above; PCIe Gen5 as above.
        Card("h100", 72 * GB, read_s=3.35e12 * 0.6, operations_s=0.989e15 * 0.5),
        # One socket with eight channels of DDR5-4800 and matrix units; parked weights are in the same memory.
        Card("cpu", 200 * GB, read_s=307e9 * 0.6, operations_s=0.1e15 * 0.5, link_s=math.inf),
    )
}
"""What a plan may be made for. None of these is measured: they are computed from what the vendors publish."""


def dense_model(
    card: Card,
    alias: str,
    *,
    billions: float,
    byte_per_weight: float,
    kv_bytes_per_token: float,
    row_tokens: int = 700,
    max_running: int = 64,
) -> ModelCosts:
    """A dense model on one device: decoding bound by memory, prefill by arithmetic, copies by the link.

    The graphs stay alive on every tier (a warm-up costs more than any copy). A row reads those of ``row_tokens`` tokens
    on average, and there is room for a good quarter more.
    """
    weights = billions * 1e9 * byte_per_weight
    return ModelCosts(
        alias=alias,
        device_bytes=weights + max_running * (row_tokens * 9 // 7) * kv_bytes_per_token,
        resident_s=0.005,
        parked_s=weights / card.link_s + 0.02,
        dropped_s=weights / _DISK + 5.0,
        step_s=weights / card.read_s,
        row_s=row_tokens * kv_bytes_per_token / card.read_s,
        prefill_tokens_s=card.operations_s / (2 * billions * 1e9),
        max_running=max_running,
        row_back_s=row_tokens * kv_bytes_per_token / card.link_s if card.keeps_blocks else None,
    )


def gaudi_model(
    alias: str, *, billions: float, byte_per_weight: float, kv_bytes_per_token: float, row_tokens: int = 700
) -> ModelCosts:
    """A dense model on one Gaudi 3, with an engine that keeps the blocks of a parked model there, as on CUDA."""
    return dense_model(
        replace(GAUDI3, keeps_blocks=True),
        alias,
        billions=billions,
        byte_per_weight=byte_per_weight,
        kv_bytes_per_token=kv_bytes_per_token,
        row_tokens=row_tokens,
    )


def gaudi3() -> Machine:
    """Four models of 8B to 70B (the two largest in fp8) on one card: 180 GB of contexts in 120 GB."""
    models = (
        gaudi_model("8b", billions=8, byte_per_weight=2, kv_bytes_per_token=131e3),
        gaudi_model("14b", billions=14, byte_per_weight=2, kv_bytes_per_token=164e3),
        gaudi_model("32b", billions=32, byte_per_weight=1, kv_bytes_per_token=131e3),
        gaudi_model("70b", billions=70, byte_per_weight=1, kv_bytes_per_token=164e3),
    )
    return Machine("gaudi3", GAUDI3.device_bytes, {model.alias: model for model in models})


def gaudi3_fleet(count: int = 50) -> Machine:
    """Fifty 8B and 14B models on one card, of which a handful is resident at a time."""
    sizes = ((8.0, 131e3), (8.0, 131e3), (14.0, 164e3))
    models = {}
    for index in range(count):
        billions, kv = sizes[index % len(sizes)]
        alias = f"m{index:02}"
        models[alias] = gaudi_model(alias, billions=billions, byte_per_weight=2, kv_bytes_per_token=kv)
    return Machine("gaudi3-fleet", GAUDI3.device_bytes, models)


def tiny_cpu(aliases: tuple[str, ...] = ("llama", "qwen", "tiny")) -> Machine:
    """This project's test models on two CPU cores, as they were measured, all resident."""
    models = {
        alias: ModelCosts(
            alias=alias,
            device_bytes=GB,
            resident_s=0.003,
            parked_s=0.02,
            dropped_s=0.7,
            step_s=0.003,
            row_s=0.0001,
            prefill_tokens_s=20_000,
        )
        for alias in aliases
    }
    return Machine("cpu", 8 * GB, models)
