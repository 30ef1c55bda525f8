"""One model's answers: the routes, handlers and error handlers of vLLM's own server, called without a socket.

For each alias the server's app is built as ``vllm serve`` builds it, and a call is given to the function behind the
route, in between the body's validation and the exception handlers that the app would apply. So the status and the
body are the server's, of every endpoint that it has for the model, errors included; only the transport is left out.
"""

import asyncio
import base64
import inspect
import json
from argparse import Namespace
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from schemas.requests import Endpoint
from service.engine.answering import continuing
from service.engine.answering.constraints import ModelConstraints
from service.engine.answering.messages import ToldMessage
from service.engine.answering.runs import RUN, CallAborted, CallClient, Run
from service.engine.versions import vllm_frontend, vllm_worker
from service.errors import EngineDied, GearshiftError, LoraRefused, NotContinued
from service.ports import Answer, Call, ChunkSink, Inquiry, Reply

CallWorkers = Callable[..., Awaitable[Any]]
FORMS = (Endpoint.TRANSCRIPTIONS, Endpoint.TRANSLATIONS)
ABORTED = 499
"""The status of a call that was ended before there was anything to answer: nginx's "client closed request"."""


class Answers:
    """What one alias answers. Make one with ``open``, once its model has been loaded."""

    def __init__(self, app: Any, client: CallClient, call_workers: CallWorkers) -> None:
        from fastapi.routing import APIRoute

        self.app = app
        self._client = client
        self._call_workers = call_workers
        self._diagnostics: Any = None
        posts = (route for route in app.routes if isinstance(route, APIRoute) and "POST" in route.methods)
        self._routes = {route.path: route for route in posts}
        for handler, render in (
            ("openai_serving_chat", "render_chat_request"),
            ("openai_serving_completion", "render_completion_request"),
            ("anthropic_serving_messages", "render_chat_request"),
        ):
            serving = getattr(app.state, handler, None)
            if serving is not None:
                setattr(serving, render, _rendered_once(getattr(serving, render)))
        messages = getattr(app.state, "anthropic_serving_messages", None)
        if messages is not None:
            for name in ("create_messages", "count_tokens"):
                setattr(messages, name, _failing_openly(getattr(messages, name)))

    @classmethod
    async def open(
        cls, llm: Any, server: Namespace, call_workers: CallWorkers, constraints: ModelConstraints
    ) -> "Answers":
        """Build the server's app on a model's AsyncLLM (a third of a second).

        ``call_workers`` runs a function of the model's worker in each of them, as ``collective_rpc`` does.
        """
        client = CallClient(llm, constraints)
        continuing.teach(llm)
        tasks = await llm.get_supported_tasks()
        app = await asyncio.to_thread(vllm_frontend.build_app(), server, tasks, llm.model_config)
        await vllm_frontend.init_app_state()(client, app.state, server, tasks)
        app.state.server = SimpleNamespace(should_exit=False)  # what an error handler would stop
        return cls(app, client, call_workers)

    async def answer(self, call: Call, run: Run, on_chunk: ChunkSink | None) -> Answer:
        """Run a call to its end. Raises HandedBack, NotContinued, EngineDied."""
        if run.begun is not None and (run.begun.engine, run.begun.call) != (self._client.fingerprint, run.id):
            raise NotContinued("another model or another version of vLLM began it, or under another id")
        run.client = self._client
        token = RUN.set(run)
        try:
            answer = await self._answer(call, run, on_chunk)
        except CallAborted:
            return aborted()
        finally:
            RUN.reset(token)
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError  # vLLM's handlers answer a cancellation as a client that went away
        return answer

    async def inquire(self, inquiry: Inquiry) -> Reply:
        """What this model's server says of its inside. Raises EngineDied."""
        from httpx import ASGITransport, AsyncClient

        if self._diagnostics is None:
            self._diagnostics = vllm_frontend.diagnostics(self.app)
        try:
            async with AsyncClient(transport=ASGITransport(self._diagnostics), base_url="http://model") as client:
                url = f"{inquiry.path}?{inquiry.query}"
                answer = await client.request(inquiry.method, url, content=inquiry.body, timeout=None)
        except Exception as error:
            if vllm_frontend.is_engine_dead(error):
                raise EngineDied(str(error)) from error
            return Reply(500, "text/plain", f"{type(error).__name__}: {error}".encode())
        return Reply(answer.status_code, answer.headers.get("content-type", "text/plain"), answer.content)

    @property
    def endpoints(self) -> Mapping[str, Any]:
        """FastAPI's routes of our endpoints that vLLM's server has for this model, by their paths."""
        own = {endpoint.value for endpoint in Endpoint}
        return {path: route for path, route in self._routes.items() if path in own}

    async def add_lora(self, name: str, path: Path) -> None:
        """Load an adapter; its name then works as ``model``. Raises LoraRefused."""
        request = vllm_frontend.lora_request("LoadLoRAAdapterRequest")(lora_name=name, lora_path=str(path))
        with _refusing(name):
            _accepted(await self.app.state.openai_serving_models.load_lora_adapter(request))

    @property
    def loras(self) -> dict[str, Path]:
        """The adapters' names that work as ``model``, and where they came from."""
        registered = self.app.state.openai_serving_models.lora_requests
        return {name: Path(each.lora_path) for name, each in registered.items()}

    async def remove_lora(self, name: str) -> None:
        """Forget an adapter, in the workers too: one that is pinned would keep its place there. Raises LoraRefused."""
        adapter = self._adapter(name)
        request = vllm_frontend.lora_request("UnloadLoRAAdapterRequest")(lora_name=name)
        with _refusing(name):
            _accepted(await self.app.state.openai_serving_models.unload_lora_adapter(request))
            await self._client.remove_lora(adapter.lora_int_id)

    async def load_lora(self, name: str) -> None:
        """Load an adapter that the registry knows into workers that have it not. Raises LoraRefused."""
        with _refusing(name):
            await self._client.add_lora(self._adapter(name))

    async def pin_lora(self, name: str) -> None:
        """Keep an adapter in the workers' memory whatever others are used. Raises LoraRefused."""
        await self.load_lora(name)
        with _refusing(name):
            await self._call_workers(vllm_worker.keep_lora, args=(self._adapter(name).lora_int_id,))

    def _adapter(self, name: str) -> Any:
        return self.app.state.openai_serving_models.lora_requests[name]

    async def _answer(self, call: Call, run: Run, on_chunk: ChunkSink | None) -> Answer:
        from fastapi import Request

        raw = Request(_scope(self.app, call))
        try:
            exchange = self._exchange(call, raw)
        except Exception as error:  # as the server's outermost handler does
            response = await self._explained(raw, error, run)
        else:
            run.beams = bool(getattr(exchange.parsed, "use_beam_search", False))
            run.cache_salt = call.body.get("cache_salt") if call.endpoint is Endpoint.MESSAGES else None
            run.streamed = exchange.streams and on_chunk is not None
            run.drawn = run.streamed and call.endpoint is Endpoint.RESPONSES
            if exchange.streams and not run.streamed:
                exchange.unstream()
            response = await self._handled(exchange, run)
            if on_chunk is not None and vllm_frontend.is_event_stream(response):
                response = await self._streamed(exchange, response, run, on_chunk)
        _raise_what_is_no_answer(run)
        body = response if isinstance(response, dict) else await _body(response)
        status = 200 if isinstance(response, dict) else response.status_code
        return Answer(
            status=status,
            body=body,
            aborted=run.cut,
            retriable=status >= 500 and status != 501,
            first_token_s=run.first_token_s,
            continued=run.history,
            longest=run.longest,
        )

    def _exchange(self, call: Call, raw: Any) -> "_Exchange":
        route = self._route(call.endpoint)
        return _Exchange(route, self._parse(route, call), raw)

    async def _handled(self, exchange: "_Exchange", run: Run) -> Any:
        """The response of a route's function, or of the exception handler that the app has for its error."""
        try:
            response = await exchange.endpoint(**exchange.arguments)
        except CallAborted:
            raise
        except Exception as error:  # as the server's outermost handler does
            return await self._explained(exchange.raw, error, run)
        return response if run.refusal is None else await self._explained(exchange.raw, run.refusal, run)

    def _route(self, endpoint: Endpoint) -> Any:
        """What the server has at a path. Raises HTTPException as it answers where this model has none."""
        from fastapi import HTTPException

        if endpoint not in self._routes:
            raise HTTPException(404, f"The model does not support {endpoint}")
        return self._routes[endpoint]

    @staticmethod
    def _parse(route: Any, call: Call) -> Any:
        """The body as the route's request model. Raises RequestValidationError as FastAPI does."""
        from fastapi.exceptions import RequestValidationError

        body = _admitted(call)
        value, errors = route.dependant.body_params[0].validate(body, {}, loc=("body",))
        if not errors and call.endpoint is Endpoint.MESSAGES and not hasattr(value, "cache_salt"):
            errors = vllm_frontend.wrong_cache_salt(body)
        if errors:
            raise RequestValidationError(errors, body=body)
        if call.endpoint is Endpoint.RESPONSES:
            value.request_id = f"resp_{call.id}"
        return value

    async def _streamed(self, exchange: "_Exchange", response: Any, run: Run, on_chunk: ChunkSink) -> Any:
        """What a stream comes to. One that can't be read fails as what the server did not expect, whatever is wrong."""
        try:
            return await self._stream(exchange, response, run, on_chunk)
        except _BrokenStream as broken:
            return await self._explained(exchange.raw, broken, run)

    async def _stream(self, exchange: "_Exchange", response: Any, run: Run, on_chunk: ChunkSink) -> Any:
        """Hand on the events of a stream, and answer with the whole: vLLM's own, made of the same tokens."""
        whole: dict[str, Any] | None = None
        failed: dict[str, Any] | None = None
        told = ToldMessage()
        async with aclosing(_events(response)) as events:
            async for event in events:
                if "error" in event:
                    _raise_what_is_no_answer(run)
                    failed = event
                elif event.get("type") in vllm_frontend.LAST_EVENTS:
                    whole = event["response"]
                told.take(event)
                if run.live:  # else its reader has it already
                    await on_chunk(event)
                    run.events += 1
        _raise_what_is_no_answer(run)
        if failed is not None:
            return _json(failed, failed["error"].get("code"))
        if whole is not None:
            return whole
        run.replay()
        exchange.unstream()
        await exchange.rewind()
        response = await self._handled(exchange, run)
        # vLLM refuses to make a whole of a tool's input that has been cut short; its stream has told it already.
        return told.message if told.ended and _is_refusal(response) else response

    async def _explained(self, raw: Any, error: Exception, run: Run) -> Any:
        """The response of the exception handler that the app has for an error."""
        _raise_what_is_no_answer(run)
        if isinstance(error, GearshiftError):
            raise error
        for kind in type(error).__mro__:
            handler = self.app.exception_handlers.get(kind)
            if handler is not None:
                return await handler(raw, error)
        raise error


