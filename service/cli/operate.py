"""Operating: switch models, send any control event, see the pool, make the topics."""

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter
from rich.table import Column, Table
from rich.text import Text

from schemas.codec import explain
from schemas.contexts import Leftover, SwitchMode, Tier
from schemas.control import CONTROL_FIELDS, EVERYONE, parse_control, unknown_type
from schemas.errors import nearest
from schemas.status import TERMINAL, HoldInfo, Presence, Status, StatusState
from service.cli.options import Bootstrap, Json, Prefix, Set, Terminal, console, print_json, settings_of
from service.cli.run import Models, models_reader
from service.client import Client
from service.client.controls import meant
from service.errors import ConfigError
from service.kafka.acls import Role, commands
from service.kafka.topics import ensure_topics

_COLOURS = {Tier.RESIDENT: "green", Tier.PARKED: "yellow", Tier.DROPPED: "dim"}
_MANUAL = {"park": "requests for other models wait for a switch", "refuse": "requests for other models are refused"}
_GOOD = {StatusState.COMPLETED, StatusState.NO_OP}


def add_to(app: typer.Typer) -> None:
    """The commands of this module."""
    app.command()(switch)
    app.command()(control)
    app.command()(status)
    topics = typer.Typer(help="The topics that a worker needs.", no_args_is_help=True)
    topics.command("create")(create_topics)
    topics.command("acls")(show_acls)
    app.add_typer(topics, name="topics")


def switch(
    model: Annotated[str, typer.Argument(help="The alias to make active.")],
    mode: Annotated[
        SwitchMode | None, typer.Option(help="What happens to running requests: keep is the default.")
    ] = None,
    drain_timeout: Annotated[
        float | None, typer.Option(help="Seconds; alone it means drain, then abort the rest.")
    ] = None,
    leftover: Annotated[Leftover | None, typer.Option(help="What a drain's deadline does with the rest.")] = None,
    hold: Annotated[str | None, typer.Option(help="Stay so many seconds, until 'drained', or 'forever'.")] = None,
    target: Annotated[str, typer.Option(help="A pool, a worker id, or * for everyone.")] = "*",
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the answer.")] = 600.0,
    bootstrap_servers: Bootstrap = None,
    topic_prefix: Prefix = None,
    as_json: Json = False,
) -> None:
    """Switch the active model, and wait until it is.

    [bold]Examples[/]: gearshift switch qwen

    gearshift switch llama --drain-timeout 30 --hold forever
    """
    event: dict[str, Any] = {"type": "switch", "model": model, "target": target}
    given = {"mode": mode, "drain_timeout": drain_timeout, "leftover": leftover, "hold": _hold(hold)}
    event |= {name: value for name, value in given.items() if value is not None}
    _ask(event, bootstrap_servers, topic_prefix, as_json=as_json, within_s=timeout)


def control(
    kind: Annotated[str, typer.Argument(help="pause, resume, pin, unpin, sleep, wake, preload, reload, lora.add, ...")],
    fields: Annotated[list[str] | None, typer.Argument(help="The event's fields: NAME=VALUE.")] = None,
    target: Annotated[str, typer.Option(help="A pool, a worker id, or * for everyone.")] = "*",
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the answer.")] = 600.0,
    bootstrap_servers: Bootstrap = None,
    topic_prefix: Prefix = None,
    as_json: Json = False,
) -> None:
    """Publish any control event and wait for its answer.

    [bold]Examples[/]: gearshift control pause

    gearshift control resume model=llama

    gearshift control pin model=llama

    gearshift control lora.add model=llama name=formal path=adapters/formal
    """
    if kind not in CONTROL_FIELDS:
        raise ConfigError(unknown_type(kind))
    event: dict[str, Any] = {"type": kind, "target": target}
    for field in fields or ():
        name, equals, value = field.partition("=")
        if not equals:
            raise ConfigError(f"{field!r}: write NAME=VALUE")
        if name not in CONTROL_FIELDS[kind]:
            raise ConfigError(f"{kind}: unknown field {name!r}{nearest(name, CONTROL_FIELDS[kind])}")
        event[name] = _value(value, CONTROL_FIELDS[kind][name].annotation)
    _ask(event, bootstrap_servers, topic_prefix, as_json=as_json, within_s=timeout)


