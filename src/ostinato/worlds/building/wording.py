"""Writes a task's instruction, as a person would, from the function's docstring and the failing tests' names. Pure."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from enum import StrEnum

from ostinato.worlds.building.mutations import Function

_SHOWN = 8
_PARAGRAPHS = 1200  # characters of a docstring that is quoted whole


class TaskKind(StrEnum):
    """What was done to the function."""

    REMOVAL = "removal"  # its body is gone
    DELETION = "deletion"  # all of it is gone, its callers are left
    BUG = "bug"


def _tests(fail_to_pass: Sequence[str], called: str = "") -> str:
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
    """The task's instruction. It says what is wanted and where, never how.

    Example: ``instruct(TaskKind.BUG, function, "tabulate", ["test_a.py::test_b"])``
    """
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
