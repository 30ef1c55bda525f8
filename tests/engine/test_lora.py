"""LoRA adapters by name: made here, loaded into a running engine, heard in the text."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from service.errors import ConfigError, GearshiftError, LoraRefused, NotContinued, UnknownModel
from service.models_file import Scheduling
from tests.engine.test_continuing import check
from tests.support.engine_spec import broken_off, chat, comparable, running, text
from tests.support.volume import shown

pytestmark = pytest.mark.engine

ALIAS = "tuned"
"""The alias that takes adapters: the same weights as ``llama``."""


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


@pytest.mark.parametrize("away", shown(["frozen", "parked", "asleep", "dropped"], "frozen", "dropped"))
async def test_an_adapter_is_still_there_when_its_model_comes_back(engine: Any, adapter: str, away: str) -> None:
    await engine.switch(ALIAS)
    base = text(await engine.answer(chat(ALIAS)))
    await engine.add_lora(ALIAS, "accent", adapter)
    expected = text(await engine.answer(chat(ALIAS, model="accent", max_tokens=100)))
    call = chat(ALIAS, model="accent", max_tokens=100)
    interrupted = None if away == "dropped" else await running(engine, call)
    await engine.switch("llama")
    if away == "parked":
        await engine.park(ALIAS)
    if away == "asleep":
        await engine.sleep(1, ALIAS)
        await engine.wake(ALIAS)
    if away == "dropped":
        await engine.drop(ALIAS)
    await engine.switch(ALIAS)
    assert list(await engine.multi.list_loras(model=ALIAS)) != []
    if interrupted is not None:
        assert text(await interrupted) == expected
    again = text(await engine.answer(chat(ALIAS, model="accent")))
    assert expected.startswith(again)
    assert again != base == text(await engine.answer(chat(ALIAS)))
    await engine.remove_lora(ALIAS, "accent")


@pytest.mark.parametrize("away", ["parked", "asleep"])
async def test_what_is_asked_of_adapters_while_their_model_is_away_is_done_when_it_is_back(
    engine: Any, adapter: str, away: str
) -> None:
    """Where its weights leave the device, nothing may be written to where they were."""

    async def go() -> None:
        await engine.switch("llama")
        await (engine.park(ALIAS) if away == "parked" else engine.sleep(1, ALIAS))

    async def come() -> None:
        if away == "asleep":
            await engine.wake(ALIAS)
        await engine.switch(ALIAS)

    await engine.switch(ALIAS)
    base = text(await engine.answer(chat(ALIAS)))
    await go()
    await engine.add_lora(ALIAS, "accent", adapter)
    assert engine.loras(ALIAS) == ("accent",)
    assert not list(await engine.multi.list_loras(model=ALIAS))
    await come()
    assert text(await engine.answer(chat(ALIAS, model="accent"))) != base
    await go()
    await engine.remove_lora(ALIAS, "accent")
    assert list(await engine.multi.list_loras(model=ALIAS))
    await come()
    assert not list(await engine.multi.list_loras(model=ALIAS))
    assert (await engine.answer(chat(ALIAS, model="accent"))).status == 404
    assert text(await engine.answer(chat(ALIAS))) == base


async def test_what_an_adapter_has_begun_to_say_it_goes_on_with_and_nobody_else(engine: Any, adapter: str) -> None:
    await engine.switch(ALIAS)
    await engine.add_lora(ALIAS, "accent", adapter)
    call = chat(ALIAS, model="accent", max_tokens=48)
    await check(engine, call)
    progress = await broken_off(engine, call)
    with pytest.raises(NotContinued, match="prompt is another"):
        await engine.answer(replace(call, body={**call.body, "model": ALIAS}), progress=progress)
    await engine.remove_lora(ALIAS, "accent")
    await engine.add_lora(ALIAS, "accent", adapter)  # with another number of vLLM's
    whole = await engine.answer(call)
    again = await engine.answer(call, progress=progress)
    assert (again.continued, comparable(again.body)) == ((progress.tokens,), comparable(whole.body))
    await engine.remove_lora(ALIAS, "accent")


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


async def test_an_adapter_that_went_missing_fails_its_own_requests_and_not_its_model(
    engine: Any, adapter: str, lora_root: Path
) -> None:
    await engine.switch(ALIAS)
    base = text(await engine.answer(chat(ALIAS)))
    shutil.copytree(lora_root / adapter, lora_root / "lent")
    await engine.add_lora(ALIAS, "accent", "lent")
    await engine.switch("llama")
    await engine.drop(ALIAS)
    shutil.rmtree(lora_root / "lent")
    await engine.switch(ALIAS)
    assert text(await engine.answer(chat(ALIAS))) == base
    with pytest.raises(LoraRefused):
        await engine.pin_lora(ALIAS, "accent")
    await engine.remove_lora(ALIAS, "accent")
    assert engine.loras(ALIAS) == ()


async def test_an_adapter_of_models_yaml_that_is_not_there_is_named_before_anything_is_changed(engine: Any) -> None:
    before = engine._models
    spec = replace(before.models[ALIAS], scheduling=Scheduling(loras={"accent": "nowhere"}))
    with pytest.raises(ConfigError, match=rf"models.{ALIAS}.loras.accent: no adapter at nowhere"):
        await engine.reload(replace(before, models={**before.models, ALIAS: spec}))
    assert engine._models is before


async def test_an_adapter_that_is_not_there_cannot_be_removed(engine: Any) -> None:
    with pytest.raises(UnknownModel, match="nobody"):
        await engine.remove_lora(ALIAS, "nobody")


async def test_adapters_of_a_model_whose_arguments_are_wrong_are_refused_and_the_engine_goes_on(
    engine: Any, adapter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of one that was set aside at the start; a pin is asked for again at each start of a worker."""
    configs = engine.multi._catalog.configs
    monkeypatch.delitem(configs, "tuned")
    monkeypatch.setitem(engine.multi._catalog.broken, "tuned", ValueError("no such argument"))
    with pytest.raises(GearshiftError, match="no such argument"):
        await engine.pin_lora(ALIAS, "accent")
    assert (await engine.answer(chat("llama"))).status == 200
