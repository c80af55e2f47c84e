"""Per-tenant quotas (token buckets over a given clock): calls, events and bytes per second, bytes per day, tokens per minute, samples in
progress, and reads of the metrics.

Half of the capacity for samples in progress is shared by all tenants; the other half is reserved for the tenants in equal shares, so that
one tenant's load never keeps another from starting a call within its share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from typing import Literal

from ostinato.core.errors import BadRequest, OstinatoError, Overloaded
from ostinato.core.fair_share import Bucket
from ostinato.core.seams import Clock
from ostinato.serve.auth import DEFAULT_TENANT
from ostinato.serve.config import SHARED, QuotaConfig, ServeConfig

DAY_S = 86_400.0
SCRAPES_PER_S, SCRAPES_AT_ONCE = 1.0, 60.0
"""Rate limit and burst of a tenant's reads of its metrics, each of which takes milliseconds per ten tenants."""


class QuotaExceeded(OstinatoError):
    """A tenant has exhausted a quota. `kind`: OpenAI's name for the resource; `retry_after_s`: seconds until a retry can succeed."""

    status = 429
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, kind: Literal["requests", "tokens"], retry_after_s: float) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry_after_s = retry_after_s


class _Tenant:
    def __init__(self, quota: QuotaConfig, now: float) -> None:
        self.quota = quota
        self.open = 0
        self.calls = Bucket(rate=quota.calls_per_s, size=quota.burst, now=now)
        self.events = Bucket(rate=quota.events_per_s, size=max(4 * quota.events_per_s, 1000.0), now=now)
        self.bytes = Bucket(rate=quota.bytes_per_s, size=4 * quota.bytes_per_s, now=now)
        minute = quota.tokens_per_minute
        self.tokens = Bucket(rate=minute / 60, size=float(minute), now=now) if minute else None
        day = 1e6 * quota.mb_per_day
        self.stored = Bucket(rate=day / DAY_S, size=day, now=now) if day else None
        self.scrapes = Bucket(rate=SCRAPES_PER_S, size=SCRAPES_AT_ONCE, now=now)


def quota_of(config: ServeConfig, tenant: str, tenants: Collection[str]) -> QuotaConfig:
    """The limits of one of these tenants. The defaults are wide unless several tenants share the server. The default tenant, to which the
    operator's own calls belong, always gets the wide ones.
    """
    chosen = config.tenant_quotas.get(tenant) or config.quota
    if chosen is not None:
        return chosen
    named = [name for name in tenants if name != DEFAULT_TENANT]
    return SHARED if len(named) > 1 and tenant != DEFAULT_TENANT else QuotaConfig()


def in_force(config: ServeConfig, tenants: Collection[str]) -> str:
    """The limits in force, as one line for the log; tenants with the same limits are grouped."""
    groups = dict[QuotaConfig, list[str]]()
    for tenant in sorted(tenants):
        groups.setdefault(quota_of(config, tenant, tenants), []).append(tenant)
    return "; ".join(f"{_listed(names)}: {_limits(quota)}" for quota, names in groups.items())


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _limits(quota: QuotaConfig) -> str:
    tokens = f", {quota.tokens_per_minute:,} tokens a minute" if quota.tokens_per_minute else ""
    stored = f", {quota.mb_per_day:,.0f} MB a day" if quota.mb_per_day else ""
    return (
        f"{quota.calls_per_s:,g} calls a second ({quota.burst:,g} at once), {quota.open_samples:,} samples in progress, "
        f"{quota.events_per_s:,g} events and {quota.bytes_per_s / 2**20:,.3g} MiB a second{tokens}{stored}"
    )


