"""What `GET /metrics` tells an operator about learning, from the summary that housekeeping keeps and the release ledger."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from tests.deadlines import PATIENT_S

from ostinato.adapt.config import AdaptConfig
from ostinato.core.arm_assignment import holdout_place
from ostinato.core.errors import Unavailable
from ostinato.core.records import Arm, Batch, Holdback, Pick, PolicyVersion, ReleaseEvent, Reward, SteeringBasis
from ostinato.core.steering import Basis, Steered
from ostinato.launch.views import numbers
from ostinato.launch.views.numbers import LearningNumbers, watch_learning
from ostinato.launch.views.progress import Progress
from ostinato.record.log import SqlLog
from ostinato.release.ledger import ReleaseLedger
from ostinato.reward.surrogate import SurrogateQuality
from ostinato.status.summary import Summary, catch_up, keep
from ostinato.testing.log import MemoryFolds
from ostinato.testing.records import a_turn

NOW = 100_000.0
V0, V3 = (PolicyVersion(number=number, hash=f"{number:064x}") for number in (0, 3))


def page(of: LearningNumbers) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(of)
    lines = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def rated(name: str, arm: Arm, user: str, value: float, heard: bool = True):
    yield a_turn(f"{name}:0", arm=arm, user=user)
    yield Reward(turn=f"{name}:0", value=value, function="f@1", signals=("s",) if heard else (), at=1.0)


def shipped(number: int, policy: PolicyVersion, at: float) -> ReleaseEvent:
    return ReleaseEvent(
        id=f"r{number}", action="shipped", policy=policy, previous=None, reason="better", detail={}, at=at
    )


def step(number: int, base: PolicyVersion | None = None) -> Batch:
    return Batch(step=number, turns=("a:0",), credits=((0.1, 0.1),), reference=V0, at=1.0, base=base)


ROWS = (
    *rated("a", Arm.LIVE, "ann", 0.75),
    *rated("b", Arm.LIVE, "bob", -0.25),
    *rated("c", Arm.LIVE, "bob", 0.0, heard=False),
    *rated("d", Arm.CONTROL, "cid", -0.25),
    *rated("e", Arm.EVAL, "nobody", 1.0),
    Holdback(turn="d:0", reason="arm:control", at=1.0),
    Holdback(turn="x:0", reason="no_signal: all 2 rewards are 0", at=1.0),
    Holdback(turn="y:0", reason="no_signal: all 3 rewards are 0", at=1.0),
    *(step(number) for number in range(1, 6)),
    shipped(0, V0, NOW - 90),
    shipped(1, V3, NOW - 60),
)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbers, "wall_clock", lambda: NOW)
    monkeypatch.setattr(numbers, "_LEARNING_POLL_S", 0.01)


async def until(true) -> None:
    async with asyncio.timeout(PATIENT_S):
        while not true():
            await asyncio.sleep(0.01)


async def test_what_the_log_adds_up_to_stands_on_the_page(tmp_path):
    folds, of, seen = MemoryFolds(), LearningNumbers(), Summary()
    with SqlLog.open(tmp_path / "log") as log:
        await log.append(*ROWS)
        await catch_up(seen, log)
        await keep(seen, folds)
        await log.append(*rated("f", Arm.LIVE, "ann", 0.75))
        watching = asyncio.create_task(watch_learning(log, folds, ReleaseLedger(log, lambda: NOW), of))
        await until(lambda: of.summary is not None)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    found = page(of)
    lower, upper = (found.pop(f'ostinato_acceptance_{end}{{arm="live"}}') for end in ("lower", "upper"))
    assert 0.0 <= lower < 1 / 3 < upper <= 1.0
    for end in ("lower", "upper"):
        assert 0.0 <= found.pop(f'ostinato_acceptance_{end}{{arm="control"}}') <= 1.0
    assert found == {
        'ostinato_acceptance{arm="live"}': pytest.approx(1 / 3),
        'ostinato_acceptance{arm="control"}': 0.0,
        'ostinato_reward_mean{arm="live"}': pytest.approx(0.5 / 3),
        'ostinato_reward_mean{arm="control"}': -0.25,
        'ostinato_rated_turns{arm="live"}': 3.0,
        'ostinato_rated_turns{arm="control"}': 1.0,
        'ostinato_heard_turns{arm="live"}': 2.0,
        'ostinato_heard_turns{arm="control"}': 1.0,
        "ostinato_step": 5.0,
        'ostinato_releases_total{action="shipped"}': 2.0,
        'ostinato_releases_total{action="blocked"}': 0.0,
        'ostinato_releases_total{action="rolled_back"}': 0.0,
        'ostinato_held_turns_total{reason="arm:control"}': 1.0,
        'ostinato_held_turns_total{reason="no_signal"}': 2.0,
        "ostinato_summary_behind_rows": 2.0,
        "ostinato_live_version": 3.0,
        "ostinato_live_seconds": 60.0,
        "ostinato_ahead_steps": 2.0,
    }


async def test_what_dials_do_stands_on_the_page_once_they_are_on(tmp_path):
    basis = SteeringBasis.of(Basis(("brief",), np.arange(3), np.ones((1, 3), np.float32), V3.hash), at=1.0)
    lean = Steered(basis=basis.hash, dials=(0.5,), cap=0.1, budget=3.0, tokens=10, kl=0.6, features=(0.1,))
    names = {holdout_place(("default", f"u{number}")) < 0.5: f"u{number}" for number in range(40)}
    turns = [
        replace(a_turn(f"{user}:0", user=user, version=3), verified=True, steered=None if held else lean)
        for held, user in names.items()
    ]
    folds, seen = MemoryFolds(), Summary()
    with SqlLog.open(tmp_path / "log") as log:
        await log.append(basis, *turns, shipped(1, V3, NOW))
        await log.append(*(Reward(turn=turn.id, value=1.0, function="f@1", signals=(), at=2.0) for turn in turns))
        await catch_up(seen, log)
        await keep(seen, folds)
        for mode, told in (("off", None), ("dials", 1.0)):
            of = LearningNumbers(adapt=AdaptConfig(mode=mode, holdout=0.5))
            watching = asyncio.create_task(watch_learning(log, folds, ReleaseLedger(log, lambda: NOW), of))
            await until(lambda of=of, told=told: of.summary is not None and (of.dials is not None or told is None))
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            found = page(of)
            assert found.get("ostinato_dials_fitted") == told
            assert found.get('ostinato_dials_people{side="dials"}') == told
            assert found.get('ostinato_dials_people{side="holdout"}') == told
            assert found.get("ostinato_dials_leaning_people") == told
            assert found.get("ostinato_dials_token_kl") == (told and pytest.approx(0.06))
            assert "ostinato_dials_effect" not in found, "two people say nothing"


async def test_answers_by_style_and_what_a_style_changes_stand_on_the_page_with_the_interval(tmp_path):
    folds, seen, of = MemoryFolds(), Summary(), LearningNumbers()
    with SqlLog.open(tmp_path / "log") as log:
        for number in range(40):
            arm = "concise@1" if number % 2 else "none"
            turn = a_turn(f"t{number}:0", user=f"u{number % 7}")
            await log.append(replace(turn, style=Pick(arm=arm, odds={"concise@1": 0.5, "none": 0.5})))
            value = float(number % 2 or number % 4 == 0)
            await log.append(Reward(turn=turn.id, value=value, function="f@1", signals=(), at=2.0))
        await catch_up(seen, log)
        await keep(seen, folds)
        watching = asyncio.create_task(watch_learning(log, folds, ReleaseLedger(log, lambda: NOW), of))
        await until(lambda: of.styles)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    found = page(of)
    assert found['ostinato_style_answers_total{style="concise@1"}'] == 20.0
    assert found['ostinato_style_answers_total{style="none"}'] == 20.0
    lower, mean, upper = (
        found[f'ostinato_style_effect{name}{{style="concise@1"}}'] for name in ("_lower", "", "_upper")
    )
    assert mean == pytest.approx(0.5)
    assert lower < 0.5 < upper
    assert 'ostinato_style_effect{style="none"}' not in found


async def test_a_trainer_that_went_back_is_as_far_ahead_as_it_has_stepped_since(tmp_path):
    of = LearningNumbers(summary=Summary())
    for cursor, row in enumerate((step(4), step(5, base=V3), step(6)), start=1):
        of.summary.apply(cursor, row)
    with SqlLog.open(tmp_path / "log") as log:
        await log.append(shipped(1, V3, NOW))
        of.ledger = await ReleaseLedger(log, lambda: NOW).refresh()
    assert page(of)["ostinato_ahead_steps"] == 2.0


def test_before_anything_is_known_nothing_is_said():
    assert page(LearningNumbers()) == {}
    assert "ostinato_live_version" not in page(LearningNumbers(summary=Summary()))


@pytest.mark.parametrize("kept", [(10_000, Summary().state()), (1, {"format": 2}), (1, {"format": 3})])
async def test_a_summary_of_another_log_or_version_is_not_shown(tmp_path, kept):
    folds, of = MemoryFolds(), LearningNumbers()
    await folds.save("status", *kept)
    with SqlLog.open(tmp_path / "log") as log:
        await log.append(*ROWS)
        watching = asyncio.create_task(watch_learning(log, folds, ReleaseLedger(log, lambda: NOW), of))
        await until(lambda: of.ledger is not None)
        await asyncio.sleep(0.05)
        assert of.summary is None
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def test_a_log_that_is_away_is_read_later(tmp_path, monkeypatch):
    folds, of, seen = MemoryFolds(), LearningNumbers(), Summary()
    with SqlLog.open(tmp_path / "log") as log:
        await log.append(*ROWS)
        await catch_up(seen, log)
        await keep(seen, folds)
        tried = asyncio.Event()

        async def away(name: str) -> None:
            tried.set()
            raise Unavailable("the server is away")

        with monkeypatch.context() as patched:
            patched.setattr(folds, "load", away)
            watching = asyncio.create_task(watch_learning(log, folds, ReleaseLedger(log, lambda: NOW), of))
            await tried.wait()
            assert of.summary is None
        await until(lambda: of.summary is not None)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def test_how_well_late_rewards_are_predicted_is_the_trainers_newest_line(tmp_path):
    of = LearningNumbers(summary=Summary(), train=tmp_path / "train.jsonl")
    assert not any("surrogate" in name for name in page(of))
    progress = Progress(tmp_path / "train.jsonl")
    known = SurrogateQuality(pairs=500, people=61, correlation=0.84, error=0.05, gap=0.01, gap_error=0.02)
    progress.surrogate({"acme": replace(known, correlation=0.1)})
    progress.surrogate({"acme": known, "new": SurrogateQuality(pairs=9, people=3, correlation=0.5, error=0.4)})
    found = {name: value for name, value in page(of).items() if "surrogate" in name}
    assert found == {
        'ostinato_surrogate_pairs{tenant="acme"}': 500.0,
        'ostinato_surrogate_pairs{tenant="new"}': 9.0,
        'ostinato_surrogate_correlation{tenant="acme"}': 0.84,
        'ostinato_surrogate_correlation{tenant="new"}': 0.5,
        'ostinato_surrogate_correlation_lower{tenant="acme"}': pytest.approx(0.81, abs=0.01),
        'ostinato_surrogate_correlation_upper{tenant="acme"}': pytest.approx(0.87, abs=0.01),
        'ostinato_surrogate_gap{tenant="acme"}': 0.01,
        'ostinato_surrogate_gap_lower{tenant="acme"}': pytest.approx(-0.029, abs=1e-3),
        'ostinato_surrogate_gap_upper{tenant="acme"}': pytest.approx(0.049, abs=1e-3),
    }
