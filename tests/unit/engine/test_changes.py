"""Changes of contexts step by step, without an engine: which steps are asked for, and what becomes of their answers."""

import time
from collections.abc import Generator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest

from schemas.contexts import KvKept, Leftover, SwitchMode, SwitchPhase, Tier
from service.engine.frontend.slots import Slots
from service.engine.models.changes import Abort, Arrive, Ask, Changes, EndStreams, Finish, HandBack, LetGo, Wake
from service.engine.models.residency import Residency
from service.errors import SwitchFailed
from service.scheduling.memory import Budgets, Keep

SIZES = {"weights": 40, "kv": 60, "host": 0}
ANSWER = {"stall_ms": 0.5, "phases_ms": {}, "memory": [100], "sizes": SIZES, "left": SIZES}


@dataclass
class Model:
    """What of a frontend matters here."""

    alias: str
    running: frozenset[str] = frozenset()
    registry: Any = None
    settled: list[Any] = field(default_factory=list)

    def adopt(self, settled: dict[str, Any]) -> None:
        self.settled.append(settled)


class Contexts:
    """Three models, the first one active; ``device`` is their budget, of which each takes 100."""

    def __init__(self, *, device: int | None = None, aside: bool = False) -> None:
        self.models = {alias: Model(alias) for alias in ("llama", "qwen", "lynx")}
        self.residency = Residency(self.models, Budgets(device=device))
        for alias in self.models:
            cache = SimpleNamespace(kv_cache_memory_bytes=60)
            parallel = SimpleNamespace(world_size=1, data_parallel_size=1)
            model = SimpleNamespace(model="/none", revision=None, max_model_len=256)
            parts = {"model_config": model, "cache_config": cache, "parallel_config": parallel}
            self.residency.add(alias, SimpleNamespace(**parts, speculative_config=None))
        self.residency.note("llama", Tier.RESIDENT, ANSWER)
        self.changes = Changes(
            self.models,
            self.residency,
            active="llama",
            pids=(1, 2),
            require=self.models.__getitem__,
            aside=lambda alias: aside,
        )

    def switch(self, alias: str, **how: Any) -> Generator[Any, Any, Any]:
        chosen = {"mode": SwitchMode.KEEP, "drain_timeout": 5.0, "leftover": Leftover.ABORT, "observe": None, **how}
        return self.changes.switch(alias, asked=time.perf_counter(), **chosen)


def carried_out(change: Generator[Any, Any, Any], *answers: Any) -> tuple[list[Any], Any]:
    """The steps of a change that gets these answers, and its result."""
    try:
        first = next(change)
    except StopIteration as done:
        return [], done.value
    return carried_out_from(change, first, *answers)


def carried_out_from(change: Generator[Any, Any, Any], step: Any, *answers: Any) -> tuple[list[Any], Any]:
    """The same from a step on that it has asked for already."""
    steps = []
    given = iter(answers)
    try:
        while True:
            steps.append(step)
            answer = next(given)
            step = change.throw(answer) if isinstance(answer, Exception) else change.send(answer)
    except StopIteration as done:
        return steps, done.value


def test_a_switch_loads_what_is_not_there_and_brings_back_what_is() -> None:
    contexts = Contexts()
    steps, report = carried_out(contexts.switch("qwen"), {**ANSWER, "settled": {"max_model_len": 128}})
    assert steps == [Ask("qwen", "activate", load=True)]
    assert steps[0].arguments("what loading takes", 60.0) == ("what loading takes", 0, 60.0, None, False)
    assert (report.switched, report.tier_found, report.kept) == (True, Tier.DROPPED, 0)
    assert contexts.models["qwen"].settled == [{"max_model_len": 128}]
    steps, report = carried_out(contexts.switch("llama"), ANSWER)
    assert steps == [Ask("llama", "activate")]
    assert report.tier_found is Tier.RESIDENT
    steps, report = carried_out(contexts.switch("llama"))
    assert (steps, report.switched) == ([], False)


def test_a_switch_to_a_resident_model_changes_nothing_that_is_known_of_it() -> None:
    """The core says nothing of it then: nothing was moved."""
    contexts = Contexts()
    contexts.residency.note("qwen", Tier.RESIDENT, {"sizes": {**SIZES, "host": 64}})
    known, used = contexts.residency.info("qwen"), contexts.residency.memory
    carried_out(contexts.switch("qwen"), {"stall_ms": 0.5, "phases_ms": {}, "left": SIZES})
    assert (contexts.residency.info("qwen"), contexts.residency.memory) == (known, used)
    assert known.host_bytes == 64


