"""A culprit is found by its third death or its fourth; an innocent is never taken for one while it has company."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from schemas.base import Origin, Record
from schemas.requests import Attempt, Endpoint, Request
from service.consumer.ledger import Ledger
from service.worker.admission import CONVICTING
from service.worker.jobs import Job
from service.worker.suspects import CAUTION, Given, Suspects


def job(offset: int = 0, *, deaths: int = 0, alias: str = "llama") -> Job:
    origin = Origin(topic="requests", partition=0, offset=offset)
    request = Request(id=str(offset), origin=origin, model=alias, endpoint=Endpoint.CHAT, body={}, received=0.0, size=0)
    record = Record("requests", 0, offset, 0.0, None, b"")
    return Job(request=request, record=record, alias=alias, attempt=Attempt(), taken=0.0, deaths=deaths)


def test_who_was_at_one_death_runs_beside_others_and_few_of_its_kind() -> None:
    suspects = Suspects()
    fresh = [job(n) for n in range(100)]
    assert suspects.may_start(job(deaths=1), Given(fresh))
    crowd = [job(n, deaths=1) for n in range(CAUTION)]
    assert not suspects.may_start(job(deaths=1), Given([*fresh, *crowd]))
    assert suspects.may_start(job(), Given([*fresh, *crowd]))


def test_who_was_at_two_deaths_closes_its_model_until_it_has_run_alone() -> None:
    suspects, suspect, other = Suspects(), job(1, deaths=2), job(2)
    assert not suspects.may_start(suspect, Given([other]))
    suspects.hold(suspect)
    assert suspects.closed("llama", Given([other]))
    assert not suspects.closed("qwen", Given([]))
    assert suspects.release("llama", Given([other])) is None
    assert suspects.release("llama", Given([])) is suspect
    assert suspects.closed("llama", Given([suspect]))
    assert not suspects.closed("llama", Given([]))


def test_one_that_was_ended_meanwhile_is_forgotten() -> None:
    suspects, gone = Suspects(), job(deaths=2)
    suspects.hold(gone)
    suspects.withdraw(gone)
    assert not suspects.closed("llama", Given([]))
    assert suspects.release("llama", Given([])) is None
    assert suspects.held("llama") == ()


class World:
    """Jobs that are read again after each death, with what the ledger remembers of them.

    ``culprits``: who kills its engine, and whether it takes the worker along.
    """

    def __init__(self, count: int, culprits: dict[int, bool]) -> None:
        self.culprits = culprits
        self.deaths = dict.fromkeys(range(count), 0)
        self.ledger = Ledger()
        self.killed_alone: Counter[int] = Counter()
        self.done: set[int] = set()
        self.condemned: dict[int, bool] = {}
        """Who was condemned, and whether for a death that had another cause."""

    def live(self, kill_after: int) -> None:
        """One worker's life: it ends with a culprit's run, or is killed after so many steps."""
        suspects = Suspects()
        running: list[Job] = []
        queue = []
        for n, deaths in self.deaths.items():
            if n in self.done or n in self.condemned:
                continue
            if self.ledger.evidence(n) >= CONVICTING:
                self.condemned[n] = n not in self.culprits
            else:
                queue.append(job(n, deaths=deaths))
        for step in range(1000):
            self._start(suspects, queue, running)
            if not running:
                return
            fatal = [self.culprits[n] for one in running if (n := int(one.request.id)) in self.culprits]
            if fatal or step == kill_after:
                self._die(running, witnessed=bool(fatal) and not any(fatal))
                return
            finished = running.pop(0)
            self.done.add(int(finished.request.id))

    def _start(self, suspects: Suspects, queue: list[Job], running: list[Job]) -> None:
        while (held := suspects.release("llama", Given(running))) is not None:
            running.append(held)
        while queue and not suspects.closed("llama", Given(running)):
            one = queue.pop(0)
            if suspects.may_start(one, Given(running)):
                running.append(one)
            else:
                suspects.hold(one)

    def _die(self, running: list[Job], *, witnessed: bool) -> None:
        culprit = None
        for one in running:
            n, alone = int(one.request.id), one.suspect and len(running) == 1
            self.deaths[n] += 1
            self.ledger.start(n, alone=alone)
            self.killed_alone[n] += alone
            culprit = n if alone else culprit
        if witnessed:
            self.ledger.engine_died(culprit)
        self.ledger = Ledger.decode(*self.ledger.encode())


@given(
    count=st.integers(1, 256),
    culprits=st.dictionaries(st.integers(0, 255), st.booleans(), max_size=3),
    kills=st.lists(st.integers(0, 300), max_size=12),
)
def test_each_culprit_is_condemned_and_an_innocent_only_if_its_worker_was_killed_twice_while_it_ran_alone(
    count: int, culprits: dict[int, bool], kills: list[int]
) -> None:
    culprits = {n: worker_too for n, worker_too in culprits.items() if n < count}
    world = World(count, culprits)
    for kill in [*kills, *[1000] * (4 * len(culprits) + 1)]:
        world.live(kill)
    assert world.done | world.condemned.keys() == set(range(count))
    assert culprits.keys() <= world.condemned.keys()
    for n, wrongly in world.condemned.items():
        assert world.deaths[n] >= 3
        assert not wrongly or world.killed_alone[n] >= 2
    if not kills:
        assert world.condemned.keys() == culprits.keys()
        assert all(world.deaths[n] <= 3 + worker_too for n, worker_too in culprits.items())


def test_one_culprit_among_a_full_engine_leaves_few_suspects() -> None:
    world = World(256, {200: False})
    world.live(1000)
    world.live(1000)
    assert sum(deaths >= 2 for deaths in world.deaths.values()) <= CAUTION
    world.live(1000)
    world.live(1000)
    assert (world.condemned, len(world.done)) == ({200: False}, 255)
