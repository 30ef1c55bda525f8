"""Three tiny models on a real engine under the worker's own loop: each alone, then all together, in paired runs.

With a recorded trace, its first requests come as well, so much faster that these models are as busy with them as those
of production sizes are with the whole, and under objectives that are as strict for their steps.
"""

import asyncio
import contextlib
import itertools
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from deploy.local.models import MAX_POSITION, ensure_models, write_models_file
from deploy.local.setup import home
from schemas.base import Origin
from schemas.control import SetObjective, Switch
from schemas.objectives import Objective
from schemas.results import Outcome, Result
from schemas.status import StatusState
from service import settings as settings_module
from service import telemetry
from service.app import seldom_collected
from service.engine import VllmEngine
from service.engine.answering import arguments
from service.models_file import load_models
from service.ports import Bus
from service.scheduling.machines import GB, Machine, ModelCosts
from service.scheduling.simulator import Arrival, Trace
from service.scheduling.simulator import Outcome as Simulated
from service.worker.worker import ModelsSource, Worker
from tests.bench.baselines import contest
from tests.bench.production import OBJECTIVE, Record, drawn, read, scaled
from tests.bench.production import machine as production
from tests.support.fake_bus import FakeBus

_PER_MODEL = 16
_TOKENS = 96
_PROMPT = 10
_MOST_ROWS = 256
_KV_BYTES = 256 << 20
"""Room for as many long prompts: the simulator knows no lack of it."""
_LIMIT_S = 120.0
_LOOK_S, _LEAST_S = 0.1, 0.05


class Run:
    """Requests sent at once, and what came of them."""

    def __init__(self, results: Sequence[Result], wall_s: float, switching_s: float) -> None:
        self.results = results
        self.wall_s = wall_s
        self.switching_s = switching_s

    def texts(self) -> dict[str, str]:
        return {r.id: r.body["choices"][0]["text"] for r in self.results if r.body}

    def goodput(self) -> float:
        """The share of all that met their objective."""
        return sum(r.objective is not None and r.objective.met for r in self.results) / len(self.results)

    def aborted(self) -> int:
        return sum(r.outcome is not Outcome.COMPLETED for r in self.results)

    def waits_s(self) -> dict[str, list[float]]:
        """Every wait for a turn, by model: before the start, and each time it was frozen."""
        waits: dict[str, list[float]] = {}
        for result in self.results:
            own = waits.setdefault(str(result.model), [])
            own.append(result.timing.waited_for.get("turn", 0.0) + result.timing.waited_for.get("switch", 0.0))
            own.extend(freeze.seconds for freeze in result.timing.freezes)
        return waits


@dataclass(frozen=True)
class Ask:
    """One request of a trace: its number, seconds after the start, how many tokens it wants and has to be read."""

    number: int
    at: float
    alias: str
    tokens: int
    prompt: int = _PROMPT


def at_once(
    aliases: Sequence[str], *, each: int = _PER_MODEL, tokens: int = _TOKENS, prompt: int = _PROMPT
) -> tuple[Ask, ...]:
    """So many requests of each model, interleaved, all at the start."""
    return tuple(Ask(number, 0.0, alias, tokens, prompt) for number, alias in enumerate(list(aliases) * each))


def mixed(aliases: Sequence[str], *, seed: int = 0) -> tuple[Ask, ...]:
    """One model dominates, lengths differ, and requests keep coming for two seconds."""
    rng = random.Random(seed)
    weights = [4, *(1 for _ in aliases[1:])]
    picks = rng.choices(aliases, weights, k=48)
    return tuple(Ask(n, 2 * n / 48, alias, rng.randint(24, 160)) for n, alias in enumerate(picks))


@dataclass(frozen=True)
class Guess:
    """What was expected of a request at a moment, since the epoch; ``first_s`` and ``end_s`` are seconds from then."""

    origin: Origin
    at: float
    first_s: float
    end_s: float
    aside: bool


_FIRST, _END = "first token", "end"


class Errors:
    """By what part of the time that was then left the estimates were off.

    Less than ``_LEAST_S`` is left out: that is a step or two, and as long as it takes to hear of it. What stood aside
    then is told by itself: what comes later is begun before it, and no estimate knows that.
    """

    def __init__(self) -> None:
        self.of: dict[str, list[float]] = {_FIRST: [], _END: []}

    def add(self, guesses: Iterable[Guess], results: Mapping[Origin, Result]) -> None:
        for guess in guesses:
            timing = results[guess.origin].timing
            first_at = timing.received + timing.waited_s + (timing.first_token_s or 0.0)
            for what, expected_s, at in (
                (_FIRST, guess.first_s, first_at),
                (_END, guess.end_s, timing.finished),
            ):
                left_s = at - guess.at
                if left_s >= _LEAST_S:
                    whose = f"{what} of what stands aside" if guess.aside else what
                    self.of.setdefault(whose, []).append(abs(expected_s - left_s) / left_s)

    def figures(self) -> dict[str, Any]:
        """The larger of both medians, and what each is made of."""
        medians = {what: round(statistics.median(errors), 3) for what, errors in self.of.items()}
        return {
            "estimate_median_error": max(medians[_FIRST], medians[_END]),
            "estimate_errors": {
                what: {"estimates": len(errors), "median": medians[what], "p95": round(_p95(errors), 3)}
                for what, errors in self.of.items()
            },
        }