def test_a_drain_lets_what_runs_finish_and_then_does_what_was_asked_with_the_rest() -> None:
    contexts = Contexts()
    contexts.residency.note("qwen", Tier.RESIDENT, ANSWER)
    contexts.models["llama"].running = frozenset({"a", "b"})
    steps, report = carried_out(contexts.switch("qwen", mode=SwitchMode.DRAIN), None, None, ANSWER)
    assert steps == [
        Finish("llama", frozenset({"a", "b"}), 5.0),
        Abort("llama", frozenset({"a", "b"})),
        Ask("qwen", "activate"),
    ]
    assert report.aborted == 2
    contexts = Contexts()
    contexts.residency.note("qwen", Tier.PARKED, ANSWER)
    contexts.models["llama"].running = frozenset({"a"})
    steps, report = carried_out(contexts.switch("qwen", mode=SwitchMode.DRAIN, leftover=Leftover.KEEP), None, ANSWER)
    assert [type(step) for step in steps] == [Finish, Ask]
    assert (report.kept, report.aborted) == (1, 0)


@pytest.mark.parametrize("aside", [False, True])
def test_what_is_not_loaded_is_loaded_before_anything_ends_for_it(aside: bool) -> None:
    contexts = Contexts(aside=aside)
    contexts.models["llama"].running = frozenset({"a"})
    beside: list[tuple[Any, Any]] = [(Ask("qwen", "warm", load=True), True), (Arrive("qwen"), None)] if aside else []
    loads = [*beside, (Ask("qwen", "preload", load=True), ANSWER)]
    answers = [*(answer for _, answer in loads), None, ANSWER]
    steps, report = carried_out(contexts.switch("qwen", mode=SwitchMode.ABORT), *answers)
    assert steps == [*(step for step, _ in loads), Abort("llama", frozenset({"a"})), Ask("qwen", "activate")]
    assert (report.switched, report.tier_found, report.aborted) == (True, Tier.DROPPED, 1)
    assert "load" in report.phases_ms


@pytest.mark.parametrize("breaks", [0, 1, 2])
def test_a_load_that_breaks_leaves_what_runs_alone(breaks: int) -> None:
    contexts = Contexts(aside=True)
    contexts.models["llama"].running = frozenset({"a"})
    phases: list[SwitchPhase] = []
    change = contexts.switch("qwen", mode=SwitchMode.DRAIN, observe=lambda transition: phases.append(transition.phase))
    answers: list[Any] = [True, None, ANSWER]
    answers[breaks] = OSError("no weights")
    with pytest.raises(SwitchFailed, match=r"Failed to switch model from llama to qwen: .*no weights"):
        carried_out(change, *answers)
    assert phases == [SwitchPhase.ACCEPTED, SwitchPhase.FAILED]
    assert contexts.residency.tier("qwen") is Tier.DROPPED
    assert not contexts.residency.returns("qwen")
    assert contexts.changes.active == "llama"


def test_nobody_else_goes_so_that_a_model_can_be_loaded_before_requests_end_for_it() -> None:
    """It has the room of the one that is left, as in any switch."""
    contexts = Contexts(device=250)
    contexts.residency.note("lynx", Tier.RESIDENT, ANSWER)
    contexts.models["llama"].running = frozenset({"a"})
    change = contexts.switch("qwen", mode=SwitchMode.ABORT)
    assert next(change) == Abort("llama", frozenset({"a"}))


def test_where_both_have_no_room_the_requests_end_first_as_ever() -> None:
    contexts = Contexts(device=150)
    contexts.models["llama"].running = frozenset({"a"})
    steps, _ = carried_out(contexts.switch("qwen", mode=SwitchMode.DRAIN), None, None, None, ANSWER)
    assert [type(step) for step in steps] == [Finish, Abort, EndStreams, Ask]


