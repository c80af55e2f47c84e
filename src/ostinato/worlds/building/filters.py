"""Decides which changes become tasks: their failures are informative, the answer is not elsewhere in the package, no duplicates. Pure.

Also writes a task's instruction, as a person would, from the function's docstring and the failing tests' names.
"""

from __future__ import annotations

import keyword
import re
import textwrap
import tokenize
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ostinato.worlds.building.mutations import Function, functions_of
from ostinato.worlds.building.runs import SuiteRun

# ---------------------------------------------------------------- what a task says


_SHOWN = 8
_PARAGRAPHS = 1200  # characters of a docstring that is quoted whole


class TaskKind(StrEnum):
    """What was done to the function."""

    REMOVAL = "removal"  # its body is gone
    DELETION = "deletion"  # all of it is gone, its callers are left
    BUG = "bug"


def _tests(fail_to_pass: Sequence[str], called: str) -> str:
    """A list of some of the tests. Those named after the function to be written come first, as they say most about it."""
    named = called.rpartition(".")[2].strip("_").lower()
    ordered = sorted(fail_to_pass, key=lambda test: named not in test.rpartition("::")[2].lower())
    more = len(ordered) - _SHOWN
    return "\n".join(f"- {test}" for test in ordered[:_SHOWN]) + (f"\n- and {more} more" if more > 0 else "")


def _what(function: Function) -> str:
    if not function.in_class:
        return "function"
    return "property" if re.search(r"^@(\w+\.)?(cached_)?property$", function.signature, re.MULTILINE) else "method"


def first_paragraph(docstring: str) -> str:
    """A docstring's first paragraph, on one line."""
    return " ".join(docstring.strip().split("\n\n")[0].split())


def docstring_left(kind: TaskKind, function: Function) -> str:
    """The part of the docstring that the solver can read: all of it if it stays in the file, else what the instruction quotes."""
    whole = kind is not TaskKind.DELETION or len(function.docstring) <= _PARAGRAPHS
    return function.docstring if whole else first_paragraph(function.docstring)


def instruct(kind: TaskKind, function: Function, package: str, fail_to_pass: Sequence[str]) -> str:
    """The task's instruction. It says what is wanted and where, never how."""
    what = _what(function)
    tests = _tests(fail_to_pass, "" if kind is TaskKind.BUG else function.name)
    plural = "These tests fail" if len(fail_to_pass) > 1 else "This test fails"
    if kind is TaskKind.REMOVAL:
        says = (
            f" Its docstring says what it is for: {first_paragraph(function.docstring)}" if function.docstring else ""
        )
        return (
            f"In {package}, the {what} `{function.name}` in `{function.path}` is not written yet: it raises NotImplementedError.{says}\n\n"
            f"Write its body. {plural} until it works:\n{tests}\n\nLeave the tests as they are."
        )
    if kind is TaskKind.DELETION:
        left = docstring_left(kind, function)
        says = f"\n\nWhat it is to do:\n{textwrap.indent(left, '    ')}" if left else ""
        return (
            f"In {package}, `{function.path}` lacks the {what} `{function.name}`. Add it:\n\n"
            f"{textwrap.indent(function.signature, '    ')}{says}\n\n{plural} until then:\n{tests}\n\nLeave the tests as they are."
        )
    about = f"\n\nThe faulty part is documented so: {first_paragraph(function.docstring)}" if function.docstring else ""
    return (
        f"{package} has a bug in `{function.path}`. {plural}:\n{tests}{about}\n\n"
        "Find the cause and mend it where it is. Leave the tests as they are."
    )


# ---------------------------------------------------------------- which changes become tasks


_WINDOW = 3  # consecutive lines
_SHORT = 12  # characters: shorter lines occur everywhere
_WORD = re.compile(r"[^\W\d_]+")
_FEWEST_WORDS = 3
_FEWEST_TYPES = 2
_SAYS_WHEN = {"__call__", "__new__", "__post_init__"}  # the language defines when these run, not what they do


class ChangeFate(StrEnum):
    """The outcome of a change: VALID, or why it does not become a task."""

    VALID = "valid"
    UNNOTICED = "no test notices it"
    TOO_PLAIN = "too many tests notice it"
    ENDLESS = "does not end"
    CRASHES = "the tests do not come to their end"
    TRIVIAL = "a body that does nothing passes"
    WEAK = "weak tests: a stub passes them"
    SAYS_LITTLE = "the prompt says too little"
    UNSTABLE = "two runs disagree"
    TWICE = "the same tests fail as for another change of the function"
    ENOUGH = "the function has enough tasks"
    LEAKS = "its text stands elsewhere in the package"
    TOO_SLOW = "its tests take too long"
    UNTESTED = "no test needs the function"
    UNGUARDED = "no test of those that were run passes with it"


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticedTests:
    """The tests that a change makes fail, and those that pass with and without it, in the suite's order.

    Example: ``NoticedTests(fail_to_pass=("test_a.py::test_pop",), pass_to_pass=("test_a.py::test_push",))``
    """

    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]


def split_tests(selected: Sequence[str], outcome: SuiteRun) -> NoticedTests:
    """Split the selected tests by a run's outcome. A test that did not pass, or could no longer be collected, counts as failed."""
    passed = outcome.passed
    return NoticedTests(
        fail_to_pass=tuple(test for test in selected if test not in passed),
        pass_to_pass=tuple(test for test in selected if test in passed),
    )


