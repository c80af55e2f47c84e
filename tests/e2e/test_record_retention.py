"""After old segments are gone every part of a run still starts: desk, trainer's replay, gateway, status, tidying up, release ledger."""

import io
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from rich.console import Console
from tests.oracles.turn_accounting import recount

from ostinato.app.evaluation import note_suite
from ostinato.app.retention import needed
from ostinato.app.storage import Run, open_run
from ostinato.config import Config, load
from ostinato.core.errors import Corrupt
from ostinato.core.notices import Alarm
from ostinato.core.records import Batch, Holdback, PolicyVersion, ReleaseEvent, Turn
from ostinato.core.samples import TrainingBatch
from ostinato.launch.commands.log import forget
from ostinato.launch.commands.status import show_status
from ostinato.record.log import SqlLog
from ostinato.release.ledger import ReleaseLedger, State
from ostinato.release.metrics.config import OutcomeConfig
from ostinato.release.watch import Outcomes
from ostinato.reward.accounting import Accounting, account
from ostinato.reward.functions import copilot
from ostinato.reward.pipeline import RewardDesk
from ostinato.reward.runners import Inline
from ostinato.serve.config import ServeConfig
from ostinato.serve.gateway import create_app
from ostinato.status import summary
from ostinato.testing.engine import FakeEngine
from ostinato.testing.records import a_delivery, a_signal, a_turn
from ostinato.testing.renderer import ByteRenderer
from ostinato.train.replay import AnswerEdits
from ostinato.train.trainer import Admission

DAY = 86_400.0
V0 = PolicyVersion(number=0, hash=f"{0:064x}")
STEPS, SIZE, CHECKPOINT = 12, 4, 9


@dataclass
class Now:
    at: float = 1_000.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def now() -> Now:
    return Now()


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load(None, [f"run.directory={tmp_path / 'run'}", "record.retain_days=30", "record.segment_rows=20"])


@asynccontextmanager
async def opened(config: Config, now: Now) -> AsyncIterator[Run]:
    """The run, with a log that goes by the test's clock."""
    with open_run(config) as run, SqlLog.open(run.home.log, now, config.record) as log:
        yield replace(run, log=log)


def desk_of(run: Run, now: Now) -> RewardDesk:
    def rated(turn: Any, signals: Any, at: float) -> Any:
        return copilot(turn, signals, at, window=30.0)

    config = run.config.reward.model_copy(update={"user_cap": 1.0})
    return RewardDesk(run.log, Inline(rated, max_abs=config.max_abs), now, config, folds=run.folds)


@asynccontextmanager
async def gateway(run: Run, now: Now) -> AsyncIterator[httpx2.AsyncClient]:
    app = create_app(
        engine=FakeEngine(lambda request: "hello"),
        renderer=ByteRenderer(),
        log=run.log,
        config=ServeConfig(),
        clock=now,
        model_name="m",
    )
    transport = httpx2.ASGITransport(app=app)
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        yield client


async def ask(client: httpx2.AsyncClient, *said: str) -> str:
    """The id of the turn that answers."""
    roles = itertools.cycle(("user", "assistant"))
    messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
    body = {"model": "m", "user": "ann", "messages": messages}
    reply = await client.post(
        "/v1/chat/completions", content=json.dumps(body).encode(), headers={"content-type": "application/json"}
    )
    assert reply.status_code == 200, reply.content
    return f"{json.loads(reply.content)['id']}:0"


async def worked(run: Run, now: Now) -> None:
    """Twelve days of work: each day a batch and a release."""
    desk = desk_of(run, now)
    await note_suite(run)
    live = V0
    for step in range(1, STEPS + 1):
        for i in range(SIZE):
            turn = replace(
                a_turn(f"t{step}-{i}", user=f"u{i}", version=step - 1, ended_at=now.at), episode=f"e{step}-{i}"
            )
            await run.log.append(turn, a_delivery(turn))
            await run.log.append(a_signal(turn, "accepted" if i % 2 else "undone", at=now.at + 1))
        now.at += 60
        batch = await desk.batch(step, SIZE, V0)
        assert batch is not None
        assert batch.row.step == step
        new = PolicyVersion(number=step, hash=f"{step:064x}")
        event = ReleaseEvent(
            id=f"r{step}", action="shipped", policy=new, previous=live, reason="", detail={}, at=now.at
        )
        await run.log.append(event)
        live = new
        now.at += DAY
    await desk.save()
    await desk.close()


async def told(config: Config) -> str:
    screen = io.StringIO()
    await show_status(config, Console(file=screen, width=200))
    return screen.getvalue()


@dataclass(frozen=True)
class Seen:
    """What the parts of a run make of its log."""

    accounting: Accounting
    releases: State
    roots: list[str]
    standing: list[Alarm]
    replayed: list[TrainingBatch]
    signals: int
    tokens: int
    step: int


async def seen(run: Run, now: Now) -> Seen:
    desk = desk_of(run, now)
    totals, _ = await summary.summarise(run.log, run.folds, run.log.newest())
    await summary.keep(totals, run.folds)
    replayed = [batch async for batch in desk.history(CHECKPOINT)]
    await desk.close()
    return Seen(
        accounting=await account(run.log, run.folds, run.config.reward),
        releases=await ReleaseLedger(run.log, now).refresh(),
        roots=await needed(run.log, run.config),
        standing=[row async for _, row in run.log.read(0, {Alarm}) if isinstance(row, Alarm)],
        replayed=replayed,
        signals=totals.signals,
        tokens=totals.tokens,
        step=totals.step,
    )


