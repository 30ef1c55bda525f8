"""The HTTP server: uvicorn with one application, open from before the engine loads until all is answered."""

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial

import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from service.errors import (
    BrokerUnavailable,
    CallConflict,
    ConfigError,
    Overloaded,
    OverQuota,
    RecordRefused,
    Unavailable,
)
from service.http import errors, models, openai_routes, openapi, operating, page, probes
from service.http.batches import BatchRoutes
from service.http.connection import Connection, Limits, protocol
from service.http.doorkeeper import Doorkeeper
from service.http.durable import Durable
from service.http.errors import Refused
from service.http.files import FileRoutes
from service.http.history import History
from service.http.listener import TlsListener
from service.http.memory_bus import InMemoryBus
from service.http.security import Guard, KeyFile, is_locked
from service.http.tls import certificate_of
from service.http.worker_view import Commands, WorkerView
from service.kafka.calls import Calls
from service.kafka.files import Files
from service.quotas_file import WatchedQuotas
from service.scheduling.quotas import Quotas
from service.settings import HttpSettings, Settings

log = structlog.get_logger(__name__)
_BACKLOG = 2048
_DEFAULT_PORT = 8000
"""As vLLM's own server; without a broker there is no worker without a port."""
_CLOSING_S = 5


class HttpServer:
    """Give ``bus`` to the worker, ``commands`` and ``history`` as watchers, then set ``worker``."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings.http
        worker = settings.worker
        self._keys = None if settings.http.api_keys_file is None else KeyFile(settings.http.api_keys_file)
        self._operable = settings.http.dev_mode or self._keys is not None  # then a key must have the role
        self._limits = Limits.of(settings)
        self.quotas = Quotas(WatchedQuotas(worker.quotas_file))
        """What tenants may have; the worker's too."""
        self.bus = InMemoryBus(
            max_requests=worker.max_waiting + worker.max_running,
            max_bytes=worker.max_waiting_bytes,
            backlog=settings.http.http_stream_backlog,
        )
        self.commands = Commands()
        self.history = History()
        self.worker: WorkerView | None = None
        self.has_broker = False
        self.calls: Calls | None = None
        """What is asked durably, where there is a broker, and it has been read."""
        self.files: Files | None = None
        self.app = self._application(settings)
        self._certificate = certificate_of(settings.http)
        self._socket = _bound(settings.http)
        self.address = _address(self._socket, "http" if self._certificate is None else "https")
        """Where it is reached."""
        self.locked = is_locked(settings.http)
        """Whether it answers probes and metrics only, for want of keys."""

    @asynccontextmanager
    async def opened(self) -> AsyncIterator["HttpServer"]:
        """Serve; at the end, answer whoever still waits and let the answers go out."""
        config = uvicorn.Config(
            self.app,
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_keep_alive=self._settings.http_keep_alive_s,
            timeout_graceful_shutdown=_CLOSING_S,
            http=protocol(self._limits),
        )
        config.load()
        server = _Server(config)
        async with asyncio.TaskGroup() as group:
            sockets, of_tls = [self._socket], []
            if self._certificate is not None:
                sockets = []  # uvicorn listens nowhere then
                listener = TlsListener(
                    self._socket,
                    self._certificate.context,
                    partial(Connection, self._limits, config=config, server_state=server.server_state, app_state={}),
                    server.server_state.connections,
                    self._limits,
                )
                of_tls = [
                    group.create_task(listener.accept(), name="accepting"),
                    group.create_task(self._certificate.keep(), name="certificate"),
                ]
            task = group.create_task(server.serve(sockets=sockets), name="http")
            log.info("http.open", address=self.address)
            if self.locked:
                log.warning("http.locked", why="others reach it and there are no keys: probes and metrics only")
            try:
                yield self
            finally:
                self.leave()
                for one in of_tls:
                    one.cancel()
                server.should_exit = True
                await asyncio.wait({task, *of_tls})

    def leave(self) -> None:
        """The worker has ended: answer whoever still waits for it."""
        self.worker = None
        self.bus.close()
        self.commands.close()

    # --- what is served ---

    def _application(self, settings: Settings) -> Starlette:
        middleware = []
        if self._settings.cors_origins:
            origins = list(self._settings.cors_origins)
            middleware.append(
                Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
            )
        middleware.append(Middleware(Guard, self._settings, self._keys))
        durable = Durable(self._calls, always=self._settings.http_durable, ends_s=self._ends_s)
        routes = [
            *openai_routes.routes(
                self.bus, durable=durable, door=Doorkeeper(self.quotas), max_bytes=settings.worker.max_request_bytes
            ),
            *durable.routes(),
            *FileRoutes(self._files, settings, self.bus.holding).routes(),
            *BatchRoutes(self._files, settings).routes(),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/health", self._health),
            Route("/ready", self._ready),
            Route("/version", self._version),
            Route("/metrics", self._metrics),
            Route("/", self._page),
            Route("/state", self._state),
            Route("/openapi.json", self._openapi),
            Route("/docs", self._docs),
            Route("/playground", self._playground),
            *operating.looking(self._live),
        ]
        if self._operable:
            routes.insert(0, Route("/v1/models/switch", self._switch, methods=["POST"]))
            routes.append(Route("/requests/{id:path}/cancel", self._cancel, methods=["POST"]))
            routes += operating.operating(self._live, self.commands)
            routes += operating.inquiring(self._live, dev_mode=self._settings.dev_mode)
        self._routes = routes
        handlers = {
            HTTPException: errors.http_exception,
            Unavailable: _unavailable,
            BrokerUnavailable: _unavailable,
            CallConflict: _conflict,
            RecordRefused: _too_large,
            Overloaded: self._overloaded,
            OverQuota: _over_quota,
            Refused: _refused,
            ClientDisconnect: _gone,
            Exception: _failed,
        }
        return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)

    def _live(self) -> WorkerView:
        if self.worker is None:
            raise Unavailable("the worker is starting or has stopped")
        if self.worker.command is None:
            raise Unavailable(f"the worker is {self.worker.presence().state}")
        return self.worker

    def _calls(self) -> Calls | None:
        if self.calls is None and self.has_broker:
            raise Unavailable("the worker is starting")
        return self.calls

    def _files(self) -> Files | None:
        if self.files is None and self.has_broker:
            raise Unavailable("the worker is starting")
        return self.files

    def _ends_s(self, request: str | None = None) -> float | None:
        return None if self.worker is None else self.worker.ends_s(request)

    async def _overloaded(self, _request: Request, raised: Exception) -> Response:
        """There is room when something ends."""
        return errors.error(429, f"Too many requests: {raised}", headers=errors.again_after(self._ends_s()))

    async def _models(self, _request: Request) -> Response:
        return JSONResponse(models.listed(self._live()))

    async def _model(self, request: Request) -> Response:
        return models.found(self._live(), request.path_params["name"])

    async def _switch(self, request: Request) -> Response:
        return await models.switch(request, self._live(), self.commands)

    async def _page(self, _request: Request) -> Response:
        return page.page("page.html")

    async def _playground(self, _request: Request) -> Response:
        return page.page("playground.html")

    async def _state(self, _request: Request) -> Response:
        if self.worker is None:
            raise Unavailable("the worker is starting or has stopped")
        return await page.state(self.worker, self.history, controls=self._operable)

    async def _openapi(self, _request: Request) -> Response:
        return await openapi.document(self._live(), self._routes, keys=self._keys is not None)

    async def _docs(self, _request: Request) -> Response:
        return page.page("docs.html")

    async def _cancel(self, request: Request) -> Response:
        return await page.cancel(request, self._live(), self.commands)

    async def _health(self, _request: Request) -> Response:
        return probes.health(self.worker)

    async def _ready(self, _request: Request) -> Response:
        return probes.ready(self.worker)

    async def _version(self, _request: Request) -> Response:
        return probes.version()

    async def _metrics(self, _request: Request) -> Response:
        return probes.metrics(self.worker)


