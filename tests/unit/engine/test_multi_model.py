"""MultiModelEngine with its AsyncLLMs and its core replaced: what it asks of them, and what it knows afterwards."""

import asyncio
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from schemas.contexts import Tier
from service.engine.frontend.death import Death
from service.engine.frontend.early import Early
from service.engine.frontend.frontend import Frontend
from service.engine.frontend.multi_model import MultiModelEngine
from service.engine.frontend.performer import Performer
from service.engine.models.residency import Residency
from service.errors import SwitchFailed
from service.scheduling.memory import Budgets
from tests.support.engine_spec import until
from tests.support.waiting import PATIENCE_S

KEYS = {"llama": 0, "qwen": 1, "lynx": 2}
SIZES = {"weights": 40, "kv": 0, "host": 0}
ANSWER = {"stall_ms": 0.5, "phases_ms": {}, "memory": [0], "sizes": SIZES, "left": SIZES}


class Core:
    """A core whose commands answer at once, unless ``answers`` has a function for one."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []
        """What was asked of which model, in this order."""
        self.answers: dict[str, Callable[[], Any]] = {}

    async def answer(self, alias: str, command: str) -> Any:
        self.asked.append((alias, command))
        answer = self.answers.get(command, lambda: ANSWER)()
        return await answer if asyncio.iscoroutine(answer) else answer


class Client:
    """A model's client of the core."""

    core_engines = (b"the only one",)

    def __init__(self, alias: str, core: Core) -> None:
        self._alias, self._core = alias, core

    async def _call_utility_async(self, _method: str, command: str, _arguments: Any, *, engine: Any) -> Any:
        assert engine in self.core_engines
        return await self._core.answer(self._alias, command)


class LLM:
    """An AsyncLLM without requests that run; those that wait for more of their prompt are ``waiting``."""

    def __init__(self, alias: str, core: Core) -> None:
        self.alias, self._core = alias, core
        self.engine_core = Client(alias, core)
        self.output_processor = SimpleNamespace(request_states={}, external_req_ids={})
        self.asleep = False

    async def abort(self, ids: Any, internal: bool = False) -> None:
        for each in ids:
            self.output_processor.request_states.pop(each, None)

    async def sleep(self, _level: int, _mode: str) -> None:
        await self._core.answer(self.alias, "sleep")
        self.asleep = True

    async def wake_up(self, _tags: Any) -> None:
        await self._core.answer(self.alias, "wake_up")
        self.asleep = False

    async def is_sleeping(self) -> bool:
        return self.asleep


class Model(Frontend):
    """A frontend of such an AsyncLLM."""

    def __init__(self, alias: str, core: Core) -> None:
        self.alias, self.key, self.registry = alias, KEYS[alias], None
        self.llm, self.early = LLM(alias, core), Early()

    def adopt(self, settled: dict[str, Any]) -> None:
        """Nothing is settled."""


async def opened(tiers: Mapping[str, Tier], *, device: int | None = None, weights: int = 40) -> tuple[Any, Core]:
    """An engine of these models, the first of them active, and its core."""
    engine, core = MultiModelEngine(dict.fromkeys(tiers, "its arguments")), Core()
    engine._frontends = {alias: Model(alias, core) for alias in tiers}
    residency = Residency(engine._frontends, Budgets(device=device))
    parts = {
        "model_config": SimpleNamespace(model="/none", revision=None, max_model_len=256),
        "cache_config": SimpleNamespace(kv_cache_memory_bytes=0),
        "parallel_config": SimpleNamespace(world_size=1, data_parallel_size=1),
        "speculative_config": None,
    }
    answer = {"sizes": {**SIZES, "weights": weights}}
    for alias, tier in tiers.items():
        residency.add(alias, SimpleNamespace(**parts))
        residency.note(alias, Tier.RESIDENT, answer)
        residency.note(alias, tier, answer)
    engine._begin(next(iter(tiers)), residency, {"pids": (2,), **answer}, 1)
    engine._performers = Performer(
        engine._frontends,
        engine._catalog,
        processes=SimpleNamespace(stop=lambda _grace: None, seal=lambda value: value),  # type: ignore[arg-type]
        death=Death(engine._frontends),
        timeout_s=60.0,
        stuck_s=60.0,
    )
    return engine, core


def taken(engine: Any) -> int:
    """Bytes on the device, by the books."""
    residency = engine._residency
    return sum(residency.budgets.on_device(residency._holding(alias)) for alias in engine.tiers())


# --- sleeping and waking ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("level", "goes_on"), [(0, True), (1, False), (2, False)])
async def test_a_prompt_that_comes_in_parts_outlives_a_pause_that_leaves_the_kv_cache_alone(
    level: int, goes_on: bool
) -> None:
    engine, _ = await opened({"llama": Tier.RESIDENT})
    told: list[Any] = []
    waiting = SimpleNamespace(streaming_input=True, input_chunk_queue=None, queue=SimpleNamespace(put=told.append))
    engine.context("llama").output_processor.request_states["waiting"] = waiting
    await engine.sleep(level, "keep")
    assert (engine.get_num_unfinished_requests(), len(told)) == ((1, 0) if goes_on else (0, 1))


