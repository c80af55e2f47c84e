"""Reward functions: map a turn and its signals to one scalar. Pure; named in the config as "module:function".

A reward function is called repeatedly until it returns a Reward or NoReward. It must return the same answer for the same set of
signals, regardless of their order, of duplicates and of how late it is called; `considered` ensures this for every function
here. All signals belong to the turn's own tenant.

The functions here run inside the reward desk, so each must obviously terminate: it may loop over the signals and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

from pydantic import Field

from ostinato.core import pending_signals
from ostinato.core.line_survival import fates, kept_share
from ostinato.core.records import Finish, LineSurvival, LineValues, NoReward, Pending, Reward, RewardReach, Signal, Turn

ACCEPTED = "accepted"
REJECTED = frozenset({"rejected", "undone"})
DONE, FAILED = ("task_done", "merged"), ("task_failed", "reverted")
OUTCOMES = (*DONE, *FAILED)
"""Signals about how a session ended. Test results are not among them: they belong to the call that made the edit, many per session."""
KEPT_A_DAY = "lines_kept_24h"
KEPT = frozenset({"lines_kept_5m", "lines_kept_1h", "lines_kept_commit", KEPT_A_DAY})
"""The share of the lines written by a turn that is still in place, measured at several times."""
_MOST_RANGES = 4_096  # most line ranges per turn; beyond that only the share of kept lines counts
_MOST_ERRORS = 3  # most failed calls that count against a turn

Weight = Annotated[float, Field(ge=0, le=1)]


def considered(signals: Iterable[Signal], deadline: float) -> list[Signal]:
    """Return the signals that count, in order of occurrence: one per id, received by `deadline`, neither retracted nor retractions.

    The deadline applies to the time of receipt by the server's clock. So the result is fixed once the deadline has passed, however late it
    is computed, and a client's clock cannot change it. A retraction also counts only if received by the deadline. It may
    arrive before the signal that it names, and cannot itself be retracted.
    """
    in_time = {signal.id: signal for signal in signals if signal.received_at <= deadline}
    forgotten = {signal.retracts for signal in in_time.values() if signal.retracts is not None}
    kept = (signal for signal in in_time.values() if signal.retracts is None and signal.id not in forgotten)
    return sorted(kept, key=pending_signals.order_of)


def copilot(
    turn: Turn,
    signals: Sequence[Signal],
    now: float,
    *,
    t: Annotated[float, Field(gt=0, lt=1)] = 0.25,
    window: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 3600.0,
    silence: Annotated[float, Field(allow_inf_nan=False)] | None = 0.0,
    left: Weight = 0.5,
    outcomes: tuple[str, ...] = OUTCOMES,
) -> Reward | Pending | NoReward:
    """Reward 1 - t if accepted, -t if rejected, 0 if ignored or nothing was shown: it pays to show a suggestion iff P(accepted) > t.

    Source: the reward of Cursor's Tab (cursor.com/blog/tab-rl), whose values 0.75, -0.25 and 0 are t = 0.25. The last of the
    signals `accepted`, `rejected` and `undone` decides, so a suggestion that was accepted and then undone counts as rejected. A
    value of 0 or less says that the event did not happen: `accepted` with value 0 is a rejection, the other two are ignored.
    A turn without signals gets `silence` as its reward, or NoReward if that is None, for products where silence means nothing.

    A stream that the client closed before its end is worth -t times the probability that a person stopped it, unless a signal decides. That
    probability is 1 after the signal `interrupted`, else `left`. Set `left` to 0 for an editor that cancels requests while people type.

    If the suggestion was accepted and signals say which of its lines survive (`lines_kept_1h`, ...; the latest measurement counts), each
    line that is kept is worth 1 - t, each other one -t, and the turn their mean: a suggestion of which nothing stays counts as rejected.

    If the deciding signal is one of `outcomes`, the reward reaches the whole episode (`RewardReach`).

    Nothing is decided before `window` seconds after `turn.ended_at`; `Reward.at` is that instant, not the time of the call.

    Example: accepted within 30 s of a turn that ended at 10.0 ->
    ``Reward(turn="a:0", value=0.75, function="copilot@1", signals=("s1",), at=40.0)``; before 40.0, ``Pending(until=40.0)``.
    """
    deadline = turn.ended_at + window
    if now < deadline:
        return Pending(until=deadline)
    kept = considered(signals, deadline)
    stopped = _stopped(turn, kept, left)
    if not kept and silence is None and not stopped:
        return NoReward(reason="silence")
    value, decided = -t * stopped if stopped else 0.0 if kept or silence is None else silence, ""
    for signal in kept:
        if signal.name == ACCEPTED:
            value, decided = 1.0 - t if signal.value > 0 else -t, signal.name
        elif signal.name in REJECTED and signal.value > 0:
            value, decided = -t, signal.name
    lines, share = _latest_lines(kept) if value > 0 and kept else ((), None)
    if share is not None:
        value = share - t
    return Reward(
        turn=turn.id,
        value=value,
        function="copilot@1",
        signals=tuple(signal.id for signal in kept),
        at=deadline,
        lines=() if share is None else _line_values(lines, kept=1.0 - t, lost=-t),
        reach=RewardReach.EPISODE if share is None and decided in outcomes else RewardReach.TURN,
    )


def tab(
    turn: Turn,
    signals: Sequence[Signal],
    now: float,
    *,
    t: Annotated[float, Field(gt=0, lt=1)] = 0.25,
    window: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 3600.0,
    nothing: Annotated[str, Field(min_length=1)] = "-",
    outcomes: tuple[str, ...] = OUTCOMES,
) -> Reward | Pending | NoReward:
    """Like `copilot`, for a model that may suggest nothing: 1 - t if accepted, -t if rejected, 0 if the answer is empty or `nothing`.

    Whether something was suggested is read from the turn itself, not inferred from missing signals: a suggestion without signals
    is `NoReward`, since a 0 would make lost feedback look like silence. Signals about an answer without a suggestion are
    ignored. It pays to suggest iff P(accepted) > t; same source as `copilot`.

    An answer without a suggestion waits for the window like any other. If it were decided at once, batches of the newest turns
    would contain more of such answers than were served.

    Example: ``"-"`` answered at 10.0 with a window of 30 s -> ``Reward(turn="a:0", value=0.0, function="tab@1", signals=(), at=40.0)``
    """
    if turn.text.strip() not in ("", nothing):
        answer = copilot(turn, signals, now, t=t, window=window, silence=None, left=0.0, outcomes=outcomes)
        return replace(answer, function="tab@1") if isinstance(answer, Reward) else answer
    deadline = turn.ended_at + window
    if now < deadline:
        return Pending(until=deadline)
    return Reward(turn=turn.id, value=0.0, function="tab@1", signals=(), at=deadline)


@dataclass(frozen=True)
class AgentWeights:
    """The weights of the parts of `agent`; see `agent_parts`.

    Example: ``AgentWeights(tests=1.0)``
    """

    t: float = 0.5
    kept: float = 1.0
    tests: float = 0.5
    explicit: float = 0.5
    dissatisfied: float = 0.5
    refused: float = 0.5
    interrupted: float = 0.3
    left: float = 0.5
    error: float = 0.1
    modified: float = 0.2
    outcome: float = 1.0


def agent(
    turn: Turn,
    signals: Sequence[Signal],
    now: float,
    *,
    window: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 7200.0,
    silence: Annotated[float, Field(ge=-1, le=1)] | None = None,
    t: Weight = AgentWeights.t,
    kept: Weight = AgentWeights.kept,
    tests: Weight = AgentWeights.tests,
    explicit: Weight = AgentWeights.explicit,
    dissatisfied: Weight = AgentWeights.dissatisfied,
    refused: Weight = AgentWeights.refused,
    modified: Weight = AgentWeights.modified,
    interrupted: Weight = AgentWeights.interrupted,
    left: Weight = AgentWeights.left,
    error: Weight = AgentWeights.error,
    outcome: Weight = AgentWeights.outcome,
    outcomes: tuple[str, ...] = OUTCOMES,
) -> Reward | Pending | NoReward:
    """Reward a coding agent's turn by the sum of `agent_parts`, clipped to [-1, 1], `window` seconds after the turn ended.

    A turn without signals gets `silence`, or `NoReward` if that is None, since a client that observes nothing sends nothing. A turn whose
    client disconnected before its end was stopped with probability `left`. Praise, a call that ran and a conversation that continues are
    worth 0: they count as signals, but being liked is not rewarded. If one of `outcomes` is among the signals that are worth something, the
    reward, apart from its lines' part, reaches the whole episode (`RewardReach`).

    Example: half of its lines are kept after an hour, and the tests passed -> 0.0 + 0.5
    """
    deadline = turn.ended_at + window
    if now < deadline:
        return Pending(until=deadline)
    heard = considered(signals, deadline)
    stopped = _stopped(turn, heard, left)
    if not heard and silence is None and not stopped:
        return NoReward(reason="silence")
    weights = AgentWeights(
        t=t,
        kept=kept,
        tests=tests,
        explicit=explicit,
        dissatisfied=dissatisfied,
        refused=refused,
        modified=modified,
        interrupted=interrupted,
        left=left,
        error=error,
        outcome=outcome,
    )
    lines, share = _latest_lines(heard)
    values = () if share is None else _line_values(lines, kept=kept * (1.0 - t), lost=-kept * t)
    value = _bounded(agent_parts(heard, weights, stopped)) if heard or stopped or silence is None else silence
    names = tuple(signal.id for signal in heard)
    reach = RewardReach.EPISODE if _happened(heard, *outcomes) else RewardReach.TURN
    return Reward(turn=turn.id, value=value, function="agent@4", signals=names, at=deadline, lines=values, reach=reach)


def agent_parts(heard: Sequence[Signal], weights: AgentWeights, stopped: float = 0.0) -> dict[str, float]:
    """Return the value of each part of `agent` about which something is known. `heard` are the signals that count, in order; `stopped`
    is the probability that a person stopped the turn while it was written.

    ====================  ======================================================================================================
    Part                  Worth
    ====================  ======================================================================================================
    `kept lines`          kept x (share of its lines still in place - t), after a day, else as last measured (the commit, an hour, five
                          minutes): the mean over its calls, or over its lines if each of these signals says which they are. It is a share,
                          so that more lines are not worth more; which lines survive decides their tokens' credit (`reward.line_credit`)
    `tests`               + tests if the last run after its edit passed, - tests if it failed
    `outcome`             + outcome if the last signal about the whole task is `task_done` or `merged`, - outcome if it is `task_failed`
                          or `reverted`
    `explicit`            + explicit if somebody accepted it, - explicit if they rejected or undid it, whichever was last
    `dissatisfied`        - dissatisfied if the next message was a retry, a correction or a complaint
    `refused`             - refused if somebody refused one of its calls
    `modified`            - modified if somebody changed one of its calls before it ran
    `interrupted`         - interrupted if somebody stopped it, after its end or before it
    `tool errors`         - error for each of its calls that failed, three at most
    ====================  ======================================================================================================

    Example: ``agent_parts([half_kept, passed], AgentWeights()) == {"kept lines": 0.0, "tests": 0.5}``
    """
    parts: dict[str, float] = {}
    share = _latest_lines(heard)[1]
    shares = _latest_shares(heard) if share is None else [share]
    if shares:
        parts["kept lines"] = weights.kept * (sum(shares) / len(shares) - weights.t)
    runs = _happened(heard, "tests_passed", "tests_failed")
    if runs:
        parts["tests"] = weights.tests if runs[-1] == "tests_passed" else -weights.tests
    ends = _happened(heard, *DONE, *FAILED)
    if ends:
        parts["outcome"] = weights.outcome if ends[-1] in DONE else -weights.outcome
    words = [
        signal.name == ACCEPTED and signal.value > 0  # `accepted` with value 0 is a rejection
        for signal in heard
        if signal.name == ACCEPTED or (signal.name in REJECTED and signal.value > 0)
    ]
    if words:
        parts["explicit"] = weights.explicit if words[-1] else -weights.explicit
    if _happened(heard, "dissatisfied"):
        parts["dissatisfied"] = -weights.dissatisfied
    if _happened(heard, "tool_rejected"):
        parts["refused"] = -weights.refused
    if _happened(heard, "tool_modified"):
        parts["modified"] = -weights.modified
    stopped = 1.0 if _happened(heard, "interrupted") else stopped
    if stopped:
        parts["interrupted"] = -weights.interrupted * stopped
    errors = _happened(heard, "tool_error")
    if errors:
        parts["tool errors"] = -weights.error * min(len(errors), _MOST_ERRORS)
    return parts


def parts_of(turn: Turn, reward: Reward, signals: Iterable[Signal], options: Mapping[str, Any]) -> dict[str, float]:
    """Return the parts of a reward given by `agent` under these options; {} if another function gave it, or other options applied."""
    if not reward.function.startswith("agent@"):
        return {}
    known = {field.name for field in fields(AgentWeights)}
    weights = AgentWeights(**{name: value for name, value in options.items() if name in known})
    heard = considered(signals, reward.at)
    parts = agent_parts(heard, weights, _stopped(turn, heard, weights.left))
    return parts if math.isclose(_bounded(parts), reward.value, abs_tol=1e-9) else {}


def _latest_looks(heard: Sequence[Signal]) -> list[Signal]:
    """Return the latest measurement of surviving lines: one signal for each call of a turn."""
    looks = [signal for signal in heard if signal.name in KEPT]
    names = [signal.name for signal in looks]
    last = KEPT_A_DAY if KEPT_A_DAY in names else names[-1] if names else ""
    return [signal for signal in looks if signal.name == last]


def _latest_shares(heard: Sequence[Signal]) -> list[float]:
    """Return, for each call of a turn, the share of its lines still in place at the latest measurement."""
    return [max(0.0, min(1.0, signal.value)) for signal in _latest_looks(heard)]


def _latest_lines(heard: Sequence[Signal]) -> tuple[tuple[LineSurvival, ...], float | None]:
    """Return which lines survived at the latest measurement, and their share; () and None unless each of these signals lists lines, and no
    two are about the same text.
    """
    looks = _latest_looks(heard)
    texts = tuple(text for signal in looks for text in signal.lines)
    places = {(text.call, text.argument) for text in texts}
    ranges = sum(len(text.followed) + len(text.kept) for text in texts)
    if not all(signal.lines for signal in looks) or len(places) < len(texts) or ranges > _MOST_RANGES:
        return (), None
    return texts, kept_share(texts)


def _line_values(texts: Iterable[LineSurvival], *, kept: float, lost: float) -> tuple[LineValues, ...]:
    """Return the value of each line of these texts: `kept` if it survives, else `lost`."""
    return tuple(
        LineValues(
            call=text.call,
            argument=text.argument,
            lines=text.lines,
            runs=tuple((first, last, kept if stays else lost) for first, last, stays in fates(text)),
        )
        for text in texts
    )


def _stopped(turn: Turn, heard: Sequence[Signal], left: float) -> float:
    """Return the probability that a person stopped a turn while it was written: 0 if it ended otherwise; `left` if its client disconnected
    and no signal says why, since clients also time out.
    """
    if turn.finish is not Finish.LEFT:
        return 0.0
    return 1.0 if _happened(heard, "interrupted") else left


def _happened(heard: Sequence[Signal], *names: str) -> list[str]:
    """Return the names of the signals among `names` whose value says that the event happened."""
    return [signal.name for signal in heard if signal.name in names and signal.value > 0]


def _bounded(parts: Mapping[str, float]) -> float:
    return max(-1.0, min(1.0, sum(parts.values())))
