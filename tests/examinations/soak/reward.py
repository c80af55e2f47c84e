"""The soak's reward function: `copilot`'s, unless it is told to misbehave."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from ostinato.core.records import NoReward, Pending, Reward, Signal, Turn
from ostinato.reward.functions import copilot


def moody(turn: Turn, signals: Sequence[Signal], now: float, *, window: float = 5.0) -> Reward | Pending | NoReward:
    """Raises, hangs or returns nonsense while the file named by OSTINATO_MOOD says so."""
    mood = Path(os.environ["OSTINATO_MOOD"]).read_text().strip()
    if now >= turn.ended_at + window:
        if mood == "raise":
            raise ZeroDivisionError("told to raise by the examination")
        if mood == "nonsense":
            return Reward(turn=turn.id, value=float("nan"), function="moody@1", signals=(), at=now)
        while mood == "hang":
            try:
                time.sleep(1.0)
            except BaseException:  # noqa: BLE001 (code that only a kill can stop)
                continue
    return copilot(turn, signals, now, window=window)
