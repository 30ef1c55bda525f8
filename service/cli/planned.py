"""What a plan says: as figures, as tables, and as a picture."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any
from xml.sax.saxutils import escape

from rich.table import Table

from service.scheduling.plan import Level, Pool, resident

_NAMED = 6
"""Models that a table names of a device; the JSON has all."""
_COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df")


def figures(pool: Pool, levels: Sequence[Level], *, device_hour_cost: float | None) -> dict[str, Any]:
    """A plan as JSON: a row per number of devices; the last level only tells what one more device brings."""
    counts = pool.traffic.counts()
    total = len(pool.traffic)
    wanted = sum(count * goal.share for count, goal in zip(counts, pool.objectives, strict=True))
    rows = [
        _row(pool, level, counts, device_hour_cost)
        | {"one_more": {"met": more.met - level.met, "share": round((more.met - level.met) / total, 4)}}
        for level, more in pairwise(levels)
    ]
    enough = next((row["devices"] for row in rows if row["met"] >= wanted - 1e-6), None)
    return {
        "requests": total,
        "hours": round(pool.traffic.span_s / 3600, 4),
        "share_asked": round(wanted / total, 4),
        "enough": enough,
        "levels": rows,
    }


def _row(pool: Pool, level: Level, counts: Sequence[int], device_hour_cost: float | None) -> dict[str, Any]:
    """So many devices. Times are shares of all devices' time, tokens are those of answers that met their objective."""
    aliases, met_of = pool.traffic.aliases, level.met_of
    span_s = max(pool.traffic.span_s, *(tally.end for tally in level.tallies), 1e-9)
    device_s = level.devices * span_s
    tokens = sum(tally.met_tokens for tally in level.tallies)
    shares = {of: met_of[of] / count for of, count in enumerate(counts) if count}
    row: dict[str, Any] = {
        "devices": level.devices,
        "met": level.met,
        "share": round(level.met / len(pool.traffic), 4),
        "serving_share": round(sum(tally.serving_s for tally in level.tallies) / device_s, 4),
        "switching_share": round(sum(tally.switching_s for tally in level.tallies) / device_s, 4),
        "switches": sum(tally.switches for tally in level.tallies),
        "below": [aliases[of] for of, share in shares.items() if share < pool.objectives[of].share],
        "models": {
            aliases[of]: {"requests": counts[of], "met": met_of[of], "share": round(share, 4)}
            for of, share in shares.items()
        },
        "placement": _placement(pool, level),
    }
    if device_hour_cost is not None:
        cost = device_hour_cost * device_s / 3600
        row["cost_per_million_tokens"] = round(cost / tokens * 1e6, 4) if tokens else None
    return row


def _placement(pool: Pool, level: Level) -> list[dict[str, list[str]]]:
    """Of each device the models to hold resident, and those that take turns beside them."""
    loads, aliases = pool.loads(), pool.traffic.aliases
    made = []
    for models in level.placement:
        kept = resident(pool, models, loads)
        parked = [of for of in models if of not in set(kept)]
        made.append({"resident": [aliases[of] for of in kept], "parked": [aliases[of] for of in parked]})
    return made


def table(name: str, made: Mapping[str, Any], *, device: str, cost: bool) -> Table:
    """A row per number of devices."""
    whole = f" of {made['requests_in_all']:,}" if made["requests_in_all"] > made["requests"] else ""
    replayed = f"{made['requests']:,}{whole} requests in {made['hours']:.1f} h"
    title = f"{name}: {replayed}, {made['share_asked']:.0%} to be met"
    shown = Table(title=title, caption=f"replayed by: {made['replayed_by']}")
    names = [device, "met", "models below", "serving", "switching", "switches", "one more brings"]
    for column in [*names[:6], *(["per million tokens"] if cost else []), names[6]]:
        shown.add_column(column, justify="right")
    for row in made["levels"]:
        price = row.get("cost_per_million_tokens")
        shown.add_row(
            str(row["devices"]),
            f"{row['share']:.1%}",
            str(len(row["below"])),
            f"{row['serving_share']:.0%}",
            f"{row['switching_share']:.1%}",
            f"{row['switches']:,}",
            *(["-" if price is None else f"{price:,.2f}"] if cost else []),
            f"{row['one_more']['met']:+,} ({row['one_more']['share']:+.1%})",
            style="bold" if row["devices"] == made["enough"] else "",
        )
    return shown


def placement_table(made: Mapping[str, Any]) -> Table:
    """Where the models are to be: with as many devices as are enough, else with the most that were tried."""
    rows = made["levels"]
    row = next((row for row in rows if row["devices"] == made["enough"]), rows[-1])
    shown = Table("device", "resident", "parked beside them", title=f"placement on {row['devices']}")
    for number, models in enumerate(row["placement"], start=1):
        shown.add_row(str(number), _list(models["resident"]), _list(models["parked"]))
    return shown


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


# --- the picture --------------------------------------------------------------------------------------------------

_WIDTH, _HEIGHT = 640, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 20, 40, 50


def picture(plans: Mapping[str, Mapping[str, Any]], *, device: str) -> str:
    """Goodput over devices as SVG: a line for each plan, and a dashed one for the share that is asked for."""
    rows = [row["devices"] for made in plans.values() for row in made["levels"]]
    least, most = min(rows), max(rows)

    def x(devices: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * ((devices - least) / (most - least) if most > least else 0.5)

    def y(share: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - share)

    parts = [_text(_WIDTH / 2, 22, "requests that meet their objective, by number of devices", size=14)]
    for tenth in range(0, 11, 2):
        parts.append(_line(_LEFT, y(tenth / 10), _WIDTH - _RIGHT, y(tenth / 10), "#d0d7de"))
        parts.append(_text(_LEFT - 8, y(tenth / 10) + 4, f"{tenth * 10} %", anchor="end"))
    step = max(1, (most - least) // 10)
    parts += [_text(x(count), _HEIGHT - _BOTTOM + 18, str(count)) for count in range(least, most + 1, step)]
    parts.append(_text(_WIDTH / 2, _HEIGHT - 10, f"devices ({device})"))
    asked = next(iter(plans.values()))["share_asked"]
    parts.append(_line(_LEFT, y(asked), _WIDTH - _RIGHT, y(asked), "#57606a", dashed=True))
    parts.append(_text(_LEFT + 6, y(asked) - 5, "asked for", anchor="start"))
    for number, (name, made) in enumerate(plans.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        points = [(x(row["devices"]), y(row["share"])) for row in made["levels"]]
        path = " ".join(f"{across:.1f},{down:.1f}" for across, down in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{across:.1f}" cy="{down:.1f}" r="3.5" fill="{colour}"/>' for across, down in points]
        low = _HEIGHT - _BOTTOM - 12 - 18 * (len(plans) - 1 - number)
        parts.append(_text(_WIDTH - _RIGHT - 8, low, name, anchor="end", colour=colour))
    inside = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif">\n'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>\n{inside}\n</svg>\n'
    )


def _text(x: float, y: float, text: str, *, anchor: str = "middle", size: int = 12, colour: str = "#24292f") -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {where} font-size="{size}" fill="{colour}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, *, dashed: bool = False) -> str:
    dashes = ' stroke-dasharray="6 4"' if dashed else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{dashes}/>'
