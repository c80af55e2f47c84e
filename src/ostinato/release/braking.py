"""The brake on releases after rollbacks, computed from the ledger, and the alarm that says that a person is needed."""

from __future__ import annotations

from ostinato.core.seams import Clock, Log
from ostinato.release.alarms import note
from ostinato.release.config import ReleaseConfig
from ostinato.release.ledger import State
from ostinato.release.pace.brakes import Brake, brake

FROZEN = "release:rollbacks"
"""The name of the alarm that stands while nothing ships by itself because of too many rollbacks."""


class Braking:
    """Keeps no state that is not in the ledger, except the alarm's last noted state."""

    def __init__(self, log: Log, config: ReleaseConfig, clock: Clock) -> None:
        self._log = log
        self._config = config
        self._clock = clock
        self._noted: bool | None = None

    def look(self, state: State) -> Brake | None:
        """The brake that keeps candidates from shipping by themselves; None if there is none."""
        pause, a_day = self._config.cooldown_s, self._config.rollbacks_a_day
        return brake(state.rollbacks, cooldown_s=pause, a_day=a_day, now=self._clock())

    def asks(self, state: State) -> bool:
        """True if a candidate that passes the gate waits for a person. A brake does not keep it from being judged then.

        Where candidates are tried on users first, a frozen controller tries none: a person ends the freeze by shipping a version.
        """
        held = self.look(state)
        frozen = held is not None and held.until is None
        return not self._config.canary and (frozen or self._config.approval == "manual")

    def holds(self, state: State) -> bool:
        """True if no candidate may advance by itself."""
        return self.look(state) is not None and not self.asks(state)

    async def note(self, state: State) -> None:
        """Raise or clear the alarm. A restarted worker compares it with the log at its first call."""
        held = self.look(state)
        frozen = held is not None and held.until is None
        if frozen != self._noted:
            why = held.reason if held is not None and frozen else "a person shipped or approved a version since"
            await note(self._log, FROZEN, raised=frozen, why=why, at=self._clock())
            self._noted = frozen
