"""Work in slices makes what it would have made at once, and gives the baton back wherever it can be cut."""

import inspect
import itertools
import os
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import handle_torch_function, has_torch_function

from service.engine.worker import slices
from service.engine.worker.slices import Sliced

ELEMENTS = (1 << 21) + 7


def carried_out(work: Callable[[], Any]) -> tuple[Any, int]:
    """What it answers, and in how many slices; each is over as soon as it is begun."""
    sliced, slices = Sliced(work), 0
    while not sliced.ended:
        assert sliced.waits(60)
        sliced.go_on(0)
        slices += 1
    return sliced.answer(), slices


def drawn(name: str) -> Any:
    return getattr(torch.empty(ELEMENTS), name)(generator=torch.Generator().manual_seed(3))


def begun_with(draw: Callable[..., Any], *arguments: float, elements: int = ELEMENTS) -> Any:
    """A parameter as a layer draws its first values."""
    return draw(torch.nn.Parameter(torch.empty(elements)), *arguments, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    "work",
    [
        pytest.param(lambda: begun_with(torch.nn.init.uniform_, -3, 5), id="a parameter's first, uniform"),
        pytest.param(lambda: begun_with(torch.nn.init.normal_, 2, 0.5), id="a parameter's first, normal"),
        pytest.param(lambda: begun_with(torch.nn.init.normal_, elements=5), id="a small parameter's first"),
        pytest.param(lambda: torch.nn.init.constant_(torch.empty(9), 4), id="a constant"),
        pytest.param(lambda: torch.empty(9).copy_(other=torch.arange(9)), id="copied by name"),
        pytest.param(lambda: drawn("uniform_"), id="uniform"),
        pytest.param(lambda: drawn("normal_"), id="normal"),
        pytest.param(lambda: torch.zeros(1024, 4096, dtype=torch.bfloat16), id="zeros"),
        pytest.param(lambda: torch.empty(ELEMENTS).fill_(7), id="fill"),
        pytest.param(lambda: torch.empty(ELEMENTS).copy_(torch.arange(ELEMENTS)), id="copied"),
        pytest.param(
            lambda: torch.empty(1500, 1700).copy_(torch.arange(1500 * 1700).view(1700, 1500).t()), id="transposed"
        ),
        pytest.param(lambda: torch.empty(1024, 2048).copy_(torch.arange(2048)), id="spread, which is not cut"),
        pytest.param(lambda: torch.nn.Parameter(torch.ones(ELEMENTS)).data.copy_(torch.zeros(1)), id="scalar"),
    ],
)
def test_what_large_tensors_get_in_pieces_is_what_they_get_at_once(work: Callable[[], torch.Tensor]) -> None:
    in_slices, slices = carried_out(work)
    assert torch.equal(in_slices, work())
    assert slices > 1


def test_a_large_tensor_does_not_keep_the_baton() -> None:
    _, slices = carried_out(lambda: torch.empty(16 << 20, dtype=torch.uint8).fill_(1))
    assert slices > 4


def create_onednn_mm_handler(begun: threading.Event, end: threading.Event, *tensors: torch.Tensor) -> str:
    """A call that vLLM makes, which takes long and lets others run."""
    if has_torch_function(tensors):
        return str(handle_torch_function(create_onednn_mm_handler, tensors, begun, end, *tensors))
    begun.set()
    assert end.wait(60)
    return "packed"


def test_a_long_call_that_asks_nothing_of_the_process_runs_beside_the_steps() -> None:
    begun, end = threading.Event(), threading.Event()
    sliced = Sliced(lambda: create_onednn_mm_handler(begun, end, torch.ones(1)))
    while not begun.wait(0.01):
        sliced.go_on(0)
    assert not sliced.waits(0)
    assert not sliced.ended
    end.set()
    assert sliced.waits(60)
    while not sliced.ended:
        sliced.go_on(0)
    assert sliced.answer() == "packed"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU")