class Bench:
    """A worker around a real engine, with a bus in memory in front of it. ``errors`` are of runs with ``guessing``."""

    def __init__(self, bus: FakeBus, worker: Worker) -> None:
        self._bus = bus
        self._worker = worker
        self.errors = Errors()

    async def guessing(self, asks: Sequence[Ask]) -> Run:
        """A run in which all that is there is asked, again and again, what may be expected of it."""
        guesses: list[Guess] = []

        async def guess() -> None:
            while True:
                await asyncio.sleep(_LOOK_S)
                prospects, now = self._worker.outlook.look(), time.time()
                standing = self._worker.scheduler.queues.standing
                guesses.extend(
                    Guess(job.origin, now, expected.first_token_s, expected.end_s, bool(standing(str(job.origin))))
                    for job in self._worker.jobs
                    if (expected := prospects.of(job)) is not None
                )

        looking = asyncio.create_task(guess())
        try:
            run = await self.run(asks)
        finally:
            looking.cancel()
        self.errors.add(guesses, {result.origin: result for result in run.results})
        return run

    async def run(self, asks: Sequence[Ask]) -> Run:
        """Send each request at its time, and wait for all results."""
        await self._begin_with(asks[0].alias)
        said = len(self._bus.statuses)
        started = time.perf_counter()
        origins = []
        for ask in asks:
            await asyncio.sleep(max(0.0, started + ask.at - time.perf_counter()))
            headers = {"ce_id": f"{ask.alias}-{ask.number}", "endpoint": "/v1/completions"}
            origins.append(self._bus.produce(_body(ask), headers))
        wanted = set(origins)
        while not wanted <= self._bus.settled.keys():
            if time.perf_counter() - started > _LIMIT_S:
                raise TimeoutError(f"{len(wanted - self._bus.settled.keys())} requests unanswered")
            with contextlib.suppress(TimeoutError):
                await self._bus.until(lambda: wanted <= self._bus.settled.keys())
        wall = time.perf_counter() - started
        results = [await self._bus.result(origin) for origin in origins]
        switches = [s.switch for s in self._bus.statuses[said:] if s.switch and s.state.value == "completed"]
        return Run(results, wall, sum(report.stall_ms for report in switches) / 1e3)

    async def under(self, objective: Objective, asks: Sequence[Ask]) -> Run:
        """The same where all are to be answered within an objective."""
        aliases = sorted({ask.alias for ask in asks})
        said = {"ttft_s": objective.ttft_s, "tpot_s": objective.tpot_s}
        await self._command(*(SetObjective(model=alias, **said) for alias in aliases))
        try:
            return await self.guessing(asks)
        finally:
            await self._command(*(SetObjective(model=alias) for alias in aliases))

    async def _command(self, *events: SetObjective) -> None:
        for event in events:
            self._bus.command(event)
            await self._bus.said(event.id, StatusState.COMPLETED)

    async def _begin_with(self, alias: str) -> None:
        """By an event: a worker whose engine was switched behind its back expects what it would do with the other."""
        asked, done = Switch(model=alias, hold=0), {StatusState.COMPLETED, StatusState.NO_OP}
        self._bus.command(asked)
        await self._bus.until(lambda: any(s.control_id == asked.id and s.state in done for s in self._bus.statuses))


_stories = itertools.count()


