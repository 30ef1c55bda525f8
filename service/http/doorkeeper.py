"""Who may come in: over HTTP a tenant that has what it may have is told when to come again."""

import math
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

from schemas import headers as h
from schemas.base import Headers
from schemas.results import Chunk, Result
from service.errors import OverQuota
from service.http.replies import Pieces
from service.scheduling.quotas import Quotas

_BYTES_PER_TOKEN, _ANSWER_TOKENS = 4, 256
_AGAIN_S = 1.0
"""Where it is not known when there is room."""


class Doorkeeper:
    """Counts what is asked at this door among its tenants' requests. ``quotas`` are the worker's."""

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas

    def check(self, headers: Headers, size: int) -> None:
        """Whether a request with these headers may come in. Raises OverQuota."""
        tenant = _tenant(headers)
        if not self._quotas.limited(tenant):
            return
        quota = self._quotas.limits.now.of(tenant)
        if self._quotas.is_full(tenant, size):
            raise OverQuota(f"{quota.waiting_bytes} bytes of your requests may be here", retry_after_s=_AGAIN_S)
        wait_s = self._quotas.wait_s(tenant, time.monotonic())
        if math.isinf(wait_s):
            raise OverQuota(f"{quota.concurrent} requests of yours may be under way", retry_after_s=_AGAIN_S)
        if wait_s > 0:
            raise OverQuota(f"you may have {quota.tokens_per_minute} tokens per minute", retry_after_s=wait_s)

    @contextmanager
    def asking(self, headers: Headers, size: int) -> Iterator["Entry"]:
        """Let a request in, which is under way until its result is there or the block ends. Raises OverQuota."""
        self.check(headers, size)
        with closing(Entry(self._quotas, _tenant(headers), size)) as entry:
            yield entry


class Entry:
    """A request that was let in."""

    def __init__(self, quotas: Quotas, tenant: str, size: int) -> None:
        self._quotas = quotas
        self._tenant = tenant
        self._size = size
        self._open = quotas.limited(tenant)
        if self._open:
            quotas.hold(tenant, size)
            self._charge = quotas.begin(tenant, size // _BYTES_PER_TOKEN + _ANSWER_TOKENS, time.monotonic())

    def until_result(self, pieces: Pieces) -> Pieces:
        """What comes of it; who has its result may ask for another one at once."""
        return _UntilResult(pieces, self)

    def close(self) -> None:
        """It is under way no more. May be called twice."""
        if self._open:
            self._open = False
            self._quotas.end(self._tenant, self._charge)
            self._quotas.let_go(self._tenant, self._size)


class _UntilResult:
    def __init__(self, pieces: Pieces, entry: Entry) -> None:
        self._pieces = pieces
        self._entry = entry

    async def next(self) -> Chunk | Result:
        item = await self._pieces.next()
        if isinstance(item, Result):
            self._entry.close()
        return item


def _tenant(headers: Headers) -> str:
    return h.attributes(headers).get(h.TENANT) or ""
