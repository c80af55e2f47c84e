"""The ledger of a log: whose turns count as what, and what is taken to lie in the cache."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from ostinato.app.storage import open_log
from ostinato.compute.ledger import OperationLedger, TokenWork
from ostinato.config import load
from ostinato.core.records import Arm, Batch
from ostinato.launch.commands.compute import fill, lent_of, show_compute
from ostinato.testing.log import MemoryLog
from ostinato.testing.records import a_turn
from ostinato.testing.tiny import tiny_model

WORK = TokenWork(body=6, head=2, pair=4)


def turn(name, prompt, answer, **more):
    made = a_turn()
    span = replace(made.spans[0], tokens=answer)
    more = {"parent": None, "arm": Arm.LIVE, **more}
    return replace(
        made,
        id=name,
        prompt_ids=(1,) * prompt,
        sampled_ids=(2,) * answer,
        logprobs=(-0.1,) * answer,
        spans=(span,),
        **more,
    )


async def test_a_log_by_hand():
    first, second = turn("a", 4, 2), turn("b", 9, 3, parent="a")
    asked, foreign = turn("c", 5, 1, arm=Arm.EVAL), turn("d", 50, 9, arm=Arm.OUTSIDE)
    batch = Batch(step=1, turns=("a", "b"), credits=((1.0,) * 2, (1.0,) * 3), reference=first.spans[0].policy, at=50.0)
    alone = replace(batch, step=2, turns=("b",), credits=((1.0,) * 3,))
    log = MemoryLog()
    await log.append(first, second, asked, foreign, batch, alone)
    wanted = (
        OperationLedger()
        .served(WORK, 4, 0, 2, evaluation=False)
        .served(WORK, 9, 6, 3, evaluation=False)
        .served(WORK, 5, 0, 1, evaluation=True)
        .stepped(WORK, [(4, 0, 2), (9, 6, 3)])
        .stepped(WORK, [(9, 0, 3)])
    )
    assert await fill(log, WORK) == wanted


async def test_the_command_reads_a_run_and_its_model(tmp_path):
    config = load(None, [f"run.directory='{tmp_path / 'run'}'", f"model.source='{tiny_model(tmp_path / 'model')}'"])
    made = turn("a", 4, 3)
    with open_log(config) as log:
        await log.append(
            made, Batch(step=1, turns=("a",), credits=((1.0,) * 3,), reference=made.spans[0].policy, at=50.0)
        )
    text, data = io.StringIO(), io.StringIO()
    await show_compute(config, Console(file=text, width=200), machine=False)
    await show_compute(config, Console(file=data, width=200), machine=True)
    found = json.loads(data.getvalue())
    body, head, pair = 2 * 2 * (2 * 64 * 16 * 6 + 3 * 64 * 128), 2 * 64 * 260, 4 * 2 * 4 * 16
    assert found["decode"] == 2 * body + 2 * head + pair * (5 + 6)
    assert found["backward"] == 2 * (7 * body + 3 * head + pair * 28)
    assert found["sampling_per_training"] == pytest.approx(
        (found["prefill"] + found["decode"]) / (1.5 * found["backward"])
    )
    assert f"{found['sampling_per_training']:.3f} for each operation of training" in text.getvalue()


def test_what_people_lent_is_added_up_over_the_gateways_starts():
    lines = [
        {"kind": "swapped"},
        {"kind": "lent", "since": 1.0, "seconds": 5.0, "tokens": 10, "cut": 0},
        {"kind": "lent", "since": 1.0, "seconds": 9.0, "tokens": 30, "cut": 1},
        {"kind": "lent", "since": 7.0, "seconds": 2.0, "tokens": 4, "cut": 2},
    ]
    assert lent_of(lines) == {"seconds": 11.0, "tokens": 34, "cut": 3}
    assert lent_of([]) == {"seconds": 0, "tokens": 0, "cut": 0}
