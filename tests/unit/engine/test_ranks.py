"""A command for several cores: one answer for all, and nothing half done."""

from typing import Any

import pytest

from service.engine.frontend.ranks import RanksApart, ask_all, merged


class Cores:
    """What ``ask_all`` needs of vLLM's client: two cores that note what they are asked; ``failing`` ones fail."""

    def __init__(self, *failing: tuple[str, str]) -> None:
        self.core_engines = ["first", "second"]
        self.asked: list[tuple[str, str]] = []
        self._failing = failing

    async def _call_utility_async(self, method: str, command: str, arguments: Any, *, engine: str) -> Any:
        assert method == "gearshift"
        self.asked.append((engine, command))
        if (engine, command) in self._failing:
            raise ValueError(f"{engine} can't {command}")
        return {"stall_ms": len(engine), "arguments": arguments}


async def test_every_core_is_asked_and_the_longest_time_counts() -> None:
    cores = Cores()
    assert await ask_all(cores, ("activate", 1, None)) == {"stall_ms": 6, "arguments": (1, None)}
    assert cores.asked == [("first", "activate"), ("second", "activate")]


async def test_what_one_core_could_not_do_is_undone_in_the_other() -> None:
    cores = Cores(("second", "activate"))
    with pytest.raises(ValueError, match="second can't activate"):
        await ask_all(cores, ("activate", 1), [("activate", 0), ("drop", 1)])
    assert cores.asked[2:] == [("first", "activate"), ("first", "drop")]


async def test_cores_that_can_not_be_brought_together_again_are_told_so() -> None:
    cores = Cores(("second", "activate"), ("first", "drop"))
    with pytest.raises(RanksApart, match=r"activate failed in one rank.*was not undone: first can't drop"):
        await ask_all(cores, ("activate", 1), [("drop", 1)])


def test_bytes_add_up_and_the_tightest_settlement_counts() -> None:
    def answer(kv: int, length: int, loaded: bool) -> dict[str, Any]:
        return {
            "pids": [kv],
            "memory": [kv],
            "sizes": {"kv": kv, "weights": 1},
            "phases_ms": {"build": float(kv)},
            "settled": {"max_model_len": length, "cache": {}},
            "contexts": [{"key": 0, "loaded": True, "unfinished": kv}, {"key": 1, "loaded": loaded, "unfinished": 0}],
        }

    assert merged([answer(3, 512, True), answer(4, 256, False)]) == {
        "pids": [3, 4],
        "memory": [3, 4],
        "sizes": {"kv": 7, "weights": 2},
        "phases_ms": {"build": 4.0},
        "settled": {"max_model_len": 256, "cache": {}},
        "contexts": [
            {"unfinished": 7, "key": 0, "loaded": True},
            {"unfinished": 0, "key": 1, "loaded": False},
        ],
    }


async def test_one_core_answers_for_itself() -> None:
    cores = Cores()
    cores.core_engines = ["only"]
    assert await ask_all(cores, ("activate", 1)) == {"stall_ms": 4, "arguments": (1,)}
    assert cores.asked == [("only", "activate")]


def test_of_what_ranks_wait_for_beside_each_other_the_longest_counts() -> None:
    left = merged([{"left": {"kv": 1, "kv_wait_s": 0.25}}, {"left": {"kv": 2, "kv_wait_s": 0.125}}])["left"]
    assert left == {"kv": 3, "kv_wait_s": 0.25}
