"""The Grafana dashboard, made from the rows below: ``--write`` puts it into the chart; a test says if it is current."""

import json
import sys
from itertools import count
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "gearshift" / "files" / "dashboard.json"
HIGH = 8
WORKER = 'instance=~"$worker"'
SOURCE = {"type": "prometheus", "uid": "prometheus"}

Line = tuple[str, str]
"""A legend and a query."""
Panel = tuple[str, str, list[Line]]
"""A title, a unit, and the lines."""


def legend(by: str, word: str = "") -> str:
    return " ".join(filter(None, [word, *(f"{{{{{label}}}}}" for label in by.split())]))


def grouped(by: str) -> str:
    return f" by ({', '.join(by.split())}) " if by else ""


def rate(metric: str, by: str = "", *, word: str = "", times: int = 1, more: str = "") -> Line:
    """What a counter adds per second, or per ``times`` seconds."""
    query = f"sum{grouped(by)}(rate(gearshift_{metric}{{{WORKER}{more}}}[$__rate_interval]))"
    return legend(by, word), query if times == 1 else f"{times} * {query}"


def now(metric: str, by: str = "", *, word: str = "", how: str = "sum", more: str = "") -> Line:
    """A gauge as it stands."""
    return legend(by, word), f"{how}{grouped(by)}(gearshift_{metric}{{{WORKER}{more}}})"


def quantile(share: float, metric: str, by: str) -> Line:
    """Of a histogram."""
    bucket = f"sum{grouped(f'{by} le')}(rate(gearshift_{metric}_bucket{{{WORKER}}}[$__rate_interval]))"
    return legend(by, f"p{share * 100:g}"), f"histogram_quantile({share}, {bucket})"


def per(line: Line, other: Line, by: str) -> Line:
    """One divided by another that has no labels."""
    return line[0], f"{line[1]} / ignoring({by}) group_left() {other[1]}"


def rest(line: Line, whole: Line) -> Line:
    """The share of one that another with the same labels leaves; where that has counted nothing, it is not there."""
    return line[0], f"1 - ({line[1]} or 0 * {whole[1]}) / {whole[1]}"


LATENCIES = rate("request_latency_seconds_count")
WORKERS = now("build_info")
ROWS: dict[str, list[Panel]] = {
    "Requests": [
        ("Requests per second", "reqps", [rate("requests_total", "model outcome")]),
        ("Tokens per second", "short", [rate("tokens_total", "model kind")]),
        ("Tokens per second by tenant that the quotas name", "short", [rate("tenant_tokens_total", "tenant")]),
        ("Seconds on the device per second, by tenant", "short", [rate("tenant_running_seconds_total", "tenant")]),
        ("Latency", "s", [quantile(share, "request_latency_seconds", "model") for share in (0.5, 0.95)]),
        (
            "Where a request's time goes, mean",
            "s",
            [per(rate("request_phase_seconds_sum", "phase"), LATENCIES, "phase")],
        ),
        (
            "Objectives met, share of requests",
            "percentunit",
            [
                rest(
                    rate("objectives_total", "model class", more=',met="false"'),
                    rate("objectives_total", "model class"),
                )
            ],
        ),
        (
            "Objectives missed per minute, by what",
            "short",
            [rate("objectives_total", "missed_by", more=',met="false"', times=60)],
        ),
    ],
    "What waits": [
        (
            "Requests waiting",
            "short",
            [
                now("queue_requests", "model"),
                now("throttled_requests", word="for their tenant's quota"),
                now("running_requests", word="running"),
            ],
        ),
        ("Oldest wait", "s", [now("queue_oldest_seconds", "model", how="max")]),
        (
            "Tokens waiting",
            "short",
            [now("queue_tokens", "model", word="queued"), now("lag_tokens", "topic", word="unread")],
        ),
        ("Requests not read yet", "short", [now("lag_requests", "topic")]),
    ],
    "Models": [
        (
            "Whose turn it is, share of time",
            "percentunit",
            [per(rate("model_active_seconds_total", "model"), WORKERS, "model")],
        ),
        (
            "Share of time, per worker",
            "percentunit",
            [
                rate("serving_seconds_total", "instance", word="serving"),
                rate("switching_seconds_total", "instance", word="switching"),
            ],
        ),
        ("Switches per minute", "short", [rate("switches_total", "tier mode", times=60)]),
        ("A switch", "s", [quantile(0.95, "switch_seconds", "tier"), quantile(0.95, "switch_stall_seconds", "tier")]),
        ("Memory of contexts", "bytes", [now("context_bytes", "model kind")]),
        ("What a load, park or drop made others wait for", "s", [now("context_stall_seconds", "model phase")]),
        ("KV memory borrowed of idle models", "bytes", [now("context_kv_borrowed_bytes", "model")]),
        ("Longest wait of a step for KV memory", "s", [now("context_kv_wait_seconds", "model")]),
        ("Workers with a model on the device", "short", [now("context_tier", "model", more=',tier="resident"')]),
    ],
    "Trouble": [
        ("Failures per minute", "short", [rate("request_failures_total", "model failure", times=60)]),
        (
            "Dead letters and repeated runs per minute",
            "short",
            [
                rate("dead_letters_total", "failure", word="dead:", times=60),
                rate("request_repeats_total", "why", word="again:", times=60),
            ],
        ),
        ("Seconds without progress", "s", [now("stalled_seconds", "instance")]),
        ("Requests hidden by an open transaction", "s", [now("transaction_open_seconds", "topic", how="max")]),
        (
            "Partitions, and assignments per minute",
            "short",
            [now("partitions", "instance"), rate("rebalances_total", "instance", word="assigned", times=60)],
        ),
    ],
}


def dashboard() -> dict[str, Any]:
    """The whole of it, as Grafana reads it."""
    ids, panels, top = count(1), [], 0
    for title, row in ROWS.items():
        panels.append({"id": next(ids), "type": "row", "title": title, "gridPos": _place(0, top, 24, 1), "panels": []})
        top += 1
        for number, panel in enumerate(row):
            panels.append(_panel(next(ids), panel, _place(12 * (number % 2), top + HIGH * (number // 2), 12, HIGH)))
        top += HIGH * -(-len(row) // 2)
    values = "label_values(gearshift_build_info, instance)"
    worker = {
        "name": "worker",
        "label": "Worker",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": values, "refId": "worker"},
        "definition": values,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "current": {"text": ["All"], "value": ["$__all"]},
    }
    return {
        "uid": "gearshift",
        "title": "Gearshift",
        "tags": ["gearshift"],
        "schemaVersion": 41,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [worker]},
        "panels": panels,
    }


def _place(x: int, y: int, w: int, h: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": w, "h": h}


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    title, unit, lines = panel
    return {
        "id": number,
        "type": "timeseries",
        "title": title,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0, "custom": {"fillOpacity": 10}}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + n), "datasource": SOURCE, "expr": query, "legendFormat": words}
            for n, (words, query) in enumerate(lines)
        ],
    }


def text() -> str:
    """As it lies in the chart."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    FILE.write_text(text())
