"""A command for several cores: one answer for all, and nothing half done."""

from typing import Any

import pytest

from service.engine.frontend.ranks import RanksApart, ask_all, merged


class Cores:
    """What ``ask_all`` needs of vLLM's client: two cores that note what they are asked; ``failing`` ones fail."""

    def __init__(self, *failing: tuple[str, str], says: dict[str, Any] | None = None) -> None:
        self._says = says
        self.core_engines = ["first", "second"]
        self.asked: list[tuple[str, str]] = []
        self._failing = failing

    async def _call_utility_async(self, method: str, command: str, arguments: Any, *, engine: str) -> Any:
        assert method == "gearshift"
        self.asked.append((engine, command))
        if (engine, command) in self._failing:
            raise ValueError(f"{engine} can't {command}")
        if self._says is not None:
            return self._says[engine]
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
    def answer(rank: int, kv: int, length: int, loaded: bool) -> dict[str, Any]:
        return {
            "pids": [kv],
            "memory": [kv],
            "sizes": {"kv": kv, "weights": 1},
            "phases_ms": {"build": float(kv)},
            "settled": {
                "max_model_len": length,
                "cache": {"num_gpu_blocks": kv, "block_size": 16},
                "kv_events": {rank: {"endpoint": f"tcp://*:{5557 + rank}"}},
            },
            "contexts": [{"key": 0, "loaded": True, "unfinished": kv}, {"key": 1, "loaded": loaded, "unfinished": 0}],
        }

    assert merged("activate", [answer(0, 3, 512, True), answer(1, 4, 256, False)]) == {
        "pids": [3, 4],
        "memory": [3, 4],
        "sizes": {"kv": 7, "weights": 2},
        "phases_ms": {"build": 4.0},
        "settled": {
            "max_model_len": 256,
            "cache": {"num_gpu_blocks": 7, "block_size": 16},
            "kv_events": {0: {"endpoint": "tcp://*:5557"}, 1: {"endpoint": "tcp://*:5558"}},
        },
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
    left = merged("activate", [{"left": {"kv": 1, "kv_wait_s": 0.25}}, {"left": {"kv": 2, "kv_wait_s": 0.125}}])["left"]
    assert left == {"kv": 3, "kv_wait_s": 0.25}


@pytest.mark.parametrize(("slow", "fast"), [("first", "second"), ("second", "first")])
async def test_a_model_is_on_its_way_as_long_as_it_is_so_in_one_core(slow: str, fast: str) -> None:
    assert await ask_all(Cores(says={slow: True, fast: False}), ("warm", 1)) is True
    assert await ask_all(Cores(says={slow: False, fast: True}), ("warmed", 1)) is False
    for alike in (True, False):
        for command in ("warm", "warmed"):
            assert await ask_all(Cores(says={slow: alike, fast: alike}), (command, 1)) is alike


def test_a_version_that_settles_no_number_of_blocks_has_none_to_add() -> None:
    settled = [
        {"settled": {"max_model_len": length, "cache": {"num_gpu_blocks": None}, "kv_events": {}}} for length in (2, 1)
    ]
    assert merged("attach", settled) == settled[1]
