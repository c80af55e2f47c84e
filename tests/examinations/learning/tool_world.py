"""A world in which the model has a Python tool: questions about numbers in a file, which cannot be answered without reading it.

`tool_tasks` makes the tasks. `demonstrations` has a script that knows the answers' programs work through the same harness in the same
sandbox, for a start by imitation. It covers only some kinds of questions, so that the others must be learned from rewards.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.examinations.learning.demonstrating import Say, call_of, demonstrated

from ostinato.core.conversation import Message, Role
from ostinato.core.sandbox import SandboxSpec
from ostinato.core.seams import Backend
from ostinato.worlds.tasks.task import Grading, Split, Task, Taskset
from ostinato.worlds.tasks.tasksets import taskset_of

OFFERED = ("python",)
HARNESS = {"offered": list(OFFERED), "prompt": "Use the tool, then answer with the number alone."}
TURNS, TOKENS = 4, 96
READ = "x = [int(a) for a in open('numbers.txt')]\n"


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of question. `program` prints the answer, given the numbers as x; {k} stands for a number in the question."""

    name: str
    question: str
    program: str
    shown: bool = False


KINDS = (
    Kind("sum", "What is the sum of the numbers?", "print(sum(x))", shown=True),
    Kind("largest", "What is the largest number?", "print(max(x))", shown=True),
    Kind("count", "How many numbers are there?", "print(len(x))", shown=True),
    Kind("even", "How many of the numbers are even?", "print(len([a for a in x if a % 2 == 0]))", shown=True),
    Kind("smallest", "What is the smallest number?", "print(min(x))"),
    Kind("odd", "How many of the numbers are odd?", "print(len([a for a in x if a % 2 == 1]))"),
    Kind("above", "How many of the numbers are greater than {k}?", "print(len([a for a in x if a > {k}]))"),
    Kind("below", "How many of the numbers are less than {k}?", "print(len([a for a in x if a < {k}]))"),
    Kind("last", "What is the last number?", "print(x[-1])"),
    Kind("first", "What is the first number?", "print(x[0])"),
    Kind("spread", "What is the largest number minus the smallest?", "print(max(x) - min(x))"),
    Kind("even_sum", "What is the sum of the even numbers?", "print(sum(a for a in x if a % 2 == 0))"),
    Kind("different", "How many different numbers are there?", "print(len(set(x)))"),
    Kind("second", "What is the second largest number?", "print(sorted(x)[-2])"),
    Kind("above_sum", "What is the sum of the numbers greater than {k}?", "print(sum(a for a in x if a > {k}))"),
    Kind("double", "What is twice the sum of the numbers?", "print(2 * sum(x))"),
)


def tool_tasks(train: int = 12, held_out: int = 6) -> Taskset:
    """`train` taught and `held_out` held-out tasks of each kind, each with its own numbers."""
    tasks = [
        _task(kind, part, number)
        for kind in KINDS
        for part, count in ((Split.TRAIN, train), (Split.HELD_OUT, held_out))
        for number in range(count)
    ]
    return taskset_of("numbers", tasks)


async def demonstrations(backend: Backend, count: int) -> list[str]:
    """`count` lines for `ostinato train --demonstrations`, of the demonstrated kinds, about numbers that no task has."""
    shown = [kind for kind in KINDS if kind.shown]
    lines: list[str] = []
    for number in range(count):
        kind = shown[number % len(shown)]
        task, program = _made(kind, Split.TRAIN, f"demonstration {number}")
        lines.append(await demonstrated(backend, task, HARNESS, _answers(READ + program)))
    return lines


def _answers(program: str) -> Say:
    """A script that runs the program with the tool, then answers with its output."""

    def say(messages: Sequence[Message]) -> Message:
        if messages[-1].role is Role.TOOL:
            return Message(role=Role.ASSISTANT, text=messages[-1].text.split("\n")[0])
        return call_of("python", code=program)

    return say


def _task(kind: Kind, part: Split, number: int) -> Task:
    return _made(kind, part, f"{kind.name}-{part.value}-{number}")[0]


def _made(kind: Kind, part: Split, name: str) -> tuple[Task, str]:
    """A task and the program that solves it."""
    chance = random.Random(name)
    numbers = [chance.randint(1, 99) for _ in range(chance.randint(9, 24))]
    named = str(chance.randint(20, 80))
    program = kind.program.replace("{k}", named)
    answer = _answer(program, numbers)
    asked = f"numbers.txt has one number per line. {kind.question.replace('{k}', named)}"
    task = Task(
        id=name,
        family=kind.name,
        messages=(Message(role=Role.USER, text=asked),),
        grading=Grading(grader="pattern", data={"pattern": rf"^\s*{answer}\.?\s*\Z"}),
        spec=SandboxSpec(files={"numbers.txt": "".join(f"{each}\n" for each in numbers).encode()}),
        harness="tools",
        split=part,
        turns=TURNS,
        tokens=TOKENS,
        timeout_s=120.0,
    )
    return task, program


def _answer(program: str, numbers: Sequence[int]) -> str:
    """The output of one of the programs above."""
    said: list[str] = []
    tell: Callable[[object], None] = lambda value: said.append(str(value))  # noqa: E731
    exec(program, {"x": list(numbers), "print": tell})
    return said[0]
