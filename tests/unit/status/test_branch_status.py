"""What an operator is told of tenants' branches: a line of `ostinato status`, its JSON, the page's section and the metrics."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console
from tests.unit.app.test_branches import publish, said, settings, turn

from ostinato.app.branches import TenantRows, begin_branch, branch_config, open_branches
from ostinato.app.evaluation import open_releases
from ostinato.app.storage import open_log, open_run, open_store
from ostinato.app.trainer import open_desk
from ostinato.core.errors import Corrupt
from ostinato.core.notices import Alarm, AlarmState
from ostinato.core.records import Arm
from ostinato.launch.commands.status import show_status
from ostinato.launch.views.numbers import LearningNumbers
from ostinato.record.log import SqlLog
from ostinato.status.branches import BranchReader, branch_line
from ostinato.status.worker_status import WorkerBoard, WorkerStatus
from ostinato.web.page.templates import StaticFiles, Templates


def board(*troubled):
    """A supervisor's board with the branch's trainer, and another tenant's, which wait."""
    workers = tuple(
        WorkerStatus(
            name=name,
            pid=1,
            condition="running",
            since=0.0,
            doing="waits",
            doing_since=0.0,
            trouble=trouble,
            restarts=0,
            reason=None,
            reason_at=None,
        )
        for name, trouble in troubled
    )
    return WorkerBoard(pid=1, at=0.0, ended=None, workers=workers)


async def a_branch(directory):
    """Four people of acme on the branch accept all, four on live none; the branch took a step, and shipped what came of it. Others were not
    dealt by chance."""
    config = settings(directory)
    branch = branch_config(config, "acme")
    (v0,) = await publish(open_store(config), 1)
    rows = []
    for n in range(32):
        made = turn(f"acme-{n}", "acme", (Arm.BRANCH, Arm.SHARED)[n % 2], user=f"u{n % 8}")
        made = replace(made, spans=(replace(made.spans[0], policy=v0),))
        rows += [made, said(made, "accepted" if n % 2 == 0 and n != 8 else "rejected")]
    for user, arm in (("unproven", Arm.BRANCH), ("u1", Arm.SHARED), ("u0", Arm.SHARED)):  # u1 and u0 before it began
        made = turn(f"acme-{user}", "acme", arm, user=user, propensity=1.0)
        rows += [made, said(made, "accepted")]
    nobody = turn("acme-x", "acme", Arm.BRANCH, user="anonymous", propensity=1.0)
    with open_log(config) as log, open_run(branch) as run:
        await log.append(*rows, nobody, said(nobody, "rejected"))
        await begin_branch(run, lambda _: None)
        copying = TenantRows(run)
        await copying.copy()
        copying.close()
        desk = open_desk(branch, run.log, run.folds)
        await desk.poll()
        made = await desk.batch(1, 1, v0)
        assert made is not None
        await desk.poll()
        await desk.close()
        (own,) = await publish(run.store, 1, "branch/acme", first=1, seed=1)
        releases = open_releases(run)
        await releases.bootstrap(v0)
        await run.log.append(
            Alarm(id="a", name="coarse", state=AlarmState.RAISED, reason="few items", detail={}, at=9.0)
        )
    return config, own, len(made.samples)


async def test_a_branch_has_a_line_a_row_and_metrics(tmp_path):
    config, own, learned = await a_branch(tmp_path)
    found = board(("train@acme", "the disk is full"), ("train@bolt", "something else"), ("train", "a third"))
    with open_branches(config) as opened:
        (seen,) = await BranchReader(opened).now(found)
    assert (seen.tenant, seen.version, seen.parent.number, seen.learned, seen.step) == ("acme", own, 0, learned, 1)
    assert seen.troubles == ("train@acme waits: the disk is full", "alarm coarse: few items")
    assert (seen.answered, seen.stayed) == (16, 16), "people who were not dealt by chance are nobody's contrast"
    assert seen.contrast.mean == pytest.approx(15 / 16)
    assert 0.0 < seen.contrast.lower < seen.contrast.mean < seen.contrast.upper
    line = branch_line(seen)
    assert line.startswith(f"branch of acme: v1 from v0; {learned} turns learned in 1 steps; shipped v")
    assert "+93.8 pp beside live, 95% [+" in line
    assert line.endswith("(16 turns beside 16 on live); train@acme waits: the disk is full; alarm coarse: few items")
    page = Templates(StaticFiles()).render("_branches.html", {"run": {"branches": (seen,)}})
    for part in ('<th scope="row">acme</th><td>v1</td><td>v0</td>', "+93.8 pp beside live", "the disk is full"):
        assert part in page
    samples = {s.name: s.value for each in LearningNumbers(branches=(seen,)).collect() for s in each.samples}
    assert (samples["ostinato_branch_version"], samples["ostinato_branch_learned_turns"]) == (1, learned)
    assert samples["ostinato_branch_contrast"] == pytest.approx(15 / 16)
    assert samples["ostinato_branch_troubles"] == 2
    assert [*LearningNumbers().collect()] == []


async def test_status_tells_of_branches_and_in_a_branch_who_its_arms_are(tmp_path):
    config, _, _ = await a_branch(tmp_path)

    async def screen(of, **more):
        out = io.StringIO()
        await show_status(of, Console(file=out, width=300), **more)
        return out.getvalue()

    assert "branch of acme: v1 from v0" in await screen(config)
    own = await screen(branch_config(config, "acme"))
    assert "branch of acme" not in own
    assert "(frozen)" not in own, "who stays on live is on no frozen version"
    assert "shared" in own
    found = json.loads(await screen(config, machine=True))["branches"]["acme"]
    assert (found["version"]["number"], found["parent"]["number"], found["stayed"]) == (1, 0, 16)


async def test_a_branch_that_has_not_begun_is_not_there_and_one_that_cannot_be_read_says_so(tmp_path, monkeypatch):
    config = settings(tmp_path / "new")
    with open_log(config), open_branches(config) as opened:
        assert await BranchReader(opened).now(None) == ()
    config, _, _ = await a_branch(tmp_path / "old")

    def damaged(*_, **__):
        raise Corrupt("segment 1 is damaged")

    with open_branches(config) as opened:
        reader = BranchReader(opened)
        opened()
        monkeypatch.setattr(SqlLog, "append", damaged)
        (seen,) = await reader.now(None)
    assert seen.troubles == ("its log cannot be read: segment 1 is damaged",)


async def test_branches_that_cannot_be_opened_just_now_end_nobody_who_asks(tmp_path):
    def crowded():
        raise OSError(24, "Too many open files")

    assert await BranchReader(crowded).now(None) == ()
