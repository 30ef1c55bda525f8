"""Which model the workers have seated, and when they are told of another one."""

from concurrent.futures import Future
from typing import Any

from service.engine.worker import calls
from service.engine.worker.calls import Failure

NOBODY = -1
"""No context's key."""


class WorkerFailed(RuntimeError):
    """A worker could not do its part of a load or a switch; the message is its own."""


class Seating:
    """What the workers were told last.

    A switch to a resident model asks them nothing: they are told before they are asked to run it, and not earlier.
    Nothing is asked of a model before each worker has answered that it is seated. Otherwise one that could not seat it
    would let the others wait for it inside a step, and a step that was scheduled would be lost with its requests.
    """

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self.key = 0
        """The key of the model that they were told to seat; NOBODY where it is not known what they have."""
        self._answer: Future[list[Any]] | None = None
        """Their answer, as long as nobody has looked at it."""

    def tell(self, key: int) -> None:
        """Have them seat a model, without waiting for it."""
        if key != self.key:
            self._answer = self._executor.collective_rpc(calls.seat, args=(key,), non_block=True)
            self.key = key

    def settle(self, key: int) -> None:
        """Have a model seated in all of them. Raises WorkerFailed; none of their models runs then."""
        self.tell(key)
        answer, self._answer = self._answer, None
        if answer is None:
            return
        try:
            checked(answer.result())
        except BaseException:
            self.key = NOBODY
            raise

    def lost(self) -> None:
        """Something went wrong in them, or they change it themselves: they are to be told anew."""
        self.key, self._answer = NOBODY, None


def checked(answers: list[Any]) -> list[Any]:
    """The workers' answers. Raises WorkerFailed where there is a failure among them."""
    failures = [answer for answer in answers if isinstance(answer, Failure)]
    if failures:
        raise WorkerFailed("; ".join(sorted({str(failure) for failure in failures})))
    return answers
