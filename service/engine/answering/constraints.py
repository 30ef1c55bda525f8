"""Which constraints a model's requests may have: those that vLLM parses and compiles within limits, as was tried."""

import asyncio
import hashlib
import os
import pickle
from collections import OrderedDict, deque
from collections.abc import Coroutine
from functools import partial
from typing import Any

from service.engine.processes.trial import PARSE_S, Limits, Trials, Verdict
from service.engine.system.constraints import ONE_TOKEN_S, TOO_SLOW

_REMEMBERED = 1024
_AT_ONCE = max(1, (os.cpu_count() or 1) // 2)
_KINDS = ("json", "regex", "choice", "grammar", "structural_tag")


def check_outcome(output: Any) -> None:
    """Raise ValueError for an engine's output that was ended because its constraint was too slow."""
    for completion in output.outputs:
        if completion.finish_reason == "error" and completion.stop_reason == TOO_SLOW:
            tokens = len(completion.token_ids)
            raise ValueError(
                f"The structured output was ended after {tokens} tokens: for one of them its constraint took more than "
                f"{ONE_TOKEN_S:g} s of processor time. Simplify it: no counted repetition inside of another, and "
                "nothing that can be read in many ways"
            )


class Room:
    """Room for so many at once. Who waits for it waits in a line of its owner's; the lines have their turns."""

    def __init__(self, most: int) -> None:
        self._free = most
        self._lines: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def acquire(self, owner: str) -> None:
        """Wait for room. Whoever is cancelled meanwhile has none."""
        if self._free:
            self._free -= 1
            return
        given = asyncio.get_running_loop().create_future()
        self._lines.setdefault(owner, deque()).append(given)
        try:
            await given
        except asyncio.CancelledError:
            if not given.cancelled():  # it had room by then
                self.release()
            raise

    def release(self) -> None:
        """One has ended: the next one of the line whose turn it is has its room."""
        while self._lines:
            owner, line = self._lines.popitem(last=False)
            while line and line[0].cancelled():
                line.popleft()
            if line:
                line.popleft().set_result(None)
                self._lines[owner] = line
                return
        self._free += 1

    @property
    def is_full(self) -> bool:
        return not self._free


class Constraints:
    """Those of all models: their trials, of which only so many run at once."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.trials = Trials()
        self.room = Room(_AT_ONCE)

    def of(self, alias: str, config: Any) -> "ModelConstraints":
        """Those of one model, whose config as vLLM has it is ``config``."""
        self.trials.add(alias, config)
        return ModelConstraints(self, alias)

    def remove(self, alias: str) -> None:
        """This model is gone."""
        self.trials.remove(alias)

    async def close(self) -> None:
        """No more trials."""
        await asyncio.to_thread(self.trials.close)


class ModelConstraints:
    """Those of one model. What was tried is remembered: most requests have one that others had before."""

    def __init__(self, constraints: Constraints, alias: str) -> None:
        self._constraints = constraints
        self._alias = alias
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()

    async def check(self, params: Any, aborted: asyncio.Event | None = None, owner: str = "") -> None:
        """Raise ValueError for vLLM's sampling parameters whose constraint takes too much.

        Raises RuntimeError where that can't be known now. Returns at once, and says nothing, when ``aborted`` is set.
        Trials have their turns by ``owner``, so that nobody's many keep others waiting.
        """
        constraint = getattr(params, "structured_outputs", None)
        kind = next((kind for kind in _KINDS if getattr(constraint, kind, None)), None)
        if kind is None:
            return
        key = hashlib.sha256(pickle.dumps(constraint)).digest()
        if key not in self._verdicts and not await _done(self._try(key, constraint, owner), aborted):
            return
        self._verdicts.move_to_end(key)
        if (verdict := self._verdicts[key]) is not Verdict.FIT:
            raise ValueError(self._refusal(kind, verdict))

    async def _try(self, key: bytes, constraint: Any, owner: str) -> None:
        """Whoever is cancelled here leaves at once; a trial that was begun keeps its room until it has ended."""
        room = self._constraints.room
        await room.acquire(owner)
        if key in self._verdicts:  # it was tried for another request meanwhile
            room.release()
            return
        judge, limits = self._constraints.trials.judge, self._constraints.limits
        trial = asyncio.create_task(asyncio.to_thread(judge, self._alias, constraint, limits))
        trial.add_done_callback(partial(self._tried, key))
        await asyncio.shield(trial)

    def _tried(self, key: bytes, trial: asyncio.Task[Verdict]) -> None:
        self._constraints.room.release()
        if trial.cancelled() or trial.exception() is not None:  # another request's trial may get further
            return
        self._verdicts[key] = trial.result()
        if len(self._verdicts) > _REMEMBERED:
            self._verdicts.popitem(last=False)

    def _refusal(self, kind: str, verdict: Verdict) -> str:
        limits = self._constraints.limits
        seconds = PARSE_S if verdict is Verdict.PARSING else limits.cpu_s
        return (
            f"The structured output's {kind} is too complex: {verdict} it takes more than {seconds:g} s of processor "
            f"time or {limits.memory_bytes >> 20} MiB of memory. Simplify it: fewer alternatives, properties and "
            "levels, and no counted repetition inside of another"
        )


async def _done(trying: Coroutine[Any, Any, None], aborted: asyncio.Event | None) -> bool:
    """Whether this came to its end before it was ``aborted``. Raises what it raises."""
    if aborted is None:
        await trying
        return True
    tried, ended = asyncio.create_task(trying), asyncio.create_task(aborted.wait())
    try:
        await asyncio.wait((tried, ended), return_when=asyncio.FIRST_COMPLETED)
        if tried.done():
            tried.result()
        return tried.done()
    finally:
        tried.cancel()
        ended.cancel()
