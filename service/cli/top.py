"""``gearshift top``: the status page in a terminal."""

import asyncio
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from schemas.words import is_name
from service.cli.options import Bootstrap, Prefix, console, settings_of
from service.client import Client
from service.errors import ConfigError, NoAnswer

_COLOURS = ("blue", "dark_orange", "green", "magenta", "yellow", "cyan")
_TIERS = {"resident": "green", "parked": "yellow", "dropped": "dim"}
_TIMEOUT_S = 5.0
_REQUESTS = 12
_ERRORS = 4
_MOST_BYTES = 16 << 20


def add_to(app: typer.Typer) -> None:
    """The commands of this module."""
    app.command()(top)


def top(
    url: Annotated[
        str | None, typer.Argument(help="A worker's HTTP server; by default that of the first worker that has one.")
    ] = None,
    key_file: Annotated[Path | None, typer.Option(help="A file with the server's API key.")] = None,
    interval: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.1)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print it once and leave.")] = False,
    bootstrap_servers: Bootstrap = None,
    topic_prefix: Prefix = None,
) -> None:
    """Watch a worker: whose turn it is, what waits, what runs, what went wrong.

    [bold]Example[/]: gearshift top http://127.0.0.1:8000
    """
    if url is None and key_file is not None:
        raise ConfigError("give the URL of the server whose key this is: a key is not sent to where a record says")
    address = url or _find(bootstrap_servers, topic_prefix)
    try:
        key = None if key_file is None else key_file.read_text(encoding="utf-8").strip()
    except UnicodeDecodeError:
        raise ConfigError(f"{key_file}: it is no text in UTF-8") from None
    if key is not None and not is_name(key):
        raise ConfigError(f"{key_file}: there must be one key in it, and nothing else")
    if once:
        console.print(_drawn(address, key))
        return
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(_frame(address, key), refresh=True)
                time.sleep(interval)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def look(address: str, key: str | None = None) -> dict[str, Any]:
    """The worker's state as its HTTP server tells it; the key goes to no other one. Raises NoAnswer, ConfigError."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    if not address.startswith(("http://", "https://")):
        raise ConfigError(f"{address!r}: give the server's address, http://HOST:PORT")
    try:
        request = urllib.request.Request(f"{address.rstrip('/')}/state", headers=headers)  # noqa: S310  # checked above
        with _HERE.open(request, timeout=_TIMEOUT_S) as answer:
            state: dict[str, Any] = json.loads(answer.read(_MOST_BYTES))
            return state
    except urllib.error.HTTPError as error:
        with error:
            wanted = {401: "it wants a key: --key-file FILE", 403: "this key does not have the role look"}
            reason = wanted.get(error.code, f"it answers {error.code}")
        raise NoAnswer(f"{address}: {reason}") from None
    except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
        raise NoAnswer(f"{address}: {error}") from None


class _Stay(urllib.request.HTTPRedirectHandler):
    """Goes nowhere else."""

    def redirect_request(self, *_: Any) -> None:
        return None


_HERE = urllib.request.build_opener(_Stay)


def screen(state: Mapping[str, Any], *, width: int) -> RenderableType:
    """A frame. Pure."""
    worker, history = state["worker"], state["history"]
    aliases = [context["alias"] for context in worker["contexts"]]
    colours = {alias: _COLOURS[n % len(_COLOURS)] for n, alias in enumerate(aliases)}
    mood = "green" if worker["state"] == "serving" else "red"
    title = Text.assemble(
        ("gearshift ", "bold"),
        f"{worker['worker']}  pool {worker['pool']}  ",
        (worker["state"], mood),
        f"  active {worker['active']}  {history['requests_per_s']:.1f} requests/s  "
        f"{len(history['switches'])} switches in {history['now'] - history['since']:.0f} s",
    )
    parts: list[RenderableType] = [title, Text(), _models(worker, colours), Text()]
    if objectives := state.get("objectives"):  # a worker of an earlier version says none
        parts += [_objectives(objectives, colours), Text()]
    label = max(map(len, aliases), default=0) + 1
    for alias in aliases:
        row = Text(alias.ljust(label))
        row.append(lane(alias, history, width - label), style=colours[alias])
        parts.append(row)
    parts += [Text(), _requests(state["requests"][:_REQUESTS], more=state["held"] - _REQUESTS)]
    if history["errors"]:
        parts += [Text(), _errors(history["errors"][:_ERRORS])]
    return Group(*parts)


def lane(alias: str, history: Mapping[str, Any], width: int) -> str:
    """The last minutes of a model as characters: full where it was active, pale where its requests were frozen."""
    width = max(1, width)  # an alias may be as long as the terminal is wide
    step = (history["now"] - history["since"]) / width or 1.0

    def slots(spans: Sequence[Mapping[str, Any]]) -> set[int]:
        found: set[int] = set()
        for span in spans:
            if span["model"] == alias:
                first = int((span["from"] - history["since"]) / step)
                last = int((span["to"] - history["since"]) / step)
                found.update(range(max(0, first), min(width, max(first + 1, last))))
        return found

    active, frozen = slots(history["turns"]), slots(history["frozen"])
    return "".join("█" if slot in active else "░" if slot in frozen else "·" for slot in range(width))


def _models(worker: Mapping[str, Any], colours: Mapping[str, str]) -> Table:
    table = Table("model", "tier", "running", "waiting", "oldest", "weights", "KV", "host", box=None, pad_edge=False)
    for context in worker["contexts"]:
        queue = worker["queues"].get(context["alias"], {})
        sizes = (f"{context[kind] / (1 << 20):.0f} MiB" for kind in ("weights_bytes", "kv_bytes", "host_bytes"))
        table.add_row(
            Text(("▶ " if context["active"] else "  ") + context["alias"], style=colours[context["alias"]]),
            Text(context["tier"], style=_TIERS.get(context["tier"], "")),
            str(queue.get("running", 0)),
            f"{queue.get('waiting', 0)}{' paused' if queue.get('paused') else ''}",
            f"{queue.get('oldest_s', 0):.1f} s",
            *sizes,
        )
    return table


def _objectives(objectives: Sequence[Mapping[str, Any]], colours: Mapping[str, str]) -> Table:
    table = Table("objective", "to begin", "per token", "requests", "met", "missed by", box=None, pad_edge=False)
    for one in objectives:
        met = one["met"] / one["requests"] if one["requests"] else None
        name = f"{one['model']} {one['class']}".strip()
        table.add_row(
            Text(f"  {name}", style=colours.get(one["model"], "")),
            f"{one['ttft_s']:g} s",
            f"{one['tpot_s']:g} s",
            str(one["requests"]),
            Text("-" if met is None else f"{met:.0%} of {one['share']:.0%}", style=_mood(met, one["share"])),
            ", ".join(f"{why} {count}" for why, count in one["missed_by"].items()),
        )
    return table


def _mood(met: float | None, share: float) -> str:
    return "" if met is None else "green" if met >= share else "red"


def _requests(requests: Sequence[Mapping[str, Any]], *, more: int) -> Table:
    table = Table("request", "model", "where", "age", box=None, pad_edge=False)
    for request in requests:
        if request["phase"] == "waiting":
            expected = request.get("expected_s")
            where = "waits" if expected is None else f"waits, about {expected:.1f} s"
        else:
            where = f"{'frozen at' if request['frozen'] else request['phase']} {request['tokens']} tokens"
        table.add_row(Text(request["id"]), Text(request["model"]), where, f"{request['age_s']:.1f} s")
    if more > 0:
        table.add_row(Text(f"and {more} more", style="dim"))
    return table


def _errors(errors: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("error", "model", "what", box=None, pad_edge=False)
    for error in errors:
        table.add_row(Text(str(error["status"] or "switch"), style="red"), Text(error["model"]), Text(error["what"]))
    return table


def _frame(address: str, key: str | None) -> RenderableType:
    try:
        return _drawn(address, key)
    except NoAnswer as error:
        return Text(str(error), style="red")


def _drawn(address: str, key: str | None) -> RenderableType:
    state = look(address, key)
    try:
        return screen(state, width=console.width)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
        raise NoAnswer(f"{address}: what is there does not answer as a worker does") from None


def _find(bootstrap_servers: str | None, topic_prefix: str | None) -> str:
    settings = settings_of(bootstrap_servers=bootstrap_servers, topic_prefix=topic_prefix)

    async def run() -> str:
        async with Client(settings=settings) as client:
            for presence in await client.presences():
                if presence.http is not None:
                    return presence.http
        raise NoAnswer("no worker of the pool has an HTTP server (gearshift worker --http PORT)")

    return asyncio.run(run())