def test_a_failed_switch_leaves_everything_as_it_was() -> None:
    contexts = Contexts()
    phases: list[SwitchPhase] = []
    change = contexts.switch("qwen", observe=lambda transition: phases.append(transition.phase))
    next(change)
    assert contexts.changes.target == "qwen"
    with pytest.raises(SwitchFailed, match="Failed to switch model from llama to qwen: no weights"):
        change.throw(OSError("no weights"))
    assert phases == [SwitchPhase.ACCEPTED, SwitchPhase.SWITCHING, SwitchPhase.ROLLED_BACK]
    assert (contexts.changes.active, contexts.changes.target) == ("llama", None)
    assert contexts.residency.tier("qwen") is Tier.DROPPED


@pytest.mark.parametrize("mode", [SwitchMode.DRAIN, SwitchMode.ABORT])
@pytest.mark.parametrize("wrong", ["arguments", "room"])
def test_what_is_known_to_stand_in_the_way_is_told_before_a_request_is_touched(mode: SwitchMode, wrong: str) -> None:
    contexts = Contexts(device=150)
    contexts.models["llama"].running = frozenset({"running"})
    if wrong == "arguments":
        del contexts.models["qwen"]
    else:
        contexts.residency.pin("llama", True)
    phases: list[SwitchPhase] = []
    with pytest.raises(SwitchFailed, match=r"Failed to switch model from llama to qwen: .*qwen"):
        next(contexts.switch("qwen", mode=mode, observe=lambda transition: phases.append(transition.phase)))
    assert phases == [SwitchPhase.ACCEPTED, SwitchPhase.FAILED]
    assert (contexts.changes.active, contexts.changes.target) == ("llama", None)


def test_room_is_made_first_and_requests_of_what_is_dropped_go_back() -> None:
    contexts = Contexts(device=100)
    steps, report = carried_out(contexts.switch("qwen"), None, ANSWER)
    assert [type(step) for step in steps] == [EndStreams, Ask]
    assert steps[1] == Ask("qwen", "activate", load=True, park_left=1)
    assert report.tier_left is Tier.PARKED
    contexts = Contexts(device=200)
    contexts.residency.budgets = Budgets(device=200, host=0)
    carried_out(contexts.switch("qwen"), ANSWER)
    contexts.models["llama"].running = frozenset({"frozen"})
    change = contexts.switch("lynx")
    assert isinstance(next(change), HandBack)
    contexts.models["llama"].running = frozenset()
    assert isinstance(change.send(None), EndStreams)
    assert change.send(None) == LetGo("llama")
    assert change.send(None) == Ask("llama", "drop")
    steps, _ = carried_out_from(change, change.send(ANSWER), ANSWER)
    assert [step.command for step in steps] == ["activate"]
    assert contexts.residency.tier("llama") is Tier.DROPPED


def test_the_model_being_left_is_parked_until_the_new_one_is_there_and_dropped_then() -> None:
    contexts = Contexts(device=100)
    contexts.residency.budgets = Budgets(device=90, shared=True)  # its weights have no room beside the new one
    contexts.models["llama"].running = frozenset({"running"})
    change = contexts.switch("qwen")
    assert isinstance(next(change), EndStreams)
    assert change.send(None) == Ask("qwen", "activate", load=True, park_left=1, keep=Keep(0))
    assert isinstance(change.send(ANSWER), HandBack)
    contexts.models["llama"].running = frozenset()
    assert isinstance(change.send(None), EndStreams)
    steps, report = carried_out_from(change, change.send(None), None, ANSWER)
    assert steps == [LetGo("llama"), Ask("llama", "drop")]
    assert (report.tier_left, report.kept) == (Tier.DROPPED, 0)
    assert contexts.changes.active == "qwen"


def test_what_one_of_several_cores_did_can_be_undone() -> None:
    def undone(step: Any) -> list[tuple[str, str, bool]]:
        return [(each.alias, each.command, each.park_left) for each in step.undo]

    contexts = Contexts()
    (first,), _ = carried_out(contexts.switch("qwen"), ANSWER)
    assert undone(first) == [("llama", "activate", True), ("qwen", "drop", False)]
    (back,), _ = carried_out(contexts.switch("llama"), ANSWER)
    assert undone(back) == [("qwen", "activate", False)]
    (_, parked), _ = carried_out(contexts.changes.lower("qwen", Tier.PARKED), None, ANSWER)
    assert undone(parked) == [("qwen", "preload", False)]
    (brought,), _ = carried_out(contexts.changes.preload("qwen"), ANSWER)
    assert undone(brought) == [("qwen", "park", False)]


