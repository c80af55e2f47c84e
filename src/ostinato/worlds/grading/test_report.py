"""Parses the reports of sealed tests, and checks the reported values against the expected ones.

The process that sends a report also runs the graded code, so a line proves only that its sender knew its content. Values are compared as
JSON trees (`inside/encoding.py`) and never turned into objects, so that no code of the sender's choice runs here.
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


_MOST_DEPTH = 128


def lines_of(sent: bytes) -> list[Any]:
    """Return the JSON values of complete lines, up to the first that is not JSON or is nested too deep to be serialized again."""
    values: list[Any] = []
    for line in sent.split(b"\n")[:-1]:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            break
        if deeper(value, _MOST_DEPTH):
            break
        values.append(value)
    return values


def deeper(tree: Any, most: int) -> bool:
    """Return True if lists and objects are nested more than `most` levels deep."""
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
    """Return True if two trees stand for values that are equal in Python: 1, 1.0 and True are equal, a list and a tuple are not.

    Numbers may differ by max(`relative` * |other|, `absolute`). Two NaN count as equal, because a function may have to return NaN.
    """
    if depth > _MOST_DEPTH:
        return False
    numbers = _number(tree), _number(other)
    if numbers[0] is not None and numbers[1] is not None:
        return _near(numbers[0], numbers[1], relative, absolute)
    if not isinstance(tree, list) or not isinstance(other, list):
        return type(tree) is type(other) and tree == other
    if tree[:1] != other[:1] or not (_is_container(tree) and _is_container(other)):
        return tree == other
    parts, others = _parts(tree), _parts(other)
    return len(parts) == len(others) and all(
        same(a, b, relative=relative, absolute=absolute, depth=depth + 1) for a, b in zip(parts, others, strict=True)
    )


def _is_container(tree: list[Any]) -> bool:
    return len(tree) == 2 and isinstance(tree[1], list)


def _parts(tree: list[Any]) -> list[Any]:
    """Return the items of a container; for a dict, its keys and values alternately."""
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


# ---------------------------------------------------------------- test reports


Sites = Mapping[str, tuple[str, Site]]
"""Reported key -> the test file, and the claim in it."""


@dataclass(slots=True, kw_only=True)
class TestHeard:
    """One test's report: its outcome, and the values seen at its claims, in order.

    Example: ``TestHeard(id="test_calc.py::test_add", ended=True, saw=[(("test_calc.py", (3, 4)), site, ["value", 9])])``
    """

    __test__ = False  # tells pytest that this is no test class

    id: str
    ended: bool = False
    failed: bool = False
    skipped: bool = False
    saw: list[tuple[tuple[str, Place], Site, Sequence[Any]]] = field(default_factory=list[Any])

    def at(self) -> dict[tuple[str, Place], list[Sequence[Any]]]:
        """Return the reports by claim, in order. A claim in a loop has several."""
        reports: dict[tuple[str, Place], list[Sequence[Any]]] = {}
        for where, _, shown in self.saw:
            reports.setdefault(where, []).append(shown)
        return reports

    def beside(
        self, other: TestHeard | None
    ) -> Iterator[tuple[tuple[str, Place], Site, Sequence[Any], Sequence[Any] | None]]:
        """Yield each report with the report of `other` for the same claim and the same pass over it, or None if `other` did not get
        there.
        """
        seen = {where: iter(shown) for where, shown in other.at().items()} if other is not None else {}
        for where, site, shown in self.saw:
            yield where, site, shown, next(seen[where], None) if where in seen else None

    @property
    def sealed(self) -> bool:
        """True if the test reported a value or an error that the grader alone can check."""
        return any(site.claim in (Claim.EQUAL, Claim.RAISES) for _, site, _ in self.saw)


@dataclass(frozen=True, slots=True, kw_only=True)
class Testimony:
    """The report of one run. `forged`: the number of lines that no honest run sends; `errors`: the end of its stderr, for people;
    `timed_out`: the run was stopped at its deadline.

    Example: ``Testimony(collected=("test_calc.py::test_add",), tests={"test_calc.py::test_add": heard}, forged=0)``
    """

    __test__ = False

    collected: tuple[str, ...]
    tests: Mapping[str, TestHeard]
    forged: int = 0
    errors: str = ""
    timed_out: bool = False


def read_testimony(sent: bytes, sites: Sites) -> Testimony:
    """Parse the lines of a run. Lines that do not fit the protocol count as forged."""
    collected: tuple[str, ...] = ()
    tests: dict[str, TestHeard] = {}
    running: TestHeard | None = None
    forged = 0
    for line in lines_of(sent):
        match line:
            case ["collected", list() as ids] if not collected and all(isinstance(each, str) for each in ids):
                collected = tuple(ids)
            case ["start", str() as id] if running is None and id not in tests:
                running = tests[id] = TestHeard(id=id)
            case ["saw", str() as key, *shown] if key in sites:
                if running is not None:
                    path, site = sites[key]
                    running.saw.append(((path, site.place), site, shown))
            case ["failed" | "skipped" as how, str() as id] if running is not None and id == running.id:
                setattr(running, how, True)
            case ["end", str() as id] if running is not None and id == running.id:
                running.ended, running = True, None
            case _:
                forged += 1
    return Testimony(collected=collected, tests=tests, forged=forged)


def passes(heard: TestHeard, solution: TestHeard | None) -> bool:
    """Return True if a test ended, neither failed nor skipped, and all its claims hold.

    It must also have reached every claim that the solution's run reached or, without a solution, at least one claim.
    """
    if not heard.ended or heard.failed or heard.skipped:
        return False
    if not all(holds(site, shown, right) for _, site, shown, right in heard.beside(solution)):
        return False
    return bool(heard.saw) if solution is None else solution.at().keys() <= heard.at().keys()


MOST_MESSAGE = 2000
"""Longest error message, in characters, that is searched for a pattern, since a search may take quadratic time."""
_REGEX_ONLY = re.compile(r"\\(?:N\{[^}]*\}|.)|\{(?![0-9]*(?:,[0-9]*)?\})|(?<=\[):", re.DOTALL)
_SEARCH_S = 1.0  # after which a search counts as no match: a message can be made to search for ever


def holds(site: Site, shown: Sequence[Any], solution: Sequence[Any] | None) -> bool:
    """Return True if the report of a claim satisfies it. `solution`: the report of the solution's run, None if it did not get there.

    Pattern searches in messages release the GIL.
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
                    raised
                    and len(message) <= MOST_MESSAGE
                    and (site.pattern is None or _matches(site.pattern, message))
                )
            case _:
                return False
    except RecursionError:
        return False


def _matches(pattern: str, message: str) -> bool:
    """Return whether `re` finds the pattern. The search uses `regex`, which has a timeout; `re` only searches patterns that `regex`
    rejects.
    """
    try:
        plain = re.compile(pattern)
    except (re.error, OverflowError):
        return False
    # to `regex`, "{e}" means fuzzy matching and "[:alpha:]" a POSIX class; to `re` they are literal text
    escaped = _REGEX_ONLY.sub(lambda found: found[0] if found[0][0] == "\\" else f"\\{found[0]}", pattern)
    try:
        return regex.search(escaped, message, concurrent=True, timeout=_SEARCH_S) is not None
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