def _hold(text: str | None) -> float | str | None:
    if text is None or text in {"drained", "forever"}:
        return text
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"--hold {text!r}: give seconds, 'drained' or 'forever'") from None


def _value(text: str, kind: Any) -> Any:
    """What a field of a kind is to have: where that may be a text, this one as it is; else the JSON that it is."""
    try:
        return TypeAdapter(kind).validate_python(text, strict=True)
    except ValueError:
        pass
    try:
        return json.loads(text)
    except ValueError:
        return text


def _ask(
    fields: dict[str, Any], bootstrap_servers: str | None, topic_prefix: str | None, *, as_json: bool, within_s: float
) -> None:
    try:
        event = parse_control(fields)
    except ValueError as error:
        raise ConfigError(explain(error)) from None
    settings = settings_of(bootstrap_servers=bootstrap_servers, topic_prefix=topic_prefix)

    async def run() -> tuple[Status, ...]:
        async with Client(settings=settings) as client:
            if silence := why_silent(event.target, await client.presences()):
                Terminal(stderr=True).print(silence)
            return await client.control(event, timeout_s=within_s, on_status=print_json if as_json else show_status)

    answers = asyncio.run(run())
    if any(answer.state not in _GOOD for answer in answers):
        raise typer.Exit(1)


def why_silent(target: str, present: Sequence[Presence]) -> str | None:
    """What to say where an event is for nobody who is there, and is waited with until somebody comes."""
    if meant(target, present):
        return None
    if not present:
        return "no worker is there: waiting for one"
    known = {EVERYONE, *(name for presence in present for name in (presence.pool, presence.worker))}
    return f"no worker that is there is meant by {target!r}{nearest(target, known)}: waiting for one"


def show_status(status: Status) -> None:
    """A line for a person."""
    colour = "green" if status.state in _GOOD else "red" if status.state in TERMINAL else "cyan"
    text = Text.assemble((f"{status.state:11}", colour), f" {status.kind} ", (status.model or "", "bold"))
    report = status.switch
    if report is not None and status.state is StatusState.COMPLETED:
        text.append(f" from {report.from_model} ({report.tier_found}) in ").append(f"{report.ms:.2f} ms", "bold")
        text.append(f", {report.kept} requests kept, {report.aborted} aborted")
    console.print(text.append(f" {status.worker}", "dim").append(f" {status.reason or ''}"))
    if status.answer:
        console.print_json(data=status.answer)


def status(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with the status events as they come.")] = False,
    bootstrap_servers: Bootstrap = None,
    topic_prefix: Prefix = None,
    as_json: Json = False,
) -> None:
    """Show the pool: workers, their active model, contexts and queues.

    [bold]Examples[/]: gearshift status

    gearshift status --follow
    """
    settings = settings_of(bootstrap_servers=bootstrap_servers, topic_prefix=topic_prefix)

    async def run() -> None:
        async with Client(settings=settings) as client:
            presences = await client.presences()
            if as_json:
                for presence in presences:
                    print_json(presence)
            else:
                console.print(pool_table(presences))
            if follow:
                async for one in client.statuses():
                    print_json(one) if as_json else show_status(one)

    try:
        asyncio.run(run())
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def pool_table(presences: tuple[Presence, ...]) -> Table:
    """The workers that are there, one row each."""
    names = (Column(name, overflow="fold") for name in ("worker", "pool", "state", "active", "contexts"))
    table = Table(*names, "waiting", "running", "heard", box=None, pad_edge=False)
    for presence in presences:
        contexts = Text(" ").join(Text(one.alias, _COLOURS[one.tier]) for one in presence.contexts)
        waiting = sum(queue.waiting for queue in presence.queues.values())
        running = sum(queue.running for queue in presence.queues.values())
        table.add_row(
            presence.worker,
            presence.pool,
            Text("\n").join(_standing(presence)),
            Text(presence.active or "-", "bold"),
            contexts or "-",
            str(waiting),
            str(running),
            f"{max(0.0, time.time() - presence.at):.0f} s ago",
        )
    return table


