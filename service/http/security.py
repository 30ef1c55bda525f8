"""Who may ask for what: API keys with roles from a file, and the names that this server may be called by."""

import hashlib
import ipaddress
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

import structlog
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from schemas.base import MAX_ATTRIBUTE
from service.errors import ConfigError
from service.http import errors, operating
from service.kafka.files import owner_named
from service.settings import HttpSettings
from service.watched_files import WatchedFiles

log = structlog.get_logger(__name__)
_LOOKING = frozenset({"/state", "/load", "/is_sleeping", "/is_paused"})
_UNASKED = ("/v1/files", "/v1/batches", "/v1/audio/", "/v1/responses/", "/v1/calls/")
"""What takes forms or has no body: a browser sends that for any page without asking first."""
OPEN_PATHS = frozenset({"/", "/docs", "/playground", "/health", "/ready", "/ping", "/metrics", "/version"})
"""What says nothing of anybody's requests: for probes and Prometheus, and pages, which ask for the key themselves."""
_LOOK_AGAIN_S = 1.0
_TENANT = "tenant="


class Role(StrEnum):
    """What a key may do."""

    LOOK = "look"
    """See the state of the worker: who waits and runs, without what they say."""
    ASK = "ask"
    """Send requests to models."""
    OPERATE = "operate"
    """Switch models and cancel requests, and look."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who has a key: what they may do, and the tenant that they belong to, if any."""

    roles: frozenset[Role]
    tenant: str
    owner: str
    """Whose durable calls are theirs: those of the same tenant, or of the same key."""


Keys = Mapping[bytes, Holder]
"""Who they are by the digest of their key: comparing digests tells nothing of a key by the time that it takes."""


def read_keys(path: Path) -> Keys:
    """A key and its roles per line; empty lines and those that begin with # are none. Raises ConfigError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_keys_file: {path} can't be read: {error}") from None
    keys = dict(
        _parsed(path, number, line) for number, line in enumerate(lines, 1) if line.strip() and line.strip()[0] != "#"
    )
    if not keys:
        raise ConfigError(f"api_keys_file: {path} has no keys")
    return keys


def _parsed(path: Path, number: int, line: str) -> tuple[bytes, Holder]:
    key, *words = line.replace(",", " ").split()
    tenants = [word.removeprefix(_TENANT) for word in words if word.startswith(_TENANT)]
    if len(tenants) > 1 or not all(0 < len(tenant.encode()) <= MAX_ATTRIBUTE for tenant in tenants):
        raise ConfigError(f"api_keys_file: {path}, line {number}: a key has one tenant, of 1 to {MAX_ATTRIBUTE} bytes")
    try:
        roles = frozenset(Role(word) for word in words if not word.startswith(_TENANT)) or frozenset({Role.ASK})
    except ValueError:  # what it quotes may be a second key
        message = f"api_keys_file: {path}, line {number}: a word is no role; roles are {', '.join(Role)}"
        raise ConfigError(message) from None
    tenant = tenants[0] if tenants else ""
    owner = owner_named(tenant) if tenant else f"key {_digest(key).hex()}"
    return _digest(key), Holder(roles | ({Role.LOOK} if Role.OPERATE in roles else frozenset()), tenant, owner)


class KeyFile:
    """The keys as the file has them now; one that can't be read any more leaves those that were."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = WatchedFiles(path)
        self._keys = read_keys(path)
        self._looked = time.monotonic()

    def holder(self, headers: Headers) -> Holder | None:
        """Whose key these have, as OpenAI's clients send it or as Anthropic's do; None: nobody's that is known."""
        if time.monotonic() - self._looked > _LOOK_AGAIN_S:
            self._look()
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            given = headers.get("x-api-key", "")
        return self._keys.get(_digest(given.strip()))

    def _look(self) -> None:
        self._looked = time.monotonic()
        if not self._file.changed():
            return
        try:
            self._keys = read_keys(self._path)
        except ConfigError as error:
            log.error("http.keys_unreadable", why=str(error))  # noqa: TRY400  # the message says all
        else:
            log.info("http.keys_read", keys=len(self._keys))


