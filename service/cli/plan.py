"""``gearshift plan``: how many devices a pool needs, by its own traffic."""

import asyncio
import gzip
import json
import os
import re
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import IO, Annotated, Any, cast

import typer
from pydantic import ValidationError
from rich.text import Text

from schemas.errors import nearest
from schemas.objectives import Objective
from service.cli.options import Bootstrap, Prefix, console, settings_of
from service.cli.planned import figures, picture, placement_table, table
from service.cli.usage import moment_of
from service.errors import ConfigError
from service.kafka.reader import TopicReader
from service.models_file import ModelSpec, read_unchecked
from service.scheduling.machines import CARDS, Card
from service.scheduling.plan import EXACT, Pool, Run, numbers_of, plan
from service.scheduling.sizes import costs_of
from service.scheduling.traffic import LeftOut, Log, Traffic
from service.settings import Settings

_RANGE = re.compile(r"([1-9][0-9]{0,3})(?:\.\.([1-9][0-9]{0,3}))?")
_ALONE = {True: 2_000, False: 200_000}
"""Requests times numbers of devices up to which it is not worth starting processes, with the policy and without."""
_REPLAYS = ("auto", "policy", "coarse")
_KINDS = ("traffic", "add", "objective")
_ROW_TOKENS = 700.0
_MOST_REQUESTS = 200_000


def add_to(app: typer.Typer) -> None:
    """The command of this module."""
    app.command("plan")(make_plan)