def test_a_model_with_unfinished_requests_is_not_dropped_whichever_core_has_them() -> None:
    contexts = Contexts()
    carried_out(contexts.changes.preload("qwen"), ANSWER)
    contexts.models["qwen"].running = frozenset({"frozen"})
    with pytest.raises(SwitchFailed, match="qwen can't be dropped: the context has 1 unfinished requests"):
        carried_out(contexts.changes.lower("qwen", Tier.DROPPED), None)


def test_room_is_made_for_who_wakes_as_for_who_is_loaded() -> None:
    contexts = Contexts(device=200)
    carried_out(contexts.switch("qwen"), ANSWER)
    contexts.residency.slept("llama", 1)
    assert contexts.residency.info("llama").tier is Tier.PARKED
    assert contexts.residency.tier("llama") is Tier.RESIDENT
    carried_out(contexts.switch("lynx"), ANSWER)
    steps, _ = carried_out(contexts.changes.wake("llama", None), None, ANSWER, True)
    assert steps[1:] == [Ask("qwen", "park"), Wake("llama", None)]
    assert contexts.residency.info("llama").tier is Tier.RESIDENT


@pytest.mark.parametrize(
    ("levels", "tier", "host"),
    [
        ((1,), Tier.PARKED, True),
        ((1, 2), Tier.DROPPED, False),
        ((2, 1), Tier.DROPPED, False),
        ((1, 1), Tier.PARKED, True),
    ],
)
def test_one_that_sleeps_and_is_put_to_sleep_again_has_what_the_deeper_sleep_left(
    levels: tuple[int, ...], tier: Tier, host: bool
) -> None:
    contexts = Contexts(device=200)
    for level in levels:
        contexts.residency.slept("llama", level)
    info = contexts.residency.info("llama")
    assert (info.tier, bool(info.host_bytes)) == (tier, host)


def test_a_model_is_removed_when_nothing_of_it_is_needed() -> None:
    contexts = Contexts()
    with pytest.raises(RuntimeError, match="llama can't be removed: it is the active model"):
        carried_out(contexts.changes.remove("llama"))
    contexts.models["qwen"].running = frozenset({"waiting"})
    with pytest.raises(RuntimeError, match="qwen can't be removed: it has 1 unfinished requests"):
        carried_out(contexts.changes.remove("qwen"))
    contexts.models["qwen"].running = frozenset()
    carried_out(contexts.changes.preload("qwen"), ANSWER)
    steps, _ = carried_out(contexts.changes.remove("qwen"), None, None, ANSWER, None)
    assert steps[1:] == [LetGo("qwen"), Ask("qwen", "drop"), Ask("qwen", "remove")]
    steps, _ = carried_out(contexts.changes.remove("lynx"), None)
    assert steps == [Ask("lynx", "remove")]


def test_one_that_is_added_under_the_name_of_one_that_was_removed_has_nothing_of_it() -> None:
    contexts = Contexts()
    before = vars(contexts.residency).copy()
    known = {name: len(value) for name, value in before.items() if isinstance(value, dict | set)}
    contexts.residency.used("qwen")
    contexts.residency.expect(["qwen"])
    contexts.residency.slept("qwen", 1)
    contexts.residency.returning("qwen")
    contexts.residency.remove("qwen")
    for name in known.keys() - {"_frontends"}:
        assert "qwen" not in before[name], name


def test_a_slot_is_used_again_with_the_client_that_waits_there() -> None:
    slots = Slots(2)
    for alias in ("llama", "qwen"):
        with slots.taken(alias, "client {}".format) as (key, client):
            assert client == f"client {key}"
    with (
        pytest.raises(RuntimeError, match="room for 2 models, has 2, and can't take 1 more"),
        slots.taken("lynx", "client {}".format),
    ):
        pass
    slots.leave("qwen", "its client")
    with slots.taken("lynx", "client {}".format) as (key, client):
        assert (key, client) == (1, "its client")


def test_the_client_of_a_slot_whose_model_failed_waits_there_for_the_next_one() -> None:
    slots = Slots(1)
    with pytest.raises(OSError, match="failed"), slots.taken("llama", "client {}".format):
        raise OSError("failed")
    with slots.taken("qwen", "another client {}".format) as (_, client):
        assert client == "client 0"


# --- what has to go, by what is measured -----------------------------------------------------------------------------


