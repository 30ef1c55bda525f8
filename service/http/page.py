"""The pages, and what the status page shows, as JSON for whoever else wants it (``gearshift top``)."""

from collections import Counter
from importlib.resources import files
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from schemas.control import Cancel
from schemas.status import StatusState
from service.http import errors
from service.http.history import History
from service.http.openai_routes import JSON, content_type
from service.http.replies import Json
from service.http.worker_view import Commands, WorkerView

MOST_REQUESTS = 100
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


def page(name: str) -> Response:
    """One of the self-contained documents beside this file."""
    text = files("service.http").joinpath(name).read_text(encoding="utf-8")
    return HTMLResponse(text, headers={"content-security-policy": POLICY, "cache-control": "no-cache"})


async def state(worker: WorkerView, history: History, *, controls: bool) -> Response:
    """Everything that the page shows. ``controls``: whether this server takes switches and cancels."""
    presence, source = worker.presence(), worker.source()
    others = () if worker.others is None else await worker.others()
    shown: dict[str, Any] = {
        "worker": presence.model_dump(exclude={"costs"}),
        "ready": source.joined,
        "controls": controls,
        "requests": [dict(each) for each in worker.requests(MOST_REQUESTS)],
        "held": sum(queue.waiting + queue.running for queue in presence.queues.values()),
        "tokens": history.tokens + worker.tokens(),
        "lag": dict(source.lag),
        "pool": [_brief(other.model_dump()) for other in others if other.worker != presence.worker],
        "history": history.shown(presence.active or ""),
        "objectives": _objectives(worker, history),
    }
    return Json(shown)


def _objectives(worker: WorkerView, history: History) -> list[dict[str, Any]]:
    """What requests are to get, and how many of the last minutes' did."""
    found = history.attained()
    rows = []
    for model, classes in worker.objectives().items():
        for name, objective in classes.items():
            counts = found.get((model, name), Counter())
            row = {"model": model, "class": name, **objective.model_dump(), "requests": counts.total()}
            rows.append({**row, "met": counts.pop("", 0), "missed_by": dict(counts.most_common())})
    return rows


async def cancel(request: Request, worker: WorkerView, commands: Commands) -> Response:
    """End a request, however it came. Only for JSON: a form of another site can't send that."""
    if content_type(request) != JSON:
        return errors.error(415, f"Send {JSON}")
    with errors.of_what_was_sent():
        event = Cancel(request=request.path_params["id"])
    status = await commands.ask(worker, event)
    if status.state is StatusState.TOO_LATE:
        return errors.error(409, "The request has ended already")
    return JSONResponse(status.answer)


def _brief(presence: dict[str, Any]) -> dict[str, Any]:
    kept = ("worker", "at", "interval_s", "state", "active", "version", "http", "queues", "contexts", "partitions")
    return {name: presence[name] for name in kept}
