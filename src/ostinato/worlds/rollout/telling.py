"""A group's verdicts as events for the gateway's feedback route, in the order in which they must arrive; its shape, for people. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ostinato.core.verdicts import CLOSED, FAILED, GRADED, MEASURED
from ostinato.worlds.harness.rollout import Ended, Rollout
from ostinato.worlds.rollout.groups import Group

MOST_EVENTS = 1000  # of one call, which enter the log all or not at all


def verdicts(group: Group, most: int = MOST_EVENTS) -> list[list[dict[str, Any]]]:
    """The calls that report a group's verdicts. The same group gives the same ids and values, so a worker that was killed in between can
    report all of them again.

    A rollout's last turn gets its grade, those before it get 0. The last call also closes the group, with an event about a turn that gets
    a verdict in the same call. Nothing is reported for a group without a turn.
    """
    events = [_event(turn, FAILED, 1.0) for outcome in group.ungraded for turn in outcome.turns]
    for outcome in group.graded:
        for turn in outcome.turns:
            final = turn == outcome.turns[-1]
            events.append(_event(turn, GRADED, (outcome.grade or 0.0) if final else 0.0))
    if not events:
        return []
    closing = _event(events[-1]["target"], CLOSED, float(len(group.graded)))
    calls = [events[start : start + most - 1] for start in range(0, len(events), most - 1)]
    calls[-1].append(closing | {"id": f"{CLOSED}:{group.name}"})
    return calls


def measured(turns: tuple[str, ...]) -> list[dict[str, Any]]:
    """The events for a rollout that is not trained on."""
    return [_event(turn, MEASURED, 1.0) for turn in turns]


def shape(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """How long rollouts were and how they ended: each rollout's sampled tokens and turns, and how many were cut by a length limit, ran out
    of time, broke their sandbox, or were ended by something other than the policy.
    """
    ended = [rollout.ended for rollout in rollouts]
    return {
        "tokens": [int(rollout.effort.get("tokens", 0)) for rollout in rollouts],
        "turns": [len(rollout.turns) for rollout in rollouts],
        "cut": ended.count(Ended.LENGTH),
        "timeouts": ended.count(Ended.TIMEOUT),
        "broken": ended.count(Ended.BROKEN),
        "failed": ended.count(Ended.FAILED),
    }


def _event(turn: str, name: str, value: float) -> dict[str, Any]:
    return {"id": f"{name}:{turn}", "target": turn, "name": name, "value": value, "source": "code"}
