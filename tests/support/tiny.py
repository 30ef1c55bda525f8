"""Tiny checkpoints of architectures whose state or layers are of other kinds than a dense decoder's: never trained.

What they say is nonsense, the same each time, and hangs on every weight: numbers are drawn wide, so that no two
tokens are nearly equally likely.
"""

import shutil
from pathlib import Path
from typing import Any

WIDE = 0.3
"""The deviation of random weights; the usual 0.02 would let a network of this size repeat one token."""


def _save(model: Any, folder: Path, tokenizer: Path) -> Path:
    import torch

    model.to(torch.float32).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder / name)
    return folder


def _common(tokenizer: Path, seed: int) -> dict[str, Any]:
    """What all of them say of their vocabulary, which is the tokenizer's. Draws from ``seed`` afterwards."""
    import torch
    from transformers import AutoConfig

    torch.manual_seed(seed)
    return {
        "vocab_size": AutoConfig.from_pretrained(tokenizer).vocab_size,
        "max_position_embeddings": 4096,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 2,
        "initializer_range": WIDE,
    }


def make_moe(folder: Path, tokenizer: Path) -> Path:
    """A mixture of experts: Qwen3-MoE with four, two of them at work for a token."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **_common(tokenizer, 11),
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        norm_topk_prob=True,
    )
    return _save(Qwen3MoeForCausalLM(config), folder, tokenizer)


def make_mixtral(folder: Path, tokenizer: Path) -> Path:
    """The other mixture of experts: Mixtral's, whose router and weights are laid out in another way."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        **_common(tokenizer, 12),
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    return _save(MixtralForCausalLM(config), folder, tokenizer)


def make_mla(folder: Path, tokenizer: Path) -> Path:
    """Latent attention: DeepSeek-V2 in the shape of its heads, which vLLM's kernels are made for, with experts."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        **_common(tokenizer, 13),
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
    )
    return _save(DeepseekV2ForCausalLM(config), folder, tokenizer)


def make_mixed(folder: Path, tokenizer: Path) -> Path:
    """Attention and recurrent state: Granite's hybrid without experts, with heads that attention on a CPU has."""
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    config = GraniteMoeHybridConfig(
        **_common(tokenizer, 7),
        hidden_size=128,
        intermediate_size=128,
        shared_intermediate_size=128,
        num_hidden_layers=4,
        layer_types=["mamba", "attention", "mamba", "attention"],
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=0,
        num_experts_per_tok=0,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=64,
        mamba_expand=2,
        mamba_n_groups=1,
        mamba_chunk_size=256,
        position_embedding_type="rope",
    )
    return _save(GraniteMoeHybridForCausalLM(config), folder, tokenizer)
