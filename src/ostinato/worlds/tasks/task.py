"""Data types of tasks in simulated worlds: a task's prompt, sandbox, limits and grading."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ostinato.core.conversation import Message
from ostinato.core.sandbox import SandboxSpec


class Split(StrEnum):
    """The use of a task: training, evaluation (held out), or canary. A canary cannot be solved: a rollout that solves it has cheated."""

    TRAIN = "train"
    HELD_OUT = "held_out"
    CANARY = "canary"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grading:
    """How an outcome is graded: a grader's name and its data.

    `hidden`: files that only the grader's own sandbox ever sees. `timeout_s`: time limit for one run of its programs; with `pytest`, up to
    four times as much if the reference solution needs it.

    Example: ``Grading(grader="pytest", data={"fail_to_pass": ["test_calc.py::test_add"]}, hidden={"test_calc.py": b"..."})``
    """

    grader: str
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])
    hidden: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    timeout_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownAnswer:
    """A question about a task with a known answer, for measuring the policy's belief after each turn (`reward.belief`).

    Neither is ever shown in a rollout.

    Example: ``KnownAnswer(question="Which function is wrong? Its name alone.", answer="add")``
    """

    question: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task.

    `family`: its kind, for statistics. `messages`: the prompt; if the last message is the assistant's, the answer continues it. `harness`:
    the name of its harness. `turns`: most model calls. `tokens`: most tokens of one answer, which ends before any text of `stop`.
    `temperature`: None for the run's (`worlds.temperature`). `timeout_s`: time limit of the whole rollout. `about`: notes for people.

    Example::

        Task(id="calc-1", family="repair", messages=(Message(role=Role.USER, text="Tests fail. Mend calc.py."),),
             spec=SandboxSpec(files={"calc.py": b"..."}), grading=Grading(grader="pytest"), harness="tools")
    """

    id: str
    family: str
    messages: tuple[Message, ...]
    grading: Grading
    spec: SandboxSpec = field(default_factory=SandboxSpec)
    harness: str = "single"
    split: Split = Split.TRAIN
    turns: int = 1
    tokens: int = 512
    stop: tuple[str, ...] = ()
    temperature: float | None = None
    top_p: float = 1.0
    timeout_s: float = 600.0
    about: Mapping[str, str] = field(default_factory=dict[str, str])
    known: KnownAnswer | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Taskset:
    """A named set of tasks, with the BLAKE3 hash of their whole content, hidden files included.

    Example: ``Taskset(name="functions", hash="9f2c...", tasks=(task,))``
    """

    name: str
    hash: str
    tasks: tuple[Task, ...]
