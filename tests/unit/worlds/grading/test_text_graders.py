"""The graders of text: a pattern in the last message, and a suggestion that may be silent."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from ostinato.core.conversation import Message, Role
from ostinato.core.errors import BadConfig, Unavailable
from ostinato.worlds.grading import grade
from ostinato.worlds.grading.grade import PatternGrader, SuggestionGrader
from ostinato.worlds.harness.rollout import Ended, Rollout
from ostinato.worlds.tasks.task import Grading, Task


def rollout(*said):
    messages = [Message(role=Role.USER, text="say yes"), *(Message(role=Role.ASSISTANT, text=text) for text in said)]
    return Rollout(task="t", harness="single@h", ended=Ended.SUBMITTED, messages=tuple(messages), turns=("c:0",))


def task(**data):
    return Task(id="t", family="f", messages=(), grading=Grading(grader="pattern", data=data))


@pytest.mark.parametrize(("said", "value"), [(("no", "yes"), 1.0), (("yes", "no"), 0.0), ((), 0.0)])
async def test_the_models_last_message_counts(said, value):
    assert (await PatternGrader().grade(task(pattern="^y"), rollout(*said))).value == value


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({}, "needs a string 'pattern'"),
        ({"pattern": 7}, "needs a string 'pattern'"),
        ({"pattern": "x" * 1_001}, "of 1 to 1000 characters"),
        ({"pattern": "("}, "is not a regular expression"),
    ],
)
async def test_a_task_without_a_usable_pattern_cannot_be_graded(data, told):
    with pytest.raises(BadConfig, match=f"task 't': .*{told}"):
        await PatternGrader().grade(task(**data), rollout("yes"))


async def test_only_the_beginning_of_an_answer_is_searched():
    assert (await PatternGrader().grade(task(pattern="y"), rollout("n" * 19_999 + "y"))).value == 1.0
    assert (await PatternGrader().grade(task(pattern="y"), rollout("n" * 20_000 + "y"))).value == 0.0


async def test_a_pattern_that_never_ends_ends_with_its_time_and_holds_nobody_up(monkeypatch):
    data = {"pattern": "^(a|aa)+(b|c)+$"}
    endless = Task(id="t", family="f", messages=(), grading=Grading(grader="pattern", data=data, timeout_s=0.5))
    turns, searched, honest = [], [], grade.read_pattern(endless).search

    def search(text, **how):
        searched.append(time.monotonic())
        try:
            return honest(text, **how)
        finally:
            searched.append(time.monotonic())

    async def neighbour():
        while True:
            await asyncio.sleep(0)
            turns.append(time.monotonic())

    monkeypatch.setattr(grade, "read_pattern", lambda task: SimpleNamespace(search=search))
    beside = asyncio.create_task(neighbour())
    with pytest.raises(Unavailable, match=r"task 't': .*0\.5 s \(grading\.timeout_s\)"):
        await PatternGrader().grade(endless, rollout("a" * 5_000))
    beside.cancel()
    began, ended = searched
    edge = (ended - began) / 10  # where the interpreter's lock goes from one thread to the other
    assert any(began + edge < at < ended - edge for at in turns)


# ---------------------------------------------------------------- suggestions


T = 0.25
MEANT = {"meant": "Friday", "nothing": "-", "t": T}


@pytest.mark.parametrize(
    ("text", "score"),
    [(" Friday", 1.0), ("friday", 0.0), ("Friday, Saturday", 0.0), ("-", T), ("", T), ("- ", T), ("--", 0.0)],
)
async def test_the_grader_tells_right_wrong_and_nothing_apart(text, score):
    assert (await SuggestionGrader().grade(task(**MEANT), rollout(text))).value == score


@pytest.mark.parametrize("field", ["meant", "nothing", "t"])
async def test_a_suggestion_without_its_fields_is_refused(field):
    for data in ({key: value for key, value in MEANT.items() if key != field}, MEANT | {field: 7}):
        with pytest.raises(BadConfig, match="task 't': grader 'suggestion' needs"):
            await SuggestionGrader().grade(task(**data), rollout("x"))
