"""An engine core's contexts with vLLM's core and executor replaced: what a load gives them, and how long they have."""

import inspect
import queue
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.v1.engine.core import EngineCore

from service.engine.core import coming
from service.engine.core import contexts as module_of_contexts
from service.engine.core import laps as module
from service.engine.core.context import Context, Media
from service.engine.core.contexts import Contexts
from service.engine.core.seating import WorkerFailed
from service.engine.versions import vllm_core
from service.engine.worker import calls
from service.platforms import current
from tests.support.waiting import PATIENCE_S

SIZES = {"weights": 40, "kv": 60, "kv_kept": 0, "kv_block": 0, "overhead": 0, "host": 0, "copies": 0, "parks": True}
SPEC, WARM_UP = "get_kv_cache_spec", "compile_or_warm_up_model"
WARM_UP_TAKES_S = 500.0


class Executor:
    """vLLM's executor of one worker, which answers at once, except that warming up takes its time."""

    parallel_config = SimpleNamespace(world_size=1)
    supported_tasks = ("generate",)

    def __init__(self) -> None:
        self.now = 1000.0
        self.had: list[tuple[str, float | None]] = []
        """The worker's methods that were called, and within how many seconds each had to answer."""
        self.kept: list[list[int]] = []
        """The blocks that were to outlive each parking."""
        self.forgotten: list[int] = []
        self.sizes = SIZES

    def collective_rpc(self, method: Any, _timeout: Any = None, args: Any = (), *_: Any, **how: Any) -> Any:
        if method is calls.seat and how.get("non_block"):
            return SimpleNamespace(result=lambda: [None])
        if method is calls.park:
            self.kept.append(args[2])
        if method is calls.forget:
            self.forgotten.append(args[0])
        if method is calls.call:
            self.had.append((args[1], args[4]))
            self.now += WARM_UP_TAKES_S if args[1] == WARM_UP else 1.0
        answers = {calls.load: {"runner": 1.0}, calls.go_on: (None,), calls.memory: 100}
        answers |= dict.fromkeys((calls.sizes, calls.park, calls.wake), self.sizes)
        return [answers.get(method)]


class Core:
    """The live core, as far as contexts look at it."""

    log_stats = False

    def __init__(self, finished: dict[int, set[str]] | None) -> None:
        self.model_executor, self.vllm_config = Executor(), config()
        self.scheduler = SimpleNamespace(finished_req_ids_dict=finished)
        self.batch_queue = None
        self.input_queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.output_queue: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def add_request(self, request: Any, _wave: int) -> None:
        raise ValueError(f"{request.request_id} is no request of this model's")


def config() -> Any:
    made = VllmConfig()
    made.model_config = SimpleNamespace(max_model_len=256)  # type: ignore[assignment]
    return made


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What vLLM's cores are built with, by the names of its parameters; building one asks the worker four times."""
    built: list[dict[str, Any]] = []
    signature = inspect.signature(EngineCore.__init__)

    def build(core: Any, *arguments: Any) -> None:
        bound = signature.bind(core, *arguments)
        bound.apply_defaults()
        built.append(bound.arguments)
        executor = built[-1]["executor_class"](built[-1]["vllm_config"])
        core.aborts_queue, core.get_supported_tasks = None, lambda: executor.supported_tasks
        for method in (SPEC, WARM_UP, WARM_UP, SPEC):
            executor.collective_rpc(method)

    monkeypatch.setattr(EngineCore, "__init__", build)
    return built


def opened(core: Core) -> tuple[Contexts, Executor]:
    """The contexts of a core, and its own executor, of which the core has a view from now on."""
    executor = core.model_executor
    return Contexts(core), executor


@pytest.mark.parametrize("finished", [None, {}])
def test_a_further_models_core_tells_what_has_finished_where_the_first_ones_does(
    given: list[dict[str, Any]], finished: dict[int, set[str]] | None
) -> None:
    """A client of several cores counts by it; one that is not told counts requests as running for ever."""
    contexts, _ = opened(Core(finished))
    contexts.preload(1, (config(), {}))
    assert [each["include_finished_set"] for each in given] == [finished is not None]


