"""When the workers hear of a switch: with what they are asked next, and not before; and what if they can't follow."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from schemas.contexts import Tier
from service.platforms.cpu import resident_bytes
from tests.support.adapters import make_adapter
from tests.support.context_spec import use_all_kv_cache
from tests.support.faults import broken, failed, mended
from tests.support.greedy import PROMPT, Greedy, alone, greedy, usual

pytestmark = pytest.mark.engine
ALWAYS = 1 << 30


def watch_seatings(_worker: Any) -> None:
    """From here on, keep how often a model is seated. Called in the workers."""
    from service.platforms import current

    vars(current())["seatings"] = seatings = []
    vars(current())["enter"] = seatings.append


def seatings(_worker: Any) -> int:
    from service.platforms import current

    return len(vars(current())["seatings"])


def model_of(worker: Any) -> str:
    return str(worker.vllm_config.model_config.model)


def known_requests(worker: Any) -> int:
    return len(worker.model_runner.requests)


@pytest.fixture
async def workers(multi: Any) -> AsyncIterator[Any]:
    """The engine, whose workers are as they were afterwards."""
    yield multi
    await multi.switch("llama")
    await multi.collective_rpc(mended("enter"))


async def test_switches_without_requests_ask_the_workers_nothing_and_the_next_step_seats_once(workers: Any) -> None:
    await greedy(workers, "llama")
    await workers.collective_rpc(watch_seatings)
    for alias in ("qwen", "lynx", "llama") * 3:
        await workers.switch(alias)
    assert await workers.collective_rpc(seatings) == [0]
    await workers.switch("qwen")
    for _ in range(3):
        await greedy(workers)
    assert await workers.collective_rpc(seatings) == [1]


@pytest.mark.delicate
async def test_a_model_that_the_workers_still_have_seated_can_be_parked(multi: Any) -> None:
    expected = await usual(multi, "qwen"), await usual(multi, "llama", tokens=150)
    await use_all_kv_cache(multi, "llama")
    request = Greedy(multi, "llama", PROMPT, 150)
    await request.has(20)
    await multi.switch("qwen")
    before = sum(map(resident_bytes, multi.worker_pids))
    assert (await multi.park("llama")).tier is Tier.PARKED
    assert before - sum(map(resident_bytes, multi.worker_pids)) > 50 << 20
    assert await greedy(multi) == expected[0]
    await multi.switch("llama")
    assert await request.tokens() == expected[1]


async def test_a_model_that_the_workers_still_have_seated_can_be_dropped(multi: Any) -> None:
    expected = await usual(multi, "qwen"), await usual(multi, "lynx")
    await multi.switch("qwen")
    assert (await multi.drop("lynx")).tier is Tier.DROPPED
    assert await greedy(multi) == expected[0]
    assert await alone(multi, "lynx") == expected[1]


async def test_a_model_that_the_workers_still_have_seated_can_be_brought_back_beside_the_active_one(multi: Any) -> None:
    expected = await usual(multi, "qwen", tokens=100), await usual(multi, "llama")
    await multi.switch("qwen")
    await multi.park("llama")
    running = Greedy(multi, "qwen", PROMPT, 100)
    await multi.preload("llama")
    assert await running.tokens() == expected[0]
    assert await alone(multi, "llama") == expected[1]


@pytest.mark.long
async def test_a_model_that_was_just_loaded_beside_the_active_one_leaves_nothing_when_it_is_dropped(multi: Any) -> None:
    expected = await usual(multi, "llama")
    sizes = []
    for _ in range(4):
        await multi.drop("lynx")
        sizes.append(sum(map(resident_bytes, multi.worker_pids)))
        await multi.preload("lynx")
    assert sizes[-1] - sizes[1] < 8 << 20
    assert await greedy(multi) == expected


async def test_what_is_asked_after_a_switch_reaches_the_new_model(multi: Any, tmp_path: Path) -> None:
    paths = {}
    for alias in ("llama", "qwen"):
        await alone(multi, alias)
        (paths[alias],) = await multi.collective_rpc(model_of)
    assert paths["llama"] != paths["qwen"]
    for alias in ("llama", "qwen", "llama"):
        await multi.switch(alias)
        assert await multi.collective_rpc(model_of) == [paths[alias]]
    make_adapter(tmp_path / "adapter", Path(paths["llama"]))
    await multi.preload("tuned")
    await alone(multi, "llama")
    await multi.switch("tuned")
    assert await multi.add_lora(_lora(tmp_path / "adapter"))
    await multi.switch("llama")
    assert set(await multi.list_loras(model="tuned")) == {7}
    await multi.remove_lora(7, model="tuned")


def _lora(path: Path) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest("adapter", 7, str(path))


# --- a worker can't seat the model ---


async def test_a_fault_that_passes_costs_no_request_anything(workers: Any) -> None:
    expected = await usual(workers, "qwen"), await usual(workers, "llama", tokens=100)
    await workers.collective_rpc(broken("enter", times=1, key=workers._frontend("qwen").key))
    request = Greedy(workers, "llama", PROMPT, 100)
    await request.has(10)
    assert await alone(workers, "qwen") == expected[0]
    assert await workers.collective_rpc(failed) == [1]
    await workers.switch("llama")
    assert await request.tokens() == expected[1]


@pytest.mark.parametrize("loaded", [False, True], ids=["idle", "with a frozen request"])
async def test_requests_of_a_model_that_can_not_be_seated_end_with_an_error_and_the_others_go_on(
    workers: Any, loaded: bool
) -> None:
    expected = await usual(workers, "qwen"), await usual(workers, "llama", tokens=100)
    doomed = []
    if loaded:
        await workers.switch("qwen")
        doomed.append(Greedy(workers, "qwen", PROMPT, 900))
        await doomed[0].has(10)
        await workers.switch("llama")
    request = Greedy(workers, "llama", PROMPT, 100)
    await request.has(10)
    await workers.collective_rpc(broken("enter", times=ALWAYS, key=workers._frontend("qwen").key))
    await workers.switch("qwen")
    doomed += [Greedy(workers, "qwen", PROMPT, 24) for _ in range(3)]
    for each in doomed:
        await each.tokens()
        assert each.finish_reason == "error"
    assert not workers.errored
    await workers.check_health()
    # One more, and with it two more attempts: a core that has nothing to run does not go on trying.
    before = await workers.collective_rpc(failed, model="llama")
    again = Greedy(workers, "qwen", PROMPT, 24)
    await again.tokens()
    assert again.finish_reason == "error"
    assert await workers.collective_rpc(failed, model="llama") == [before[0] + 2]
    # What asks for the model is told why.
    with pytest.raises(Exception, match="no memory to enter"):
        await workers.collective_rpc(model_of, model="qwen")
    # What serves others is not touched.
    assert len(await alone(workers, "lynx")) == 24
    await workers.switch("llama")
    assert await request.tokens() == expected[1]
    await workers.collective_rpc(mended("enter"))
    assert await alone(workers, "qwen") == expected[0]
    assert await workers.collective_rpc(known_requests, model="qwen") == [0]


@pytest.mark.long
async def test_other_models_are_parked_and_dropped_and_loaded_while_the_active_one_can_not_be_seated(
    workers: Any,
) -> None:
    expected = await usual(workers, "lynx"), await alone(workers, "llama")
    await workers.collective_rpc(broken("enter", times=ALWAYS, key=workers._frontend("qwen").key))
    await workers.switch("qwen")
    assert await greedy(workers) == ()
    for lower in (workers.park, workers.drop):
        await lower("lynx")
        await workers.preload("lynx")
    assert await alone(workers, "lynx") == expected[0]
    await workers.switch("qwen")
    assert await greedy(workers) == ()
    await workers.drop("lynx")
    assert await alone(workers, "lynx") == expected[0]
    assert await alone(workers, "llama") == expected[1]


async def test_a_model_that_is_still_seated_goes_although_the_active_one_can_not_be_seated(workers: Any) -> None:
    expected = await usual(workers, "llama", tokens=100)
    request = Greedy(workers, "llama", PROMPT, 100)
    await request.has(10)
    await workers.collective_rpc(broken("enter", times=ALWAYS, key=workers._frontend("qwen").key))
    await workers.switch("qwen")
    assert (await workers.park("llama")).tier is Tier.PARKED
    await workers.switch("llama")
    assert await request.tokens() == expected
