"""Work in slices: a second thread does it, and runs only while it holds the baton.

It looks at the clock at each call of torch's (a torch function mode sees them all: the constructors of parameters, the
copies of the loaders, what follows them) and gives the baton back when its slice is over. What moves many bytes in one
call is done in pieces. The main thread waits while the other one runs, so that only one of the two ever does; what the
process holds for a model is changed by whoever passes the baton.
"""

import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Generator
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from service.engine.system.deadline import Overdue, interrupt
from service.engine.system.threads import aside, spread

log = logging.getLogger(__name__)

SLICE_S = 10e-3
"""How long a slice is at least, between two steps of the model that runs."""
IDLE_S = 50e-3
"""How long it is at most, and while that one has nothing to do: a request that comes waits for no more."""
_AGAIN_S = 5.0
_PIECE_S = 2e-3
_FIRST_BYTES, _LEAST_BYTES, _MOST_BYTES = 1 << 20, 1 << 16, 64 << 20
_DRAWN_TOGETHER = 16
"""Elements that a generator of the CPU draws at once: pieces of so many draw the numbers that one call would."""
_IN_PIECES = frozenset({"copy_", "uniform_", "normal_", "fill_", "zero_"})
_DRAWS = {torch.nn.init.uniform_: ("a", "b"), torch.nn.init.normal_: ("mean", "std")}
"""They come with all of their arguments by name, and call the methods of these names where no mode sees them."""
_BESIDE = frozenset({"create_onednn_mm_handler"})
"""Long calls into C++ that can't be cut, ask nothing of what the process holds for a model, and let go of the
interpreter's lock: steps are run meanwhile, on other CPUs if there are any, unless one is expected to be as short as a
piece."""