def loaded(contexts: Contexts, alias: str, **sizes: Any) -> None:
    contexts.residency.note(alias, Tier.RESIDENT, {"sizes": {**SIZES, **sizes}})


def test_what_was_measured_is_believed_and_not_the_files_of_the_checkpoint(tmp_path: Any) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(80))
    contexts = Contexts()
    cache = SimpleNamespace(kv_cache_memory_bytes=60)
    parallel = SimpleNamespace(world_size=1, data_parallel_size=1)
    model = SimpleNamespace(model=str(tmp_path), revision=None, max_model_len=256)
    parts = {"model_config": model, "cache_config": cache, "parallel_config": parallel}
    config = SimpleNamespace(**parts, speculative_config=None)
    for shared, weighs in ((False, 40), (True, 80)):  # FP8 made of BF16 on a card; packed on a CPU
        residency = Residency(contexts.models, Budgets(shared=shared))
        residency.add("qwen", config)
        assert residency.info("qwen").weights_bytes == 80
        residency.note("qwen", Tier.RESIDENT, {"sizes": SIZES})
        assert residency.info("qwen").weights_bytes == weighs


def carried_out_well(contexts: Contexts, change: Generator[Any, Any, Any]) -> tuple[list[Any], Any]:
    """The steps of a change that all work, and its result. Requests that are handed back end."""
    steps, given = [], None
    try:
        while True:
            step = change.send(given)
            steps.append(step)
            given = ANSWER if isinstance(step, Ask) else None
            if isinstance(step, HandBack):
                contexts.models[step.alias].running = frozenset()
    except StopIteration as done:
        return steps, done.value


def test_graphs_and_workspaces_count_also_while_their_model_is_parked() -> None:
    contexts = Contexts(device=210)
    loaded(contexts, "llama", overhead=30)
    loaded(contexts, "qwen", overhead=30)
    contexts.residency.note("qwen", Tier.PARKED, {"sizes": {**SIZES, "kv": 0, "overhead": 30}})
    assert carried_out_well(contexts, contexts.changes.preload("lynx"))[0] == [
        EndStreams("qwen", ANY),
        LetGo("qwen"),
        Ask("qwen", "drop"),  # parked it takes thirty still, and 130 + 30 + 60 are too many
        Ask("lynx", "preload", load=True),
    ]


def test_a_first_parking_counts_what_its_pinned_copies_will_take_of_the_host() -> None:
    contexts = Contexts(device=200)
    contexts.residency.budgets = Budgets(device=200, host=50)
    loaded(contexts, "qwen", copies=64)  # of 40 bytes of weights
    steps, _ = carried_out_well(contexts, contexts.changes.preload("lynx"))
    assert steps[-2:] == [Ask("qwen", "drop"), Ask("lynx", "preload", load=True)]
    loaded(contexts, "qwen", copies=48)
    contexts.residency.note("lynx", Tier.DROPPED, {})
    steps, _ = carried_out_well(contexts, contexts.changes.preload("lynx"))
    left = Keep(2, cached=True)
    assert steps == [EndStreams("qwen", ANY), Ask("qwen", "park", keep=left), Ask("lynx", "preload", load=True)]


def test_a_model_that_can_not_be_parked_is_dropped() -> None:
    contexts = Contexts(device=200)
    dropped = [EndStreams("qwen", ANY), LetGo("qwen"), Ask("qwen", "drop")]
    loaded(contexts, "qwen", parks=False)
    steps, _ = carried_out_well(contexts, contexts.changes.preload("lynx"))
    assert steps == [*dropped, Ask("lynx", "preload", load=True)]
    assert contexts.residency.tier("qwen") is Tier.DROPPED
    loaded(contexts, "qwen", parks=False)
    assert carried_out_well(contexts, contexts.changes.lower("qwen", Tier.PARKED))[0] == dropped


def test_one_that_is_left_and_can_not_be_parked_lets_go_of_its_weights_first() -> None:
    contexts = Contexts(device=100)
    loaded(contexts, "llama", parks=False)
    contexts.models["llama"].running = frozenset({"a"})
    steps, report = carried_out_well(contexts, contexts.switch("qwen"))
    assert [type(step) for step in steps[:2]] == [EndStreams, HandBack]
    assert steps[2] == Ask("qwen", "activate", load=True, park_left=2, keep=Keep(0))
    assert steps[-1] == Ask("llama", "drop")
    assert report.switched
    assert contexts.residency.tier("llama") is Tier.DROPPED


