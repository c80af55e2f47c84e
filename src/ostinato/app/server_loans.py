"""Servers lent from people to rollouts, and draining servers.

Lending: while people send few requests, servers of the live slot go to rollouts. `Lending` watches the gateway, applies the guard rules
and instructs the engine. Draining: such servers get no new requests. `ostinato drain` writes their URLs to a file in the run's directory,
which the gateway reads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ostinato.compute.borrowing import FleetView, GuardRules, Meter, lending
from ostinato.compute.config import LendConfig
from ostinato.config import Config
from ostinato.core.errors import BadConfig, BadRequest
from ostinato.core.files import write_atomic
from ostinato.core.records import Arm
from ostinato.engine.config import EngineConfig
from ostinato.record.roles import hold

if TYPE_CHECKING:
    from ostinato.engine.vllm.loans import Loans
    from ostinato.serve.priority import LatencyWindow

_LOOK_S = 0.5
_REPORT_S = 30.0
_IDLE_S = 60.0  # rollouts that send no request for this long do not need lent servers


@dataclass(frozen=True, slots=True, kw_only=True)
class Lent:
    """The state of lending, for reports. `since`: when this gateway started (Unix seconds), from which `seconds`, `tokens`, `cut` count.

    `why` describes a change and its reason; it is empty in a periodic report.
    """

    since: float
    lent: int
    returning: int
    serving: int
    seconds: float
    tokens: float
    cut: int
    why: str


def check_lending(config: Config) -> None:
    """Raise BadConfig for a run whose servers cannot be lent."""
    lend = config.compute.lend
    if not lend.most:
        return
    if config.engine.kind != "vllm":
        raise BadConfig(
            f'compute.lend.most lends vLLM servers, and engine.kind is "{config.engine.kind}": set engine.kind = "vllm" and engine.urls, '
            "or compute.lend.most = 0"
        )
    own = config.engine.replicas.get(Arm.LIVE.value, 1)
    if own <= lend.most:
        raise BadConfig(
            f"compute.lend.most is {lend.most}, and the live slot has {own} server{'s' * (own > 1)}, and people must keep one: "
            f"raise engine.replicas.live to {lend.most + 1}" + (f", or lend at most {own - 1}" if own > 1 else "")
        )
    if config.learn.source == "people":
        raise BadConfig(
            'compute.lend.most: learn.source is "people", so there are no rollouts to lend to; set it to "worlds" or "both", or '
            "compute.lend.most = 0"
        )
    if config.record.url and not lend.only_gateway:
        raise BadConfig(
            "compute.lend.most: with record.url several gateways may ask the same servers, and another one would answer people with "
            "rollouts' weights; if this one alone asks them, set compute.lend.only_gateway = true"
        )


class Lending:
    """Decides every half second how many servers to lend. Reports each change with its reason, and the totals from time to time.

    Args:
        loans: the engine's loans.
        waits: people's waiting times at the gateway.
        config: when to lend.
        tokens: returns how many tokens were sampled on lent servers.
        tell: receives the reports.
        wall: a clock in Unix seconds.
        clock: a monotonic clock in seconds.
    """

    def __init__(
        self,
        loans: Loans,
        waits: LatencyWindow,
        config: LendConfig,
        tokens: Callable[[], float],
        tell: Callable[[Lent], None],
        wall: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loans, self._waits, self._config, self._tokens = loans, waits, config, tokens
        self._tell, self._clock = tell, clock
        self._rules = GuardRules(
            lend_below=config.lend_below,
            return_above=config.return_above,
            guard_s=config.guard_s,
            window_s=config.window_s,
            hold_s=config.hold_s,
            most=config.step,
        )
        self._meter = Meter(config.window_s)
        self._began = wall()
        # as if servers had just returned, because nothing is known of the traffic after a start
        self._returned = clock()
        self._used = self._told = -_IDLE_S - _REPORT_S
        self._last: tuple[int, int] | None = None  # the last reported numbers of servers lent, and being returned

    async def run(self) -> None:
        """Decide until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(_LOOK_S)

    def look(self) -> int:
        """Make one decision. Return how many servers were lent; negative: how many should come back."""
        now, standing = self._clock(), self._loans.standing()
        rate, highest = self._meter.note(now, self._waits.answers)
        if standing.open:
            self._used = now
        seen = FleetView(
            serving=standing.serving,
            returning=standing.returning,
            lent=standing.lent,
            rate=rate,
            highest=highest,
            delay_s=self._waits.delay_s(),
            carries=self._config.carries,
            since_s=now - self._returned,
        )
        wanted = self._config.most if now - self._used < _IDLE_S else 0
        change = lending(self._rules, seen, wanted)
        if change > 0:
            change = self._loans.lend(change)
        elif change < 0:
            self._returned = now
            self._loans.give_back(-change, self._config.end_s)
        after = self._loans.standing()
        out = (after.lent, after.returning)
        if change or out != self._last or (any(out) and now - self._told >= _REPORT_S):
            self._told, self._last = now, out
            self._tell(self._lent(change, seen))
        return change

    def _lent(self, change: int, seen: FleetView) -> Lent:
        why = f"{abs(change)} {'lent' if change > 0 else 'wanted back'}: {seen.rate:.2f} answers a second"
        why += f", at most {seen.highest:.2f} lately, {seen.serving} servers, first tokens within {seen.delay_s:.2f} s"
        standing = self._loans.standing()
        return Lent(
            since=self._began,
            lent=standing.lent,
            returning=standing.returning,
            serving=standing.serving,
            seconds=round(self._loans.seconds, 1),
            tokens=self._tokens(),
            cut=self._loans.cut_off,
            why=why if change else "",
        )


# ---------------------------------------------------------------- draining


_LOCKED_S = 10.0  # how long to wait for another process that changes the file


def read_draining(path: Path) -> frozenset[str]:
    """Return the URLs of the draining servers; empty if there is no file."""
    try:
        return frozenset(path.read_text(errors="replace").split())
    except FileNotFoundError:
        return frozenset()


def write_draining(path: Path, engine: EngineConfig, url: str, *, back: bool) -> frozenset[str]:
    """Start draining a server, or stop with `back`. Return all servers that then drain.

    Raises BadRequest for a server that the engine does not have; Conflict if another process holds the file for `_LOCKED_S`.
    """
    known = {each.rstrip("/") for each in engine.urls}
    url = url.rstrip("/")
    if engine.kind != "vllm" or url not in known:
        raise BadRequest(f"{url} is not in engine.urls: {', '.join(sorted(known)) or 'there are none'}", field="url")
    with hold(path.parent, "draining", wait_s=_LOCKED_S):
        left = (read_draining(path) - {url}) if back else read_draining(path) | {url}
        write_atomic(path, "".join(f"{each}\n" for each in sorted(left)), durable=True)
    return left
