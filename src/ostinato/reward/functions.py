"""Reward functions: a turn and what people did about it -> one scalar. Pure; named in the config as "module:function".

A reward function is asked again until it answers with a Reward or NoReward. It must give the same answer for the same set of
signals, in whatever order and however often they arrived and however late it is asked; `considered` does that part for every
function here. The signals are the turn's own tenant's.

The functions here run inside the reward desk, so each must be seen to end: a loop over the signals and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated

from pydantic import Field

from ostinato.core.records import NoReward, Pending, Reward, Signal, Turn

ACCEPTED = "accepted"
REJECTED = frozenset({"rejected", "undone"})


def considered(signals: Iterable[Signal], deadline: float) -> list[Signal]:
    """The signals that count: one per id, received by `deadline`, neither retracted nor retractions, by (occurred_at, id).

    The cut is at the time of receipt, by the server's clock: what counts is then fixed once the deadline has passed, however late
    somebody looks, and a client's clock cannot move it. A retraction counts only if it, too, came in time. It may come before
    the signal that it names, and cannot itself be retracted.
    """
    in_time = {signal.id: signal for signal in signals if signal.received_at <= deadline}
    forgotten = {signal.retracts for signal in in_time.values() if signal.retracts is not None}
    kept = (signal for signal in in_time.values() if signal.retracts is None and signal.id not in forgotten)
    return sorted(kept, key=lambda signal: (signal.occurred_at, signal.id))


def copilot(
    turn: Turn,
    signals: Sequence[Signal],
    now: float,
    *,
    t: Annotated[float, Field(gt=0, lt=1)] = 0.25,
    window: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 3600.0,
    silence: Annotated[float, Field(allow_inf_nan=False)] | None = 0.0,
) -> Reward | Pending | NoReward:
    """Accepted 1 - t, rejected -t, ignored or nothing shown 0: it pays to show a suggestion iff P(accepted) > t.

    Source: the reward of Cursor's Tab (cursor.com/blog/tab-rl), whose figures 0.75, -0.25 and 0 are t = 0.25. The last of the
    signals `accepted`, `rejected` and `undone` decides, so a suggestion that was accepted and then undone counts as rejected. One
    of these with a value of 0 or less says that it did not happen: `accepted` with value 0 is a rejection, the others are void.
    A turn about which nothing was said gets `silence`; None where saying nothing means nothing.

    Nothing is decided before `window` seconds after `turn.ended_at`; `Reward.at` is that instant, not the time of the call.

    Example: accepted within 30 s of a turn that ended at 10.0 ->
    ``Reward(turn="a:0", value=0.75, function="copilot@1", signals=("s1",), at=40.0)``; before 40.0, ``Pending(until=40.0)``.
    """
    deadline = turn.ended_at + window
    if now < deadline:
        return Pending(until=deadline)
    kept = considered(signals, deadline)
    if not kept and silence is None:
        return NoReward(reason="silence")
    value = 0.0 if kept or silence is None else silence
    for signal in kept:
        if signal.name == ACCEPTED:
            value = 1.0 - t if signal.value > 0 else -t
        elif signal.name in REJECTED and signal.value > 0:
            value = -t
    return Reward(
        turn=turn.id,
        value=value,
        function="copilot@1",
        signals=tuple(signal.id for signal in kept),
        at=deadline,
    )


def tab(
    turn: Turn,
    signals: Sequence[Signal],
    now: float,
    *,
    t: Annotated[float, Field(gt=0, lt=1)] = 0.25,
    window: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 3600.0,
    nothing: Annotated[str, Field(min_length=1)] = "-",
) -> Reward | Pending | NoReward:
    """As `copilot`, for a model that may say nothing: accepted 1 - t, rejected -t, and an answer that is empty or `nothing` 0.

    Whether something was suggested is read off the turn itself and not off what is missing in the log: a suggestion about which
    nothing was said is `NoReward`, since a 0 would make lost feedback look like silence. What is said about an answer that
    suggested nothing changes nothing. It pays to suggest iff P(accepted) > t; source as of `copilot`.

    An answer that suggests nothing waits for the window like any other: were it decided at once, batches of the newest turns would
    hold more of them than were served.

    Example: ``"-"`` answered at 10.0 with a window of 30 s -> ``Reward(turn="a:0", value=0.0, function="tab@1", signals=(), at=40.0)``
    """
    if turn.text.strip() not in ("", nothing):
        answer = copilot(turn, signals, now, t=t, window=window, silence=None)
        return replace(answer, function="tab@1") if isinstance(answer, Reward) else answer
    deadline = turn.ended_at + window
    if now < deadline:
        return Pending(until=deadline)
    return Reward(turn=turn.id, value=0.0, function="tab@1", signals=(), at=deadline)
