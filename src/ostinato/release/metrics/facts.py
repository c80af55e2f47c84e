"""The building blocks of metrics: facts of a turn or of a user's day, signals about a turn, and terms with thresholds over them.

Facts need no signals; metrics refer to them with the prefix `turn.` or `user.`.
"""

from __future__ import annotations

import hashlib
import math
import operator
import re
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, cast

from ostinato.core.pending_signals import order_of
from ostinato.core.records import Finish, Signal, Turn
from ostinato.release.monitors.rates import broken_tool_call
from ostinato.release.monitors.turn_text import take_apart

HEARD = "turn.heard"
"""1 if anybody gave feedback on the turn. This is the only fact that needs signals."""


def _latency(turn: Turn) -> float | None:
    """Return seconds from the request to the end: None for an engine error, a lower bound for a turn that somebody stopped."""
    return None if turn.finish is Finish.ERROR else max(0.0, turn.ended_at - turn.started_at)


def _broken_tool_calls(turn: Turn) -> float | None:
    return broken_tool_call(take_apart(turn)) if turn.calls else None


def _length(turn: Turn) -> float | None:
    return None if turn.finish is Finish.ERROR else float(sum(span.tokens for span in turn.spans))


_STOPPED = (Finish.LEFT, Finish.ABORT)

_FACTS: Mapping[str, tuple[str, Callable[[Turn], float | None]]] = {
    "turn": ("1, of every turn", lambda turn: 1.0),
    "turn.failed": ("1 if the engine failed", lambda turn: float(turn.finish is Finish.ERROR)),
    "turn.stopped": ("1 if it was broken off: somebody pressed stop or left", lambda turn: float(turn.finish in _STOPPED)),
    "turn.cut_off": ("1 if it ran into its token budget", lambda turn: float(turn.finish is Finish.LENGTH)),
    "turn.latency": ("seconds from request to end; none where the engine failed", _latency),
    "turn.tokens": ("sampled tokens; none where the engine failed", _length),
    "turn.broken_tool_calls": ("share of its tool calls that cannot be read; none without calls or if unknown", _broken_tool_calls),
}  # fmt: skip

SUGGESTS = "turn.suggests"

USER_FACTS: Mapping[str, str] = {
    "user": "1, of every user and day, for seven days after a visit",
    "user.returned": "1 if the user came that day, else 0",
    "user.log_turns": "log(1 + the user's turns of that day)",
    "user.sessions": "the user's sessions of that day: turns without half an hour's pause between them",
    "user.days_away": "whole days since the user's last visit, 0 if that is the day itself",
}
"""Meaning of every fact of a user's day (`retention.Retention`)."""

MEANINGS: Mapping[str, str] = {
    **USER_FACTS,
    **{name: meaning for name, (meaning, _) in _FACTS.items()},
    SUGGESTS: "1 if it suggests something: the answer is neither empty nor `release.outcomes.nothing`",
    HEARD: "1 if anybody said anything about it",
}
"""Meaning of every fact."""


def facts_of(turn: Turn, wanted: Collection[str], nothing: str) -> dict[str, float]:
    """Return those facts of a turn that are in `wanted`, except `HEARD`. `nothing` is the answer that stands for no suggestion.

    Example: ``facts_of(turn, {"turn.failed", "turn.tokens"}, "-") == {"turn.failed": 0.0, "turn.tokens": 40.0}``
    """
    found: dict[str, float] = {}
    for name in wanted:
        fact = _FACTS.get(name)
        if fact is not None and (value := fact[1](turn)) is not None:
            found[name] = value
    if SUGGESTS in wanted and not turn.redacted and turn.finish is not Finish.ERROR:
        found[SUGGESTS] = float(turn.text.strip() not in ("", nothing))
    return found


# ---------------------------------------------------------------- tasks


Task = tuple[str, str]
"""A tenant, and the hash of the opening of its prompts or of a whole prompt."""

_OPENING = 64  # tokens that identify a product's instructions, or those of one of its features