async def keep_after(run: Run) -> int:
    """What readers still need: the rows above their folds, and the turns of the steps since the checkpoint."""
    kept = [found[0] for name in ("desk", summary.FOLD) if (found := await run.folds.load(name)) is not None]
    assert len(kept) == 2
    since = {f"t{step}-{i}" for step in range(CHECKPOINT + 1, STEPS + 1) for i in range(SIZE)}
    turns = [seq async for seq, row in run.log.read(0, {Turn}) if isinstance(row, Turn) and row.id in since]
    return min(*kept, turns[0] - 1)


async def test_every_part_starts_as_before_when_old_segments_are_gone(config: Config, now: Now):
    async with opened(config, now) as run:
        async with gateway(run, now) as client:
            await worked(run, now)
            first = await ask(client, "hi")
        before = await seen(run, now)
        now.at += 60 * DAY
        assert await run.log.drop_old(now.at, await keep_after(run)) >= 5
        horizon = await run.log.horizon()
        assert horizon > 60

    async with opened(config, now) as run:  # every process is started again
        after = await seen(run, now)
        assert after == before
        assert [batch.row.step for batch in after.replayed] == [10, 11, 12]
        assert all(len(batch.samples) == SIZE for batch in after.replayed)
        assert after.accounting.balanced
        assert (after.accounting.trained, after.step) == (STEPS * SIZE, STEPS)
        with pytest.raises(Corrupt, match="batch 1 names turn t1-0, which the log does not hold"):
            await anext(desk_of(run, now).history(0))
        await Outcomes(run.log, OutcomeConfig()).refresh()
        assert "no answer has been rated" not in await told(config)

        async with gateway(run, now) as client:
            follow = await ask(client, "hi", "hello", "and then?")
        (turn,) = await run.log.find(Turn, [(follow,)])
        assert turn.parent == first

        desk = desk_of(run, now)  # and learning goes on where it was
        for i in range(SIZE):
            each = replace(a_turn(f"new-{i}", user=f"u{i}", version=STEPS, ended_at=now.at), episode=f"new-{i}")
            await run.log.append(
                each, a_delivery(each), a_signal(each, "accepted" if i % 2 else "undone", at=now.at + 1)
            )
        now.at += 60
        made = await desk.batch(STEPS + 1, SIZE, V0)
        assert made is not None
        assert set(made.row.turns) <= {f"new-{i}" for i in range(SIZE)} | {first, follow}
        steps = [row.step async for _, row in run.log.read(0, {Batch}) if isinstance(row, Batch)]
        assert steps == list(range(1, STEPS + 2))
        await desk.close()


async def test_a_run_without_its_folds_starts_from_what_is_left(config: Config, now: Now):
    """Counts begin at the first row that is there; what was learned and released is known whole."""
    async with opened(config, now) as run:
        await worked(run, now)
        before = await seen(run, now)
        now.at += 60 * DAY
        await run.log.drop_old(now.at, await keep_after(run))
        for fold in (run.home.folds).iterdir():
            fold.unlink()
    async with opened(config, now) as run:
        after = await seen(run, now)
        assert (after.releases, after.roots, after.standing) == (before.releases, before.roots, before.standing)
        assert (after.replayed, after.step) == (before.replayed, STEPS)
        assert after.accounting.balanced
        assert 0 < after.accounting.ingested < before.accounting.ingested
        desk = desk_of(run, now)
        await desk.poll()
        assert desk.last_step == STEPS
        await desk.close()


def no_grammars():
    raise AssertionError("no turn has one")


class NoExperts:
    """Of a dense model."""

    def admits(self, turn: Turn) -> bool:
        return True


async def test_learning_goes_on_when_a_person_was_forgotten(tmp_path: Path, now: Now):
    """Before and after their turns became a batch, with folds and without."""
    config = load(None, [f"run.directory={tmp_path / 'run'}", "record.encrypt=user"])
    async with opened(config, now) as run:
        await worked(run, now)
        before = await seen(run, now)
        for i in range(SIZE):
            each = replace(a_turn(f"new-{i}", user=f"u{i}", version=STEPS, ended_at=now.at), episode=f"new-{i}")
            said = a_signal(each, "accepted" if i % 2 else "undone", at=now.at + 1)
            await run.log.append(each, a_delivery(each), said)
        now.at += 60
        desk = desk_of(run, now)
        await desk.poll()  # their rewards are known, and they wait for a batch
        screen = io.StringIO()
        await forget(config, "default", "u1", Console(file=screen, width=300))
        assert f"rows up to {run.log.newest()} may still know it" in screen.getvalue()

        assert await desk.batch(STEPS + 1, SIZE, V0) is None  # one of four is missing
        await desk.save()
        held = {row.turn: row.reason async for _, row in run.log.read(0, {Holdback}) if isinstance(row, Holdback)}
        assert held == {"new-1": "forgotten"}

        again = desk_of(run, now)
        replayed = [batch async for batch in again.history(CHECKPOINT)]
        assert [batch.row for batch in replayed] == [batch.row for batch in before.replayed]
        for batch in replayed:
            admission = Admission(None, refuse_foreign=False, experts=NoExperts(), edits=AnswerEdits(no_grammars))
            admitted, counts = admission.admit(batch.samples)
            assert [sample.turn.user for sample in admitted] == ["u0", "u2", "u3"]
            assert counts["turns_empty"] == 1
        kept = await account(run.log, run.folds, run.config.reward)
        assert kept.balanced
        assert (kept.trained, kept.held) == (STEPS * SIZE, {"forgotten": 1})
        afresh = await account(run.log, None, run.config.reward)
        assert replace(afresh, coverage=kept.coverage) == kept
        assert (await recount(run.log)).contradictions == ()
