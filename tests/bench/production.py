"""A trace of production services as traffic for many models on one Gaudi 3.

Its columns: ``arrival_s``, ``service``, ``context_tokens`` and ``generated_tokens``.
"""

import csv
import gzip
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from schemas.objectives import Objective
from service.scheduling.machines import GB, Machine, gaudi_model
from service.scheduling.simulator import Arrival, Trace

OBJECTIVE = Objective(ttft_s=10.0, tpot_s=0.1)
"""Aegaeon's: 10 s to the first token, and 100 ms for each further one."""
STRICTNESS = {"half": 0.5, "as published": 1.0, "twice": 2.0}
_DEVICE_BYTES = 120 * GB
_ROW_TOKENS = 1500
"""Tokens whose keys and values a row reads on average: what the first half hour's prompts and answers come to."""
_CLAIM = 256
"""Tokens that a schedule is told an answer may cost: the same for all, for nobody knows before."""


@dataclass(frozen=True, slots=True)
class Size:
    """A dense model: parameters in billions, bytes for each, bytes of keys and values per token."""

    billions: float
    byte_per_weight: float
    kv_bytes_per_token: float

    @property
    def weights(self) -> float:
        return self.billions * 1e9 * self.byte_per_weight


SIZES = {
    "8b": Size(8, 2, 131e3),
    "14b": Size(14, 2, 164e3),
    "32b": Size(32, 1, 131e3),
    "70b": Size(70, 1, 164e3),
    "3b": Size(3, 2, 115e3),
    "7b": Size(7, 2, 57e3),
    "24b": Size(24, 1, 164e3),
    "27b": Size(27, 1, 131e3),
}
"""In bf16 up to 14B, larger ones in fp8. Pools of 2, 4 and 8 take the first so many."""
COUNTS = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class Switching:
    """What a system's switches cost, as published. ``says`` is where that is from.

    A switch takes ``flat_s`` and ``s_per_byte`` of the weights. ``alone``: one model has the whole device, and one that
    is left keeps nothing there. ``keeps``: running requests keep their keys and values, in the host's memory.
    """

    says: str
    flat_s: float = 0.0
    s_per_byte: float = 0.0
    alone: bool = True
    keeps: bool = False


COLD_START = Switching("vLLM cold: 47 s for 30B in bf16", s_per_byte=47 / 60e9)
SLEEP_MODE = Switching("vLLM sleep level 1: 2.9 s wake and 2.8 s sleep for 30B in bf16", s_per_byte=5.7 / 60e9)
LLAMA_SWAP = Switching("llama-swap #941: 1.6 s wake", flat_s=1.6)
QLM = Switching("weights from the host at vLLM's rate of waking, what is left costs nothing", s_per_byte=2.9 / 60e9)
AEGAEON = Switching("half of the switches near-instant, the rest under 1 s", flat_s=1.0, alone=False, keeps=True)


def machine(count: int, switching: Switching | None = None) -> Machine:
    """One Gaudi 3 with the first ``count`` models, with our costs of a switch or a rival's own.

    Ours keeps the keys and values of running requests when their model is parked, as the engine does.
    """
    models = {}
    for alias, size in list(SIZES.items())[:count]:
        made = gaudi_model(
            alias,
            billions=size.billions,
            byte_per_weight=size.byte_per_weight,
            kv_bytes_per_token=size.kv_bytes_per_token,
            row_tokens=_ROW_TOKENS,
        )
        if switching is not None:
            made = replace(made, parked_s=switching.flat_s + switching.s_per_byte * size.weights)
            if not switching.keeps:
                made = replace(made, row_back_s=None)
            if switching.alone:
                made = replace(made, device_bytes=_DEVICE_BYTES)
        models[alias] = made
    return Machine(f"gaudi3, {count} models", _DEVICE_BYTES, models)


@dataclass(frozen=True, slots=True)
class Record:
    """A line of such a trace."""

    at: float
    service: str
    prompt: int
    output: int


def read(file: Path) -> list[Record]:
    """A trace's lines in order of arrival; a name in .gz is unpacked. Raises OSError, KeyError or ValueError."""
    with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as lines:
        rows = csv.DictReader(lines)
        made = [
            Record(float(row["arrival_s"]), row["service"], int(row["context_tokens"]), int(row["generated_tokens"]))
            for row in rows
        ]
    return sorted(made, key=lambda record: record.at)


def drawn(records: Sequence[Record], aliases: Sequence[str], seed: int) -> list[str]:
    """A model for each request: within each service a Zipf(1) draw, each service with its own order of popularity."""
    weights = [1 / (1 + rank) for rank in range(len(aliases))]
    services = sorted({record.service for record in records})
    dice = {service: random.Random(f"{seed}/{service}/{len(aliases)}") for service in services}
    popular = {service: dice[service].sample(list(aliases), k=len(aliases)) for service in services}
    return [dice[record.service].choices(popular[record.service], weights)[0] for record in records]


def traffic(records: Sequence[Record], on: Machine, objective: Objective, *, rate: float = 1.0, seed: int = 0) -> Trace:
    """The records as requests for the models of ``on``, coming ``rate`` times as fast."""
    picks = drawn(records, tuple(on.models), seed)
    arrivals = tuple(
        Arrival(
            at=record.at / rate,
            alias=alias,
            prompt=max(1, record.prompt),
            output=max(1, record.output),
            objective=objective,
            claim=_CLAIM,
        )
        for record, alias in zip(records, picks, strict=True)
    )
    return Trace(on.name, on, arrivals)


def scaled(objective: Objective, by: float) -> Objective:
    """An objective whose times are ``by`` times as long."""
    return Objective(ttft_s=objective.ttft_s * by, tpot_s=objective.tpot_s * by, share=objective.share)


def part(trace: Trace, aliases: Iterable[str]) -> Trace:
    """Only the requests of some models, on a machine that has only those."""
    wanted = set(aliases)
    models = {alias: model for alias, model in trace.machine.models.items() if alias in wanted}
    arrivals = tuple(arrival for arrival in trace.arrivals if arrival.alias in wanted)
    return Trace(trace.name, replace(trace.machine, models=models), arrivals)
