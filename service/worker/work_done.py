"""What the device did for each model while it served: what a step, a row and a prompt cost is learnt from that."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from service.scheduling.costs import Costs
from service.worker.jobs import Job

_TOLD_S, _LONG_S = 1.0, 300.0
"""After so much serving it is told, and at the latest. A prompt counts once it is read: what is told is at least twice
as long as those that are being read have taken.
"""


@dataclass(slots=True)
class _Done:
    seconds: float = 0.0
    rows_s: float = 0.0
    """Seconds of all requests in the batch together."""
    prompt: int = 0
    said: int = 0
    steps_of_all: float = 0.0
    """Steps that gave each of the requests its tokens, added up: one gives all answers of a request one each."""
    steps_of_one: float = 0.0
    """Of the request with most: there were as many at the least."""
    next_look_s: float = 0.0

    @property
    def steps(self) -> float:
        """Steps that gave tokens: who waits for its prompt has none, and who came late or left early not all."""
        return max(self.steps_of_one, self.steps_of_all * self.seconds / max(self.seconds, self.rows_s))


class WorkDone:
    """Counts tokens as they come, of what runs and of what ends: what is begun is not what ends in the same time.

    ``said`` gives how many tokens a call has so far, zero where it has ended.
    """

    def __init__(self, costs: Costs, said: Callable[[str], int]) -> None:
        self._costs = costs
        self._said = said
        self._done: dict[str, _Done] = {}

    def begun(self, job: Job) -> None:
        """A run begins, perhaps with what an earlier one said."""
        job.read, job.counted = False, 0 if job.progress is None else job.progress.tokens

    def served(self, alias: str, seconds: float, rows: int, running: Iterable[Job], *, served_s: float) -> None:
        """The model has served so many requests for so much longer, ``served_s`` in all; ``running`` are those that
        have not ended.
        """
        done = self._of(alias)
        done.seconds += seconds
        done.rows_s += seconds * rows
        if done.seconds < max(_TOLD_S, done.next_look_s):
            return
        reads_s = 0.0
        for job in running:
            if (tokens := self._said(job.call_id)) > job.counted:
                self._count(job, tokens)
            elif not job.read:
                reads_s = max(reads_s, served_s - job.beside[1])
        if done.seconds >= min(_LONG_S, 2 * reads_s):
            del self._done[alias]
            self._costs.did(alias, seconds=done.seconds, prompt=done.prompt, steps=done.steps, rows=done.said)
        else:
            done.next_look_s = done.seconds + _TOLD_S

    def ended(self, job: Job, tokens: int, *, continued: int = 0) -> None:
        """A run ended with so many tokens, ``continued`` of which an earlier one had said."""
        job.counted = max(job.counted, continued)
        self._count(job, tokens)

    def _count(self, job: Job, tokens: int) -> None:
        done = self._of(job.alias)
        if not job.read:
            job.read = True
            done.prompt += job.prompt_tokens + job.counted
        more = max(0, tokens - job.counted)
        done.said += more
        done.steps_of_all += more / job.samples
        done.steps_of_one = max(done.steps_of_one, more / job.samples)
        job.counted = max(tokens, job.counted)

    def _of(self, alias: str) -> _Done:
        return self._done.setdefault(alias, _Done())
