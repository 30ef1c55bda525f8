"""One device's part of a plan, replayed: by the worker's own policy in the simulator, or in coarse strokes."""

from dataclasses import dataclass, replace

from schemas.objectives import Objective
from service.models_file import Scheduling
from service.scheduling.coarse import Replay, Tally
from service.scheduling.machines import Machine, ModelCosts
from service.scheduling.policy import Policy, PolicySettings
from service.scheduling.queues import Queues
from service.scheduling.scheduler import Scheduler
from service.scheduling.simulator import Arrival, Trace, simulate
from service.scheduling.traffic import Traffic


class Ours:
    """The worker's own scheduler, driven as the worker drives it."""

    def __init__(self, queues: Queues[Arrival], machine: Machine, settings: PolicySettings) -> None:
        self._scheduler = Scheduler(
            policy=Policy(settings),
            active=next(iter(machine.models)),
            now=0.0,
            models={alias: Scheduling(max_concurrency=costs.max_running) for alias, costs in machine.models.items()},
            queues=queues,
        )
        self.decide = self._scheduler.decide
        self.take = self._scheduler.take
        self.takes_at = self._scheduler.takes_at
        self.switched = self._scheduler.switched
        self.finished = self._scheduler.costs.finished
        self.worked = self._scheduler.costs.worked
        self.did = self._scheduler.costs.did


@dataclass(frozen=True, slots=True)
class Part:
    """What one device has to do. ``models``: each one's place in the traffic's aliases, what it costs, what it owes.

    ``exact``: by the policy itself, a hundred times as long.
    """

    traffic: Traffic
    models: tuple[tuple[int, ModelCosts, Objective], ...]
    device_bytes: float
    max_wait_s: float
    exact: bool


def replay(part: Part) -> Tally:
    """What comes of a device's requests. The same part gives the same."""
    if not len(part.traffic):
        return Tally()
    if not part.exact:
        return Replay(
            part.traffic,
            part.models,
            device_bytes=part.device_bytes,
            max_wait_s=part.max_wait_s,
        ).run()
    known = {of: (replace(costs, alias=str(of)), objective) for of, costs, objective in part.models}
    usual = _usual_answers(part.traffic)
    arrivals = tuple(
        Arrival(at, str(of), prompt, output, objective=known[of][1], claim=usual[of])
        for at, of, prompt, output in part.traffic
    )
    machine = Machine("planned", part.device_bytes, {str(of): costs for of, (costs, _) in known.items()})
    queues: Queues[Arrival] = Queues()
    ours = Ours(queues, machine, PolicySettings(max_wait_s=part.max_wait_s))
    outcome = simulate(Trace("planned", machine, arrivals), ours, queues)
    return Tally(
        met_of={int(name): count for name, count in outcome.met_of.items()},
        met=outcome.met,
        missed=sum(outcome.missed.values()),
        met_tokens=outcome.met_tokens,
        switches=outcome.switches,
        serving_s=outcome.serving_s,
        switching_s=outcome.switching_s,
        end=outcome.end,
    )


def _usual_answers(traffic: Traffic) -> dict[int, int]:
    """What the policy is told that an answer will take: what its model's answers take on average."""
    sums: dict[int, list[int]] = {}
    for _, of, _, output in traffic:
        known = sums.setdefault(of, [0, 0])
        known[0] += output
        known[1] += 1
    return {of: max(1, round(said / n)) for of, (said, n) in sums.items()}