def try_address(settings: HttpSettings) -> None:
    """Raises ConfigError where a server could not listen: said before vLLM is imported, which takes long."""
    _bound(settings).close()


class _Server(uvicorn.Server):
    """Signals are the worker's to handle."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bound(settings: HttpSettings) -> socket.socket:
    """The listening socket; bound here, so that a port in use is a plain error. Raises ConfigError."""
    port = _DEFAULT_PORT if settings.http_port is None else settings.http_port
    try:
        info = socket.getaddrinfo(settings.http_host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.create_server(info[4][:2], family=info[0], backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(f"http_port: can't listen on {settings.http_host}:{port}: {error}") from None
    # Connections inherit it. asyncio would set it, but not for a socket that was made without naming its protocol;
    # without it each answer waits 40 ms for the client to acknowledge its headers.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def _address(listening: socket.socket, scheme: str) -> str:
    """With this machine's name, where it listens on all of its addresses."""
    host, port = listening.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = socket.gethostname()
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


async def _unavailable(_request: Request, raised: Exception) -> Response:
    return errors.error(503, str(raised), kind="ServiceUnavailableError")


async def _over_quota(_request: Request, raised: Exception) -> Response:
    assert isinstance(raised, OverQuota)
    again = errors.again_after(raised.retry_after_s)
    return errors.error(429, f"Too many requests: {raised}", kind="RateLimitError", headers=again)


async def _conflict(_request: Request, raised: Exception) -> Response:
    return errors.error(409, str(raised), kind="ConflictError", param="idempotency-key")


async def _too_large(_request: Request, raised: Exception) -> Response:
    return errors.error(413, f"The request can't be written down: {raised}")


async def _refused(_request: Request, raised: Exception) -> Response:
    assert isinstance(raised, Refused)
    return raised.response


async def _gone(_request: Request, _raised: Exception) -> Response:
    """Nobody is there to read it."""
    return Response(status_code=499)


async def _failed(_request: Request, _raised: Exception) -> Response:
    """What is wrong is in the log."""
    return errors.error(500, "The server failed to answer; its log says why", kind="InternalServerError")