def make_plan(
    results: Annotated[
        list[str],
        typer.Option(help="Results or usage: a file of JSON lines (- is standard input), or a topic; several."),
    ],
    models: Annotated[Path, typer.Option(help="The pool's models.yaml.")],
    objective: Annotated[
        str | None, typer.Option(help="Of models without one of their own: ttft_s=2,tpot_s=0.1,share=0.9.")
    ] = None,
    devices: Annotated[str, typer.Option(help="How many: 4, or 1..8.")] = "1..8",
    device: Annotated[str, typer.Option(help=f"Of which kind: {', '.join(CARDS)}.")] = "gaudi3",
    device_hour_cost: Annotated[float | None, typer.Option(help="What a device costs per hour.", min=0)] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(help="Change one thing and show both: traffic=2, add=MODEL:SHARE, objective=ttft_s:1; several."),
    ] = None,
    size: Annotated[list[str] | None, typer.Option(help="ALIAS=BILLIONS of parameters, where no name tells.")] = None,
    max_wait_s: Annotated[float, typer.Option(help="The workers' setting max_wait_s.", min=1)] = 60.0,
    since: Annotated[
        str | None, typer.Option(help="Of topics: from a moment in RFC 3339 on, or of the last 12h.")
    ] = None,
    how: Annotated[str, typer.Option("--replay", help=f"How: {', '.join(_REPLAYS)} (by how much there is).")] = "auto",
    most_requests: Annotated[
        int, typer.Option(help="Of more than so many, slices that are spread evenly over them are replayed.", min=1)
    ] = _MOST_REQUESTS,
    to_json: Annotated[Path | None, typer.Option("--json", help="Write all figures to a file.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write a picture of goodput over devices to a file.")] = None,
    bootstrap_servers: Bootstrap = None,
    topic_prefix: Prefix = None,
) -> None:
    """Replay a pool's own traffic on one, two, and more devices, and tell what each brings.

    [bold]Example[/]: gearshift plan --results results.jsonl --models models.yaml --objective ttft_s=2,tpot_s=0.1
    """
    counts, card = devices_of(devices), card_of(device)
    if how not in _REPLAYS:
        raise ConfigError(f"--replay: unknown {how!r}{nearest(how, _REPLAYS)}; known: {', '.join(_REPLAYS)}")
    specs = read_unchecked(models)
    settings = settings_of(bootstrap_servers=bootstrap_servers, topic_prefix=topic_prefix)
    log = Log(_names(specs))
    for source in results:
        _read(source, log, settings, moment_of(since, now=time.time()))
    asked = Asked(specs, log.traffic(tuple(specs)), card, objective_of(objective), sizes_of(size, specs), max_wait_s)
    if not len(asked.traffic):
        raise ConfigError(f"--results: no request to replay; {_said(log.left_out)}")
    variants = {"as it is": asked, **{change: asked.changed(change) for change in what_if or ()}}
    pools = {name: variant.pool(most_requests) for name, variant in variants.items()}
    made: dict[str, dict[str, Any]] = {}
    works = {name: len(pool.traffic) * len(numbers_of(counts)) for name, (pool, _) in pools.items()}
    exact = how == "policy" or (how == "auto" and max(works.values()) <= EXACT)  # one way for all that is compared
    for name, (pool, unknown) in pools.items():
        with _run(works[name] > _ALONE[exact]) as run:
            levels = plan(pool, counts, exact=exact, run=run)
        made[name] = {
            "replayed_by": "policy" if exact else "coarse",
            "requests_in_all": len(variants[name].traffic),
            "assumed_sizes": unknown,
            "assumed_lengths": list(log.assumed),
            **figures(pool, levels, device_hour_cost=device_hour_cost),
        }
    told = {"device": device, "left_out": {why.value: n for why, n in log.left_out.items()}, "plans": made}
    _show(told, cost=device_hour_cost is not None)
    if to_json is not None:
        to_json.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    if svg is not None:
        svg.write_text(picture(made, device=device), encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Asked:
    """All that a plan is made of. ``objective`` is that of models without one, ``sizes`` their billions as given."""

    specs: Mapping[str, ModelSpec]
    traffic: Traffic
    card: Card
    objective: Objective | None
    sizes: Mapping[str, float]
    max_wait_s: float

    def changed(self, change: str) -> "Asked":
        """With one thing changed. Raises ConfigError."""
        kind, _, value = change.partition("=")
        try:
            if kind == "traffic" and 0 < (factor := float(value)) < 1e6:
                return replace(self, traffic=self.traffic.sped(factor))
            if kind == "add":
                model, _, share = value.rpartition(":")
                if model and 0 < (part := float(share)) <= 10:
                    return self._with_model(model, part)
            if kind == "objective":
                return self._with_objective(value)
        except ValueError:
            pass
        hint = "" if kind in _KINDS else nearest(kind, _KINDS)
        raise ConfigError(f"--what-if {change!r}: write traffic=2, add=MODEL:SHARE or objective=ttft_s:1{hint}")

    def _with_model(self, model: str, share: float) -> "Asked":
        alias = model
        while alias in self.specs:
            alias += "'"
        spec = ModelSpec(alias=alias, engine_args={"model": model})
        if model in self.specs:
            spec = replace(self.specs[model], alias=alias)
        sizes = {**self.sizes, alias: self.sizes[model]} if model in self.sizes else self.sizes
        traffic = self.traffic.joined(alias, share)
        return replace(self, specs={**self.specs, alias: spec}, traffic=traffic, sizes=sizes)

    def _with_objective(self, text: str) -> "Asked":
        fields = _fields(text, "--what-if objective")
        specs = {}
        for alias, spec in self.specs.items():
            merged = {**self._objective(spec).model_dump(), **fields}
            made = spec.scheduling.model_copy(update={"objective": _objective(merged, "--what-if objective")})
            specs[alias] = replace(spec, scheduling=made)
        return replace(self, specs=specs)

    def _objective(self, spec: ModelSpec) -> Objective:
        found = spec.scheduling.objective or self.objective
        if found is None:
            raise ConfigError(f"{spec.alias} has no objective in models.yaml: give --objective ttft_s=2,tpot_s=0.1")
        return found

    def pool(self, most: int) -> tuple[Pool, list[str]]:
        """About ``most`` requests to replay, and the models whose size nobody told.

        Raises ConfigError for a model that no device can hold.
        """
        costs, unknown = [], []
        card, engines = self.card, _devices_per_engine(self.specs)
        card = replace(
            card,
            device_bytes=card.device_bytes * engines,
            read_s=card.read_s * engines,
            operations_s=card.operations_s * engines,
            link_s=card.link_s * engines,
        )
        usual = self._row_tokens()
        for place, (alias, spec) in enumerate(self.specs.items()):
            each, known = costs_of(spec, card, row_tokens=usual.get(place, _ROW_TOKENS), billions=self.sizes.get(alias))
            if each.device_bytes > card.device_bytes:
                raise ConfigError(
                    f"{alias} takes {each.device_bytes / 1e9:.0f} GB, and a {card.name} has "
                    f"{card.device_bytes / 1e9:.0f}: quantize it, or set tensor_parallel_size for all"
                )
            costs.append(each)
            if not known and alias not in self.sizes:
                unknown.append(alias)
        goals = tuple(self._objective(spec) for spec in self.specs.values())
        pool = Pool(
            self.traffic.sliced(most),
            tuple(costs),
            goals,
            card.device_bytes,
            self.max_wait_s,
        )
        return pool, unknown

    def _row_tokens(self) -> dict[int, float]:
        """Tokens whose keys and values a running request reads, by model: its prompt, and half of its answer."""
        sums: dict[int, list[float]] = {}
        for _, of, prompt, output in self.traffic:
            known = sums.setdefault(of, [0.0, 0.0])
            known[0] += prompt + output / 2
            known[1] += 1
        return {of: tokens / count for of, (tokens, count) in sums.items()}


def devices_of(text: str) -> range:
    """``4`` or ``1..8``. Raises ConfigError."""
    found = _RANGE.fullmatch(text)
    if found is None or (found[2] and int(found[2]) < int(found[1])):
        raise ConfigError(f"--devices {text!r}: give a number of devices, or the least and the most as 1..8")
    return range(int(found[1]), int(found[2] or found[1]) + 1)


def card_of(name: str) -> Card:
    """Raises ConfigError."""
    if name not in CARDS:
        raise ConfigError(f"--device: unknown {name!r}{nearest(name, CARDS)}; known: {', '.join(CARDS)}")
    return CARDS[name]


def objective_of(text: str | None) -> Objective | None:
    """Raises ConfigError."""
    return None if text is None else _objective(_fields(text, "--objective"), "--objective")


def sizes_of(given: Sequence[str] | None, specs: Mapping[str, ModelSpec]) -> dict[str, float]:
    """Raises ConfigError."""
    found = {}
    for each in given or ():
        alias, _, number = each.rpartition("=")
        if alias not in specs:
            raise ConfigError(f"--size: unknown alias {alias!r}{nearest(alias, specs)}")
        try:
            found[alias] = float(number)
        except ValueError:
            found[alias] = 0.0
        if not 0 < found[alias] < 1e5:
            raise ConfigError(f"--size {each!r}: write ALIAS=BILLIONS")
    return found


def _fields(text: str, where: str) -> dict[str, float]:
    found = {}
    for each in text.split(","):
        name, _, value = each.strip().replace(":", "=").partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            raise ConfigError(f"{where} {text!r}: write ttft_s=2,tpot_s=0.1,share=0.9") from None
    return found


def _objective(fields: Mapping[str, float], where: str) -> Objective:
    try:
        return Objective(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{where}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _names(specs: Mapping[str, ModelSpec]) -> dict[str, str]:
    """The alias behind each name that a request may ask for."""
    adapters = {name: alias for alias, spec in specs.items() for name in spec.scheduling.loras}
    return adapters | {alias: alias for alias in specs}


def _devices_per_engine(specs: Mapping[str, ModelSpec]) -> int:
    """An engine that spans several cards is one device here: sizes are the same for all models of a pool."""
    said = (spec.engine_args.get("tensor_parallel_size", 1) for spec in specs.values())
    return max((each for each in said if isinstance(each, int) and each > 0), default=1)


def _read(source: str, log: Log, settings: Settings, since: float | None) -> None:
    """Raises ConfigError, TopicError, BrokerUnavailable."""
    path = Path(source)
    if source == "-":
        _add(log, sys.stdin.buffer)
    elif path.is_file():
        try:
            with _opened(path) as lines:
                _add(log, lines)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ConfigError(f"--results: {source}: {error}") from None
    elif "/" in source or path.suffix in {".json", ".jsonl", ".gz"}:
        raise ConfigError(f"--results: no such file: {source}")
    else:
        asyncio.run(_read_topic(settings, source, log, since))


def _add(log: Log, lines: IO[bytes]) -> None:
    for line in lines:
        if line.strip():
            log.add(line)


def _opened(path: Path) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


async def _read_topic(settings: Settings, topic: str, log: Log, since: float | None) -> None:
    name = settings.topics.named(topic)
    async with TopicReader(kafka=settings.kafka, topics=[name], since=since) as reader:
        async for record in reader.backlog():
            log.add(record.value or b"")


@contextmanager
def _run(large: bool) -> Iterator[Run]:
    """What replays devices: one after another, or all processors at once where there is much to do."""
    if not large:
        yield map
        return
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        yield pool.map


def _said(left_out: Mapping[LeftOut, int]) -> str:
    return "; ".join(f"{count:,} left out: {why.value}" for why, count in left_out.items()) or "nothing was read"


def _show(told: Mapping[str, Any], *, cost: bool) -> None:
    for why, count in told["left_out"].items():
        console.print(Text.assemble((f"{count:,} records left out", "yellow"), f": {why}"))
    for name, made in told["plans"].items():
        console.print(table(name, made, device=told["device"], cost=cost))
        for alias in made["assumed_sizes"][:5]:
            said = f": neither folder nor name tells its size: taken as 8B; --size {alias}=8"
            console.print(Text.assemble((alias, "yellow"), said))
        if assumed := made["assumed_lengths"]:
            said = f"{', '.join(assumed[:5])}: none of their requests was answered: taken for as long as the others'"
            console.print(Text(said, style="yellow"))
        enough = made["enough"]
        if enough:
            below = next(row["below"] for row in made["levels"] if row["devices"] == enough)
            but = f", though {', '.join(below[:5])} stay below their own share" if below else ""
            console.print(Text.assemble((f"{enough}", "bold"), f" {told['device']} are enough for what is asked{but}"))
        else:
            console.print(Text.assemble(("none of these are enough", "red"), " for what is asked"))
        console.print(placement_table(made))
