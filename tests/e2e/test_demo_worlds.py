"""`ostinato demo worlds` on the tiny model: the whole way from a world to simulated users, and the way that ends at the bar."""

import io

import pytest
from rich.console import Console

from ostinato.app.storage import open_log
from ostinato.config import load
from ostinato.core.conversation import Message, Role
from ostinato.core.records import Arm, Batch, ReleaseEvent, Turn
from ostinato.launch.commands.worlds.demo import Plan, demo_worlds, worlds_demo_overrides
from ostinato.status.run_report import RunReport
from ostinato.testing.tiny import tiny_model
from ostinato.worlds.tasks.task import Grading, Split, Task
from ostinato.worlds.tasks.tasksets import taskset_of

QUICK = (
    "model.dtype='float32'",
    "model.numerics=fast",
    "train.compute='fp32'",
    "train.publish='fp32'",
    "train.learning_rate=5e-3",
    "worlds.groups=4",
    "worlds.retry_pause_s=0.1",
    "worlds.measure_every=8",
    "reward.options={window=1.0}",
    "learn.poll_s=0.1",
    "evaluate.items=40",
    "evaluate.gate.first_draws=2",
    "evaluate.gate.max_draws=2",
    "evaluate.gate.margin=0.5",
    "evaluate.gate.total_margin=0.5",
    "release.poll_s=0.2",
    "release.outcomes.maturity_s=1.0",
    "release.trial.slot_s=2.0",
    "release.trial.min_people=3",
    "release.trial.min_turns=20",
    "release.trial.margin=0.5",
    "follow.interval_s=0.2",
)


def letters():
    """What a random model says now and then: a lower-case letter first."""
    return taskset_of(
        "functions",
        [
            Task(
                id=f"{split.value}{n}",
                family="letters",
                messages=(Message(role=Role.USER, text=f"say {n % 7}"),),
                grading=Grading(grader="pattern", data={"pattern": "^[a-z]"}),
                split=split,
                tokens=6,
            )
            for split in (Split.TRAIN, Split.HELD_OUT)
            for n in range(40)
        ],
    )


async def likes(head, text, *_):
    """The users want what the world taught: a random model writes no function that would pass its tests."""
    return float(text[:1].islower())


async def shown(tmp_path, monkeypatch, at_least, **seconds):
    """A whole demo: its report, what was printed, and the rows of its log."""
    monkeypatch.setattr("ostinato.launch.commands.worlds.demo.function_tasks", letters)
    monkeypatch.setattr("ostinato.launch.commands.scenarios.python_tests", likes)
    model = tiny_model(tmp_path / "model")
    tasks = tmp_path / "run" / "functions.jsonl"
    bars = f"evaluate.bars=[{{taskset='{tasks}', at_least={at_least}}}]"
    settings = (*worlds_demo_overrides(0, tmp_path / "run"), *QUICK, f"model.source='{model}'", bars)
    config, console = load(None, settings), Console(file=io.StringIO(), width=200)
    await demo_worlds(config, seed=0, plan=Plan(**seconds), out=tmp_path, console=console)
    report = RunReport.from_json((tmp_path / "report.json").read_bytes())
    assert "From a simulated world to simulated users" in (tmp_path / "report.html").read_text()
    with open_log(config) as log:
        rows = [row async for _, row in log.read(0, {Turn, Batch, ReleaseEvent})]
    return (
        report,
        console.file.getvalue(),
        {kind: [r for r in rows if isinstance(r, kind)] for kind in (Turn, Batch, ReleaseEvent)},
    )


@pytest.mark.examination
async def test_what_a_world_taught_goes_through_bar_and_canary_to_users(tmp_path, monkeypatch):
    report, told, rows = await shown(tmp_path, monkeypatch, 0.01, training_s=15.0, users_s=40.0)
    summary = dict(report.summary)
    (live,) = [event for event in rows[ReleaseEvent] if event.action == "shipped" and event.previous is not None]
    (begun,) = [event for event in rows[ReleaseEvent] if event.action == "canary"]
    assert live.policy == begun.policy
    assert begun.at < live.at
    served = {
        arm: {span.policy for turn in rows[Turn] if turn.arm is arm for span in turn.spans}
        for arm in (Arm.LIVE, Arm.CANARY, Arm.CONTROL)
    }
    base = live.previous
    assert served == {
        Arm.LIVE: {base, live.policy},
        Arm.CANARY: {live.policy, base},
        Arm.CONTROL: {base},
    } or served == {
        Arm.LIVE: {base, live.policy},
        Arm.CANARY: {live.policy},
        Arm.CONTROL: {base},
    }
    people = [turn for turn in rows[Turn] if turn.arm.people]
    assert min(turn.started_at for turn in people) > max(batch.at for batch in rows[Batch]), (
        "nothing is learned from users"
    )
    assert summary["bar on score of world functions"].startswith("cleared: 99% bound ")
    assert summary["solved in the world, held-out tasks"].endswith("40 tasks x 2")
    assert " pp, 95% [" in summary["live minus control"]
    assert "acceptance, live arm, trained in the world" in summary
    assert "acceptance, control arm, not trained in it" in summary
    assert summary["turns accounted for"] == "all, once each"
    assert summary["user requests, failed"].endswith(", 0")
    assert [bar.label for bar in report.held_out] == [
        "held-out tasks, base",
        f"held-out tasks, v{live.policy.number}",
    ]
    assert report.users > 20
    assert "live minus control" in told


@pytest.mark.examination
async def test_below_the_bar_there_are_no_users(tmp_path, monkeypatch):
    report, told, rows = await shown(tmp_path, monkeypatch, 0.88, training_s=5.0, users_s=40.0)
    assert not [turn for turn in rows[Turn] if turn.arm.people]
    assert {event.action for event in rows[ReleaseEvent]} == {"shipped", "evaluated", "blocked"}
    summary = dict(report.summary)
    assert summary["bar on score of world functions"].startswith("MISSED: 99% bound ")
    assert summary["live minus control"] == "it did not go live"
    assert summary["turns accounted for"] == "all, once each"
    assert (report.users, report.curves) == (0, ())
    assert "was not tried on users: below a quality bar (score of world functions" in told
