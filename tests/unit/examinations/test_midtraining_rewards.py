"""The examination of rewards after mid-training, with the training itself replaced."""

import argparse
import inspect

from tests.examinations.learning import run as learning
from tests.examinations.midtraining import rewards

from ostinato.core.records import PolicyVersion
from ostinato.worlds.harness.rollout import Ended
from ostinato.worlds.rollout.finished import Finished
from ostinato.worlds.tasks.task import Split


def tried(number: int, family: str, solved: bool) -> str:
    policy = PolicyVersion(number=number, hash=f"{number:064x}")
    return Finished(
        at=1.0, taskset="9f2c", task=f"{family}-1", family=family, split=Split.HELD_OUT, harness="h", group=None, member=None,
        episode=f"e{number}{family}{solved}", turns=("t",), policy=policy, policy_last=policy, value=float(solved), solved=solved,
        why="", ended=Ended.SUBMITTED,
    ).line()  # fmt: skip


def test_success_before_and_after_is_read_by_family_from_what_training_leaves(tmp_path, monkeypatch):
    calls = []

    def leave(world, file, own, engine, seed, steps, place):
        calls.append(seed)
        assert own == {"model.source": "somewhere"}
        lines = [tried(0, "sums", False), tried(0, "sums", True), tried(0, "words", False)]
        lines += [tried(steps, "sums", True), tried(steps, "words", False)]
        learning.tried_in(place, world, engine, seed).write_text("\n".join(lines))
        return {"steps": steps}

    assert inspect.signature(leave).parameters.keys() == inspect.signature(learning.train).parameters.keys()
    monkeypatch.setattr(rewards, "train", leave)
    args = argparse.Namespace(work=tmp_path, steps=12)
    model = {"tokens": 512, "loss": 1.0, "source": "somewhere"}
    found = rewards.taught(model, tmp_path / "functions.jsonl", 3, args)
    assert found == {"before": {"sums": 0.5, "words": 0.0}, "after": {"sums": 1.0, "words": 0.0}}
    assert rewards.taught(model, tmp_path / "functions.jsonl", 3, args) == found
    assert calls == [3], "a finished part is not repeated"
