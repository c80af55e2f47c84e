"""Where code that a model wrote is run, and what an answer is worth."""

from __future__ import annotations

from ostinato.config import Config
from ostinato.core.errors import BadConfig
from ostinato.evaluate.graders import pattern
from ostinato.evaluate.runner import Grader
from ostinato.evaluate.suites import Item
from ostinato.worlds.grader import python_tests
from ostinato.worlds.sandbox import Sandbox


def open_grader(config: Config) -> Grader:
    """Grades one answer to a suite item: in the sandbox, or by pattern. Raises BadConfig for a grader that does not exist."""
    sandbox = Sandbox(config.sandbox)

    async def grade(item: Item, text: str) -> float:
        if item.grader == "pattern":
            return pattern(item, text)
        if item.grader == "python_tests":
            data = item.data
            return await python_tests(data["head"], text, data["tests"], sandbox, config.evaluate.grade_timeout_s)
        raise BadConfig(f"suite item {item.id!r}: no grader {item.grader!r}; there are 'python_tests' and 'pattern'")

    return grade
