"""What tenants may have of the pool, and what they have had of it. Pure; time is an argument, monotonic.

Tokens are a bucket that fills by the minute's rate, up to some seconds of it, and that results empty. What begins here
is charged with what the tenant's results cost on average, and when it ends it is given back for what it did cost: over
time a tenant gets its rate to the token. Nobody owns a bucket: every worker makes it of the same records.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from schemas.status import TenantShare
from service.quotas_file import UNLIMITED, Quota, WatchedQuotas

BURST_S = 6.0
"""Who has asked for nothing may have so many seconds of its rate at once."""
_WEIGHT = 0.1
"""Of one result in the average cost."""
_TIDY_FROM = 1000


@dataclass(slots=True)
class _Account:
    level: float
    """Tokens that may be spent; fewer than none: what was spent too many."""
    at: float
    cost: float | None = None
    """What a result costs on average; None: there was none yet."""
    under_way: int = 0
    bytes: int = 0
    moved: str | None = None
    """The id of the last request that went to wait elsewhere, until that one is done."""

    def refill(self, quota: Quota, now: float) -> None:
        if quota.tokens_per_minute is not None:
            per_s = quota.tokens_per_minute / 60
            self.level = min(BURST_S * per_s, self.level + per_s * max(0.0, now - self.at))
        self.at = max(self.at, now)

    @property
    def idle(self) -> bool:
        return self.under_way == 0 and self.bytes == 0 and self.moved is None


class Quotas:
    """Tenants' accounts under the ``limits`` as they are at the time."""

    def __init__(self, limits: WatchedQuotas | None = None) -> None:
        self.limits = limits or WatchedQuotas(None)
        self._accounts: dict[str, _Account] = {}
        self._elsewhere: Mapping[str, Collection[TenantShare]] = {}
        self._tidy_at = _TIDY_FROM

    def limited(self, tenant: str) -> bool:
        """Whether there is anything that it may not have."""
        quota = self.limits.now.of(tenant)
        return quota is not UNLIMITED and quota != UNLIMITED

    # --- what tenants have ---

    def spent(self, tenant: str, tokens: int, at: float) -> None:
        """A result of a tenant's has cost so many tokens, at any worker.

        One that cost nothing, as of a request that is refused, says nothing of what the others cost.
        """
        if tokens == 0 or self.limits.now.of(tenant).tokens_per_minute is None:
            return
        account = self._account(tenant, at)
        account.level -= tokens
        account.cost = tokens if account.cost is None else account.cost + _WEIGHT * (tokens - account.cost)

    def others(self, shares: Mapping[str, Collection[TenantShare]]) -> None:
        """What other workers have of each tenant's, as they said last."""
        self._elsewhere = shares

    def hold(self, tenant: str, size: int) -> None:
        """A request of so many bytes is here from now on, until ``let_go``."""
        self._account(tenant, 0.0).bytes += size

    def let_go(self, tenant: str, size: int) -> None:
        self._account(tenant, 0.0).bytes -= size

    def begin(self, tenant: str, tokens: int, now: float) -> float:
        """A request is under way, which may cost so many tokens; gives the charge, for ``end``."""
        account = self._account(tenant, now)
        charge = max(1.0, tokens if account.cost is None else account.cost)
        account.under_way += 1
        account.level -= charge
        return charge

    def end(self, tenant: str, charge: float) -> None:
        """It is no more; what it has cost is told apart from this."""
        account = self._account(tenant, 0.0)
        account.under_way -= 1
        account.level += charge

    def moved(self, tenant: str, id_: str) -> None:
        """A request goes where those wait in order that are too many to wait here."""
        self._account(tenant, 0.0).moved = id_

    def ended(self, tenant: str, id_: str) -> None:
        """A request is done, at any worker."""
        account = self._accounts.get(tenant)
        if account is not None and account.moved == id_:
            account.moved = None

    def waits_elsewhere(self, tenant: str) -> bool:
        """Whether the last one that went away is not done: what comes behind it must not begin before it."""
        account = self._accounts.get(tenant)
        return account is not None and account.moved is not None

    # --- what they may have ---

    def wait_s(self, tenant: str, now: float) -> float:
        """How soon another one may begin: 0, it may now; infinity: when one of its others has ended."""
        quota = self.limits.now.of(tenant)
        account = self._account(tenant, now)
        if quota.concurrent is not None and account.under_way >= self._allowance(tenant, quota.concurrent):
            return float("inf")
        if quota.tokens_per_minute is None or account.level > 0:
            return 0.0
        return (1 - account.level) * 60 / quota.tokens_per_minute

    def is_full(self, tenant: str, more: int = 0) -> bool:
        """Whether with so many bytes more the pool holds more of it than it may."""
        most = self.limits.now.of(tenant).waiting_bytes
        elsewhere = sum(share.bytes for share in self._elsewhere.get(tenant, ()))
        return most is not None and self._account(tenant, 0.0).bytes + elsewhere + more > most

    def shares(self, most: int) -> dict[str, TenantShare]:
        """What there is here, of those tenants that have limits and something; so many at most, the largest."""
        found = [
            (tenant, TenantShare(under_way=account.under_way, bytes=account.bytes))
            for tenant, account in self._accounts.items()
            if not account.idle and self.limited(tenant)
        ]
        return dict(sorted(found, key=lambda one: one[1].bytes, reverse=True)[:most])

    def _allowance(self, tenant: str, concurrent: int) -> int:
        """How many of a tenant's may be under way here: what others leave, and no less than an equal part, or one."""
        others = self._elsewhere.get(tenant, ())
        return max(1, concurrent // (1 + len(others)), concurrent - sum(share.under_way for share in others))

    def _account(self, tenant: str, now: float) -> _Account:
        quota = self.limits.now.of(tenant)
        account = self._accounts.get(tenant)
        if account is None:
            self._tidy(now)
            burst = 0.0 if quota.tokens_per_minute is None else BURST_S * quota.tokens_per_minute / 60
            account = self._accounts[tenant] = _Account(level=burst, at=now)
        account.refill(quota, now)
        return account

    def _tidy(self, now: float) -> None:
        """Forget those that are as if they had never asked: anybody may make names up."""
        if len(self._accounts) < self._tidy_at:
            return
        for tenant, account in list(self._accounts.items()):
            quota = self.limits.now.of(tenant)
            account.refill(quota, now)
            full = quota.tokens_per_minute is None or account.level >= BURST_S * quota.tokens_per_minute / 60
            if account.idle and full:
                del self._accounts[tenant]
        self._tidy_at = _TIDY_FROM + 2 * len(self._accounts)