class Guard:
    """Middleware in front of every route.

    - With ``keys``, a key with the right role is needed.
    - Without them, an address that others reach answers probes and metrics only, unless ``http_anonymous`` is set.
    - Without them, the Host must be one of ours, or the page of a stranger could name its own site as this machine.
    """

    def __init__(self, app: ASGIApp, settings: HttpSettings, keys: KeyFile | None) -> None:
        self._app = app
        self._keys = keys
        self._hosts = _hosts(settings, keys=keys is not None)
        self._origins = settings.cors_origins
        self._locked = is_locked(settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = None if scope["type"] != "http" or scope["path"] in OPEN_PATHS else self._refusal(scope)
        await (self._app if refusal is None else refusal)(scope, receive, send)

    def _refusal(self, scope: Scope) -> ASGIApp | None:
        headers = Headers(scope=scope)
        if self._hosts is not None and not _is_ours(headers.get("host", ""), self._hosts):
            return errors.error(421, "This server is not called by that name; see its setting http_hosts", param="host")
        if self._locked:
            message = "This server has no API keys, so that others get probes and metrics only; see api_keys_file"
            return errors.error(403, message, kind="PermissionDeniedError")
        needed = _needed(scope)
        if self._keys is None:
            unasked = scope["path"].startswith(_UNASKED) and "*" not in self._origins
            guarded = needed is Role.OPERATE or unasked
            foreign = guarded and self._is_foreign(headers)
            message = "A page of another site may not do that"
            return errors.error(403, message, kind="PermissionDeniedError") if foreign else None
        if scope["method"] == "OPTIONS":  # browsers ask beforehand, and can't have a key then
            return None
        holder = self._keys.holder(headers)
        if holder is not None:
            scope.setdefault("state", {}).update(owner=holder.owner, tenant=holder.tenant)
        return _refused_by(None if holder is None else holder.roles, needed)

    def _is_foreign(self, headers: Headers) -> bool:
        """Whether a browser says that a page of another site asks; without keys it would do so as this machine."""
        origin = headers.get("origin")
        if origin is None or origin in self._origins:
            return False
        try:
            return urlsplit(origin).netloc != headers.get("host")
        except ValueError:
            return True


def _refused_by(roles: frozenset[Role] | None, needed: Role | None) -> ASGIApp | None:
    """What who has these roles is told where ``needed`` is asked for."""
    if roles is None:
        return errors.error(
            401,
            "An API key is needed: Authorization: Bearer KEY, or x-api-key: KEY",
            kind="AuthenticationError",
            headers={"www-authenticate": "Bearer"},
        )
    if needed is not None and needed not in roles:
        return errors.error(403, f"This key may not do that; the role is {needed}", kind="PermissionDeniedError")
    return None


def is_locked(settings: HttpSettings) -> bool:
    """Whether others than this machine reach the server, nobody has a key, and nobody said that this is well."""
    return not (settings.api_keys_file or settings.http_anonymous or _is_loopback(settings.http_host))


def _needed(scope: Scope) -> Role | None:
    """The role for a route; models may be listed by anyone with a key, as OpenAI's client does."""
    path, reads = scope["path"], scope["method"] in {"GET", "HEAD"}
    if reads and (path in {"/v1/models", "/openapi.json"} or path.startswith("/v1/models/")):
        return None
    if path in _LOOKING:
        return Role.LOOK
    operates = path in operating.PATHS or path == "/v1/models/switch" or path.startswith("/requests/")
    return Role.OPERATE if operates else Role.ASK


def _hosts(settings: HttpSettings, *, keys: bool) -> frozenset[str] | None:
    """The names that are ours; None: any is good."""
    if "*" in settings.http_hosts or (keys and not settings.http_hosts):
        return None
    own = {"localhost", socket.gethostname(), settings.http_host}
    return frozenset(name.lower() for name in own | set(settings.http_hosts))


def _is_ours(host: str, names: frozenset[str]) -> bool:
    """A number is: no site can make a browser take its own name for one."""
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    name = name.strip("[]").rstrip(".").lower()
    return name in names or _is_number(name)


def _is_number(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
