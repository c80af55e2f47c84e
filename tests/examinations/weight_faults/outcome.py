"""The outcome of one fault, and the rule that decides whether it was right."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

RIGHT = "right hash"
REPAIRED = "refused by name, then right hash"
FELL_BACK = "served what it had, then right hash"
OBEYED = "delivered what the ref said, then right hash"
WAITED = "went on as it was, then right hash"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One fault at one place. `problem` says how the rule was broken; "" if it held.

    The rule: the follower ends at the right hash, or refuses with an error that names the object and ends there once the object is
    restored. Never a mixture, never a wrong byte, never a manual step if it is possible to continue.

    Example: ``Case(fault="truncated", where="route manifest, one behind", outcome=REPAIRED)``
    """

    fault: str
    where: str
    outcome: str
    problem: str = ""


class Broken(Exception):
    """The rule did not hold; the message says how."""


def must(held: bool, why: str) -> None:
    """Raises Broken with `why` unless `held`."""
    if not held:
        raise Broken(why)


def problems(cases: Iterable[Case]) -> list[str]:
    """One sentence for each case in which the rule did not hold."""
    return [f"{case.fault}, {case.where}: {case.problem}" for case in cases if case.problem]
