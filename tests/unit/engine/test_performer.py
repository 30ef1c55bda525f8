"""How long a core may be silent over a load: as long as loading takes, and longer once it warms the model up."""

import asyncio
import gc
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from service.engine.frontend.death import Death
from service.engine.frontend.performer import Performer
from service.engine.models.changes import Ask, Finish, LetGo, Step, Wake
from service.platforms import current
from tests.support.engine_spec import until
from tests.support.virtual_time import virtual_time

LOAD_S, STUCK_S, WARM_UP_S = 600.0, 120.0, 4 * 3600.0


class Core:
    """A frontend whose core begins to warm up and answers a load at these seconds; None: never."""

    key = 0

    def __init__(self, *, warms_up: float | None, answers: float | None) -> None:
        self._warms_up, self._answers = warms_up, answers
        self.asked: list[str] = []

    async def ask(self, command: str, *_: Any) -> None:
        self.asked.append(command)
        await _after(self._warms_up)

    async def perform(self, step: Any, *_: Any, **__: Any) -> str:
        self.asked.append(step.command if isinstance(step, Ask) else type(step).__name__)
        await _after(self._answers)
        return "loaded"

    def fail(self, _error: BaseException) -> None:
        """The engine is dead."""


async def _after(seconds: float | None) -> None:
    await (asyncio.sleep(seconds) if seconds is not None else asyncio.get_running_loop().create_future())


def performed(core: Core, *, load: bool = True, step: Step | None = None) -> tuple[Any, float]:
    """What a step comes to, and after how many seconds."""
    step = step or Ask("a", "preload" if load else "park", load=load)

    async def perform() -> tuple[Any, float]:
        loop, frontends = asyncio.get_running_loop(), {"a": core}
        given: dict[str, Any] = {
            "processes": SimpleNamespace(stop=lambda _grace: None),
            "death": Death(frontends),  # type: ignore[arg-type]
        }
        catalog = SimpleNamespace(loading=lambda _alias: "its config")
        performer = Performer(frontends, catalog, **given, timeout_s=LOAD_S, stuck_s=STUCK_S)  # type: ignore[arg-type]

        def change() -> Any:
            return (yield step)

        ticking = asyncio.create_task(_tick())  # processes are stopped in a thread, for which no time passes
        try:
            return await performer.make(change, "change"), loop.time() - 1000.0
        except EngineDeadError as error:
            return error.args[-1], loop.time() - 1000.0
        finally:
            ticking.cancel()

    with virtual_time() as loop:
        return loop.run_until_complete(perform())


async def _tick() -> None:
    while True:  # noqa: ASYNC110 - it is the clock
        await asyncio.sleep(1)


@pytest.fixture(autouse=True)
def _platform_that_warms_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current()), "warm_up_s", WARM_UP_S)


def test_a_core_that_never_says_that_it_warms_up_has_no_more_time_than_loading_takes() -> None:
    said, _ = performed(Core(warms_up=None, answers=None))
    assert said == "the engine core is stuck: it neither loaded a model nor gave it up in 720 s"


def test_one_that_warms_up_has_the_time_that_this_takes_from_then_on() -> None:
    core = Core(warms_up=500.0, answers=10_000.0)
    assert performed(core) == ("loaded", 10_000.0)
    assert core.asked == ["warming", "preload"], "behind the load it would be heard when that is over"


def test_one_that_is_stuck_in_its_warm_up_is_given_up_after_that() -> None:
    said, _ = performed(Core(warms_up=700.0, answers=None))
    assert said.endswith(f"in {LOAD_S + STUCK_S + WARM_UP_S:.0f} s")


def test_what_loads_nothing_is_not_waited_for_longer() -> None:
    core = Core(warms_up=0.0, answers=None)
    said, _ = performed(core, load=False)
    assert said.endswith("in 720 s")
    assert core.asked == ["park"]


