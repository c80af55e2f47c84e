"""A checkpoint that is surer of less is named; tasks that were tried too seldom do not count."""

import io
import json

import pytest
from rich.console import Console

from ostinato.core.errors import BadRequest, NotFound
from ostinato.core.records import PolicyVersion
from ostinato.evaluate.coverage import ScoredAttempt, covered, lost_coverage
from ostinato.launch.commands.worlds.run import read_attempts, show_coverage


def tried(number, solved, tasks=60, k=8):
    """`solved(task)`: how many of a task's k tries succeed."""
    policy = PolicyVersion(number=number, hash=f"{number:02x}")
    return [
        ScoredAttempt(task=f"t{task}", family="repair", policy=policy, value=float(at < solved(task)))
        for task in range(tasks)
        for at in range(k)
    ]


BROAD, NARROW, BETTER = (lambda t: 2), (lambda t: 8 * (t % 2)), (lambda t: 6)


def test_narrowing_is_named_and_learning_is_not():
    rows = covered([*tried(1, BROAD), *tried(2, NARROW)], 8)
    assert [(row.rates.first.mean, row.rates.best.mean) for row in rows] == [(0.25, 1.0), (0.5, 0.5)]
    assert lost_coverage(rows).policy.number == 2
    assert lost_coverage(covered([*tried(1, BROAD), *tried(2, BETTER)], 8)) is None
    assert lost_coverage(covered([*tried(1, BROAD), *tried(2, NARROW), *tried(3, BETTER)], 8)) is None
    assert lost_coverage([]) is None


def test_tasks_that_were_tried_too_seldom_are_counted_and_left_out():
    (row,) = covered([*tried(1, BROAD, tasks=12), *tried(1, BROAD, tasks=20, k=3)[36:]], 8)
    assert (row.short, row.rates.first.items, row.attempts) == (8, 12, 120)
    (alone,) = covered(tried(1, BROAD, k=3), 8)
    assert (alone.rates, alone.change, alone.short) == (None, None, 60)


def written(path, attempts, **more):
    lines = [
        {"task": a.task, "family": a.family, "split": "held_out", "value": a.value}
        | {"policy": {"number": a.policy.number, "hash": a.policy.hash}}
        | more
        for a in attempts
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


def test_the_command_tells_from_a_file_of_rollouts(tmp_path):
    file = written(tmp_path / "r.jsonl", [*tried(1, BROAD), *tried(2, NARROW)])
    out = io.StringIO()
    show_coverage(file, 8, Console(file=out, width=200), machine=False)
    assert "v2 has narrowed" in out.getvalue()
    out = io.StringIO()
    show_coverage(file, 8, Console(file=out, width=200), machine=True)
    assert json.loads(out.getvalue())["lost"].startswith("v2@")
    assert read_attempts(written(tmp_path / "t.jsonl", tried(1, BROAD), split="train")) == []
    with pytest.raises(BadRequest, match="line 1"):
        read_attempts(written(tmp_path / "b.jsonl", tried(1, BROAD), value=2.0))
    with pytest.raises(NotFound):
        read_attempts(tmp_path / "none")
    with pytest.raises(BadRequest):
        show_coverage(file, 1, Console(file=out), machine=False)
