"""The terms that a metric is declared with: a signal or a fact of the turn, by name, optionally with a threshold. Pure."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, cast

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
    """A name, which stands for its value, or a name with a threshold, which is 1 if the comparison holds and 0 if not.

    Example: ``Term(name="stars", comparison=">=", bound=4.0)`` is written ``stars >= 4``
    """

    name: str
    comparison: Comparison | None
    bound: float

    def value(self, known: Mapping[str, float]) -> float | None:
        """The term's value, given the values of names in `known`; None if its name has none."""
        found = known.get(self.name)
        if found is None or self.comparison is None:
            return found
        return float(_HOLDS[self.comparison](found, self.bound))

    def happened(self, known: Mapping[str, float]) -> bool:
        """True if it has a value above 0."""
        return (self.value(known) or 0.0) > 0.0


def largest(terms: Iterable[Term], known: Mapping[str, float]) -> float | None:
    """The largest value among the terms; None if none has one."""
    most: float | None = None
    for term in terms:
        value = term.value(known)
        if value is not None and (most is None or value > most):
            most = value
    return most


def parse(text: str) -> Term:
    """Read a term as it is written in the settings.

    Raises:
        ValueError: the text is not a term.

    Example: ``parse("turn.latency > 5") == Term(name="turn.latency", comparison=">", bound=5.0)``
    """
    match = _TERM.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"{text!r} is no term; write a signal or a fact, or one with a threshold, like 'accepted', 'stars >= 4' or 'turn.latency > 5'"
        )
    name, comparison, bound = match.groups()
    return Term(name=name, comparison=cast("Comparison | None", comparison), bound=float(bound or 0.0))