def test_a_wake_up_that_is_never_answered_ends_as_a_load_does() -> None:
    said, took = performed(Core(warms_up=None, answers=None), step=Wake("a", None))
    assert (said, took) == ("the engine core is stuck: it has not answered a in 720 s", LOAD_S + STUCK_S)
    assert performed(Core(warms_up=500.0, answers=10_000.0), step=Wake("a", None)) == ("loaded", 10_000.0)


def test_so_does_a_profile_whose_end_is_never_answered() -> None:
    said, took = performed(Core(warms_up=None, answers=None), step=LetGo("a"))
    assert (said, took) == ("the engine core is stuck: it has not answered a in 720 s", LOAD_S + STUCK_S)


def test_requests_that_are_waited_for_have_the_time_that_their_caller_gave_them() -> None:
    core = Core(warms_up=None, answers=10_000.0)
    assert performed(core, step=Finish("a", frozenset(), 10_000.0)) == ("loaded", 10_000.0)


async def test_a_caller_whose_change_ends_with_the_engine_is_told_so_and_not_that_it_was_cancelled() -> None:
    """A TaskGroup would take a CancelledError of one of its tasks for an end that was asked for, and say nothing."""
    core = Core(warms_up=None, answers=None)
    given: dict[str, Any] = {"catalog": None, "processes": None, "death": Death({})}
    performer = Performer({"a": core}, **given, timeout_s=LOAD_S, stuck_s=STUCK_S)  # type: ignore[dict-item]

    def change() -> Any:
        return (yield Ask("a", "park"))

    calls = [asyncio.create_task(performer.make(change, "a change")) for _ in range(2)]
    gone = asyncio.create_task(performer.make(change, "another one"))
    await until(lambda: core.asked == ["park"])
    gone.cancel()
    performer.cancel()
    for call in calls:
        with pytest.raises(EngineDeadError, match="the engine was shut down"):
            await call
    with pytest.raises(asyncio.CancelledError):
        await gone


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
async def test_nothing_is_begun_for_a_core_where_the_engine_ends_before_it_is_asked() -> None:
    """Python complains of a coroutine that nobody awaits."""
    for turns in range(6):
        core = Core(warms_up=None, answers=None)
        given: dict[str, Any] = {"processes": None, "death": Death({})}
        catalog: Any = SimpleNamespace(loading=lambda _alias: "its config")
        performer = Performer({"a": core}, catalog, **given, timeout_s=LOAD_S, stuck_s=STUCK_S)  # type: ignore[dict-item]

        def change() -> Any:
            return (yield Ask("a", "preload", load=True))

        call = asyncio.create_task(performer.make(change, "a change"))
        for _ in range(turns):
            await asyncio.sleep(0)
        performer.cancel()
        call.cancel()
        await asyncio.wait([call])
        gc.collect()


async def test_a_change_that_was_given_up_before_its_turn_is_not_made_and_one_that_has_begun_is() -> None:
    core = Core(warms_up=None, answers=0.0)
    given: dict[str, Any] = {"catalog": None, "processes": None, "death": Death({})}
    performer = Performer({"a": core}, **given, timeout_s=LOAD_S, stuck_s=STUCK_S)  # type: ignore[dict-item]
    go_on = asyncio.Event()

    def change(command: str) -> Any:
        return (yield Ask("a", command))

    async def hold() -> None:
        async with performer._lock:
            await go_on.wait()

    holding = asyncio.create_task(hold())
    await asyncio.sleep(0)
    given_up, waiting = (
        asyncio.create_task(performer.make(lambda each=each: change(each), each)) for each in ("given up", "waiting")
    )
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    given_up.cancel()
    go_on.set()
    await asyncio.gather(holding, waiting)
    with pytest.raises(asyncio.CancelledError):
        await given_up
    assert core.asked == ["waiting"]
    core._answers = 0.01
    begun = asyncio.create_task(performer.make(lambda: change("begun"), "begun"))
    await until(lambda: core.asked[-1] == "begun")
    begun.cancel()
    await performer.make(lambda: change("next"), "next")
    assert core.asked == ["waiting", "begun", "next"]
