"""LoRA adapters by name: made here, loaded into a running engine, heard in the text."""

import json
from pathlib import Path
from typing import Any

import pytest

from service.errors import LoraRefused, UnknownModel
from tests.support.engine_spec import chat, text

pytestmark = pytest.mark.engine

ALIAS = "tuned"
"""The alias that takes adapters: the same weights as ``llama``."""


def make_adapter(folder: Path, base: Path, *, rank: int = 4) -> None:
    """An adapter that was never trained: random numbers, large enough to be heard."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((base / "config.json").read_text())
    hidden, width = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    generator = torch.Generator().manual_seed(7)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(rank, hidden, generator=generator)
        weights[f"{name}.lora_B.weight"] = torch.randn(width, rank, generator=generator)
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    adapter = {"peft_type": "LORA", "r": rank, "lora_alpha": 4 * rank, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))


@pytest.fixture(scope="session")
def adapter(lora_root: Path, models_path: Path) -> str:
    entries = json.loads(models_path.read_text())["models"]
    make_adapter(lora_root / "random", Path(entries[ALIAS]["model"]))
    return "random"


async def test_an_adapters_name_works_as_a_model_and_is_heard(engine: Any, adapter: str) -> None:
    await engine.switch(ALIAS)
    base = text(await engine.answer(chat(ALIAS)))
    await engine.add_lora(ALIAS, "accent", adapter)
    assert engine.loras(ALIAS) == ("accent",)
    answer = await engine.answer(chat(ALIAS, model="accent"))
    assert answer.body["model"] == "accent"
    assert text(answer) != base
    await engine.switch("llama")
    await engine.switch(ALIAS)
    assert text(await engine.answer(chat(ALIAS, model="accent"))) == text(answer)
    assert text(await engine.answer(chat(ALIAS))) == base
    await engine.pin_lora(ALIAS, "accent")
    await engine.remove_lora(ALIAS, "accent")
    assert (await engine.answer(chat(ALIAS, model="accent"))).status == 404


@pytest.mark.parametrize(
    ("path", "reason"), [("../elsewhere", "not below"), ("nothing", "no adapter"), ("/etc", "not below")]
)
async def test_only_adapters_below_the_root_are_loaded(engine: Any, path: str, reason: str) -> None:
    with pytest.raises(LoraRefused, match=reason):
        await engine.add_lora(ALIAS, "stray", path)
    assert engine.loras(ALIAS) == ()


async def test_a_model_without_lora_refuses_adapters(engine: Any, adapter: str) -> None:
    with pytest.raises(LoraRefused):
        await engine.add_lora("llama", "accent", adapter)
    assert engine.loras("llama") == ()


async def test_an_adapter_that_is_not_there_cannot_be_removed(engine: Any) -> None:
    with pytest.raises(UnknownModel, match="nobody"):
        await engine.remove_lora(ALIAS, "nobody")
