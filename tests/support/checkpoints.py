"""Checkpoints such as the speakers of ``deploy.local.models`` are not: they see, hear, are quantized, or never end."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

IMAGE = "<image>"
WHISPERED = ("<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|translate|>", "<|notimestamps|>", "<|0.00|>")
SIDE = 28
"""Pixels of a tile's side, in four patches; an image is seen as four tiles and as a whole."""


def make_vision(folder: Path, text: Path) -> Path:
    """A tiny Idefics3 at ``folder``: the trained Llama at ``text`` with a random eye. Returns ``folder``.

    It was never taught to see; but what it says hangs on what it is shown.
    """
    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3ImageProcessorPil,
        Idefics3Processor,
    )

    tokenizer = AutoTokenizer.from_pretrained(text)
    # Of a picture that is not split, vLLM 0.26 counts no patches.
    whole, tile = {"longest_edge": 2 * SIDE}, {"longest_edge": SIDE}
    eyes = Idefics3ImageProcessorPil(size=whole, max_image_size=tile, do_image_splitting=True)
    processor = Idefics3Processor(eyes, tokenizer, image_seq_len=1)
    speaker = AutoModelForCausalLM.from_pretrained(text)
    speaker.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    torch.manual_seed(5)
    seer = Idefics3ForConditionalGeneration(
        Idefics3Config(
            text_config=speaker.config.to_dict(),
            vision_config={
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": SIDE,
                "patch_size": SIDE // 2,
            },
            image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
            scale_factor=2,
            tie_word_embeddings=False,
            pad_token_id=speaker.config.pad_token_id,
        )
    )
    seer.model.text_model.load_state_dict(speaker.model.state_dict())
    seer.lm_head.load_state_dict(speaker.lm_head.state_dict())
    seer.model.connector.modality_projection.proj.weight.data.normal_(std=1.0)
    seer.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def make_endless(folder: Path, source: Path, *, library: bool) -> Path:
    """The checkpoint at ``source`` with weights that never come: a pipe that nobody writes to. Returns ``folder``.

    Python waits for them, or, with ``library``, the safetensors library does, which nothing interrupts.
    """
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    os.mkfifo(folder / ("model.safetensors" if library else "pytorch_model.bin"))
    return folder


def make_quantized(folder: Path, source: Path) -> Path:
    """The network at ``source`` with its linear layers in eight bits, as compressed-tensors has them."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, folder)
    weights: dict[str, Any] = {}
    (checkpoint,) = folder.glob("*.safetensors")
    for name, weight in load_file(checkpoint).items():
        if not name.endswith("_proj.weight"):
            weights[name] = weight
            continue
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        weights[name] = torch.round(weight / scale).to(torch.int8)
        weights[name.replace(".weight", ".weight_scale")] = scale.to(torch.float32)
    save_file(weights, checkpoint, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    integers = {"num_bits": 8, "type": "int", "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**integers, "strategy": "channel", "dynamic": False},
                "input_activations": {**integers, "strategy": "token", "dynamic": True},
            }
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_hearing(folder: Path) -> Path:
    """A tiny Whisper at ``folder``, never trained: what it writes hangs on what it hears. Returns ``folder``."""
    import torch
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import (
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
        WhisperProcessor,
        WhisperTokenizer,
    )

    tokenizer = WhisperTokenizer(vocab={letter: n for n, letter in enumerate(sorted(ByteLevel.alphabet()))}, merges=[])
    tokenizer.add_special_tokens({"additional_special_tokens": list(WHISPERED)})
    start, end = tokenizer.convert_tokens_to_ids("<|startoftranscript|>"), tokenizer.eos_token_id
    torch.manual_seed(9)
    config = WhisperConfig(
        vocab_size=len(tokenizer),
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        decoder_start_token_id=start,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        init_std=0.4,
    )
    WhisperForConditionalGeneration(config).save_pretrained(folder)
    WhisperProcessor(WhisperFeatureExtractor(), tokenizer).save_pretrained(folder)
    return folder
