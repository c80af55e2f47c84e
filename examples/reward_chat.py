"""A reward for a chat product: what people do with an answer, and a guard against answers that only grow longer.

Put it in place with two settings, and start `ostinato up` with this file's directory in PYTHONPATH:
`reward.function = "reward_chat:reward"` and `reward.options = { window = 1800.0 }`. Needs nothing but ostinato.
"""

from collections.abc import Sequence

from ostinato.core.records import NoReward, Pending, Reward, Signal, Turn
from ostinato.reward.functions import considered

WORTH = {
    "accepted": 0.5,  # copied, sent, or used in another way
    "followed_up": 0.1,  # the person went on; little, since half an answer earns it too
    "regenerated": -0.5,
    "undone": -1.0,  # more than `accepted` gives
}
THUMBS = "thumbs"  # above 0 is up, anything else down
THUMB_WORTH = 1.0


def reward(
    turn: Turn,
    signals: Sequence[Signal],
    now: float,
    *,
    window: float = 1800.0,
    long_tokens: int = 600,
    length_price: float = 0.5,
) -> Reward | Pending | NoReward:
    """From -1 to 1, decided `window` seconds after the turn; the price of length grows from `long_tokens` to twice as many."""
    deadline = turn.ended_at + window
    if now < deadline:
        return Pending(until=deadline)
    heard = [signal for signal in considered(signals, deadline) if signal.name in WORTH or signal.name == THUMBS]
    if not heard:
        return NoReward(reason="silence")
    last = {signal.name: signal.value for signal in heard}  # oldest first: of each name the latest counts
    value = sum(worth for name, worth in WORTH.items() if last.get(name, 0.0) > 0)
    if THUMBS in last:
        value += THUMB_WORTH if last[THUMBS] > 0 else -THUMB_WORTH
    excess = len(turn.sampled_ids) / long_tokens - 1
    value -= length_price * min(1.0, max(0.0, excess))
    return Reward(
        turn=turn.id,
        value=max(-1.0, min(1.0, value)),
        function="reward_chat@1",
        signals=tuple(signal.id for signal in heard),
        at=deadline,
    )