@pytest.mark.delicate
def test_warming_up_has_a_time_of_its_own_which_is_not_counted_as_loading(
    given: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts, executor = opened(Core(None))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: executor.now, perf_counter=lambda: 0.0))
    monkeypatch.setattr(type(current()), "warm_up_s", 600.0)
    contexts.preload(1, (config(), {}), 10.0)
    assert given
    assert executor.had == [(SPEC, 10.0), (WARM_UP, 609.0), (WARM_UP, 609.0), (SPEC, 9.0)]


@pytest.mark.parametrize(("warm_up_s", "asked_before"), [(600.0, [SPEC]), (0.0, [SPEC, WARM_UP, WARM_UP, SPEC])])
def test_a_load_tells_once_when_it_begins_to_warm_up_or_when_it_is_over(
    given: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, warm_up_s: float, asked_before: list[str]
) -> None:
    contexts, executor = opened(Core(None))
    monkeypatch.setattr(type(current()), "warm_up_s", warm_up_s)
    told: list[list[str]] = []
    contexts.commands["warming"]().add_done_callback(lambda _: told.append([method for method, _ in executor.had]))
    contexts.preload(1, (config(), {}), 1e6)
    assert given
    assert told == [asked_before]


def test_whoever_waited_for_a_warm_up_that_never_came_is_told_where_the_next_one_asks() -> None:
    contexts, _ = opened(Core(None))
    first, second = contexts.warming(), contexts.warming()
    assert (first.done(), second.done()) == (True, False)
    with pytest.raises(LookupError):
        contexts.preload(1, None)
    assert not second.done()


@pytest.mark.delicate
def test_where_a_platform_does_not_warm_up_apart_a_load_that_takes_too_long_is_given_up(
    given: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts, executor = opened(Core(None))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: executor.now, perf_counter=lambda: 0.0))
    with pytest.raises(TimeoutError, match="did not load in time"):
        contexts.preload(1, (config(), {}), 10.0)
    assert given
    assert executor.had == [(SPEC, 10.0), (WARM_UP, 9.0)]
    assert not contexts.of(1).loaded


# --- a load beside the active model, whose slices are one each -------------------------------------------------------


ASIDE = pytest.mark.parametrize(
    "environment", [{}, {"GEARSHIFT_NOBODY_READS": "1"}], ids=["in a thread", "for which variables change"]
)


@pytest.fixture
def sliced(given: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> tuple[Contexts, Executor]:
    """Contexts that load in slices, with the executor's clock, on a platform that has ten minutes to warm up."""
    contexts, executor = opened(Core(None))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: executor.now, perf_counter=lambda: 0.0))
    monkeypatch.setattr(type(current()), "warm_up_s", 600.0)
    monkeypatch.setattr(type(current()), "slices", True)
    monkeypatch.setattr(vllm_core, "slices", lambda *_: True)
    assert not given
    return contexts, executor


def arrived(contexts: Contexts) -> None:
    """As a frontend waits: an answer that comes later is waited for, and False is asked again."""
    while True:
        answer = contexts.warmed(1)
        while isinstance(answer, Future) and not answer.done():
            contexts.go_on(idle=True)
        if answer.result() if isinstance(answer, Future) else answer:
            return


@ASIDE
@pytest.mark.delicate
def test_a_load_in_slices_has_the_time_that_one_has_which_stalls_and_tells_when_it_warms_up(
    sliced: tuple[Contexts, Executor], environment: dict[str, str | None]
) -> None:
    contexts, executor = sliced
    told: list[list[str]] = []
    contexts.warming().add_done_callback(lambda _: told.append([method for method, _ in executor.had]))
    assert contexts.warm(1, (config(), environment), 10.0)
    arrived(contexts)
    assert executor.had == [(SPEC, 10.0), (WARM_UP, 609.0), (WARM_UP, 609.0), (SPEC, 9.0)]
    assert told == [[SPEC]]
    assert not contexts.of(1).loaded
    contexts.preload(1, None)
    assert contexts.of(1).loaded