def test_a_long_call_runs_on_cpus_that_no_step_does(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, *_ = all_cpus = os.sched_getaffinity(0)
    ran_on = []

    def create_onednn_mm_handler(tensor: torch.Tensor) -> None:
        if has_torch_function((tensor,)):
            handle_torch_function(create_onednn_mm_handler, (tensor,), tensor)
            return
        ran_on.append(os.sched_getaffinity(0))

    def work() -> None:
        create_onednn_mm_handler(torch.ones(1))
        ran_on.append(os.sched_getaffinity(0))

    for aside in ({second}, set()):
        monkeypatch.setattr(slices, "spread", lambda aside=aside: aside)
        Sliced(work).go_on(600)
    assert ran_on == [{second}, all_cpus, all_cpus, all_cpus]
    assert first not in ran_on[0]


def test_a_short_one_ends_no_slice() -> None:
    begun, end = threading.Event(), threading.Event()
    end.set()
    sliced = Sliced(lambda: [create_onednn_mm_handler(begun, end, torch.ones(1)) for _ in range(50)])
    sliced.go_on(600)
    assert sliced.ended
    assert sliced.answer() == ["packed"] * 50


def test_calls_that_are_expected_to_be_as_short_as_a_piece_run_in_their_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    now, beside = 0.0, []
    monkeypatch.setattr(slices, "time", SimpleNamespace(perf_counter=lambda: now))

    def create_onednn_mm_handler(tensor: torch.Tensor, seconds: float) -> None:
        nonlocal now
        if has_torch_function((tensor,)):
            handle_torch_function(create_onednn_mm_handler, (tensor,), tensor, seconds)
            return
        beside.append(not sliced.waits(0))
        now += seconds

    def work() -> None:
        for floats, seconds in ((1000, 1.0), (1000, 0.001), (1000, 9.0), (2000, 0.002), (2100, 0.002)):
            create_onednn_mm_handler(torch.ones(floats), seconds)

    sliced = Sliced(work)
    sliced.go_on(600)
    assert sliced.ended
    assert beside == [True, True, False, False, True]  # in the first one's second there were steps


def test_a_long_one_is_waited_for_until_the_slice_is_over() -> None:
    begun, end = threading.Event(), threading.Event()
    sliced = Sliced(lambda: create_onednn_mm_handler(begun, end, torch.ones(1)))
    sliced.go_on(0.05)
    assert begun.is_set()
    assert not sliced.ended
    end.set()
    sliced.go_on(600)
    assert sliced.ended


def test_the_longest_stretch_that_could_not_be_cut_is_known_by_the_line_that_it_ended_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = itertools.count()
    monkeypatch.setattr(slices, "time", SimpleNamespace(perf_counter=lambda: float(next(now))))

    def work() -> int:
        torch.ones(1)
        for _ in range(600):
            next(now)
        torch.ones(1)
        return inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]

    sliced = Sliced(work)
    while not sliced.ended:
        sliced.go_on(0)
    assert sliced.uncut == f"{__file__}:{sliced.answer()}"
    assert 600 < sliced.uncut_s < 700


def test_an_error_is_raised_to_whoever_asks_for_the_answer() -> None:
    def work() -> None:
        torch.ones(1)
        raise LookupError("no such tensor")

    sliced = Sliced(work)
    while not sliced.ended:
        sliced.go_on(0)
    for _ in range(2):
        with pytest.raises(LookupError, match="no such tensor"):
            sliced.answer()


def test_what_is_given_up_ends_where_it_is_and_puts_things_right() -> None:
    said: list[str] = []

    def work() -> None:
        try:
            while True:
                try:
                    torch.ones(1)
                except Exception:
                    said.append("tried again")
        finally:
            said.append("put right")

    sliced = Sliced(work)
    sliced.go_on(0)
    assert said == []
    sliced.give_up()
    assert said == ["put right"]
    with pytest.raises(TimeoutError):
        sliced.answer()


def test_what_was_never_begun_can_be_given_up() -> None:
    sliced = Sliced(lambda: torch.ones(1))
    sliced.give_up()
    assert sliced.ended


@pytest.mark.parametrize("asks", [True, False], ids=["calls of torch's", "no call of torch's"])
def test_what_takes_too_long_is_interrupted(asks: bool) -> None:
    def work() -> None:
        while True:
            if asks:
                torch.ones(1)

    sliced = Sliced(work)
    sliced.go_on(600, within_s=0.05)
    assert sliced.ended
    with pytest.raises(TimeoutError, match="did not load in time"):
        sliced.answer()