def tasks_of(turn: Turn) -> tuple[Task, ...]:
    """Return what a turn was asked, the widest task first: its prompt's opening and, unless it continues another turn, the whole prompt.

    It is known before the turn's first token. () for an erased turn.
    """
    if not turn.prompt_ids:
        return ()
    asked = [turn.prompt_ids[:_OPENING]]
    if turn.parent is None and len(turn.prompt_ids) > _OPENING:
        asked.append(turn.prompt_ids)
    return tuple((turn.tenant, hashlib.blake2b(array("I", ids), digest_size=8).hexdigest()) for ids in asked)


# ---------------------------------------------------------------- terms


Comparison = Literal[">", ">=", "<", "<="]

_TERM = re.compile(r"([A-Za-z0-9_.:-]+)\s*(?:(>=|<=|>|<)\s*(-?\d+(?:\.\d+)?))?")
_HOLDS: Mapping[Comparison, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A name, which stands for its value, or a name with a threshold, which is 1 if the comparison holds, else 0.

    Example: ``Term(name="stars", comparison=">=", bound=4.0)`` is written ``stars >= 4``
    """

    name: str
    comparison: Comparison | None
    bound: float

    def value(self, known: Mapping[str, float]) -> float | None:
        """Return the term's value, given the values of names in `known`; None if its name has none."""
        found = known.get(self.name)
        if found is None or self.comparison is None:
            return found
        return float(_HOLDS[self.comparison](found, self.bound))

    def happened(self, known: Mapping[str, float]) -> bool:
        """Return true if the term has a value above 0."""
        return (self.value(known) or 0.0) > 0.0


def largest(terms: Iterable[Term], known: Mapping[str, float]) -> float | None:
    """Return the largest value among the terms; None if none has one."""
    most: float | None = None
    for term in terms:
        value = term.value(known)
        if value is not None and (most is None or value > most):
            most = value
    return most


def parse_term(text: str) -> Term:
    """Parse a term as it is written in the settings.

    Raises:
        ValueError: the text is not a term.

    Example: ``parse_term("turn.latency > 5") == Term(name="turn.latency", comparison=">", bound=5.0)``
    """
    match = _TERM.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"{text!r} is not a term; write a signal or a fact, or one with a threshold, like 'accepted', 'stars >= 4' or "
            "'turn.latency > 5'"
        )
    name, comparison, bound = match.groups()
    return Term(name=name, comparison=cast("Comparison | None", comparison), bound=float(bound or 0.0))


# ---------------------------------------------------------------- signals of one turn


MOST_SIGNALS = 100
"""The number of signals kept per turn: the first ones written."""


@dataclass(slots=True)
class _KeptSignal:
    """A signal, whose retraction may arrive before it. `received_at` and `retracted_at` are times of receipt by the server's clock."""

    name: str = ""
    value: float = math.nan
    order: tuple[float, float, str] = (0.0, 0.0, "")
    received_at: float = math.inf
    retracted_at: float | None = None


class TurnSignals:
    """The signals about one turn.

    Of several signals with the same name, the one that occurred last counts, whatever the order of arrival, so that a changed value
    replaces the earlier one. A retracted signal does not count.
    """

    __slots__ = ("_by_id",)

    def __init__(self) -> None:
        self._by_id: dict[str, _KeptSignal] = {}

    def __len__(self) -> int:
        """Return the number of signals kept."""
        return len(self._by_id)

    def hear(self, signal: Signal) -> None:
        """Add a signal. Beyond `MOST_SIGNALS`, only retractions of known signals are accepted."""
        about = signal.retracts or signal.id
        kept = self._by_id.get(about)
        if kept is None:
            if len(self._by_id) >= MOST_SIGNALS:
                return
            kept = self._by_id[about] = _KeptSignal()
        if signal.retracts is not None:
            before = signal.received_at if kept.retracted_at is None else kept.retracted_at
            kept.retracted_at = min(before, signal.received_at)
        elif not kept.name:
            kept.name, kept.value = signal.name, signal.value
            kept.order, kept.received_at = order_of(signal), signal.received_at

    def values(self, until: float = math.inf) -> dict[str, float]:
        """Return the values that held at `until`, by name: signals and retractions received later are ignored."""
        standing = [
            kept
            for kept in self._by_id.values()
            if kept.received_at <= until
            and (kept.retracted_at is None or kept.retracted_at > until)
            and not math.isnan(kept.value)
        ]
        if len(standing) > 1:
            standing.sort(key=lambda kept: kept.order)
        return {kept.name: kept.value for kept in standing}