def judge_first(
    outcome: SuiteRun | None, split: NoticedTests, *, stable: int, most_failing: float, lazy: frozenset[str] | None
) -> ChangeFate:
    """Judge a change by its first run.

    `stable` counts the suite's stable tests; `lazy` are tests that fail if the function does nothing (None: that run gave no failed test).
    """
    if outcome is None or (outcome.code is None and not outcome.stopped and not outcome.hung):
        return ChangeFate.CRASHES
    if outcome.hung:
        return ChangeFate.ENDLESS
    if outcome.stopped or len(split.fail_to_pass) > most_failing * stable:
        return ChangeFate.TOO_PLAIN
    if not split.fail_to_pass:
        return ChangeFate.UNNOTICED
    if lazy is not None and not lazy & {*split.fail_to_pass, *split.pass_to_pass}:
        return ChangeFate.TRIVIAL
    return ChangeFate.VALID if split.pass_to_pass else ChangeFate.UNGUARDED


def _windows(lines: Iterable[str]) -> list[str]:
    """All runs of three consecutive lines, short lines and comments left out, each as one text."""
    told = [line.strip() for line in lines]
    told = [line for line in told if len(line) >= _SHORT and not line.startswith("#")]
    return ["\n".join(told[at : at + _WINDOW]) for at in range(max(0, len(told) - _WINDOW + 1))]


class Elsewhere:
    """Finds code that a package contains twice: a copy of a function, even with other names, or its text in the documentation."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.counts: Counter[str] = Counter()
        self.shapes: Counter[str] = Counter()
        for path, data in files.items():
            if b"\0" not in data[:4096]:
                text = data.decode("utf-8", "replace")
                self.counts.update(_windows(text.splitlines()))
                if path.endswith(".py"):
                    self.shapes.update(shape_of(each, text) for each in functions_of(path, text))

    def leaks(self, function: Function, text: str) -> bool:
        """True if at least half of the function's body also occurs elsewhere, or all of it with other names."""
        if function.code_lines >= _WINDOW and self.shapes[shape_of(function, text)] > 1:
            return True
        windows = _windows(body_lines(function, text))
        known = sum(self.counts[window] > windows.count(window) for window in windows)
        return bool(windows) and 2 * known >= len(windows)


def body_lines(function: Function, text: str) -> list[str]:
    """The lines of a function's body, docstring and signature left out."""
    lines = function.block(text).splitlines()
    code = [at for at, line in enumerate(lines) if line.strip() and not line.strip().startswith("#")]
    return lines[code[-function.code_lines] :] if function.code_lines else []


def shape_of(function: Function, text: str) -> str:
    """A function's body with its names, strings and numbers replaced by placeholders, numbered by first occurrence."""
    called: dict[str, str] = {}
    shape: list[str] = []
    lines = iter([*body_lines(function, text), ""])
    try:
        for token in tokenize.generate_tokens(lambda: next(lines) + "\n"):
            named = token.type == tokenize.NAME and not keyword.iskeyword(token.string)
            if named or token.type in (tokenize.STRING, tokenize.NUMBER):
                shape.append(called.setdefault(token.string, f"${len(called)}"))
            elif token.type != tokenize.COMMENT:
                shape.append(token.string.strip())
    except (tokenize.TokenError, SyntaxError, StopIteration):
        return f"{function.key} cannot be read"
    return " ".join(filter(None, shape))


class TestLines:
    """Source lines of a package's tests, keyed by test id."""

    __test__ = False  # no tests for pytest to collect

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = files
        self._known: dict[str, dict[str, str]] = {}

    def of(self, test: str) -> str:
        """A test's source lines, including decorators; "" if the test is not found."""
        path, _, name = test.partition("::")
        if path not in self._known:
            text = self.files.get(path, b"").decode("utf-8", "replace")
            self._known[path] = {each.name: each.block(text) for each in functions_of(path, text)}
        return self._known[path].get(name.split("[")[0].replace("::", "."), "")


def says_enough(
    kind: TaskKind, function: Function, test_blocks: Iterable[str], *, lines_a_word: float, undocumented_lines: int
) -> bool:
    """True if a function to be written says what it is for, beyond its location and the names of the failing tests.

    Its docstring has at least one word per `lines_a_word` lines of code, and at least three. Or the function is short, and the language
    gives its name a meaning (`__eq__`, but not `__call__`), its signature states two types, or one of the given tests calls it by name.
    """
    words = len(_WORD.findall(docstring_left(kind, function)))
    if words >= max(_FEWEST_WORDS, function.code_lines / lines_a_word):
        return True
    if function.code_lines > undocumented_lines:
        return False
    name = function.name.rpartition(".")[2]
    fixed = name.startswith("__") and name.endswith("__") and name not in _SAYS_WHEN
    if fixed or function.types >= _FEWEST_TYPES:
        return True
    called = re.compile(rf"\b{re.escape(name)}\b")
    return any(called.search(block) for block in test_blocks)


def gives_away(function: Function, text: str, words: str) -> bool:
    """True if a line of the function's body occurs in `words`."""
    return any(line.strip() in words for line in body_lines(function, text) if len(line.strip()) >= _SHORT)
