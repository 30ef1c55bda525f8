"""A small model that mixes attention with recurrent state: no training, so it says the same nonsense each time."""

import shutil
from pathlib import Path


def make_hybrid(folder: Path, *, tokenizer: Path) -> None:
    """A checkpoint in ``folder`` of the kind that vllm-gaudi aligns specially (granitemoehybrid, without experts)."""
    import torch
    from transformers import AutoConfig, GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    vocabulary = AutoConfig.from_pretrained(tokenizer).vocab_size
    torch.manual_seed(7)
    model = GraniteMoeHybridForCausalLM(
        GraniteMoeHybridConfig(
            vocab_size=vocabulary,
            hidden_size=64,
            intermediate_size=128,
            shared_intermediate_size=128,
            num_hidden_layers=4,
            layer_types=["mamba", "attention", "mamba", "attention"],
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=0,
            num_experts_per_tok=0,
            mamba_n_heads=8,
            mamba_d_head=16,
            mamba_d_state=64,
            mamba_expand=2,
            mamba_n_groups=1,
            mamba_chunk_size=256,
            position_embedding_type="rope",
            max_position_embeddings=4096,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=2,
        )
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder / name)