class Quotas:
    """Tracks what each tenant uses and refuses what exceeds its quota.

    Args:
        config: the quotas.
        tenants: all tenants that can send requests.
        clock: seconds.
        refused: called with the tenant and the error's code on each refusal.
    """

    def __init__(
        self, config: ServeConfig, tenants: Collection[str], clock: Clock, refused: Callable[[str, str], None]
    ) -> None:
        self._clock = clock
        self._refused = refused
        now = clock()
        self._tenants = {name: _Tenant(quota_of(config, name, tenants), now) for name in tenants}
        self._places = config.max_inflight
        self._reserved = self._places if len(tenants) == 1 else self._places // (2 * len(tenants))
        self._open = 0
        self._reserved_free = self._reserved * len(tenants)  # reserved places that are not in use

    def count_call(self, tenant: str) -> None:
        """Charge a model call. Raises QuotaExceeded."""
        account = self._tenants[tenant]
        if wait_s := account.calls.take(1.0, self._clock()):
            limit = f"{account.quota.calls_per_s:g} calls a second (serve.quota.calls_per_s)"
            raise self._exceeded(tenant, f"more than {limit}.", wait_s)

    def count_scrape(self, tenant: str) -> None:
        """Charge a read of the metrics. Raises QuotaExceeded."""
        if wait_s := self._tenants[tenant].scrapes.take(1.0, self._clock()):
            raise self._exceeded(tenant, f"the metrics were read more than {SCRAPES_PER_S:g} time a second.", wait_s)

    def count_bytes(self, tenant: str, size: int) -> None:
        """Charge a request body of `size` bytes. Raises QuotaExceeded."""
        account, now = self._tenants[tenant], self._clock()
        if account.stored is not None and (wait_s := account.stored.wait(size, now)):
            limit = f"{account.quota.mb_per_day:g} MB of request bodies a day (serve.quota.mb_per_day)"
            raise self._exceeded(tenant, f"more than {limit}; the quota refills over the day.", wait_s)
        if wait_s := account.bytes.take(size, now):
            limit = f"{account.quota.bytes_per_s:g} bytes a second (serve.quota.bytes_per_s)"
            raise self._exceeded(tenant, f"more than {limit}.", wait_s)
        if account.stored is not None:
            account.stored.take(size, now)

    def expect_events(self, tenant: str) -> None:
        """Check that at least one event is within the quota, before their number is known; charges nothing. Raises QuotaExceeded."""
        if wait_s := self._tenants[tenant].events.wait(1.0, self._clock()):
            raise self._too_many_events(tenant, wait_s)

    def count_events(self, tenant: str, events: int) -> None:
        """Charge feedback events. Raises QuotaExceeded."""
        if wait_s := self._tenants[tenant].events.take(events, self._clock()):
            raise self._too_many_events(tenant, wait_s)

    def give_back_events(self, tenant: str, events: int) -> None:
        """Refund events that were charged before their number was known."""
        self._tenants[tenant].events.give_back(events)

    @contextmanager
    def places(self, tenant: str, samples: int) -> Generator[None]:
        """Reserve capacity for a call's samples while it is in progress. Raises BadRequest, QuotaExceeded, Overloaded."""
        account = self._tenants[tenant]
        quota = account.quota
        most = min(quota.max_n, quota.open_samples, self._places - self._reserved * (len(self._tenants) - 1))
        if samples > most:
            raise BadRequest(f"n is {samples}; at most {most} samples are made per call here.", field="n")
        if account.open + samples > quota.open_samples:
            limit = f"{account.open} samples are in progress, of {quota.open_samples} (serve.quota.open_samples)."
            raise self._exceeded(tenant, limit, 1.0)
        own = max(0, self._reserved - account.open)
        if samples > self._places - self._open - (self._reserved_free - own):
            self._refused(tenant, Overloaded.code)
            raise Overloaded(
                f"The server is overloaded: {self._open} samples are being generated, as many as fit; try again in a moment."
            )
        self._change(account, samples)
        try:
            yield
        finally:
            self._change(account, -samples)

    def hold_tokens(self, tenant: str, tokens: int) -> None:
        """Charge the most tokens that a call may use. Raises QuotaExceeded."""
        account = self._tenants[tenant]
        if account.tokens is not None and (wait_s := account.tokens.take(tokens, self._clock())):
            limit = f"{account.quota.tokens_per_minute} (serve.quota.tokens_per_minute)"
            why = f"{tokens} tokens are more than is left of this minute's {limit}; ask for less or wait."
            raise self._exceeded(tenant, why, wait_s, "tokens")

    def give_back_tokens(self, tenant: str, tokens: int) -> None:
        """Refund the tokens that a finished call did not use."""
        bucket = self._tenants[tenant].tokens
        if bucket is not None:
            bucket.give_back(tokens)

    def _too_many_events(self, tenant: str, wait_s: float) -> QuotaExceeded:
        limit = f"{self._tenants[tenant].quota.events_per_s:g} events a second (serve.quota.events_per_s)"
        return self._exceeded(tenant, f"more than {limit}.", wait_s)

    def _exceeded(
        self, tenant: str, why: str, wait_s: float, kind: Literal["requests", "tokens"] = "requests"
    ) -> QuotaExceeded:
        self._refused(tenant, QuotaExceeded.code)
        wait = f"{math.ceil(1000 * wait_s) / 1000:g}s"  # Codex parses the wait from this message
        return QuotaExceeded(f"Rate limit reached: {why} Please try again in {wait}.", kind=kind, retry_after_s=wait_s)

    def _change(self, account: _Tenant, samples: int) -> None:
        before = max(0, self._reserved - account.open)
        account.open += samples
        self._open += samples
        self._reserved_free += max(0, self._reserved - account.open) - before
