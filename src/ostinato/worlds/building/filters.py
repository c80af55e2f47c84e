"""Decides which mutations become tasks, and writes their instructions. Pure functions.

A mutation becomes a task if some but not too many tests fail, the answer cannot be found elsewhere in the package, and it is no duplicate.
The instruction is written like a person's, from the function's docstring and the names of the failing tests.
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

# ---------------------------------------------------------------- a task's instruction


_SHOWN = 8
_PARAGRAPHS = 1200  # a docstring of at most this many characters is quoted in full


class TaskKind(StrEnum):
    """How the function was mutated."""

    REMOVAL = "removal"  # the body was removed
    DELETION = "deletion"  # the whole function was removed, but not its callers
    BUG = "bug"


def _test_list(fail_to_pass: Sequence[str], called: str) -> str:
    """Return a bulleted list of up to `_SHOWN` tests. Tests named after the function come first, since they say most about it."""
    named = called.rpartition(".")[2].strip("_").lower()
    ordered = sorted(fail_to_pass, key=lambda test: named not in test.rpartition("::")[2].lower())
    more = len(ordered) - _SHOWN
    return "\n".join(f"- {test}" for test in ordered[:_SHOWN]) + (f"\n- and {more} more" if more > 0 else "")


def _noun(function: Function) -> str:
    if not function.in_class:
        return "function"
    return "property" if re.search(r"^@(\w+\.)?(cached_)?property$", function.signature, re.MULTILINE) else "method"


def first_paragraph(docstring: str) -> str:
    """Return a docstring's first paragraph, on one line."""
    return " ".join(docstring.strip().split("\n\n")[0].split())


def readable_docstring(kind: TaskKind, function: Function) -> str:
    """Return the part of the docstring that the solver can read: all of it if it stays in the file, else the part in the instruction."""
    whole = kind is not TaskKind.DELETION or len(function.docstring) <= _PARAGRAPHS
    return function.docstring if whole else first_paragraph(function.docstring)


def instruct(kind: TaskKind, function: Function, package: str, fail_to_pass: Sequence[str]) -> str:
    """Return the task's instruction. It says what is wanted and where, never how."""
    noun = _noun(function)
    tests = _test_list(fail_to_pass, "" if kind is TaskKind.BUG else function.name)
    plural = "These tests fail" if len(fail_to_pass) > 1 else "This test fails"
    if kind is TaskKind.REMOVAL:
        says = (
            f" Its docstring says what it is for: {first_paragraph(function.docstring)}" if function.docstring else ""
        )
        return (
            f"In {package}, the {noun} `{function.name}` in `{function.path}` is not written yet: it raises NotImplementedError.{says}\n\n"
            f"Write its body. {plural} until it works:\n{tests}\n\nLeave the tests as they are."
        )
    if kind is TaskKind.DELETION:
        readable = readable_docstring(kind, function)
        says = f"\n\nWhat it is to do:\n{textwrap.indent(readable, '    ')}" if readable else ""
        return (
            f"In {package}, `{function.path}` lacks the {noun} `{function.name}`. Add it:\n\n"
            f"{textwrap.indent(function.signature, '    ')}{says}\n\n{plural} until then:\n{tests}\n\nLeave the tests as they are."
        )
    about = f"\n\nThe faulty part is documented so: {first_paragraph(function.docstring)}" if function.docstring else ""
    return (
        f"{package} has a bug in `{function.path}`. {plural}:\n{tests}{about}\n\n"
        "Find the cause and mend it where it is. Leave the tests as they are."
    )


# ---------------------------------------------------------------- filters of mutations


_WINDOW = 3  # consecutive lines that are compared at once
_SHORT = 12  # characters; shorter lines occur everywhere and are ignored
_WORD = re.compile(r"[^\W\d_]+")
_FEWEST_WORDS = 3
_FEWEST_TYPES = 2
# special methods of which the language defines when they run, not what they do
_UNDEFINED_SPECIAL = {"__call__", "__new__", "__post_init__"}


