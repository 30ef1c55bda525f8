"""Who may ask: API keys from a file, as bearer tokens."""

import hashlib
import secrets
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from service.errors import ConfigError
from service.http import errors

OPEN_PATHS = frozenset({"/", "/health", "/ready", "/metrics", "/version"})
"""What says nothing of anybody's requests: for probes, for Prometheus, and the page itself, which asks for the key."""


def read_keys(path: Path) -> tuple[str, ...]:
    """One key per line; empty lines and those that begin with # are none. Raises ConfigError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_keys_file: {path} can't be read: {error}") from None
    keys = tuple(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
    if not keys:
        raise ConfigError(f"api_keys_file: {path} has no keys")
    return keys


class RequireKey:
    """Middleware that lets through whoever has a key; preflight requests of browsers can't have one."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asks = scope["type"] == "http" and scope["method"] != "OPTIONS" and scope["path"] not in OPEN_PATHS
        if asks and not self._known(Headers(scope=scope).get("authorization", "")):
            refusal = errors.error(401, "An API key is needed: Authorization: Bearer KEY", kind="AuthenticationError")
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _known(self, authorization: str) -> bool:
        scheme, _, given = authorization.partition(" ")
        digest = _digest(given.strip())
        matches = [secrets.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == "bearer" and any(matches)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
