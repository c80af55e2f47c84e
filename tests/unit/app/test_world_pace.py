"""What a run's pace cannot keep is said aloud before the first step, with what to change."""

import pytest

from ostinato.app.worlds import check_steps, check_tasks, function_tasks, open_taskset, warn_of_staleness
from ostinato.config import load
from ostinato.core.conversation import Message, Role
from ostinato.core.errors import BadConfig
from ostinato.worlds.tasks.task import Grading, KnownAnswer, Split, Task
from ostinato.worlds.tasks.tasksets import save, taskset_of


def task(**changes) -> Task:
    fields = {"id": "t", "family": "f", "messages": (Message(role=Role.USER, text="Go."),)}
    return Task(**fields | {"grading": Grading(grader="pattern", data={"pattern": "x"})} | changes)


def of(*tasks: Task):
    return taskset_of("tasks", tasks)


def test_long_rollouts_that_would_be_held_back_are_named_and_only_then(caplog):
    tasks = function_tasks()
    warn_of_staleness(load(None, []), tasks)
    assert caplog.text == ""
    warn_of_staleness(load(None, ["worlds.lead=7", "worlds.window=32"]), tasks)
    assert "12 steps behind" in caplog.text
    assert "reward.world_staleness is 8" in caplog.text


def test_answers_too_long_for_a_steps_groups_are_named(caplog):
    warn_of_staleness(load(None, []), of(task(turns=8, tokens=1024)))
    assert "may have 131072 tokens in answers alone, so that a step may hold 1 of worlds.groups = 8" in caplog.text
    assert "32 steps behind" in caplog.text


def test_too_few_tasks_for_one_step_are_refused():
    with pytest.raises(BadConfig, match=r"gives 1 groups .* takes 8 .* set worlds\.epochs=0"):
        check_steps(load(None, ['learn.source="worlds"']), of(task()))
    check_steps(load(None, ['learn.source="worlds"', "worlds.epochs=0"]), of(task()))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"harness": "toolz"}, "no harness 'toolz'; there are single, repair, tools, and agent"),
        ({"harness": "agent-claude"}, r"not configured; add \[worlds.harness.agent-claude\] with its command"),
        ({"grading": Grading(grader="pytst")}, "no grader 'pytst'; there are function, pattern, pytest"),
        ({"grading": Grading(grader="pattern", data={"pattern": "("})}, "is not a regular expression"),
        ({"grading": Grading(grader="python_tests", data={"head": "x"})}, "needs a 'head'"),
        ({"grading": Grading(grader="pytest", data={"fail_to_pass": ["t.py::a"]})}, "grading.solution"),
        ({"grading": Grading(grader="function", data={"nonsense": 1})}, "grading.entry"),
    ],
    ids=str,
)
def test_a_task_that_nobody_can_work_on_or_grade_is_named(changes, said):
    with pytest.raises(BadConfig, match=f"task 't'.*{said}"):
        check_tasks(load(None, []), [task(**changes)])


KNOWN = KnownAnswer(question="Which?", answer="this")


@pytest.mark.parametrize("setting", ["reward.belief.strength", "worlds.suspects"])
def test_belief_without_a_known_answer_to_learn_from_is_refused(setting, tmp_path):
    save(of(task(id="a"), task(id="b", split=Split.HELD_OUT, known=KNOWN)), tmp_path / "plain.jsonl")
    save(of(task(id="a", known=KNOWN), task(id="b")), tmp_path / "known.jsonl")

    def opened(name: str, value: int):
        told = ['learn.source="worlds"', f'worlds.file="{tmp_path / name}"', f"{setting}={value}"]
        return open_taskset(load(None, told))

    with pytest.raises(BadConfig, match=rf"{setting} is set, .* give tasks the field 'known', or set {setting} = 0"):
        opened("plain.jsonl", 1)
    opened("plain.jsonl", 0)
    opened("known.jsonl", 1)


def test_an_agents_conversation_is_not_asked_what_it_believes():
    config = load(None, ['worlds.harness.agent-own.command=["own"]'])
    with pytest.raises(BadConfig, match="task 't', field 'known': an agent's conversation is its own; leave it out"):
        check_tasks(config, [task(harness="agent-own", known=KNOWN)])
