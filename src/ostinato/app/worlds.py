"""Grades answers to suite items. Code that a model wrote is run in the sandbox."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ostinato.config import Config
from ostinato.core.errors import BadConfig
from ostinato.evaluate.graders import pattern, suggestion
from ostinato.evaluate.suites import Item
from ostinato.worlds.grading.completion import python_tests
from ostinato.worlds.sandbox import SingleRuns

if TYPE_CHECKING:
    from ostinato.evaluate.runner import ItemGrader


GRADERS = ("python_tests", "pattern", "suggestion")


def check_item(item: Item) -> None:
    """Raise BadConfig unless the item's grader exists and can work with it."""
    if item.grader == "pattern":
        pattern(item, "")
    elif item.grader == "suggestion":
        suggestion(item, "")
    elif item.grader == "python_tests":
        head, tests = item.data.get("head"), item.data.get("tests")
        if not isinstance(head, str) or re.match(r"def \w+\(", head) is None:
            raise BadConfig(
                f"suite item {item.id!r}: grader 'python_tests' needs a 'head' that starts with 'def name('"
            )
        if not isinstance(tests, str) or not tests.strip():
            raise BadConfig(f"suite item {item.id!r}: grader 'python_tests' needs 'tests', Python source with asserts")
    else:
        raise BadConfig(f"suite item {item.id!r}: no grader {item.grader!r}; there are {' and '.join(GRADERS)}")


def open_grader(config: Config) -> ItemGrader:
    """Grades one answer to a suite item: in the sandbox, by pattern, or as a suggestion.

    Raises BadConfig for an item that cannot be graded.
    """
    sandbox = SingleRuns(config.sandbox)

    async def grade(item: Item, text: str) -> float:
        check_item(item)
        if item.grader == "pattern":
            return pattern(item, text)
        if item.grader == "suggestion":
            return suggestion(item, text)
        return await python_tests(item.data["head"], text, item.data["tests"], sandbox, config.evaluate.grade_timeout_s)

    return grade