class ChangeFate(StrEnum):
    """The outcome of a mutation: VALID, or why it does not become a task."""

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
    """The tests that a mutation makes fail, and those that pass with and without it, in the suite's order.

    Example: ``NoticedTests(fail_to_pass=("test_a.py::test_pop",), pass_to_pass=("test_a.py::test_push",))``
    """

    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]


def split_tests(selected: Sequence[str], outcome: SuiteRun) -> NoticedTests:
    """Split the selected tests by a run's outcome. Tests that did not pass or could not be collected count as failed."""
    passed = outcome.passed
    return NoticedTests(
        fail_to_pass=tuple(test for test in selected if test not in passed),
        pass_to_pass=tuple(test for test in selected if test in passed),
    )


def judge_run(
    outcome: SuiteRun | None, split: NoticedTests, *, stable: int, most_failing: float, lazy: frozenset[str] | None
) -> ChangeFate:
    """Judge a mutation by its first run.

    `stable`: the number of the suite's stable tests. `lazy`: the tests that fail with a stub returning None; None if unknown.
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
    """Return all windows of three consecutive lines, each as one text. Short lines and comments are ignored."""
    code = [line.strip() for line in lines]
    code = [line for line in code if len(line) >= _SHORT and not line.startswith("#")]
    return ["\n".join(code[at : at + _WINDOW]) for at in range(max(0, len(code) - _WINDOW + 1))]


class DuplicateCode:
    """An index of duplicated code in a package: a copy of a function, even with other names, or its text in the documentation."""

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
        """Return True if at least half of the function's body also occurs elsewhere, or all of it with other names."""
        if function.code_lines >= _WINDOW and self.shapes[shape_of(function, text)] > 1:
            return True
        windows = _windows(body_lines(function, text))
        known = sum(self.counts[window] > windows.count(window) for window in windows)
        return bool(windows) and 2 * known >= len(windows)


def body_lines(function: Function, text: str) -> list[str]:
    """Return the lines of a function's body, without docstring and signature."""
    lines = function.block(text).splitlines()
    code = [at for at, line in enumerate(lines) if line.strip() and not line.strip().startswith("#")]
    return lines[code[-function.code_lines] :] if function.code_lines else []


def shape_of(function: Function, text: str) -> str:
    """Return a function's body with names, strings and numbers replaced by placeholders, numbered by first occurrence."""
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

    __test__ = False  # not a test class for pytest

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = files
        self._known: dict[str, dict[str, str]] = {}

    def of(self, test: str) -> str:
        """Return a test's source lines, including decorators; "" if the test is not found."""
        path, _, name = test.partition("::")
        if path not in self._known:
            text = self.files.get(path, b"").decode("utf-8", "replace")
            self._known[path] = {each.name: each.block(text) for each in functions_of(path, text)}
        return self._known[path].get(name.split("[")[0].replace("::", "."), "")


def is_specified(
    kind: TaskKind, function: Function, test_blocks: Iterable[str], *, lines_a_word: float, undocumented_lines: int
) -> bool:
    """Return True if the prompt specifies a function to be written well enough, beyond its location and the names of failing tests.

    Either its docstring has at least one word per `lines_a_word` lines of code, and at least three. Or the function is short, and the
    language defines what its name means (`__eq__`, not `__call__`), at least two of its annotations are informative, or a test calls it.
    """
    words = len(_WORD.findall(readable_docstring(kind, function)))
    if words >= max(_FEWEST_WORDS, function.code_lines / lines_a_word):
        return True
    if function.code_lines > undocumented_lines:
        return False
    name = function.name.rpartition(".")[2]
    fixed = name.startswith("__") and name.endswith("__") and name not in _UNDEFINED_SPECIAL
    if fixed or function.types >= _FEWEST_TYPES:
        return True
    called = re.compile(rf"\b{re.escape(name)}\b")
    return any(called.search(block) for block in test_blocks)


def reveals_answer(function: Function, text: str, words: str) -> bool:
    """Return True if a line of the function's body occurs in `words`, the instruction."""
    return any(line.strip() in words for line in body_lines(function, text) if len(line.strip()) >= _SHORT)