class Sliced(TorchFunctionMode):
    """``work`` in a thread of its own, a slice at a time."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__()
        self._work = work
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._until = self._seen = 0.0
        self._given_up = False
        self._alone = threading.Event()
        """Set unless a call runs beside the steps."""
        self._alone.set()
        self._piece_bytes = dict.fromkeys(_IN_PIECES, _FIRST_BYTES)
        self._s_per_byte = math.inf
        """Of calls that may run beside the steps: of the fastest one, for the others' times have steps in them."""
        self._cpus_aside: set[int] = set()
        self._answer: Any = None
        self._error: BaseException | None = None
        self.ended = False
        self.uncut_s, self.uncut = 0.0, ""
        """The longest stretch of it so far that could not be cut, and the line of code where that ended."""
        self._thread = threading.Thread(target=self._run, name="gearshift-slices", daemon=True)
        self._thread.start()

    def waits(self, seconds: float) -> bool:
        """Whether it can be given the baton within ``seconds``: no call of it runs beside the steps."""
        return self._alone.wait(seconds)

    def go_on(self, seconds: float, within_s: float | None = None) -> None:
        """Let the thread run for so long, or to its end. The main thread's, between two steps.

        A call that runs beside the steps is waited for as long, too: most are short. After ``within_s`` seconds Python
        code is interrupted that does not give the baton back.
        """
        if self.ended:
            return
        self._until = time.perf_counter() + seconds
        self._pass_baton(within_s)
        while not self.ended and (left_s := self._until - time.perf_counter()) > 0 and self.waits(left_s):
            self._pass_baton(within_s)

    def _pass_baton(self, within_s: float | None) -> None:
        self._go.release()
        if not self._back.acquire(timeout=within_s):
            self._given_up = True
            while not self.ended:
                interrupt(self._thread)
                if self._back.acquire(timeout=_AGAIN_S):
                    self._go.release()

    def give_up(self) -> None:
        """Have it fail where it is, and wait for that."""
        self._given_up = True
        while not self.ended:
            self._alone.wait()
            self.go_on(IDLE_S)

    def answer(self) -> Any:
        """What the work answered, once it has ended. Raises what it raised."""
        if self._error is not None:
            raise self._error
        return self._answer

    def _run(self) -> None:
        self._go.acquire()
        self._seen = time.perf_counter()
        try:
            self._cpus_aside = spread()
            with self:
                self._answer = self._work()
        except Overdue:
            self._error = TimeoutError("the model did not load in time")
        except BaseException as error:
            self._error = error
        self._note_uncut()
        self.ended = True
        self._back.release()

    def _note_uncut(self) -> None:
        seconds = time.perf_counter() - self._seen
        if seconds > self.uncut_s:
            self.uncut_s, self.uncut = seconds, _line()

    def _look(self) -> None:
        """At the clock: where the slice is over, the baton goes back, and comes again."""
        self._note_uncut()
        if self._given_up:
            raise Overdue
        if time.perf_counter() > self._until:
            self._back.release()
            self._go.acquire()
            if self._given_up:
                raise Overdue
        self._seen = time.perf_counter()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._look()
        name = getattr(func, "__name__", "")
        if name in _BESIDE:
            size = sum(each.nbytes for each in args if isinstance(each, torch.Tensor))
            return self._whole(partial(func, *args, **kwargs), size)
        if name == "zeros" and "out" not in kwargs:
            made = torch.empty(*args, **kwargs)
            self._in_pieces("zero_", made)
            return made
        if func in _DRAWS:
            first, second = (kwargs[parameter] for parameter in _DRAWS[func])
            with torch.no_grad():
                return self._in_pieces(name, kwargs["tensor"], first, second, generator=kwargs.get("generator"))
        if name in _IN_PIECES and len(args) >= (2 if name == "copy_" else 1):  # not what is given by name
            return self._in_pieces(name, *args, **kwargs)
        return func(*args, **kwargs)

    def _whole(self, call: Callable[[], Any], size: int) -> Any:
        """A call on so many bytes that can't be cut."""
        began = time.perf_counter()
        answer = call() if size * self._s_per_byte <= _PIECE_S else self._beside(call)
        self._s_per_byte = min(self._s_per_byte, (time.perf_counter() - began) / max(size, 1))
        return answer

    def _beside(self, call: Callable[[], Any]) -> Any:
        self._alone.clear()
        self._back.release()
        try:
            with aside(self._cpus_aside):
                return call()
        finally:
            self._alone.set()
            self._go.acquire()
            self._seen = time.perf_counter()

    def _in_pieces(self, name: str, target: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """An operation on a tensor, piece by piece, each of which takes about as long as the last one should have."""
        source = args[0] if name == "copy_" else None
        if target.nbytes <= self._piece_bytes[name] or not _can_be_cut(target, source):
            return getattr(target, name)(*args, **kwargs)  # type: ignore[no-any-return]
        flat = target.detach()
        if source is not None:
            args = args[1:]
            source = source.detach()
        if flat.is_contiguous() and (source is None or source.is_contiguous()):
            flat, source = flat.view(-1), None if source is None else source.view(-1)
        row_bytes, at = flat.nbytes / len(flat), 0
        while at < len(flat):
            self._look()
            rows = max(1, int(self._piece_bytes[name] / row_bytes / _DRAWN_TOGETHER)) * _DRAWN_TOGETHER
            if len(flat) - at - rows < _DRAWN_TOGETHER:
                rows = len(flat) - at
            first = () if source is None else (source[at : at + rows],)
            began = time.perf_counter()
            getattr(flat[at : at + rows], name)(*first, *args, **kwargs)
            self._aim(name, time.perf_counter() - began)
            at += rows
        return target

    def _aim(self, name: str, seconds: float) -> None:
        change = min(max(_PIECE_S / max(seconds, 1e-6), 0.5), 1.5)
        self._piece_bytes[name] = int(min(max(self._piece_bytes[name] * change, _LEAST_BYTES), _MOST_BYTES))


class Pieces:
    """Work that is cut already: a piece of it at a time, in the main thread."""

    def __init__(self, pieces: Generator[None, None, None]) -> None:
        self._pieces = pieces
        self._error: Exception | None = None
        self.ended = False

    def waits(self, seconds: float) -> bool:  # noqa: ARG002 - as of what a thread does
        return True

    def go_on(self, seconds: float, within_s: float | None = None) -> None:  # noqa: ARG002 - a piece is what it is
        """Do a piece, of which the first one after the last ends the work."""
        if self.ended:
            return
        try:
            next(self._pieces)
        except StopIteration:
            self.ended = True
        except Exception as error:
            self._error, self.ended = error, True

    def done(self) -> bool:
        return self.ended

    def result(self) -> None:
        """Do the rest at once. Raises what went wrong."""
        while not self.ended:
            self.go_on(0)
        self.answer()

    def give_up(self) -> None:
        """Leave it where it is."""
        self._pieces.close()
        self.ended = True

    def answer(self) -> None:
        """Raises what went wrong, once it has ended."""
        if self._error is not None:
            raise self._error


def _line() -> str:
    """Of the code that called into this module, which is at its end where nobody did."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in {__file__, threading.__file__}:
        frame = frame.f_back
    return "its end" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _can_be_cut(target: Any, source: Any) -> bool:
    if not isinstance(target, torch.Tensor) or not target.dim() or (target.requires_grad and torch.is_grad_enabled()):
        return False
    if source is None:
        return target.is_contiguous()
    return isinstance(source, torch.Tensor) and source.shape == target.shape
