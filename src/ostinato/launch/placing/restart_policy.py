"""Decides when a worker is hung, what its end means, and when a restart has no point. Pure: the caller supplies the time."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

from ostinato.launch.placing.heartbeat import Sign
from ostinato.placing_config import SuperviseConfig

FIRST_WAIT_S = 0.5
STEADY_S = 30.0
_OWN_FAULT = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGSYS, signal.SIGTRAP}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Why a process ended. `fault`: the process itself was the cause, so it counts as a failure; `certain`: it would fail again."""

    reason: str
    fault: bool
    certain: bool = False


def hung(sign: Sign | None, silent_s: float, limits: SuperviseConfig) -> str | None:
    """Why the worker counts as hung; None if it does not. `silent_s`: seconds since its last sign, or its start."""
    if silent_s > limits.silence_s:
        return f"gave no sign of life for {silent_s:.0f} s" + (f" while {sign.doing}" if sign else "")
    if sign is None:
        return None
    if sign.limit_s is not None and sign.for_s > sign.limit_s:
        return f"was {sign.doing} for {sign.for_s:.0f} s, longer than the {sign.limit_s:g} s allowed"
    if sign.lag_s > max(limits.silence_s, sign.limit_s or 0.0):
        return f"its event loop stood still for {sign.lag_s:.0f} s while {sign.doing}"
    return None


def ending(code: int, sign: Sign | None, last_line: str) -> Ending:
    """Interpret an exit code and the last sign. `last_line` is the last line of the worker's output, used if no sign gives a reason."""
    if sign is not None and sign.failed is not None:
        return Ending(reason=sign.failed, fault=not sign.outside, certain=sign.certain)
    if code == 0:
        return Ending(reason="ended, as if it had been asked to", fault=False)
    if code < 0:
        known = -code in set(signal.Signals)  # most real-time signals have no name
        name = signal.Signals(-code).name if known else f"signal {-code}"
        crashed = -code in _OWN_FAULT
        hint = "; is memory short?" if -code == signal.SIGKILL else ""
        return Ending(reason=f"{'crashed with' if crashed else 'was killed by'} {name}{hint}", fault=crashed)
    return Ending(reason=f"ended with code {code}" + (f": {last_line}" if last_line else ""), fault=True)


@dataclass(slots=True)
class Failures:
    """How often one worker ended, on a monotonic clock. Decides whether to restart it and how long to wait before."""

    limits: SuperviseConfig
    faults: list[float] = field(default_factory=list[float])
    quick: int = 0

    def add(self, now: float, end: Ending, ran_s: float) -> None:
        """Count an end after `ran_s` seconds. Failures older than the window are dropped; a run of over `STEADY_S` resets the pause."""
        self.faults = [at for at in self.faults if now - at <= self.limits.window_s] + [now] * end.fault
        self.quick = 1 if ran_s > STEADY_S else self.quick + 1

    @property
    def enough(self) -> bool:
        """True once the worker failed too often to be restarted. Kills from outside are not failures."""
        return len(self.faults) >= self.limits.tries

    @property
    def wait_s(self) -> float:
        """The pause before the next start, which doubles with every end in quick succession."""
        return min(FIRST_WAIT_S * 2 ** min(max(self.quick - 1, 0), 32), self.limits.longest_wait_s)
