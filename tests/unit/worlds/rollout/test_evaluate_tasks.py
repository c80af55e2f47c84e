"""Measuring: every task as often as asked, what failed tried again, nothing told but that it was measured; figures by hand."""

import asyncio
import io
import random
from collections import Counter
from dataclasses import replace

import pytest
from rich.console import Console
from tests.unit.worlds.rollout.test_finished import TASK, V3, V5, a_record
from tests.unit.worlds.rollout.test_rollout_worker import Coin, FakeGateway, Steps, tasks

from ostinato.core.errors import BadConfig
from ostinato.core.records import Signal, Turn
from ostinato.launch.commands.worlds.run import chosen_tasks, figures_json, show_figures, solved
from ostinato.testing.log import MemoryLog
from ostinato.worlds.grading.grade import Grade
from ostinato.worlds.rollout.attempt import Measurement, Workshop
from ostinato.worlds.tasks.task import Split
from ostinato.worlds.tasks.tasksets import taskset_of


def a_measurement(count: int, *, tries=3, failing=0.0, away=0.0, grader=None):
    chance = random.Random(0)
    gateway = FakeGateway(MemoryLog(), chance)
    gateway.away = away
    harness = Steps(chance, failing)
    shop = Workshop(harnesses={"single": harness}, backend=None, grader=grader or Coin(chance), gateway=gateway)
    chosen = tasks(count).tasks
    return gateway.log, Measurement(chosen, shop, tries=tries, concurrency=4, token="m", again=3, pause_s=0.001)


async def test_each_task_is_tried_as_often_as_asked_and_only_measured():
    log, measurement = a_measurement(5, failing=0.3, away=0.1)
    found = [tried async for tried in measurement.results()]
    assert Counter(tried.task.id for tried in found) == {f"t{n}": 3 for n in range(5)}
    assert len({tried.episode for tried in found}) == 15
    told = [row for row in log.rows if isinstance(row, Signal)]
    assert {signal.name for signal in told} == {"rollout_measured"}
    assert {turn for tried in found for turn in tried.turns} <= {signal.turn for signal in told}
    assert {row.group for row in log.rows if isinstance(row, Turn)} == {None}


async def test_stopped_early_nothing_is_left_under_way():
    _, measurement = a_measurement(20)
    results = measurement.results()
    assert await anext(results)
    await results.aclose()
    assert len(asyncio.all_tasks()) == 1


async def test_a_task_that_cannot_be_graded_ends_it():
    class Helpless:
        async def grade(self, task, rollout):
            raise BadConfig("no grader 'coin'")

    _, measurement = a_measurement(3, grader=Helpless())
    with pytest.raises(BadConfig, match="no grader"):
        [tried async for tried in measurement.results()]
    assert len(asyncio.all_tasks()) == 1


def records(task: str, *values, family="repair", **more):
    return [a_record(task=replace(TASK, id=task, family=family), grade=Grade(value=value), **more) for value in values]


def test_rates_are_of_whole_solutions_with_tasks_as_clusters():
    found = [*records("a", 1.0, 0.0), *records("b", 0.5, 0.5), *records("c", 1.0, family="other")]
    found.append(a_record(task=replace(TASK, id="c", family="other"), grade=None))
    whole, other, repair = solved(found, 2)
    assert (whole.first.mean, whole.first.items) == (pytest.approx((0.5 + 0 + 1) / 3), 3)
    assert (whole.best.mean, whole.best.items) == (0.5, 2), "a task with too few graded tries says nothing of best-of-k"
    assert whole.value.mean == pytest.approx((0.5 + 0.5 + 1) / 3)
    assert (other.family, other.best, other.tries) == ("other", None, 1)
    assert (repair.first.mean, repair.best.mean) == (0.25, 0.5)
    assert whole.first.lower < 0.5 < whole.first.upper


def test_what_others_answered_who_cheated_and_what_was_not_graded_is_said():
    cheated = a_record(grade=Grade(value=1.0, cheated=("patched the judge",)), policies=(V5,))
    found = [*records("a", 1.0, policies=(V5,)), *records("a", 0.0, policies=(V3, V5)), cheated]
    found += [a_record(grade=None, policies=(V5,)), *records("a", 1.0, policies=())]
    out = io.StringIO()
    show_figures(found, 2, V5, Console(file=out, width=200))
    said = out.getvalue()
    for part in (
        "answered by v5@ee: 3 rollouts",
        "v3@cc to v5@ee: 1",
        "unnamed weights: 1",
        "patched the judge",
        "not graded, 1",
    ):
        assert part in said
    told = figures_json(found, 2, V5, whole=False)
    assert (told["ungraded"], told["ended"]["submitted"], told["whole"]) == (1, 5, False)
    assert sum(each["rollouts"] for each in told["answered_by"]) == 5


def test_tasks_are_chosen_by_split_and_drawn_by_the_seed():
    many = taskset_of("many", [*tasks(30).tasks, replace(tasks(1).tasks[0], id="out", split=Split.HELD_OUT)])
    assert [task.id for task in chosen_tasks(many, "held_out", 0, 0)] == ["out"]
    assert len(chosen_tasks(many, "all", 0, 0)) == 31
    drawn = [[task.id for task in chosen_tasks(many, "train", 8, seed)] for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(drawn[0]) == 8
    with pytest.raises(BadConfig, match="canary"):
        chosen_tasks(many, "canary", 0, 0)