def test_the_tokenizer_is_read_from_when_a_load_in_slices_is_asked_for(
    sliced: tuple[Contexts, Executor], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Future[Any]()

    def reading(model_config: Any) -> None:
        read.set_result(model_config)

    monkeypatch.setattr("vllm.tokenizers.cached_tokenizer_from_config", reading)
    contexts, executor = sliced
    asked = config()
    assert contexts.warm(1, (asked, {}), 10.0)
    assert read.result(60) is asked.model_config
    assert executor.had == []
    arrived(contexts)


def test_a_tokenizer_that_is_read_slowly_keeps_no_other_model(
    sliced: tuple[Contexts, Executor], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, quick = config(), config()
    other_is_there, kept = threading.Event(), Future[bool]()

    def reading(model_config: Any) -> None:
        if model_config is slow.model_config:
            kept.set_result(not other_is_there.wait(20))

    monkeypatch.setattr("vllm.tokenizers.cached_tokenizer_from_config", reading)
    contexts, _ = sliced
    assert contexts.warm(1, (slow, {}), 10.0)
    contexts.preload(2, (quick, {}), 10.0)
    other_is_there.set()
    assert contexts.of(2).loaded
    assert not kept.result(60)


def test_after_a_load_that_was_given_up_the_tokenizer_is_read_once_nobody_reads_it_for_that_one(
    sliced: tuple[Contexts, Executor], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = config(), config()
    asked_again, read_twice, at_once = threading.Event(), threading.Event(), []

    def reading(model_config: Any) -> None:
        if model_config is second.model_config:
            read_twice.set()
        else:
            assert asked_again.wait(60)
            at_once.append(read_twice.wait(0.5))

    monkeypatch.setattr("vllm.tokenizers.cached_tokenizer_from_config", reading)
    contexts, _ = sliced
    assert contexts.warm(1, (first, {}), 10.0)
    contexts.drop(1)
    assert contexts.warm(1, (second, {}), 10.0)
    asked_again.set()
    arrived(contexts)
    assert read_twice.is_set()
    assert at_once == [False]


def test_a_slice_is_as_long_as_the_step_before_it_within_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked = [0.0], []

    def workers(function: Any, _key: int, *given: Any) -> list[Any]:
        if function is calls.go_on:
            asked.append(given)
        return [None]

    monkeypatch.setattr(coming, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    due = module.Due(None, 1, warming=lambda: None)
    model = coming.Load(1, (None, {}), due, workers=workers, build=lambda: None, end=print, aside=False)
    for step_s, idle in ((0.0, False), (0.0078125, False), (0.03125, False), (9.0, False), (0.0078125, True)):
        now[0] += step_s
        model.go_on(idle=idle)
    assert asked == [(0.010, False, None), (0.03125, False, None), (0.050, False, None), (0.050, True, None)]


def test_what_takes_longer_than_its_slice_is_told_by_phase_and_at_once_nothing_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, takes = [0.0], {calls.begin: 0.125, calls.go_on: 0.25, calls.call: 1.0}
    slices = [3]

    def workers(function: Any, *_: Any) -> list[Any]:
        now[0] += takes[function]
        slices[0] -= function is calls.go_on
        return [(None,) if slices[0] == 0 else None]

    def build() -> str:
        now[0] += 0.5
        return "core"

    def load() -> coming.Load:
        due = module.Due(None, 1, warming=lambda: None)
        slices[0] = 3
        return coming.Load(1, (None, {}), due, workers=workers, build=build, end=print, aside=False)

    monkeypatch.setattr(coming, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    beside, at_once, short = load(), load(), load()
    while not beside.ended:
        beside.go_on(idle=True)  # slices of 50 ms
    assert beside.stall_s == {"begin": 0.075, "load": 0.2, "build": 0.45}
    slices[0] = 3
    at_once.settle()
    assert at_once.stall_s == {}
    takes[calls.begin], takes[calls.go_on], slices[0] = 0.0, 0.05, 3
    while not short.ended:
        short.go_on(idle=True)
    assert short.stall_s == {"build": 0.45}


@ASIDE
@pytest.mark.delicate
def test_a_load_in_slices_that_is_overdue_is_not_warmed_up_and_leaves_nothing(
    sliced: tuple[Contexts, Executor], environment: dict[str, str | None]
) -> None:
    contexts, executor = sliced
    contexts.warm(1, (config(), environment), 0.5)
    with pytest.raises(TimeoutError, match="did not load in time"):
        arrived(contexts)
    assert executor.had == [(SPEC, 0.5)]
    assert executor.forgotten == [1]
    assert not contexts.of(1).loaded
    assert contexts.warmed(1)


@pytest.mark.delicate
def test_a_load_in_slices_that_is_overdue_fails_whoever_settles_it_and_the_next_one_begins_anew(
    sliced: tuple[Contexts, Executor],
) -> None:
    contexts, executor = sliced
    contexts.warm(1, (config(), {}), 0.5)
    with pytest.raises(TimeoutError, match="did not load in time"):
        contexts.preload(1, (config(), {}))
    assert executor.forgotten == [1]
    assert not contexts.of(1).loaded
    contexts.preload(1, (config(), {}))
    assert contexts.of(1).loaded


@pytest.mark.parametrize("early", [True, False])
def test_a_core_that_is_built_behind_the_end_of_its_load_is_ended(early: bool) -> None:
    """Its publisher of KV events has an address that the next load wants."""
    may, ended = threading.Event(), queue.SimpleQueue[str]()

    def build() -> str:
        assert may.wait(PATIENCE_S)
        return "core"

    due = module.Due(None, 1, warming=lambda: None)
    model = coming.Load(1, (None, {}), due, workers=lambda *_: [(None,)], build=build, end=ended.put, aside=True)
    for _ in range(4):
        model.go_on(idle=False)
    assert not model.ended
    if early:
        model.give_up(RuntimeError("not wanted"))
        may.set()
    else:
        may.set()
        model._built.result(PATIENCE_S)
        model.give_up(RuntimeError("not wanted"))
    model.give_up(RuntimeError("dropped, though it had failed already"))
    assert ended.get(timeout=PATIENCE_S) == "core"
    assert ended.empty(), "its scheduler is shut down once"


@pytest.mark.parametrize("slices", range(10))
def test_the_thread_that_builds_a_core_ends_wherever_its_load_is_given_up(slices: int) -> None:
    left = [0]

    def workers(function: Any, *_: Any) -> list[Any]:
        if function in {calls.begin, calls.begin_call}:
            left[0] = 3
        left[0] -= function is calls.go_on
        return [(None,) if left[0] == 0 else None]

    def build() -> str:
        model.ask("initialize_from_config", (), {})
        return "core"

    due = module.Due(None, 1, warming=lambda: None)
    model = coming.Load(1, (None, {}), due, workers=workers, build=build, end=print, aside=True)
    for _ in range(slices):
        if not model.ended:
            model.go_on(idle=True)
    threads = [thread for thread in threading.enumerate() if thread.name == "gearshift-core"]
    model.give_up(RuntimeError("it is not wanted any more"))
    for thread in threads:
        thread.join(timeout=10)
        assert not thread.is_alive()


def test_a_core_that_a_thread_builds_is_done_before_another_models_variables_are_the_processs(
    sliced: tuple[Contexts, Executor],
) -> None:
    contexts, _ = sliced
    contexts.warm(1, (config(), {}), None)
    for _ in range(3):
        contexts.go_on(idle=False)
    warmed = contexts.warmed(1)
    assert isinstance(warmed, Future)
    assert not warmed.done()
    contexts.preload(2, (config(), {"GEARSHIFT_NOBODY_READS": "1"}))
    assert warmed.result(0)


@ASIDE
@pytest.mark.delicate
def test_whoever_waits_for_a_load_hears_of_its_end_however_it_ends(
    sliced: tuple[Contexts, Executor], environment: dict[str, str | None]
) -> None:
    contexts, _ = sliced
    contexts.warm(1, (config(), environment), 1e6)
    dropped = contexts.warmed(1)
    contexts.drop(1)
    contexts.warm(1, (config(), environment), 0.5)
    overdue = contexts.warmed(1)
    with pytest.raises(TimeoutError):
        arrived(contexts)
    contexts.warm(1, (config(), environment), 1e6)
    settled = contexts.warmed(1)
    contexts.preload(1, None)
    assert [each.result(0) for each in (dropped, overdue, settled) if isinstance(each, Future)] == [False, False, True]


def test_a_request_that_waited_for_its_model_and_can_not_be_added_ends_and_the_model_stays(
    given: list[dict[str, Any]],
) -> None:
    core = Core(None)
    contexts, _ = opened(core)
    contexts.of(1).held.append(SimpleNamespace(request_id="early", current_wave=0))
    contexts.preload(1, (config(), {}))
    assert given
    assert contexts.of(1).loaded
    assert contexts.of(1).held == []
    key, outputs = core.output_queue.get_nowait()
    assert (key, outputs.finished_requests) == (1, {"early"})


def test_an_image_that_can_not_be_taken_in_keeps_neither_the_model_nor_those_behind_it_from_each_other(
    given: list[dict[str, Any]],
) -> None:
    """0.26 asserts that what was sent as known is known."""
    core = Core(None)
    contexts, _ = opened(core)
    early = SimpleNamespace(request_id="early", current_wave=0)
    contexts.of(1).held += [Unreceived([object()], 1), early]
    contexts.preload(1, (config(), {}))
    assert given
    assert contexts.of(1).loaded
    _, outputs = core.output_queue.get_nowait()
    assert outputs.finished_requests == {"early"}
    assert core.output_queue.empty()


class Unreceived(Media):
    def receive(self, core: Any) -> None:
        raise AssertionError("it is not there")


def test_what_waits_for_a_model_that_was_removed_is_no_matter_of_the_next_one_in_its_slot(
    given: list[dict[str, Any]],
) -> None:
    core = Core(None)
    contexts, _ = opened(core)
    asked: Future[Any] = Future()
    contexts.of(1).asked.append(asked)
    contexts.of(1).held.append(Unreceived([object()], 1))
    contexts.commands["remove"](1)
    with pytest.raises(LookupError, match="the model was removed"):
        asked.result(0)
    contexts.preload(1, (config(), {}))
    assert given
    assert core.output_queue.empty()


@pytest.mark.parametrize(
    ("method", "given_too", "moved"),
    [("sleep", {"level": 1}, False), ("wake_up", {}, False), ("sleep", {"level": 2}, True)],
)
def test_a_parked_models_memory_is_left_alone_by_sleeping_and_waking(
    given: list[dict[str, Any]], method: str, given_too: dict[str, Any], moved: bool
) -> None:
    contexts, executor = opened(Core(None))
    executor.sizes = {**SIZES, "kv_block": BLOCK}
    contexts.preload(1, (config(), {}))
    contexts.of(1).core.scheduler = Cached()
    contexts.of(1).core.scheduler.requests = {}
    contexts.park(1)
    asked: list[Any] = []

    def note(function: Any, *_: Any, **__: Any) -> list[None]:
        asked.append(function)
        return [None]

    executor.collective_rpc = note  # type: ignore[method-assign]
    contexts.nap(1, method, **given_too)
    assert given
    assert bool(asked) is moved


@pytest.mark.parametrize("asleep", [False, True])
def test_a_sleep_that_fails_in_the_workers_leaves_the_model_as_it_was(
    given: list[dict[str, Any]], asleep: bool
) -> None:
    contexts, executor = opened(Core(None))
    contexts.preload(1, (config(), {}))
    core, done = contexts.of(1).core, []
    core.scheduler = SimpleNamespace(requests={})
    core.model_executor.is_sleeping = asleep
    core.resume_scheduler = lambda: done.append("resumed")

    def full(function: Any, *_: Any, **__: Any) -> list[Any]:
        done.append(function)
        return [calls.Failure("MemoryError", "no room")] if function is calls.park else [None]

    executor.collective_rpc = full  # type: ignore[method-assign]
    with pytest.raises(WorkerFailed, match="no room"):
        contexts.nap(1, "sleep", level=1)
    assert given
    assert done == ([calls.park] if asleep else [calls.park, calls.wake, "resumed"])


def test_of_what_cancelled_requests_brought_the_latest_is_kept_as_far_as_a_frontend_remembers_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange

    monkeypatch.setattr("service.engine.core.context._MOST_MEDIA", 2500)

    def request(number: int) -> Any:
        item = MultiModalKwargsItem.dummy(nbytes=1000)
        where = PlaceholderRange(offset=0, length=1)
        feature = MultiModalFeatureSpec(data=item, modality="image", identifier=str(number), mm_position=where)
        return SimpleNamespace(request_id=str(number), mm_features=[feature])

    context = Context(1, held=[request(number) for number in range(6)])
    context.cancel_held({"0", "1", "2"})
    context.cancel_held({"5"})
    kept = [each.features[0].identifier if isinstance(each, Media) else each.request_id for each in context.held]
    assert kept == ["2", "3", "4", "5"]
    assert [isinstance(each, Media) for each in context.held] == [True, False, False, True]
    assert context.unfinished == 2


def test_a_cancelled_request_that_brought_nothing_but_text_is_forgotten() -> None:
    context = Context(1, held=[SimpleNamespace(request_id="text", mm_features=None)])
    context.cancel_held({"text"})
    assert context.held == []


def test_a_core_has_what_is_the_processs_also_where_the_one_beside_which_it_was_built_has_gone(
    given: list[dict[str, Any]],
) -> None:
    core = Core(None)
    contexts, executor = opened(core)
    contexts.preload(1, (config(), {}))
    first, view = contexts.active, vllm_core.view_of(executor, config(), contexts, 2)
    further = contexts.live.build(config(), view)
    contexts.live.share(contexts.of(1))
    vars(first.core).clear()
    contexts.live.adopt(further)
    contexts.live.share(Context(2, core=further))
    assert len(given) == 2
    assert contexts.live.core is core
    assert core.output_queue is contexts.of(1).core.output_queue


# --- which blocks of a KV cache outlive parking ----------------------------------------------------------------------

BLOCK = 100
"""Bytes of one."""


class Cached:
    """A scheduler with vLLM's own blocks: 1 and 2 are a request's, 3 to 5 the prefix cache's, 3 unused for longest."""

    def __init__(self, connector: Any = None) -> None:
        from vllm.v1.core.block_pool import BlockPool
        from vllm.v1.core.kv_cache_utils import BlockHash

        self.connector, self.running, self.resets = connector, ["a request"], 0
        self.pool = BlockPool(8, True, 16)
        self.kv_cache_manager = SimpleNamespace(block_pool=self.pool)
        blocks = self.pool.get_new_blocks(5)
        request: Any = SimpleNamespace(block_hashes=[BlockHash(bytes([block.block_id])) for block in blocks[1:]])
        self.pool.cache_full_blocks(request, blocks[1:], 0, 4, 16, 0)
        self.pool.free_blocks(blocks[2:])

    def reset_prefix_cache(self, *, reset_running_requests: bool) -> None:
        assert reset_running_requests
        self.resets += 1

    @property
    def cached(self) -> set[int]:
        return {block.block_id for block in self.pool.blocks if block.block_hash is not None}


@pytest.mark.parametrize(
    ("most", "cached", "kept"),
    [
        (None, True, [1, 2, 3, 4, 5]),
        (5 * BLOCK, True, [1, 2, 3, 4, 5]),
        (5 * BLOCK - 1, True, [1, 2, 4, 5]),
        (3 * BLOCK, True, [1, 2, 5]),
        (2 * BLOCK, True, [1, 2]),
        (None, False, [1, 2]),
        (9 * BLOCK, False, [1, 2]),
    ],
)
def test_what_requests_have_is_kept_and_of_the_prefix_cache_what_was_used_last(
    given: list[dict[str, Any]], most: int | None, cached: bool, kept: list[int]
) -> None:
    contexts, executor, scheduler = with_cached(Cached())
    sizes = contexts.park(1, most, cached)["sizes"]
    assert given
    assert executor.kept == [kept]
    assert scheduler.cached == set(kept) - {1}
    assert (scheduler.resets, sizes.get("preempted", 0), sizes["evicted"]) == (0, 0, 5 - len(kept))


@pytest.mark.parametrize(
    ("most", "block", "connector"), [(2 * BLOCK - 1, BLOCK, None), (None, 0, None), (None, BLOCK, "one")]
)
def test_where_not_all_of_that_can_be_kept_requests_are_preempted_and_that_is_told(
    given: list[dict[str, Any]], most: int | None, block: int, connector: Any
) -> None:
    """The budget is too small, the layout is not known (0.26), or a KV connector has the addresses."""
    contexts, executor, scheduler = with_cached(Cached(connector), block)
    sizes = contexts.park(1, most, True)["sizes"]
    assert given
    assert executor.kept == [[]]
    assert (scheduler.resets, sizes["preempted"]) == (1, 1)


def test_a_return_that_failed_leaves_a_parked_model_that_is_parked_no_more_than_before(
    given: list[dict[str, Any]],
) -> None:
    contexts, executor, scheduler = with_cached(Cached())
    contexts.park(1)
    answers = executor.collective_rpc

    def full(function: Any, *args: Any, **how: Any) -> Any:
        if function in {calls.wake_aside, calls.awake}:
            return [True]
        return [calls.Failure("MemoryError", "no room")] if function is calls.wake else answers(function, *args, **how)

    executor.collective_rpc = full  # type: ignore[method-assign]
    assert contexts.warm(1)
    assert contexts.warmed(1)
    with pytest.raises(WorkerFailed, match="no room"):
        contexts.preload(1, None)
    again = len(executor.kept)
    contexts.park(1)
    assert (len(executor.kept), contexts.of(1).parked) == (again, True)
    assert given
    assert scheduler.resets == 0


class Between:
    """Workers whose platform brings a parked model back between the steps of another one, in so many slices."""

    def __init__(self, executor: Executor, slices: int, *, fails: bool = False) -> None:
        self._answers = executor.collective_rpc
        self.slices, self.fails = slices, fails
        self.now, self.takes_s = 0.0, 0.0
        self.woken = 0

    def __call__(self, function: Any, timeout: Any = None, args: Any = (), *more: Any, **how: Any) -> Any:
        if function is calls.wake_aside:
            return [True]
        if function is calls.go_on:
            self.now += self.takes_s
            self.slices -= 1
            if self.fails:
                return [calls.Failure("MemoryError", "no room")]
            return [(None,) if self.slices < 0 else None]
        self.woken += function is calls.wake
        if function is calls.wake and self.fails:
            return [calls.Failure("MemoryError", "no room")]
        return self._answers(function, timeout, args, *more, **how)


def between(monkeypatch: pytest.MonkeyPatch, slices: int, **how: Any) -> tuple[Contexts, Between]:
    contexts, executor, _ = with_cached(Cached())
    contexts.park(1)
    workers = Between(executor, slices, **how)
    monkeypatch.setattr(executor, "collective_rpc", workers)
    monkeypatch.setattr(module_of_contexts, "current", lambda: SimpleNamespace(wakes_aside=False, warm_up_s=0.0))
    monkeypatch.setattr(coming, "time", SimpleNamespace(perf_counter=lambda: workers.now))
    assert contexts.warm(1)
    return contexts, workers


def test_a_parked_model_is_brought_back_slice_by_slice_where_its_workers_have_no_thread_for_it(
    given: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts, workers = between(monkeypatch, 3)
    assert contexts.live.core.input_queue.qsize() == 1  # a loop with nothing else to do looks here
    workers.takes_s = 0.25
    there = contexts.warmed(1)
    assert isinstance(there, Future)
    for left in (2, 1, 0):
        assert contexts.warm(1)  # asked again it goes on
        contexts.go_on()
        assert (workers.slices, there.done()) == (left, False)
    contexts.go_on()
    assert there.result(0) is True
    assert contexts.warmed(1) is True
    contexts.go_on()
    assert workers.slices == -1
    assert contexts.of(1).parked
    answer = contexts.preload(1, None)
    assert (contexts.of(1).parked, workers.woken, len(given)) == (False, 1, 1)
    assert answer["stall_s"] == {"wake": 0.24}  # the first slice of ten milliseconds was not waited for
    assert contexts.warmed(1) is True


@pytest.mark.parametrize("ending", ["park", "preload", "drop"])
def test_who_waits_for_a_model_on_its_way_back_hears_of_it_whatever_becomes_of_that(
    given: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    contexts, workers = between(monkeypatch, 3)
    there = contexts.warmed(1)
    assert isinstance(there, Future)
    contexts.go_on()
    if ending == "drop":
        core = contexts.of(1).core
        core.scheduler.requests, core.scheduler.shutdown = {}, lambda: None
        core.structured_output_manager = SimpleNamespace(clear_backend=lambda: None)
        contexts.drop(1)
    elif ending == "park":
        contexts.park(1)
    else:
        contexts.preload(1, None)
    assert there.result(0) is False  # it is asked again
    assert contexts.warmed(1) is True
    contexts.go_on()
    assert workers.slices == 2
    assert given


def test_a_way_back_that_fails_is_told_to_who_wants_the_model_and_it_stays_parked(
    given: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts, workers = between(monkeypatch, 3, fails=True)
    contexts.go_on()
    assert contexts.warmed(1) is True
    with pytest.raises(WorkerFailed, match="no room"):
        contexts.preload(1, None)
    assert contexts.of(1).parked
    workers.fails, workers.slices = False, 1
    assert contexts.warm(1)
    while contexts.warmed(1) is not True:
        contexts.go_on()
    contexts.preload(1, None)
    assert (contexts.of(1).parked, len(given)) == (False, 1)


def test_of_two_workers_of_which_one_can_keep_nothing_none_does(given: list[dict[str, Any]]) -> None:
    contexts, executor, scheduler = with_cached(Cached())
    sizes = {**SIZES, "kv_block": BLOCK}
    executor.collective_rpc = lambda *_, **__: [sizes, {**sizes, "kv_block": 0}]  # type: ignore[method-assign]
    assert contexts._measure(contexts.of(1))["kv_block"] == 0
    assert given
    assert scheduler.resets == 0


def with_cached(scheduler: Cached, block: int = BLOCK) -> tuple[Contexts, Executor, Cached]:
    contexts, executor = opened(Core(None))
    executor.sizes = {**SIZES, "kv_block": block}
    contexts.preload(1, (config(), {}))
    contexts.of(1).core.scheduler = scheduler
    return contexts, executor, scheduler


def test_requests_are_hashed_from_one_seed_also_while_a_further_core_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core import kv_cache_utils

    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"the first core's", raising=False)
    made: list[Any] = []
    with vllm_core.keeping_none_hash():
        vllm_core.init_none_hash(made.append, hash)
        assert made == []
    vllm_core.init_none_hash(made.append, hash)
    assert made == [hash]