@dataclass(frozen=True, slots=True)
class _Exchange:
    """A request on its route: ``parsed`` is the body as vLLM's request model, ``raw`` what came around it."""

    route: Any
    parsed: Any
    raw: Any

    @property
    def endpoint(self) -> Callable[..., Awaitable[Any]]:
        """The route's function, without the wrapper that runs it in a task of its own until the connection is lost:
        cancelling our task must end it, and nobody is connected."""
        return inspect.unwrap(self.route.endpoint)

    @property
    def arguments(self) -> dict[str, Any]:
        """What the route's function takes, by the names it gives them."""
        dependant = self.route.dependant
        return {dependant.body_params[0].name: self.parsed, dependant.request_param_name: self.raw}

    @property
    def streams(self) -> bool:
        return bool(getattr(self.parsed, "stream", False))

    def unstream(self) -> None:
        """Ask for the whole instead."""
        self.parsed.stream = False
        if hasattr(self.parsed, "stream_options"):
            self.parsed.stream_options = None

    async def rewind(self) -> None:
        """Let a recording be read once more."""
        if (file := getattr(self.parsed, "file", None)) is not None:
            await file.seek(0)


@contextmanager
def _refusing(name: str) -> Iterator[None]:
    """What the registry or a worker could not do with an adapter is no end of anything else."""
    try:
        yield
    except Exception as error:
        if isinstance(error, GearshiftError) or vllm_frontend.is_engine_dead(error):
            raise
        raise LoraRefused(f"{name}: {error}") from error