# --- what is kept of a KV cache --------------------------------------------------------------------------------------


def test_who_is_parked_keeps_what_there_is_room_for_and_the_report_says_what_that_was() -> None:
    contexts = Contexts()
    contexts.residency.budgets = Budgets(device=110, host=20, shared=True)
    change = contexts.switch("qwen")
    next(change)
    asked = change.send(None)
    assert asked == Ask("qwen", "activate", load=True, park_left=1, keep=Keep(10, cached=True))  # beside 40 and 60
    assert asked.arguments(None, 1.0) == (None, 1, 1.0, 10, True)
    with pytest.raises(StopIteration) as done:
        change.send({**ANSWER, "left": {**SIZES, "kv": 0, "kv_kept": 8, "evicted": 2}})
    assert (done.value.value.kv_kept, done.value.value.kv_kept_mb) == (KvKept.IN_USE, 8 / (1 << 20))
    assert contexts.residency.info("llama").kv_kept_bytes == 8


def test_a_switch_says_what_the_model_that_it_left_had_borrowed_and_waited_for() -> None:
    contexts = Contexts()
    lent = {"kv_borrowed": 3 << 20, "kv_wait_s": 0.25, "kv_preempted": 2}
    _, report = carried_out(contexts.switch("qwen"), {**ANSWER, "left": {**SIZES, **lent}})
    assert (report.kv_borrowed_mb, report.kv_wait_s, report.kv_preempted) == (3.0, 0.25, 2)
    info = contexts.residency.info("llama")
    assert (info.kv_borrowed_bytes, info.kv_wait_s, info.kv_preempted) == (3 << 20, 0.25, 2)
    _, report = carried_out(contexts.switch("llama"), ANSWER)
    assert (report.kv_borrowed_mb, report.kv_wait_s, report.kv_preempted) == (0, 0, 0)
    assert contexts.residency.info("llama").kv_borrowed_bytes == 3 << 20


def test_each_of_several_cores_keeps_its_part() -> None:
    contexts = Contexts()
    contexts.residency.budgets = Budgets(host=100)
    cache, parallel = SimpleNamespace(kv_cache_memory_bytes=60), SimpleNamespace(world_size=1, data_parallel_size=2)
    model = SimpleNamespace(model="/none", revision=None, max_model_len=256)
    parts = {"model_config": model, "cache_config": cache, "parallel_config": parallel}
    contexts.residency.add("qwen", SimpleNamespace(**parts, speculative_config=None))
    loaded(contexts, "qwen")
    (_, asked), _ = carried_out(contexts.changes.lower("qwen", Tier.PARKED), None, ANSWER)
    assert asked.keep == Keep(30, cached=True)  # the weights take forty


def test_what_a_parked_model_has_kept_goes_before_a_model_does() -> None:
    contexts = Contexts()
    contexts.residency.budgets = Budgets(device=200, shared=True)
    contexts.residency.note("qwen", Tier.PARKED, {"sizes": {**SIZES, "kv": 0, "kv_kept": 30}})
    contexts.residency.pin("llama", True)
    steps, _ = carried_out_well(contexts, contexts.switch("lynx"))
    assert steps == [Ask("qwen", "park", keep=Keep(0)), Ask("lynx", "activate", load=True)]
    assert steps[0].arguments(None) == (0, False)
    assert contexts.residency.info("qwen").kv_kept_bytes == 0


@pytest.mark.parametrize(
    ("there", "gives_up"),
    [(Tier.PARKED, Ask("qwen", "park", keep=Keep(20, cached=True))), (Tier.DROPPED, Ask("qwen", "drop"))],
)
def test_room_is_made_by_a_model_that_is_on_its_way_and_what_its_requests_have_is_kept(
    there: Tier, gives_up: Ask
) -> None:
    contexts = Contexts()
    contexts.residency.budgets = Budgets(device=200, host=60)
    contexts.residency.note("qwen", there, {"sizes": {**SIZES, "kv": 0, "kv_kept": 20, "host": 60}})
    contexts.residency.returning("qwen")
    contexts.residency.pin("llama", True)
    steps, _ = carried_out_well(contexts, contexts.switch("lynx"))
    assert [step for step in steps if isinstance(step, Ask)] == [gives_up, Ask("lynx", "activate", load=True)]
    assert not contexts.residency.returns("qwen")
