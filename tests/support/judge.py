"""Others' own tests as a judge: what they check is checked here by behaviour, at rest and while models are switched.

A test names whose behaviour it shows: ``@judge("AsyncLLM", "test_abort")``. Which of them hold, and in which life of
their model, is counted at the end of the run.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType
from typing import Any, Self

import pytest

AT_REST, SWITCHED = "at rest", "switched"
TURN_S = 0.01
"""How long each model has its turn where they are switched all the time: a few steps of a small one."""
_PROPERTY = "judge"


def judge(source: str, *tests: str) -> pytest.MarkDecorator:
    """``tests`` of ``source`` whose behaviour the test shows, as they are called there."""
    return pytest.mark.judge(source, *tests)


class Life:
    """What a model goes through while the block runs: nothing, or its place is taken and given back all the time."""

    def __init__(self, switch: Callable[[str], Awaitable[Any]], home: str, away: str | None) -> None:
        self._switch = switch
        self._home = home
        self.away = away
        self._enough = asyncio.Event()
        self._begun = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self.away is not None:
            self._task = asyncio.create_task(self._turns(self.away), name="turns")
            begun = asyncio.create_task(self._begun.wait())
            await asyncio.wait((self._task, begun), return_when=asyncio.FIRST_COMPLETED)
            begun.cancel()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._enough.set()
        if self._task is not None:
            await self._task

    async def _turns(self, away: str) -> None:
        while not self._enough.is_set():
            for alias in (away, self._home):
                await self._switch(alias)
                await asyncio.sleep(TURN_S)
            self._begun.set()


class Counts:
    """A plugin of pytest: notes what each test shows, and tells at the end how many behaviours hold."""

    def __init__(self) -> None:
        self._held: dict[str, dict[str, dict[str, bool]]] = defaultdict(lambda: defaultdict(dict))
        """By source and life, whether each behaviour holds: where several tests show it, in all of them."""

    @pytest.hookimpl
    def pytest_collection_modifyitems(self, items: Iterable[pytest.Item]) -> None:
        for item in items:
            for mark in item.iter_markers("judge"):
                item.user_properties.append((_PROPERTY, (mark.args[0], mark.args[1:], _life(item))))

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped or (report.when != "call" and report.passed):
            return
        for name, value in report.user_properties:
            if name == _PROPERTY:
                source, tests, life = value
                for test in tests:
                    held = self._held[source][life]
                    held[test] = held.get(test, True) and report.passed

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self._held:
            return
        terminalreporter.section("what others' own tests check")
        for source, lives in sorted(self._held.items()):
            behaviours = len({test for held in lives.values() for test in held})
            told = [f"{sum(held.values())} of {len(held)} hold {life}" for life, held in sorted(lives.items())]
            terminalreporter.write_line(f"{source}: {behaviours} behaviours; {', '.join(told)}")


def _life(item: pytest.Item) -> str:
    callspec = getattr(item, "callspec", None)
    away = callspec is not None and callspec.params.get("away")
    return SWITCHED if away else AT_REST
