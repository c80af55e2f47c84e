"""`ostinato demo --scenario tab` on the tiny model: the whole command, from the first request to the report."""

import io

import pytest
from rich.console import Console

from ostinato.app.storage import open_log
from ostinato.config import load
from ostinato.core.records import Reward, Turn
from ostinato.demo.tab import HELD_OUT
from ostinato.launch.commands.demo import demo, demo_overrides
from ostinato.status.run_report import RunReport
from ostinato.testing.tiny import tiny_model

QUICK = (
    "model.dtype='float32'",
    "train.compute='fp32'",
    "train.publish='fp32'",
    "reward.options={window=2.0, t=0.25, nothing='-'}",
    "learn.batch=24",
    "evaluate.runner.samples_per_request=2",
    f"evaluate.items={2 * HELD_OUT}",
    # two families resolve no less
    "evaluate.gate.margin=0.3",
    "evaluate.gate.total_margin=0.4",
)


@pytest.mark.examination
async def test_the_report_says_where_suggestions_are_made(tmp_path):
    model = tiny_model(tmp_path / "model")
    settings = (*demo_overrides("tab", 0, tmp_path / "run"), *QUICK, f"model.source='{model}'")
    config = load(None, settings)
    console = Console(file=io.StringIO(), width=160)
    await demo(config, scenario="tab", seed=0, minutes=0.3, out=tmp_path, console=console)

    report = RunReport.from_json((tmp_path / "report.json").read_bytes())
    assert report.users > 20
    summary = dict(report.summary)
    assert summary["turns accounted for"] == "all, once each"
    assert summary["user requests, failed"].endswith(", 0")
    assert {"suggestions, live against control", "accept rate, live against control"} <= set(summary)
    assert "live" in {curve.arm for curve in report.suggested}
    assert report.calibration is not None
    assert [family.family for family in report.calibration.families] == ["same", "days"]
    assert "Where suggestions are made" in (tmp_path / "report.html").read_text()
    assert "suggestions, live against control" in console.file.getvalue()

    with open_log(config) as log:
        rows = [row async for _, row in log.read(0, {Turn, Reward})]
    texts = {row.id: row.text.strip() for row in rows if isinstance(row, Turn)}
    rewards = [row for row in rows if isinstance(row, Reward)]
    assert len(rewards) > 20
    assert {row.function for row in rewards} == {"tab@1"}
    assert all((row.value == 0.0) == (texts[row.turn] in ("", "-")) for row in rewards)
