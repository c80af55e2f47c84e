"""Steps from rewards in the repository world: a run that is killed at any place goes on, with nothing learned from twice."""

import asyncio
import json
from collections import Counter
from typing import ClassVar

import pytest
from benchmarks.worlds import repository_rewards as rewards
from benchmarks.worlds.repository_world import Repository, RepositoryReader, tasks_of
from tests.deadlines import WHOLE_PROGRAM_S
from tests.fakes.scripted_model import ScriptedModel, says

from ostinato.core.records import Batch
from ostinato.record.log import SqlLog
from ostinato.testing.tiny import tiny_model
from ostinato.train.trainer import PolicyTrainer
from ostinato.worlds.grading.grade import Grade


class Turnabout:
    """Every other rollout of a task is worth something, so that its group can be learned from."""

    graded: ClassVar = Counter()

    async def grade(self, task, rollout):
        Turnabout.graded[task.id] += 1
        return Grade(value=float(Turnabout.graded[task.id] % 2))


@pytest.fixture
def small(tmp_path, monkeypatch):
    monkeypatch.setattr(rewards, "REPOSITORIES", 1)
    monkeypatch.setattr(rewards, "SIZES", ((900, 1000), 1))
    monkeypatch.setattr(rewards, "GROUP", 3)
    monkeypatch.setattr(rewards, "PatternGrader", Turnabout)
    monkeypatch.setattr(Turnabout, "graded", Counter())
    return tiny_model(tmp_path / "base", context=4096), tmp_path / "run"


def learn(small, steps):
    base, place = small
    return rewards.learn(base, "all", place, seed=0, groups=2, rate=1e-4, steps=steps, minutes=60)


def journal(place, kind):
    lines = map(json.loads, (place / "rollouts.jsonl").read_text().splitlines())
    return Counter((line["n"], line.get("member")) for line in lines if line["kind"] == kind and line.get("last", True))


async def batches(place):
    with SqlLog.open(place / "log") as log:
        return [row async for _, row in log.read(0, {Batch})]


async def test_a_run_that_was_killed_goes_on_with_what_had_ended(small, monkeypatch):
    _, place = small
    assert await learn(small, 1) == 1

    def killed(*_):
        raise InterruptedError

    with monkeypatch.context() as patch:
        patch.setattr(PolicyTrainer, "step", killed)
        work = asyncio.create_task(learn(small, 2))
        async with asyncio.timeout(WHOLE_PROGRAM_S):
            while sum(journal(place, "ended").values()) < 6 + 2:
                await asyncio.sleep(0.01)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        before = journal(place, "ended")
        with pytest.raises(InterruptedError):
            await learn(small, 2)
    (first, recorded) = await batches(place)
    assert await learn(small, 2) == 2
    assert await batches(place) == [first, recorded], "a step that is in the log is taken as it is there"
    assert not set(first.turns) & set(recorded.turns)
    after = journal(place, "ended")
    assert before <= after
    assert max(after.values()) == 1, "no member is rolled out twice"
    steps = [json.loads(line) for line in (place / "steps.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    (before, after) = (set(step["questions"]) for step in steps)
    assert not before & after
    assert min(len(before), len(after)) >= 6, "two groups of three, and whatever else ended before the step"
    assert (place / "model" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("note", "answer", "value"),
    [
        ("{first} = {second} = {n}", "{n}", 1.0),
        ("nothing", "{n}", 1.0),
        ("{first} = {second} = {n}", "7", 0.5),
        ("{first} = {second} = ?", "7", 0.25),
        ("{first} = ?", "7", 0.0),
    ],
)
async def test_facts_in_the_last_notes_are_worth_a_part_of_the_answer(note, answer, value):
    repository = Repository.drawn(3, characters=2000, links=(2,))
    (task,), (chain,) = tasks_of("r", repository), repository.chains
    first, second = (name.split(".")[1] for name in chain.names)
    reader = RepositoryReader(1000)
    notes = [says("?")] * (len(reader.parts(task)) - 1)
    model = ScriptedModel(
        *notes, says(note.format(first=first, second=second, n=chain.number)), says(answer.format(n=chain.number))
    )
    rollout = await reader.run(task, model, None)
    grade = await rewards.NotesGrader({task.id: (task, chain)}, 0.5).grade(task, rollout)
    assert grade.value == value
    plain = await rewards.NotesGrader({}, 0.0).grade(task, rollout)
    assert plain.value == float(value == 1.0)


def test_differences_are_paired_and_repositories_are_their_units():
    def answers(*right):
        rows = [{"right": each, "kept": int(each), "known": 2} for each in right]
        return {"questions": {f"r{n // 2}-{n % 2}": row for n, row in enumerate(rows)}}

    found = rewards.compared(answers(0.0, 0.0, 1.0, 0.0), answers(1.0, 1.0, 0.0, 0.0))
    assert (found["gained"], found["lost"]) == (2, 1)
    assert found["right"].startswith("+0.250 [")
    assert found["right"].endswith("over 2 repositories")
    assert found["facts kept"].startswith("+0.125 [")