def _accepted(answer: Any) -> None:
    """The registry answers a refusal as an error response."""
    if not isinstance(answer, str):
        raise LoraRefused(answer.error.message)


def aborted() -> Answer:
    """The answer of a call that ended before it had anything to show."""
    error = {"message": "The request was aborted.", "type": "Aborted", "param": None, "code": ABORTED}
    return Answer(status=ABORTED, body={"error": error}, aborted=True)


def session_lost(reason: str) -> Answer:
    """The answer to a part of a session that can't be gone on with."""
    error = {"message": reason[:1].upper() + reason[1:], "type": "SessionLost", "param": "session", "code": 409}
    return Answer(status=409, body={"error": error})


def _raise_what_is_no_answer(run: Run) -> None:
    """What the handlers turn into an answer, but is not one: a dead engine, a request handed back, an abort."""
    failure = run.failure
    while failure is not None:
        if isinstance(failure, GearshiftError | CallAborted):
            raise failure
        if vllm_frontend.is_engine_dead(failure):
            raise EngineDied(str(failure)) from failure
        failure = failure.__cause__  # vLLM wraps what it can't tell from an error of its own


def _is_refusal(response: Any) -> bool:
    return getattr(response, "status_code", 200) >= 400


def _failing_openly(handle: Any) -> Any:
    """A handler of Anthropic's messages, whose error is kept as it is: 0.26 calls each of them one of the server."""

    async def handled(*given: Any) -> Any:
        run = RUN.get()
        try:
            return await handle(*given)
        except Exception as error:
            if run is not None:
                run.refusal = error
            raise

    return handled


