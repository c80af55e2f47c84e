"""Asks a function in the desk's own process: for functions that are known to end."""

from __future__ import annotations

from collections.abc import Sequence

from ostinato.core.seams import RewardFn
from ostinato.reward.asking.question import Answer, Question, answered


class Inline:
    """Implements `Asker`. An exception affects only its turn's answer; a function that never returns would stop the desk.

    The functions in `ostinato.reward.functions` may be asked like this: each loops only over a turn's signals, of which there are
    at most `reward.max_signals`.

    Example: ``await Inline(copilot, max_abs=100.0).ask([question])``
    """

    def __init__(self, fn: RewardFn, *, max_abs: float) -> None:
        self._fn = fn
        self._max_abs = max_abs

    async def open(self) -> None:
        """Nothing to start."""

    async def ask(self, questions: Sequence[Question]) -> list[Answer | None]:
        """An answer to each question."""
        return [answered(self._fn, question, self._max_abs) for question in questions]

    async def close(self) -> None:
        """Nothing to release."""
