"""`ostinato adapt approve` on a tiny model: a style that costs quality is not approved, one that costs none is, and only for its text."""

import io
import json

import pytest
from rich.console import Console

from ostinato.adapt.styles import StyleApprovals, styles_of
from ostinato.app.storage import open_run
from ostinato.config import load
from ostinato.core.errors import BadConfig
from ostinato.core.notices import Alarm, AlarmState
from ostinato.launch.commands.adapt import approve, show
from ostinato.launch.workers.prepare import prepare
from ostinato.testing.tiny import tiny_model

RUDE = "Shout."


async def a_run(tmp_path, *more, harness="single"):
    tiny_model(tmp_path / "model")
    rows = [
        {
            "id": f"t{number}",
            "family": "any",
            "split": "held_out",
            "harness": harness,
            "tokens": 4,
            "messages": [{"role": "user", "content": str(number)}],
            "grading": {"grader": "pattern", "data": {"pattern": r"^[\s\S]*$"}},
        }
        for number in range(40)
    ]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = [
        f"run.directory={tmp_path / 'run'}",
        f"model.source={tmp_path / 'model'}",
        "model.numerics='fast'",
        "model.dtype='float32'",
        "engine.kv_tokens=16384",
        f"adapt.styles.suite='{tmp_path / 'tasks.jsonl'}'",
        "adapt.styles.margin=0.2",
        "adapt.styles.prompts.concise='Be brief.'",
    ]
    if not (tmp_path / "run").exists():
        with open_run(load(None, sets)) as run:
            await prepare(run, lambda _: None)
    return load(None, [*sets, *more])


async def alarms(config):
    with open_run(config) as run:
        live = await run.follower.resolve("live")
        return live, [row async for _, row in run.log.read(0, {Alarm}) if row.name.startswith("style:")]


def with_losses(monkeypatch, text):
    """Answers in the style with this text score nothing."""
    from ostinato.app import dials

    attempted = dials._LiveAnswers._attempted

    def spoilt(self, *args):
        made = attempted(self, *args)

        async def grade():
            return 0.0 if self.style == text else 1.0

        object.__setattr__(made, "grade", grade)
        return made

    monkeypatch.setattr(dials._LiveAnswers, "_attempted", spoilt)


async def test_what_costs_no_quality_is_approved_for_its_text_and_version_and_what_does_is_not(tmp_path, monkeypatch):
    with_losses(monkeypatch, RUDE)
    config, said = await a_run(tmp_path, f"adapt.styles.prompts.rude='{RUDE}'"), io.StringIO()
    assert not await approve(config, seed=1, console=Console(file=said, width=140))
    live, rows = await alarms(config)
    assert [(row.name, row.state) for row in rows] == [
        ("style:concise", AlarmState.CLEARED),
        ("style:rude", AlarmState.RAISED),
    ]
    assert "-100.0 pp" in said.getvalue()
    concise, rude = styles_of(config.adapt)
    found = StyleApprovals(0)
    for row in rows:
        found.take(row)
    assert [found.holds(style.arm, live) for style in (concise, rude)] == [True, False]
    assert all(row.detail["shared"] for row in rows), "no tenant's branch has this version"
    config = await a_run(tmp_path)  # the rude one was taken out
    assert await approve(config, seed=1, console=Console(file=io.StringIO()))
    assert {row.name: row.state for row in (await alarms(config))[1]}["style:rude"] is AlarmState.CLEARED
    for row in (await alarms(config))[1]:
        found.take(row)
    assert not found.holds(rude.arm, live), "that its alarm was cleared approves nothing"


async def test_a_person_of_the_control_arm_is_told_of_no_chance(tmp_path, monkeypatch):
    with_losses(monkeypatch, "")
    people = ["adapt.holdout=0.0", "adapt.users='declared'", "serve.arm_users='declared'"]
    assert await approve(await a_run(tmp_path), seed=1, console=Console(file=io.StringIO()))
    for share in (0.0, 1.0):
        config, said = await a_run(tmp_path, *people, f"serve.control_share={share}"), io.StringIO()
        await show(config, "default", "ann", Console(file=said, width=140), machine=True)
        concise = json.loads(said.getvalue())["style"]["styles"][1]
        assert (concise["name"], concise["chance"] is None) == ("concise", share == 1.0)


async def test_the_models_own_prompt_holds_the_style(tmp_path, monkeypatch):
    from ostinato.app import dials

    shown = []
    generate_of = dials.Generate

    def noted(**fields):
        shown.append(len(fields["prompt_ids"]))
        return generate_of(**fields)

    monkeypatch.setattr(dials, "Generate", noted)
    await approve(await a_run(tmp_path), seed=1, console=Console(file=io.StringIO()))
    plain, styled = shown[: len(shown) // 2], shown[len(shown) // 2 :]
    assert min(styled) > max(plain)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["adapt.styles.prompts={}"], "adapt.styles.prompts"),
        (["adapt.styles.suite=''"], "adapt.styles.suite"),
    ],
)
async def test_without_styles_or_a_suite_it_says_what_to_set(tmp_path, more, why):
    with pytest.raises(BadConfig, match=why):
        await approve(await a_run(tmp_path, *more), seed=1, console=Console(file=io.StringIO()))