def _rendered_once(render: Any) -> Any:
    """A handler's rendering of the prompt, done once per call though a stream's call asks for it twice."""

    async def rendered(request: Any) -> Any:
        run = RUN.get()
        if run is not None and run.cache_salt is not None:
            request.cache_salt = run.cache_salt  # which messages of 0.26 don't have
        if run is None or not run.streamed:
            return await render(request)
        if run.rendered is None:
            run.rendered = await render(request)
        return run.rendered

    return rendered


def _admitted(call: Call) -> dict[str, Any]:
    """The body without what only the operator may say: ids inside the engine, and where KV caches come from."""
    body = {key: value for key, value in call.body.items() if key not in vllm_frontend.PRIVATE_FIELDS}
    extra = body.get("vllm_xargs")
    if isinstance(extra, Mapping):
        body["vllm_xargs"] = {key: value for key, value in extra.items() if key not in vllm_frontend.PRIVATE_FIELDS}
    if call.endpoint in FORMS:
        body["file"] = _upload(body.get("file"))
    return body


def _upload(value: object) -> Any:
    """A file in a body is base64, or a data URL of it. What is neither is left for validation to refuse."""
    import io

    from starlette.datastructures import UploadFile

    if not isinstance(value, str):
        return value
    with suppress(ValueError):
        content = base64.b64decode(value.partition("base64,")[2] or value, validate=True)
        return UploadFile(io.BytesIO(content), size=len(content), filename="audio")
    return value


def _scope(app: Any, call: Call) -> dict[str, Any]:
    """The ASGI scope of the request that the server would have seen. The id makes the engine's ids ours."""
    headers = {"content-type": "application/json", "x-request-id": call.id, **(call.trace_headers or {})}
    return {
        "type": "http",
        "method": "POST",
        "path": str(call.endpoint),
        "query_string": b"",
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        "app": app,
        "state": {},
    }


class _BrokenStream(Exception):
    """A stream of vLLM's can't be read, or its making failed."""


async def _events(response: Any) -> AsyncGenerator[dict[str, Any], None]:
    """The events of a stream, without its framing, its comments and its end mark. Raises _BrokenStream."""
    try:
        async with aclosing(response.body_iterator) as pieces:
            async for piece in pieces:
                text = piece if isinstance(piece, str) else piece.decode()
                for line in text.split("\n"):  # JSON may have what else ends a line for Python
                    if line.startswith("data: ") and line != "data: [DONE]":
                        yield json.loads(line[6:])
    except (CallAborted, GearshiftError):
        raise
    except Exception as error:
        raise _BrokenStream(f"The stream broke off: {type(error).__name__}: {error}") from error


async def _body(response: Any) -> dict[str, Any]:
    if hasattr(response, "body_iterator"):
        pieces = [piece if isinstance(piece, bytes) else piece.encode() async for piece in response.body_iterator]
        return {
            "content_type": response.media_type,
            "metadata": json.loads(response.headers.get("metadata", "null")),
            "data_base64": base64.b64encode(b"".join(pieces)).decode(),
        }
    body = json.loads(response.body)
    return body if isinstance(body, dict) else {"data": body}


def _json(body: dict[str, Any], code: object) -> Any:
    from starlette.responses import JSONResponse

    return JSONResponse(body, status_code=code if isinstance(code, int) and 400 <= code < 600 else 500)
