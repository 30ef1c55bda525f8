"""Which constraints a model's requests may have: those that vLLM parses and compiles within limits, as was tried."""

import asyncio
import hashlib
import os
import pickle
from collections import OrderedDict
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


class Constraints:
    """Those of all models: their trials, of which only so many run at once."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.trials = Trials()
        self.room = asyncio.Semaphore(_AT_ONCE)

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

    async def check(self, params: Any) -> None:
        """Raise ValueError for vLLM's sampling parameters whose constraint takes too much."""
        constraint = getattr(params, "structured_outputs", None)
        kind = next((kind for kind in _KINDS if getattr(constraint, kind, None)), None)
        if kind is None:
            return
        key = hashlib.sha256(pickle.dumps(constraint)).digest()
        if key not in self._verdicts:
            await self._try(key, constraint)
        self._verdicts.move_to_end(key)
        if (verdict := self._verdicts[key]) is not Verdict.FIT:
            raise ValueError(self._refusal(kind, verdict))

    async def _try(self, key: bytes, constraint: Any) -> None:
        """Raises RuntimeError where no trial can be made."""
        async with self._constraints.room:
            if key in self._verdicts:  # it was tried for another request meanwhile
                return
            judge, limits = self._constraints.trials.judge, self._constraints.limits
            self._verdicts[key] = await asyncio.to_thread(judge, self._alias, constraint, limits)
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
