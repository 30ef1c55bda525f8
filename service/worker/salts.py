"""Tenants apart in the prefix cache: else how soon an answer begins tells what somebody else has asked."""

import hmac
import json
import secrets
from collections.abc import Sequence
from typing import Any

from schemas.requests import Endpoint, Request

CACHE_SALT = "cache_salt"
"""vLLM's name: prompts with different salts share no blocks of the cache."""
_GENERATING = frozenset({Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.RESPONSES, Endpoint.MESSAGES})


class CacheSalts:
    """A salt per tenant, that nobody can guess: from the pool's first key, or from a secret of this worker.

    With a pool's key all its workers have the same salts, so that a cache that they share stays shared. Requests
    without a tenant share the cache with each other. A salt that a request brings divides its tenant's part further.
    """

    def __init__(self, keys: Sequence[bytes] = ()) -> None:
        self._key = keys[0] if keys else secrets.token_bytes(32)

    def body(self, request: Request) -> dict[str, Any]:
        """The body to run: the request's own, with its tenant's salt."""
        own = request.body.get(CACHE_SALT)
        if not request.tenant or request.endpoint not in _GENERATING:
            return request.body
        if own is not None and not (isinstance(own, str) and own):
            return request.body  # vLLM says what is wrong with it
        said = json.dumps([CACHE_SALT, request.tenant, own]).encode()  # so that no two pairs are written alike
        return {**request.body, CACHE_SALT: hmac.digest(self._key, said, "sha256").hex()}