def _body(ask: Ask) -> dict[str, Any]:
    story: str | list[int] = f"Story number {ask.number}: once"
    if ask.prompt != _PROMPT:  # by its tokens; none has an earlier one's first ones, that would not be read again
        story = random.Random(next(_stories)).choices(range(10, 200), k=ask.prompt)
    return {
        "model": ask.alias,
        "prompt": story,
        "max_tokens": ask.tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


def measure(*, rounds: int, recorded: Path | None = None) -> dict[str, Any]:
    """The engine's part of the bench: paired runs, medians. ``recorded`` is a file that ``production.read`` reads."""
    return uvloop.run(_measure(rounds, [] if recorded is None else read(recorded)))


async def _measure(rounds: int, records: Sequence[Record]) -> dict[str, Any]:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    settings = settings_module.load(log_level="warning")
    telemetry.configure(settings.log)
    with tempfile.TemporaryDirectory() as folder:
        paths = ensure_models(home() / "models")
        file = write_models_file(
            Path(folder) / "models.yaml", paths, default=next(iter(paths)), kv_cache_bytes=_KV_BYTES
        )
        models = load_models(
            file,
            settings.engine,
            engine_keys=arguments.engine_arg_names(),
            frontend_keys=arguments.frontend_arg_names(),
        )
        async with await VllmEngine.open(models, settings.engine) as engine:
            for alias in paths:
                await engine.switch(alias)
            bus, stop = FakeBus(), asyncio.Event()
            worker = Worker(
                engine=engine,
                bus=Bus(source=bus, settlements=bus, control=bus, announcements=bus),
                settings=settings,
                models=ModelsSource(lambda: models, lambda: models.scheduling),
            )
            serving = asyncio.create_task(_serve(worker, stop))
            bench, aliases = Bench(bus, worker), tuple(paths)
            try:
                together = at_once(aliases)
                await bench.run(together)  # compiles and caches what the first run does
                pairs = [await _pair(bench, together) for _ in range(rounds)]
                traces = {"at once": together, "mixed": mixed(aliases)}
                walls: dict[str, list[float]] = {name: [] for name in traces}
                seen: list[Alone] = []
                for _ in range(rounds):  # by turns: what the machine does meanwhile, it does to all
                    seen.append({})
                    for alias in aliases:
                        seen[-1] |= await _alone(bench, alias)
                        for name, asks in traces.items():
                            walls[name].append((await bench.guessing(asks)).wall_s)
                here = _machine(seen)
                figures = _figures(pairs) | bench.errors.figures()
                if records:
                    figures["recorded"] = await _recorded(bench, aliases, records, rounds)
            finally:
                stop.set()
                await serving
    return figures | {
        "simulated_over_measured": {
            name: round((here.simulated(asks).end + here.beside_s) / statistics.median(walls[name]), 3)
            for name, asks in traces.items()
        }
    }


async def _serve(worker: Worker, stop: asyncio.Event) -> None:
    """As the application does."""
    with seldom_collected():
        await worker.run(stop)


@dataclass(frozen=True)
class Pair:
    """The same requests, each model's alone and all together."""

    alone: Sequence[Run]
    together: Sequence[Run]

    @property
    def ratio(self) -> float:
        """The time of all together over the sum of the times alone."""
        return statistics.mean(run.wall_s for run in self.together) / sum(run.wall_s for run in self.alone)

    @property
    def identical(self) -> bool:
        """Whether every text is what it was alone."""
        alone = {key: text for run in self.alone for key, text in run.texts().items()}
        return all(run.texts() == alone for run in self.together)


async def _pair(bench: Bench, asks: Sequence[Ask]) -> Pair:
    """By turns, for a shared machine's speed changes from one second to the next: what it does, it does to both."""
    alone, together = [], []
    for alias in dict.fromkeys(ask.alias for ask in asks):
        alone.append(await bench.run(_of(asks, alias)))
        together.append(await bench.run(asks))
    return Pair(alone, together)


def _of(asks: Sequence[Ask], alias: str) -> tuple[Ask, ...]:
    return tuple(ask for ask in asks if ask.alias == alias)


def _figures(pairs: Sequence[Pair]) -> dict[str, Any]:
    together = [run for pair in pairs for run in pair.together]
    waits: dict[str, list[float]] = {}
    for run in together:
        for alias, own in run.waits_s().items():
            waits.setdefault(alias, []).extend(own)
    return {
        "together_over_sum": round(statistics.median(pair.ratio for pair in pairs), 3),
        "wait_p95_ms": {alias: round(_p95(own) * 1e3, 1) for alias, own in sorted(waits.items())},
        "aborted": sum(run.aborted() for run in together),
        "outputs_identical": all(pair.identical for pair in pairs),
        "no_step_share": round(statistics.median(run.switching_s / run.wall_s for run in together), 4),
        "frozen": [sum(len(r.timing.freezes) for r in run.results) for run in together],
    }


@dataclass(frozen=True)
class Here:
    """This machine. ``beside_s`` is no time of the device's: from the producer to the first step, and from the last
    token to the result. ``begins`` is what beginning a request takes by alias, in tokens of a prompt."""

    machine: Machine
    beside_s: float
    begins: Mapping[str, float]

    def simulated(self, asks: Sequence[Ask], objective: Objective | None = None) -> Simulated:
        """What comes of requests in the simulator, which answers late ones as a worker does."""
        arrivals = tuple(
            Arrival(ask.at, ask.alias, round(ask.prompt + self.begins[ask.alias]), ask.tokens, 1e9, objective)
            for ask in asks
        )
        return contest(Trace("recorded", self.machine, arrivals), "gearshift", refuses=False)


_REQUESTS = 400
"""How many of a recorded trace come."""
_MET = 0.8
"""They come so fast that the simulator has so many within their objective: where it matters who is served when."""
_TRIALS = 12
_CROWDS = (4, 64)
"""As many as run at once then."""


async def _recorded(bench: Bench, aliases: Sequence[str], records: Sequence[Record], rounds: int) -> dict[str, Any]:
    """A recorded trace on the engine and in the simulator. The objective is Aegaeon's, by the time of a step."""
    first = [record for record in records if record.prompt + record.output <= MAX_POSITION][:_REQUESTS]
    usual = round(statistics.mean(record.prompt for record in first))
    seen = [
        {of: wall_s for alias in aliases for of, wall_s in (await _alone(bench, alias, usual, _CROWDS)).items()}
        for _ in range(rounds)
    ]
    here = _machine(seen)
    their_s, our_s = (
        statistics.mean(model.step_s for model in on.models.values())
        for on in (production(len(here.machine.models)), here.machine)
    )
    objective = scaled(OBJECTIVE, our_s / their_s)
    picks = drawn(first, aliases, seed=0)

    def hurried(rate: float) -> tuple[Ask, ...]:
        return tuple(
            Ask(n, record.at / rate, alias, max(1, record.output), max(1, record.prompt))
            for n, (record, alias) in enumerate(zip(first, picks, strict=True))
        )

    slow, fast = 0.01, 1e4
    for _ in range(_TRIALS):
        rate = (slow * fast) ** 0.5
        slow, fast = (rate, fast) if here.simulated(hurried(rate), objective).goodput > _MET else (slow, rate)
    asks = hurried(slow)
    bench.errors = Errors()
    runs = [await bench.under(objective, asks) for _ in range(rounds)]
    return {
        "requests": len(asks),
        "seconds": round(asks[-1].at, 1),
        "ttft_s": round(objective.ttft_s, 3),
        "tpot_s": round(objective.tpot_s, 4),
        "goodput_simulated": round(here.simulated(asks, objective).goodput, 3),
        "goodput_measured": [round(run.goodput(), 3) for run in runs],
        **bench.errors.figures(),
    }


_WIDTHS = (4, 16)
_LENGTHS = (48, 240)
_LONGER = 400
Alone = dict[tuple[str, int, int, int], float]
"""How long so many requests of so many tokens, with prompts of so many, took with their model alone; seconds."""


async def _alone(bench: Bench, alias: str, prompt: int = _PROMPT, widths: Sequence[int] = _WIDTHS) -> Alone:
    """With prompts of so many tokens, whose keys and values each step reads; and once with longer ones."""
    shapes = [(each, tokens, prompt) for each in widths for tokens in _LENGTHS]
    shapes.append((widths[-1], _LENGTHS[0], prompt + _LONGER))
    return {(alias, *shape): (await bench.run(_shaped(alias, *shape))).wall_s for shape in shapes}


def _shaped(alias: str, each: int, tokens: int, prompt: int) -> tuple[Ask, ...]:
    return at_once([alias], each=each, tokens=tokens, prompt=prompt)


def _machine(runs: Sequence[Alone]) -> Here:
    """This machine as runs of each model alone show it: two lengths of answers, two widths, two lengths of prompts.

    What they differ by in length are steps, in width rows and requests, and in the prompts' length what is read.
    """
    walls = {of: statistics.median(run[of] for run in runs) for of in runs[0]}
    short, long = _LENGTHS
    few, many = sorted({each for _, each, *_ in walls})
    brief, wordy = sorted({prompt for *_, prompt in walls})
    models, beside, begins = {}, [], {}
    for alias in dict.fromkeys(alias for alias, *_ in walls):
        narrow, wide = (
            (walls[alias, each, long, brief] - walls[alias, each, short, brief]) / (long - short)
            for each in (few, many)
        )
        row_s = max(0.0, (wide - narrow) / (many - few))
        rest_few = walls[alias, few, short, brief] - short * narrow
        rest_many = walls[alias, many, short, brief] - short * wide
        request_s = max(1e-4, (rest_many - rest_few) / (many - few))
        read_s = (walls[alias, many, short, wordy] - walls[alias, many, short, brief]) / many / (wordy - brief)
        token_s = max(1e-7, read_s)
        begins[alias] = max(0.0, request_s / token_s - brief)
        beside.append(max(0.0, rest_few - few * request_s))
        models[alias] = ModelCosts(
            alias=alias,
            device_bytes=GB,
            resident_s=0.003,
            parked_s=0.003,
            dropped_s=1.0,
            step_s=narrow - few * row_s,
            row_s=row_s,
            prefill_tokens_s=1 / token_s,
            max_running=_MOST_ROWS,
        )
    return Here(Machine("here", 8 * GB, models), statistics.median(beside), begins)


def _p95(values: list[float]) -> float:
    return sorted(values)[int(0.95 * len(values))] if values else 0.0
