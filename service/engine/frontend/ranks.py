"""One command for the cores of every data-parallel rank: all of them do it, or it is undone where it was done."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from service.engine.core.laps import longest

Command = tuple[Any, ...]
"""A command's name, then its arguments."""


class RanksApart(RuntimeError):
    """The ranks are in different states, and could not be brought back to the same one."""


async def ask_all(client: Any, command: Command, undo: Sequence[Command] = ()) -> Any:
    """What the cores behind vLLM's ``client`` answer to ``command``, as one answer.

    Where it fails in some of them, the others are asked to do ``undo``, and the first failure is raised.
    Raises RanksApart where that fails as well, EngineDeadError.
    """
    engines = list(client.core_engines)
    if len(engines) == 1:
        return await _ask(client, engines[0], command)
    answers = await asyncio.gather(*(_ask(client, engine, command) for engine in engines), return_exceptions=True)
    failures = [answer for answer in answers if isinstance(answer, BaseException)]
    if not failures:
        return merged(command[0], [answer for answer in answers if not isinstance(answer, BaseException)])
    done = [engine for engine, answer in zip(engines, answers, strict=True) if not isinstance(answer, BaseException)]
    try:
        for step in undo:
            await asyncio.gather(*(_ask(client, engine, step) for engine in done))
    except Exception as error:
        raise RanksApart(f"{command[0]} failed in one rank ({failures[0]}), and was not undone: {error}") from error
    raise failures[0]


async def _ask(client: Any, engine: Any, command: Command) -> Any:
    return await client._call_utility_async("gearshift", command[0], command[1:], engine=engine)


def merged(command: str, answers: Sequence[Any]) -> Any:
    """The ranks' answers as one core would give it: bytes add up, the longest time counts."""
    if command in _VERDICTS:
        return _VERDICTS[command](answers)
    first = answers[0]
    if not isinstance(first, Mapping):
        return first
    names = {name: None for answer in answers for name in answer}
    return {name: _MERGES.get(name, _same)([answer[name] for answer in answers if name in answer]) for name in names}


def _same(values: Sequence[Any]) -> Any:
    return values[0]


def _joined(lists: Sequence[Sequence[Any]]) -> list[Any]:
    return [each for one in lists for each in one]


def _added(sizes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """What all ranks have together; ranks wait beside each other, so of what is waited for the longest counts."""
    names = {name: None for each in sizes for name in each}
    return {name: (max if name == "kv_wait_s" else sum)(each.get(name, 0) for each in sizes) for name in names}


def _tightest(settled: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The rank that has the least room decides how long a request may be; the blocks of all add up, as in vLLM."""
    events = {rank: config for each in settled for rank, config in each["kv_events"].items()}
    tightest = {**min(settled, key=lambda each: each["max_model_len"]), "kv_events": events}
    blocks = [each["cache"].get("num_gpu_blocks") for each in settled]
    if None in blocks:
        return tightest
    return {**tightest, "cache": {**tightest["cache"], "num_gpu_blocks": sum(blocks)}}


def _described(contexts: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Each context once: what it holds in all ranks; loaded where it is so in every one."""
    by_key: dict[int, list[Mapping[str, Any]]] = {}
    for each in _joined(contexts):
        by_key.setdefault(each["key"], []).append(each)
    return [
        {
            **_added([{name: each[name] for name in each if name not in {"key", "loaded"}} for each in found]),
            "key": key,
            "loaded": len(found) == len(contexts) and all(each["loaded"] for each in found),
        }
        for key, found in by_key.items()
    ]


_VERDICTS: Mapping[str, Callable[[Sequence[bool]], bool]] = {"warm": any, "warmed": all}
"""What is to be waited for is over when it is so in every rank."""
_MERGES: Mapping[str, Callable[[Any], Any]] = {
    "pids": _joined,
    "memory": _joined,
    "sealed": _joined,
    "sizes": _added,
    "left": _added,
    "stall_ms": max,
    "phases_ms": longest,
    "stall_s": longest,
    "settled": _tightest,
    "contexts": _described,
}
