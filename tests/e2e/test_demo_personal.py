"""`ostinato demo --scenario personal` on the tiny model: the whole command, from the fit to the report and the verdict."""

import io

import pytest
from rich.console import Console

from ostinato.app.storage import open_log
from ostinato.config import load
from ostinato.core.arm_assignment import holdout_place
from ostinato.core.errors import BadConfig
from ostinato.core.records import Batch, SteeringBasis, Turn
from ostinato.core.steering import DialPrior
from ostinato.launch.commands.personal_demo import PersonalSize, personal_demo, personal_overrides
from ostinato.status.run_report import RunReport
from ostinato.testing.tiny import tiny_model

QUICK = ("model.dtype='float32'", "train.compute='fp32'", "train.publish='fp32'")


def settings(tmp_path, *more):
    model = tiny_model(tmp_path / "model")
    return load(None, (*personal_overrides(0, tmp_path / "run"), *QUICK, f"model.source='{model}'", *more))


@pytest.mark.examination
async def test_the_report_compares_people_with_dials_with_the_holdout(tmp_path):
    config = settings(tmp_path)
    console = Console(file=io.StringIO(), width=160)
    size = PersonalSize(each=16, first=(20, 3), second=(20, 3))
    shown = await personal_demo(config, seed=0, out=tmp_path, console=console, size=size)

    said = console.file.getvalue()
    assert "simulated people" in said
    assert "a prior from 20 people's ratings" in said
    assert "pp, 95% [" in said
    assert ("not shown" in said) != shown
    assert "dials: people with dials accept" in said
    report = RunReport.from_json((tmp_path / "report.json").read_bytes())
    assert {curve.arm for curve in report.curves} == {"dials", "holdout"}
    assert any("simulated" in note for note in report.notes)
    assert report.users == 80
    page = (tmp_path / "report.html").read_text()
    assert "People's dials" in page
    assert "second wave, dials minus holdout" in page

    with open_log(config) as log:
        rows = [row async for _, row in log.read(0, {Turn, SteeringBasis, Batch, DialPrior})]
    assert isinstance(rows[0], SteeringBasis), "the basis is there before anybody asks"
    assert not any(isinstance(row, Batch) for row in rows), "nothing is trained"
    turns = [row for row in rows if isinstance(row, Turn)]
    held = [turn for turn in turns if holdout_place(turn.person) < config.adapt.holdout]
    assert len(held) == len(turns) - len(held) == 120
    assert all(turn.steered is None for turn in held)
    leaning = [turn.steered for turn in turns if turn.steered is not None]
    assert len(leaning) == 120
    (prior,) = [number for number, row in enumerate(rows) if isinstance(row, DialPrior)]
    first_of_second = {
        row.user: row.steered.kl
        for row in reversed(rows[prior:])
        if isinstance(row, Turn) and row.steered is not None and row.user.startswith("sim-2-")
    }
    assert len(first_of_second) == 20
    assert all(kl > 0 for kl in first_of_second.values()), "the second wave leans from the first answer"


async def test_without_a_holdout_it_says_what_to_set(tmp_path):
    config = settings(tmp_path, "adapt.holdout=0")
    with pytest.raises(BadConfig, match=r"adapt\.holdout is 0.*set 0\.05 to 0\.95"):
        await personal_demo(config, seed=0, out=tmp_path, console=Console(file=io.StringIO()))
