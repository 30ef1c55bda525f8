"""A model on its way while another one's steps run: its workers load it in slices, and a thread builds its core; or it
was parked, and they bring it back in slices.
"""

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from service.engine.core.laps import TOLD_S, Due
from service.engine.worker import calls
from service.engine.worker.slices import IDLE_S, SLICE_S

_SLICED = frozenset({"initialize_from_config"})
"""Methods of a worker that are cut as a load is: what they do is make large tensors."""

Way = Generator[None, None, Any]

_BUILT_HERE = threading.local()
"""Whose core this thread builds."""


def built_here() -> "Load | None":
    """The model whose core is built in the thread that asks, which is not the main one."""
    return getattr(_BUILT_HERE, "coming", None)


class Coming(ABC):
    """It gets on by ``go_on`` only, which the core's main thread calls between two steps.

    ``workers`` asks all of them.
    """

    def __init__(self, key: int, due: Due, *, workers: Callable[..., list[Any]]) -> None:
        self.key = key
        self.over: Future[bool] = Future()
        """Whether it has come, once it has ended."""
        self.stall_s: dict[str, float] = {}
        """By phase, what the active model waited for in one piece beyond its slice, at the longest, in seconds. Not
        what was done at once because somebody waited for it.
        """
        self.error: BaseException | None = None
        self.due = due
        self._workers = workers
        self._at_once = False
        self._idle, self._slice_s = True, IDLE_S
        self._last = time.perf_counter()
        """When the last slice ended."""
        self._way = self._come()

    @property
    def ended(self) -> bool:
        return self.over.done()

    def go_on(self, *, idle: bool) -> None:
        """A slice, the longest one where the active model is ``idle``, otherwise as long as its last step took."""
        step_s = time.perf_counter() - self._last
        self._idle, self._slice_s = idle, IDLE_S if idle else min(max(SLICE_S, step_s), IDLE_S)
        try:
            next(self._way)
        except StopIteration:
            self.over.set_result(True)
        except Exception as error:
            self.give_up(error)
        self._last = time.perf_counter()

    def give_up(self, error: BaseException) -> None:
        """It ends where it is."""
        self.error = error
        if not self.ended:
            self.over.set_result(False)
        self._way.close()

    @abstractmethod
    def _come(self) -> Way:
        """All the way, slice by slice."""

    def _slices(self, phase: str) -> Way:
        while True:
            with self._piece(phase):
                answers = self._workers(calls.go_on, self.key, self._slice_s, self._idle, self.due.left())
            if all(answers):
                return [answer for (answer,) in answers]
            yield

    @contextmanager
    def _piece(self, phase: str) -> Iterator[None]:
        """What goes on in here is done in one piece."""
        began = time.perf_counter()
        yield
        over = time.perf_counter() - began - self._slice_s
        if not self._at_once and over >= TOLD_S:
            self.stall_s[phase] = max(self.stall_s.get(phase, 0.0), round(over, 4))


class Return(Coming):
    """A parked model that is brought back."""

    def _come(self) -> Way:
        yield from self._slices("wake")


class Load(Coming):
    """A model that is loaded.

    ``build`` makes the core where the workers have loaded it; ``aside`` says whether it may do so in a thread of its
    own. What that thread asks of the workers is asked by the main one. ``end`` ends a core that was built though its
    load had been given up.
    """

    def __init__(
        self,
        key: int,
        loading: tuple[Any, dict[str, str | None]],
        due: Due,
        *,
        workers: Callable[..., list[Any]],
        build: Callable[[], Any],
        end: Callable[[Any], None],
        aside: bool,
    ) -> None:
        self.core: Any = None
        self._loading = loading
        self._build = build
        self._end = end
        self._aside = aside
        self._built: Future[Any] = Future()
        self._asked: queue.SimpleQueue[tuple[str, Any, Any, Future[list[Any]]] | None] = queue.SimpleQueue()
        super().__init__(key, due, workers=workers)

    def settle(self) -> Any:
        """Do the rest at once, and answer with the core. Raises what went wrong."""
        self._at_once = True
        while not self.ended:
            self.go_on(idle=True)
        if self.error is not None:
            raise self.error
        return self.core

    def give_up(self, error: BaseException) -> None:
        """It ends where it is, and the thread where it next asks; what the workers have of it is to be forgotten."""
        if self.error is None and self.core is None:
            self._built.add_done_callback(self._end_untaken)
        super().give_up(error)
        while not self._asked.empty():
            if (question := self._asked.get()) is not None:
                question[-1].set_exception(error)

    def _end_untaken(self, built: Future[Any]) -> None:
        if built.exception() is None:
            self._end(built.result())

    def ask(self, method: str, args: Any, kwargs: Any) -> list[Any]:
        """What the workers answer to the thread that builds the core."""
        answers: Future[list[Any]] = Future()
        self._asked.put((method, args, kwargs, answers))
        if self.error is not None:
            raise self.error
        return answers.result()

    def _come(self) -> Way:
        with self._piece("begin"):
            self._workers(calls.begin, self.key, *self._loading)
        yield
        yield from self._slices("load")
        if self._aside:
            self.core = yield from self._built_aside()
        else:
            with self._piece("build"):
                self.core = self._build()

    def _built_aside(self) -> Way:
        def build() -> None:
            _BUILT_HERE.coming = self
            try:
                self._built.set_result(self._build())
            except BaseException as error:
                self._built.set_exception(error)
            self._asked.put(None)

        threading.Thread(target=build, name="gearshift-core", daemon=True).start()
        while not self._built.done():
            yield
            self.due.left()
            try:
                question = self._asked.get(timeout=self._slice_s) if self._idle else self._asked.get_nowait()
            except queue.Empty:
                continue
            if question is not None:
                yield from self._answer(*question)
        return self._built.result()

    def _answer(self, method: str, args: Any, kwargs: Any, answers: Future[list[Any]]) -> Way:
        try:
            with self.due.warming_up(method):
                if method in _SLICED and self.due.workers == 1:
                    self._workers(calls.begin_call, self.key, method, args, kwargs)
                    answers.set_result((yield from self._slices(method)))
                else:
                    with self._piece(method if isinstance(method, str) else "call"):
                        given = self._workers(calls.call, self.key, method, args, kwargs, self.due.left())
                    answers.set_result(given)
        except GeneratorExit:
            answers.set_exception(self.error)
            raise
        except Exception as error:
            answers.set_exception(error)
