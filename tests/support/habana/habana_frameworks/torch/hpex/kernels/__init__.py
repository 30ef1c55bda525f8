import enum

import torch


class RotaryPosEmbeddingMode(enum.Enum):
    BLOCKWISE = 0
    PAIRWISE = 1


def apply_rotary_pos_emb(x, cos, sin, _position_ids=None, _offset=0, mode=RotaryPosEmbeddingMode.BLOCKWISE):
    if mode is RotaryPosEmbeddingMode.BLOCKWISE:
        first, second = x.chunk(2, dim=-1)
        rotated = torch.cat((-second, first), dim=-1)
    else:
        rotated = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return (x * cos + rotated * sin).to(x.dtype)


class FusedSDPA:
    @staticmethod
    def apply(*_, **__):
        raise RuntimeError("the stand-in has no fused attention; set VLLM_PROMPT_USE_FUSEDSDPA=0")


def fp8_fused_sdpa(*_, **__):
    raise RuntimeError("the stand-in has no fused attention")
