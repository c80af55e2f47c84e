"""The reward of a simulated world's turn: its rollout's verdict, as soon as that is in the log. Pure.

There is no window, since the verdict comes from a program, not from a person, and is final. Nobody else is believed: the signals are the
turn's own tenant's, and of those only a program's count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ostinato.core.records import NoReward, Pending, Reward, Signal, Source, Turn
from ostinato.core.verdicts import GRADED, VERDICTS

FUNCTION = "world@1"


def verdict(turn: Turn, signals: Sequence[Signal]) -> Reward | NoReward | Pending:
    """The first verdict among the signals, in the order of the log; Pending forever if there is none.

    Example: graded 1.0 -> ``Reward(turn="a:0", value=1.0, function="world@1", signals=("graded:a:0",), at=12.5)``
    """
    for signal in signals:
        if signal.source is not Source.CODE or signal.name not in VERDICTS:
            continue
        if signal.name != GRADED:
            return NoReward(reason=signal.name)
        return Reward(turn=turn.id, value=signal.value, function=FUNCTION, signals=(signal.id,), at=signal.received_at)
    return Pending(until=math.inf)
