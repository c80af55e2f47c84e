"""Facts of a turn that need no signals; metrics name them with the prefix `turn.`. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from ostinato.core.records import Finish, Turn
from ostinato.release.monitors.rates import broken_tool_call
from ostinato.release.monitors.turn_text import take_apart

HEARD = "turn.heard"
"""1 if anybody said anything about the turn; the only fact that needs signals."""


def _latency(turn: Turn) -> float | None:
    """Seconds from the request to the end. None for an engine error; a lower bound for a turn that somebody stopped."""
    return None if turn.finish is Finish.ERROR else max(0.0, turn.ended_at - turn.started_at)


def _broken_tool_calls(turn: Turn) -> float | None:
    return None if turn.redacted else broken_tool_call(take_apart(turn))


def _length(turn: Turn) -> float | None:
    return None if turn.finish is Finish.ERROR else float(sum(span.tokens for span in turn.spans))


_FACTS: Mapping[str, tuple[str, Callable[[Turn], float | None]]] = {
    "turn": ("1, of every turn", lambda turn: 1.0),
    "turn.failed": ("1 if the engine failed", lambda turn: float(turn.finish is Finish.ERROR)),
    "turn.stopped": ("1 if it was broken off: somebody pressed stop or left", lambda turn: float(turn.finish is Finish.ABORT)),
    "turn.cut_off": ("1 if it ran into its token budget", lambda turn: float(turn.finish is Finish.LENGTH)),
    "turn.latency": ("seconds from request to end; none where the engine failed", _latency),
    "turn.tokens": ("sampled tokens; none where the engine failed", _length),
    "turn.broken_tool_calls": ("share of its tool calls that cannot be read; none without calls", _broken_tool_calls),
}  # fmt: skip

SUGGESTS = "turn.suggests"

MEANINGS: Mapping[str, str] = {
    **{name: meaning for name, (meaning, _) in _FACTS.items()},
    SUGGESTS: "1 if it suggests something: the answer is neither empty nor `release.outcomes.nothing`",
    HEARD: "1 if anybody said anything about it",
}
"""Every fact and its meaning."""


def facts_of(turn: Turn, wanted: Collection[str], nothing: str) -> dict[str, float]:
    """The facts of a turn that are in `wanted`, without `HEARD`. `nothing` is the answer that suggests nothing.

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
