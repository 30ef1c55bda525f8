"""LoRA adapters over control and in models.yaml: added, listed, pinned and removed in a worker that serves."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from schemas.control import Control, LoraAdd, LoraList, LoraPin, LoraRemove
from schemas.status import Status, StatusState
from service.client import RequestFailed
from service.models_file import Scheduling
from tests.support.adapters import make_adapter
from tests.support.doors import Doors, open_doors, with_models

pytestmark = [pytest.mark.engine, pytest.mark.broker, pytest.mark.long]

BASE = "tuned"
NAMES = ("poet", "clerk", "cook")
HELLO: Any = [{"role": "user", "content": "Tell me about your day."}]


@pytest.fixture(scope="module")
def adapters(lora_root: Path, models_path: Path) -> tuple[str, ...]:
    """Three adapters, by their paths below the root."""
    base = Path(json.loads(models_path.read_text())["models"][BASE]["model"])
    names = ("events-one", "events-two", "events-three")
    for name, rank in zip(names, (4, 8, 2), strict=True):
        make_adapter(lora_root / name, base, rank=rank)
    return names


@pytest.fixture
async def doors(engine: Any, broker: Any) -> AsyncIterator[Doors]:
    async with open_doors(engine, broker.bootstrap) as opened:
        yield opened
    for name in engine.loras(BASE):
        await engine.remove_lora(BASE, name)


async def control(doors: Doors, event: Control) -> Status:
    (status,) = await doors.bus.control(event, timeout_s=60)
    return status


async def said(doors: Doors, model: str) -> str:
    """A model's greedy words, the same at both doors."""
    asked: Any = {"model": model, "messages": HELLO, "max_tokens": 24, "temperature": 0}
    over_bus = await doors.bus.chat(**asked)
    over_http = await doors.openai.chat.completions.create(**asked)
    assert over_bus.model == over_http.model == model
    assert over_bus.choices[0].message.content == over_http.choices[0].message.content
    return str(over_bus.choices[0].message.content)


async def listed(doors: Doors) -> dict[str, Any]:
    """Adapters in the list of models, with their base models."""
    models = (await doors.http.get("/v1/models")).json()["data"]
    return {model["id"]: model["parent"] for model in models if model["parent"] is not None}


async def test_an_adapter_is_added_heard_listed_and_removed_by_events(doors: Doors, adapters: tuple[str, ...]) -> None:
    plain = await said(doors, BASE)
    for name, path in zip(NAMES, adapters, strict=True):
        added = await control(doors, LoraAdd(model=BASE, name=name, path=path))
        assert added.state is StatusState.COMPLETED, added.reason
    words = {name: await said(doors, name) for name in NAMES}
    assert len({plain, *words.values()}) == 4
    answer = (await control(doors, LoraList(model=BASE))).answer
    assert answer == {"loras": {BASE: list(NAMES)}}
    assert await listed(doors) == dict.fromkeys(NAMES, BASE)
    for model in ("llama", BASE, "qwen"):
        await doors.bus.switch(model)
    assert {name: await said(doors, name) for name in NAMES} == words
    assert await said(doors, BASE) == plain
    for name in NAMES:
        removed = await control(doors, LoraRemove(model=BASE, name=name))
        assert removed.state is StatusState.COMPLETED
    with pytest.raises(RequestFailed, match="poet"):
        await doors.bus.chat(model="poet", messages=HELLO)
    with pytest.raises(openai.NotFoundError):
        await doors.openai.chat.completions.create(model="poet", messages=HELLO)
    assert await listed(doors) == {}


async def test_a_pinned_adapter_stays_in_memory_and_leaves_room_for_the_others(
    doors: Doors, adapters: tuple[str, ...]
) -> None:
    for name, path in zip(NAMES, adapters, strict=True):
        await control(doors, LoraAdd(model=BASE, name=name, path=path))
    (poet, *_) = words = [await said(doors, name) for name in NAMES]
    held = set(await doors.engine.multi.list_loras(model=BASE))
    assert len(held) == 2, "there is room for two: the first one has gone"
    pinned = await control(doors, LoraPin(model=BASE, name="poet"))
    assert pinned.state is StatusState.COMPLETED, pinned.reason
    (first,) = set(await doors.engine.multi.list_loras(model=BASE)) - held
    for _ in range(2):
        assert [await said(doors, name) for name in NAMES[1:]] == words[1:]
        assert first in await doors.engine.multi.list_loras(model=BASE)
    assert await said(doors, "poet") == poet
    refused = await control(doors, LoraPin(model=BASE, name="clerk"))
    assert refused.state is StatusState.REJECTED
    assert "set max_cpu_loras to 3" in refused.reason


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"path": "../outside"}, "not below lora_root"),
        ({"path": "nothing"}, "no adapter"),
        ({"model": "lama"}, "llama"),
        ({"model": "llama"}, "set enable_lora"),
        ({"name": "qwen"}, "qwen is a model"),
    ],
)
async def test_an_adapter_that_can_not_be_taken_is_refused_with_the_reason(
    doors: Doors, adapters: tuple[str, ...], changed: dict[str, str], says: str
) -> None:
    event = LoraAdd(**{"model": BASE, "name": "poet", "path": adapters[0], **changed})
    status = await control(doors, event)
    assert status.state in {StatusState.FAILED, StatusState.REJECTED}
    assert says in status.reason
    assert await listed(doors) == {}


async def test_adapters_in_models_yaml_come_and_go_with_a_reload(doors: Doors, adapters: tuple[str, ...]) -> None:
    plain = await said(doors, BASE)
    base = doors.models.now.models[BASE]
    first, second = (replace(base, scheduling=Scheduling(loras={"poet": path})) for path in adapters[:2])
    async with with_models(doors, first):
        assert await listed(doors) == {"poet": BASE}
        words = await said(doors, "poet")
        async with with_models(doors, second):
            others = await said(doors, "poet")
        assert await said(doors, "poet") == words
    assert len({plain, words, others}) == 3
    assert await listed(doors) == {}
