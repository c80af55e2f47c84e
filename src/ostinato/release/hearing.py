"""What the signals about one turn say together: good, not good, or nothing."""

from __future__ import annotations

from ostinato.core.records import Signal
from ostinato.release.outcome_config import OutcomeConfig

MOST_SIGNALS = 100
"""Of one turn, the first to be written."""


class Said:
    """The signals about one turn, in the log's order."""

    __slots__ = ("_by_signal",)

    def __init__(self) -> None:
        self._by_signal: dict[str, bool | None] = {}  # signal id -> good, not good, or says neither

    def __len__(self) -> int:
        """How many signals are remembered."""
        return len(self._by_signal)

    def hear(self, signal: Signal, config: OutcomeConfig) -> None:
        """One more. Beyond `MOST_SIGNALS` only those that are known already can be taken back."""
        about = signal.retracts or signal.id
        if len(self._by_signal) >= MOST_SIGNALS and about not in self._by_signal:
            return
        if signal.retracts is not None:
            self._by_signal[about] = None  # also keeps a late original from coming back
        else:
            self._by_signal.setdefault(about, _says(signal, config))

    @property
    def good(self) -> bool | None:
        """A bad signal wins; None where nobody said whether it was."""
        found = set(self._by_signal.values())
        return False if False in found else True if True in found else None


def _says(signal: Signal, config: OutcomeConfig) -> bool | None:
    """A bad signal that did not happen says nothing; a good one that did not happen is a bad one."""
    if signal.name in config.bad:
        return False if signal.value > 0 else None
    return signal.value > 0 if signal.name in config.good else None
