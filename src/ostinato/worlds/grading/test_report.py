"""Parses what sealed tests reported, and checks whether it is what they should have seen.

All of it was sent by a process that the graded code shares: a line proves only that its sender knew its content. Values are compared as
trees (`inside/encoding.py`) and never made into objects, so that no code of a sender's choosing runs here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import regex

from ostinato.worlds.grading.hidden_values import Claim, Place, Site
from ostinato.worlds.grading.inside.encoding import Opaque, encode

# ---------------------------------------------------------------- values


_DEEPEST = 128


def lines_of(sent: bytes) -> list[Any]:
    """The JSON values of complete lines, up to the first that is not JSON or is nested too deep to be serialized again."""
    found: list[Any] = []
    for line in sent.split(b"\n")[:-1]:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            break
        if deeper(value, _DEEPEST):
            break
        found.append(value)
    return found


def deeper(tree: Any, most: int) -> bool:
    """True if lists and objects are nested more than `most` deep."""
    level = [tree]
    for _ in range(most + 1):
        level = [
            part
            for each in level
            for part in (each.values() if isinstance(each, dict) else each if isinstance(each, list) else ())
        ]
        if not level:
            return False
    return True


def same(tree: Any, other: Any, *, relative: float = 0.0, absolute: float = 0.0, depth: int = 0) -> bool:
    """True if two trees stand for values that are equal in Python: 1, 1.0 and True are equal, a list and a tuple are not.

    Numbers may differ by max(`relative` * |other|, `absolute`). Two NaN count as equal: a function that should return NaN did.
    """
    if depth > _DEEPEST:
        return False
    numbers = _number(tree), _number(other)
    if numbers[0] is not None and numbers[1] is not None:
        return _near(numbers[0], numbers[1], relative, absolute)
    if not isinstance(tree, list) or not isinstance(other, list):
        return type(tree) is type(other) and tree == other
    if tree[:1] != other[:1] or not (_holds(tree) and _holds(other)):
        return tree == other
    parts, others = _parts(tree), _parts(other)
    return len(parts) == len(others) and all(
        same(a, b, relative=relative, absolute=absolute, depth=depth + 1) for a, b in zip(parts, others, strict=True)
    )


def _holds(tree: list[Any]) -> bool:
    return len(tree) == 2 and isinstance(tree[1], list)


def _parts(tree: list[Any]) -> list[Any]:
    """The items of a container; for a dict, its keys and values in turn."""
    if tree[0] != "d":
        return tree[1]
    return [part for pair in tree[1] if isinstance(pair, list) for part in pair]


def _number(tree: Any) -> int | float | None:
    if isinstance(tree, bool | int):
        return int(tree)
    if isinstance(tree, list) and len(tree) == 2 and isinstance(tree[1], str):
        try:
            if tree[0] == "i":
                return int(tree[1], 16)
            if tree[0] == "f":
                return float.fromhex(tree[1])
        except (ValueError, OverflowError):
            return None
    return None


def _near(number: float, other: float, relative: float, absolute: float) -> bool:
    if number == other or (number != number and other != other):
        return True
    if not relative and not absolute:
        return False
    try:
        return math.isfinite(other) and abs(number - other) <= max(relative * abs(other), absolute)
    except OverflowError:
        return False


# ---------------------------------------------------------------- what tests saw


Sites = Mapping[str, tuple[str, Site]]
"""Reported key -> the test file, and the claim in it."""


@dataclass(slots=True, kw_only=True)
class TestHeard:
    """One test's report: its outcome, and what was seen at which claims, in order.

    Example: ``TestHeard(id="test_calc.py::test_add", ended=True, saw=[(("test_calc.py", (3, 4)), site, ["value", 9])])``
    """

    __test__ = False  # tells pytest that this is no test class

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

    def beside(
        self, other: TestHeard | None
    ) -> Iterator[tuple[tuple[str, Place], Site, Sequence[Any], Sequence[Any] | None]]:
        """What was seen at each claim, in order, and what `other` saw there the same time; None if it did not get there."""
        seen = {where: iter(shown) for where, shown in other.at().items()} if other is not None else {}
        for where, site, shown in self.saw:
            yield where, site, shown, next(seen[where], None) if where in seen else None

    @property
    def sealed(self) -> bool:
        """True if the test reported a value or an error that only the grader can check."""
        return any(site.claim in (Claim.EQUAL, Claim.RAISES) for _, site, _ in self.saw)


@dataclass(frozen=True, slots=True, kw_only=True)
class Testimony:
    """All that one run reported. `forged` counts lines that no honest run sends. `errors` is the end of its stderr, for people.
    `timed_out`: it was stopped by its deadline.

    Example: ``Testimony(collected=("test_calc.py::test_add",), tests={"test_calc.py::test_add": heard}, forged=0)``
    """

    __test__ = False

    collected: tuple[str, ...]
    tests: Mapping[str, TestHeard]
    forged: int = 0
    errors: str = ""
    timed_out: bool = False


def read_testimony(sent: bytes, sites: Sites) -> Testimony:
    """Parse the lines of a run. Lines that make no sense are counted as forged."""
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
    """True if a test saw what it should.

    If the solution's own run is given, the test must also have reached every claim that the solution reached; if not, at least one.
    """
    if not heard.ended or heard.failed or heard.skipped:
        return False
    if not all(holds(site, shown, right) for _, site, shown, right in heard.beside(solution)):
        return False
    return bool(heard.saw) if solution is None else solution.at().keys() <= heard.at().keys()


MOST_MESSAGE = 2000
"""The longest error message, in characters, that may match a pattern: a search may take quadratic time."""
_APART = re.compile(r"\\(?:N\{[^}]*\}|.)|\{(?![0-9]*(?:,[0-9]*)?\})|(?<=\[):", re.DOTALL)
_LONGEST_S = 1.0  # of a search, after which it has found nothing: its sender may have written one that takes for ever


def holds(site: Site, shown: Sequence[Any], solution: Sequence[Any] | None) -> bool:
    """True if what was shown at a claim satisfies it. `solution` is what the solution's run showed there, None if it did not get there.

    Searches of messages leave the interpreter's lock to other threads.
    """
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
                    raised and len(message) <= MOST_MESSAGE and (site.pattern is None or _found(site.pattern, message))
                )
            case _:
                return False
    except RecursionError:
        return False


def _found(pattern: str, message: str) -> bool:
    """What `re` finds. `regex` searches, whose time is bounded; only a pattern that it alone refuses is left to `re`."""
    try:
        plain = re.compile(pattern)
    except (re.error, OverflowError):
        return False
    # `regex` takes "{e}" for a number of errors and "[:alpha:]" for a class of characters, `re` takes them as they stand
    same = _APART.sub(lambda found: found[0] if found[0][0] == "\\" else f"\\{found[0]}", pattern)
    try:
        return regex.search(same, message, concurrent=True, timeout=_LONGEST_S) is not None
    except TimeoutError:
        return False
    except regex.error:
        return plain.search(message) is not None


def _is_expected(site: Site, tree: Any, solution: Sequence[Any] | None) -> bool:
    relative, absolute = site.near
    if site.known:
        try:
            return same(tree, encode(site.value), relative=relative, absolute=absolute)
        except Opaque:
            return False
    return solution is not None and solution[0] == "value" and same(tree, solution[1])