def _standing(presence: Presence) -> Iterator[Text]:
    """A worker's state, and whatever somebody ought to know of it."""
    yield Text(presence.state)
    if presence.trouble:
        yield Text(presence.trouble, "red")
    if presence.hold is not None:
        yield Text(f"holds {presence.hold.model} {_how_long(presence.hold)}", "yellow")
    if presence.inactive != "switch":
        yield Text(f"manual: {_MANUAL.get(presence.inactive, presence.inactive)}", "yellow")
    for context in presence.contexts:
        if context.stall_s:
            phase, seconds = max(context.stall_s.items(), key=lambda item: item[1])
            yield Text(f"{context.alias} kept others waiting {1e3 * seconds:.0f} ms ({phase})", "dim")
        if context.kv_borrowed_bytes:
            yield Text(f"{context.alias} borrowed {context.kv_borrowed_bytes >> 20} MiB of KV memory", "dim")
        if context.kv_preempted:
            yield Text(f"{context.alias} preempted {context.kv_preempted} requests for its KV memory", "dim")
    if presence.overtaken:
        yield Text(f"retention took {presence.overtaken} requests unread", "red")
    if presence.forgotten:
        yield Text(f"the offsets of {presence.forgotten} partitions had expired", "yellow")


def _how_long(hold: HoldInfo) -> str:
    if hold.drained:
        return "until it has nothing left to do"
    return "until the next switch" if hold.until is None else f"for {max(0.0, hold.until - time.time()):.0f} s"


def create_topics(
    models: Models = None,
    bootstrap_servers: Bootstrap = None,
    topic_prefix: Prefix = None,
    assignments: Set = None,
) -> None:
    """Create the topics that are missing, those of models.yaml's aliases too, and check the others.

    [bold]Example[/]: gearshift topics create --models models.yaml --set request_partitions=24
    """
    settings = settings_of(
        assignments, models=models, bootstrap_servers=bootstrap_servers, topic_prefix=topic_prefix, create_topics=True
    )
    aliases = list(models_reader(settings)().models) if settings.engine.models is not None else []
    created = asyncio.run(ensure_topics(settings, aliases))
    for name in created:
        console.print(Text.assemble(("created", "green"), f" {name}"))
    if not created:
        console.print("all there")


def show_acls(
    worker: Annotated[list[str] | None, typer.Option(help="A worker's principal, User:NAME.")] = None,
    producer: Annotated[list[str] | None, typer.Option(help="A producer's: asks, and reads answers.")] = None,
    consumer: Annotated[list[str] | None, typer.Option(help="Of who reads answers only.")] = None,
    batch: Annotated[list[str] | None, typer.Option(help="Of who follows submitted batches: reads all.")] = None,
    operator: Annotated[list[str] | None, typer.Option(help="An operator's.")] = None,
    viewer: Annotated[list[str] | None, typer.Option(help="Of who only looks: no prompts, no answers.")] = None,
    topic_prefix: Prefix = None,
    assignments: Set = None,
) -> None:
    """Print the commands that give each principal what it needs on the broker, and no more.

    [bold]Example[/]: gearshift topics acls --worker User:worker --producer User:app --operator User:alice
    """
    settings = settings_of(assignments, topic_prefix=topic_prefix)
    asked = {
        Role.WORKER: worker,
        Role.PRODUCER: producer,
        Role.CONSUMER: consumer,
        Role.BATCH: batch,
        Role.OPERATOR: operator,
        Role.VIEWER: viewer,
    }
    principals = [(role, name) for role, names in asked.items() for name in names or ()]
    if not principals:
        raise ConfigError(f"name at least one principal: {', '.join(f'--{role}' for role in Role)} with User:NAME")
    for line in commands(settings, principals):
        typer.echo(line)