async def test_all_models_sleep_and_wake_and_what_was_parked_before_is_parked_again() -> None:
    engine, core = await opened({"llama": Tier.RESIDENT, "qwen": Tier.PARKED}, device=100, weights=60)
    await engine.sleep()
    assert engine.info("qwen").asleep
    assert await engine.wake_up()
    assert core.asked[-2:] == [("llama", "wake_up"), ("qwen", "wake_up")]
    assert engine.tiers() == {"llama": Tier.RESIDENT, "qwen": Tier.PARKED}
    assert not engine.info("qwen").asleep


async def test_a_model_whose_caller_gives_its_sleep_up_is_known_to_sleep() -> None:
    engine, core = await opened({"llama": Tier.RESIDENT, "qwen": Tier.RESIDENT})
    goes_on = asyncio.Event()
    core.answers["sleep"] = goes_on.wait
    asked = asyncio.create_task(engine.sleep(mode="wait", model="qwen"))
    await until(lambda: core.asked == [("qwen", "sleep")])
    asked.cancel()
    await asyncio.wait([asked])
    goes_on.set()
    await until(lambda: engine.context("qwen").asleep)
    await until(lambda: not engine._performer._tasks)
    assert engine.info("qwen").asleep


async def test_those_that_wake_make_room_one_after_another() -> None:
    engine, core = await opened({"lynx": Tier.RESIDENT, "llama": Tier.RESIDENT, "qwen": Tier.RESIDENT}, device=100)
    for alias in ("llama", "qwen"):
        await engine.sleep(model=alias)
    assert await engine.wake_up()
    assert core.asked[2:] == [("lynx", "wake_up"), ("llama", "wake_up"), ("llama", "park"), ("qwen", "wake_up")]
    assert engine.tiers() == {"lynx": Tier.RESIDENT, "llama": Tier.PARKED, "qwen": Tier.RESIDENT}
    assert taken(engine) == 80


async def test_a_sleeping_model_whose_memory_a_preload_brought_back_counts() -> None:
    engine, _ = await opened({"llama": Tier.RESIDENT, "qwen": Tier.PARKED}, device=100)
    await engine.sleep(model="qwen")
    await engine.preload("qwen")
    assert (engine.info("qwen").tier, engine.info("qwen").asleep, taken(engine)) == (Tier.RESIDENT, True, 80)
    await engine.park("qwen")
    assert (engine.info("qwen").tier, taken(engine)) == (Tier.PARKED, 40)


async def test_a_paused_model_goes_on_while_a_switch_waits_for_its_requests() -> None:
    engine, _ = await opened({"llama": Tier.RESIDENT, "qwen": Tier.RESIDENT})
    requests = engine.context("llama").output_processor.request_states
    requests["running"] = SimpleNamespace(streaming_input=False)
    await engine.sleep(0, "keep")
    switch = asyncio.create_task(engine.switch_model("qwen", drain_timeout=PATIENCE_S))
    await until(lambda: engine.active == "qwen")
    assert await engine.wake_up()
    requests.clear()
    assert (await switch)["switched"]


# --- bringing a model in beside the active one -----------------------------------------------------------------------


async def returning(engine: Any, core: Core) -> tuple[asyncio.Task[Any], asyncio.Future[bool]]:
    """A parked model's preload that is under way, and what ends it."""
    arrival: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def arrived() -> bool:
        return await arrival

    core.answers |= {"warm": lambda: True, "warmed": arrived}
    preload = asyncio.create_task(engine.preload("qwen"))
    await until(lambda: ("qwen", "warmed") in core.asked)
    return preload, arrival


async def test_a_return_that_fails_takes_no_room_even_where_nobody_waits_for_it_any_more() -> None:
    engine, core = await opened({"llama": Tier.RESIDENT, "qwen": Tier.PARKED})
    preload, arrival = await returning(engine, core)
    assert taken(engine) == 80
    preload.cancel()
    await asyncio.wait([preload])
    arrival.set_exception(RuntimeError("out of memory"))
    await until(lambda: taken(engine) == 40)
    assert engine.info("qwen").tier is Tier.PARKED


async def test_a_return_that_fails_as_it_is_settled_takes_no_room() -> None:
    engine, core = await opened({"llama": Tier.RESIDENT, "qwen": Tier.PARKED, "lynx": Tier.PARKED}, device=100)
    preload, arrival = await returning(engine, core)

    def fails() -> Any:
        raise RuntimeError("out of memory")

    core.answers["preload"] = fails
    arrival.set_result(True)
    with pytest.raises(SwitchFailed, match="Failed to preload qwen: out of memory"):
        await preload
    assert taken(engine) == 40
    await engine.pin("qwen")
    core.answers = {"warm": lambda: False}
    assert (await engine.preload("lynx")).tier is Tier.RESIDENT
    assert ("qwen", "park") not in core.asked
