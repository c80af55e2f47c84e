"""What sealed tests told, and whether it is what they ought to have seen. Pure.

Everything here was sent by a process that the graded code shares: a line proves nothing but that somebody knew what stands in it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ostinato.worlds.grading.inside.encoding import Opaque, encode
from ostinato.worlds.grading.sealing import Claim, Place, Site
from ostinato.worlds.grading.trees import lines_of, same

Sites = Mapping[str, tuple[str, Site]]
"""By the key that is told: the test file, and the claim in it."""


@dataclass(slots=True, kw_only=True)
class TestHeard:
    """One test: how it went, and what was seen at which claims, in order.

    Example: ``TestHeard(id="test_calc.py::test_add", ended=True, saw=[(("test_calc.py", (3, 4)), site, ["value", 9])])``
    """

    __test__ = False  # of pytest: no test of this project

    id: str
    ended: bool = False
    failed: bool = False
    skipped: bool = False
    saw: list[tuple[tuple[str, Place], Site, Sequence[Any]]] = field(default_factory=list[Any])

    def at(self) -> dict[tuple[str, Place], list[Sequence[Any]]]:
        """What was seen at each claim."""
        found: dict[tuple[str, Place], list[Sequence[Any]]] = {}
        for where, _, shown in self.saw:
            found.setdefault(where, []).append(shown)
        return found

    @property
    def sealed(self) -> bool:
        """True if somewhere a value or an error was told that had to be known."""
        return any(site.claim in (Claim.EQUAL, Claim.RAISES) for _, site, _ in self.saw)


@dataclass(frozen=True, slots=True, kw_only=True)
class Testimony:
    """All that one run told. `forged`: lines that no honest run tells. `errors`: the end of what it wrote to stderr, for people.

    Example: ``Testimony(collected=("test_calc.py::test_add",), tests={"test_calc.py::test_add": heard}, forged=0)``
    """

    __test__ = False

    collected: tuple[str, ...]
    tests: Mapping[str, TestHeard]
    forged: int = 0
    errors: str = ""


def read_testimony(sent: bytes, sites: Sites) -> Testimony:
    """Make sense of the lines; what makes none is counted."""
    collected: tuple[str, ...] = ()
    tests: dict[str, TestHeard] = {}
    now: TestHeard | None = None
    forged = 0
    for line in lines_of(sent):
        match line:
            case ["collected", list() as ids] if not collected and all(isinstance(each, str) for each in ids):
                collected = tuple(ids)
            case ["start", str() as id] if now is None and id not in tests:
                now = tests[id] = TestHeard(id=id)
            case ["saw", str() as key, *shown] if key in sites:
                if now is not None:
                    path, site = sites[key]
                    now.saw.append(((path, site.place), site, shown))
            case ["failed" | "skipped" as how, str() as id] if now is not None and id == now.id:
                setattr(now, how, True)
            case ["end", str() as id] if now is not None and id == now.id:
                now.ended, now = True, None
            case _:
                forged += 1
    return Testimony(collected=collected, tests=tests, forged=forged)


def passes(heard: TestHeard, solution: TestHeard | None) -> bool:
    """True if a test saw what it ought to.

    With the solution's own run to compare with: it also reached every claim that the solution reached. Without: at least one.
    """
    if not heard.ended or heard.failed or heard.skipped:
        return False
    right = solution.at() if solution is not None else None
    times: dict[tuple[str, Place], int] = {}
    for where, site, shown in heard.saw:
        index = times[where] = times.get(where, -1) + 1
        shows = right.get(where, []) if right is not None else []
        if not holds(site, shown, shows[index] if index < len(shows) else None):
            return False
    return bool(heard.saw) if right is None else right.keys() <= times.keys()


MOST_MESSAGE = 2000
"""Characters of an error's message in which a pattern is looked for: a search may take the square of them."""


def holds(site: Site, shown: Sequence[Any], solution: Sequence[Any] | None) -> bool:
    """True if what was shown at a claim is what it claims. `solution`: what was shown there when the solution ran, if it came there."""
    try:
        match site.claim, shown:
            case Claim.EQUAL, ["value", tree]:
                return _is_expected(site, tree, solution)
            case Claim.PAIR, ["values", left, right]:
                return same(left, right)
            case Claim.PAIR, ["truth", True]:
                return solution is None or solution[0] == "truth"
            case Claim.TRUTH, ["truth", bool() as truth]:
                return truth is not site.flipped
            case Claim.RAISES, ["raised", list() as names, str() as message]:
                raised = not set(site.errors).isdisjoint(name for name in names if isinstance(name, str))
                return (
                    raised
                    and len(message) <= MOST_MESSAGE
                    and (site.pattern is None or re.search(site.pattern, message) is not None)
                )
            case _:
                return False
    except RecursionError:
        return False


def _is_expected(site: Site, tree: Any, solution: Sequence[Any] | None) -> bool:
    relative, absolute = site.near
    if site.known:
        try:
            return same(tree, encode(site.value), relative=relative, absolute=absolute)
        except Opaque:
            return False
    return solution is not None and solution[0] == "value" and same(tree, solution[1])
