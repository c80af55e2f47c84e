"""Prometheus metrics of a run, beside the gateway's own on `GET /metrics`: workers, alarms, disk, and its learning. No tenant sees them.

Those of its learning, acceptance, rewards, steps and releases, come from the summary that the housekeeping worker stores, so a gateway
reads no log row for them. Every gateway of a run reports the same values, so a dashboard takes their maximum, not their sum.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ostinato.adapt.config import AdaptConfig
from ostinato.core.clock import wall_clock
from ostinato.core.errors import OstinatoError
from ostinato.core.notices import Alarm, AlarmState
from ostinato.core.seams import Folds
from ostinato.record.rowlog import RowLog
from ostinato.release.auto.estimating import StyleEffect
from ostinato.release.ledger import ReleaseLedger, State
from ostinato.status.arms import acceptance_by_arm
from ostinato.status.branches import BranchNow, BranchReader
from ostinato.status.compactions import CompactionsNow, compactions_now
from ostinato.status.dials import DIALS, HOLDOUT, DialsNow, dials_now
from ostinato.status.progress_lines import last_lines
from ostinato.status.summary import FOLD, RATED, RatedTurn, Summary
from ostinato.status.worker_status import read_board

_LOOK_S = 5.0


class RunNumbers(Collector):
    """Reads the supervisor's board and the disk at each scrape. `watch_alarms` keeps the raised alarms' names in `alarms`."""

    def __init__(self, board: Path) -> None:
        self._board = board
        self.alarms: set[str] = set()

    def collect(self) -> Iterable[Metric]:
        """The metric families of one scrape."""
        standing = GaugeMetricFamily("ostinato_alarm", "1 for each active alarm in the log.", labels=["name"])
        for name in sorted(self.alarms):
            standing.add_metric([name], 1.0)
        yield standing
        free = shutil.disk_usage(self._board.parent).free
        yield GaugeMetricFamily(
            "ostinato_disk_free_bytes", "Free bytes on the disk of the run's directory.", value=free
        )
        yield from self._workers()

    def _workers(self) -> Iterable[Metric]:
        board, now = read_board(self._board), wall_clock()
        if board is None or board.ended is not None:
            return
        yield GaugeMetricFamily(
            "ostinato_up_heard_seconds", "Seconds since the last sign of life of `ostinato up`.", value=now - board.at
        )
        running = GaugeMetricFamily("ostinato_worker_running", "1 while the worker runs.", labels=["worker"])
        troubled = GaugeMetricFamily(
            "ostinato_worker_trouble", "1 while it waits for a disk or a store.", labels=["worker"]
        )
        doing = GaugeMetricFamily(
            "ostinato_worker_doing_seconds", "Seconds in its current activity.", labels=["worker"]
        )
        restarts = CounterMetricFamily("ostinato_worker_restarts", "Number of restarts.", labels=["worker"])
        for worker in board.workers:
            running.add_metric([worker.name], float(worker.condition == "running"))
            troubled.add_metric([worker.name], float(worker.trouble is not None))
            doing.add_metric([worker.name], max(0.0, now - worker.doing_since))
            restarts.add_metric([worker.name], worker.restarts)
        yield from (running, troubled, doing, restarts)


async def watch_alarms(log: RowLog, standing: set[str]) -> None:
    """Until cancelled, keep the names of the raised alarms in `standing`. A failed read of the log is tried again later."""
    cursor = 0
    while True:
        with contextlib.suppress(OstinatoError):
            newest = await asyncio.to_thread(log.newest)
            async for _, row in log.read(cursor, {Alarm}):
                if isinstance(row, Alarm):
                    (standing.add if row.state is AlarmState.RAISED else standing.discard)(row.name)
            cursor = newest  # rows appended meanwhile are read twice, in order, which changes nothing
        await asyncio.sleep(_LOOK_S)


# ---------------------------------------------------------------- learning


_LEARNING_S = 30.0
_ACTIONS = {"shipped": 0, "blocked": 0, "rolled_back": 0}
"""Exported from the start, because Prometheus sees no increase in a counter that first appears with its first count."""


@dataclass(slots=True, eq=False)
class LearningNumbers(Collector):
    """Reports the values last set: the summary, the number of log rows after it, and the release ledger's state. `adapt`: the settings of
    dials; `serve`: the serving worker's progress, which tells the bases that are not used; `train`: the trainer's, which tells how well
    late rewards are predicted, None if none is.
    """

    summary: Summary | None = None
    behind: int = 0
    ledger: State | None = None
    adapt: AdaptConfig = field(default_factory=AdaptConfig)
    dials: DialsNow | None = None
    styles: Sequence[StyleEffect] = ()
    serve: Path | None = None
    train: Path | None = None
    branches: Sequence[BranchNow] = ()

    def collect(self) -> Iterable[Metric]:
        """The metric families of one scrape; none but branches' until there is a summary."""
        yield from _branches(self.branches)
        seen = self.summary
        if seen is None:
            return
        yield from _people(seen.rated)
        yield GaugeMetricFamily("ostinato_step", "Optimizer steps in the log.", value=seen.step)
        actions = _ACTIONS | seen.actions
        yield _counted("ostinato_releases", "Lines of the release ledger, by action.", "action", actions)
        yield _counted("ostinato_held_turns", "Turns held back from training, by reason.", "reason", seen.held)
        yield GaugeMetricFamily(
            "ostinato_summary_behind_rows", "Rows of the log that are not in these numbers yet.", value=self.behind
        )
        live = None if self.ledger is None else self.ledger.live
        if self.dials is not None:
            yield from _dials(self.dials)
        if self.styles:
            yield from _styles(self.styles)
        if (compactions := compactions_now(seen.compactions)) is not None:
            yield from _compactions(compactions)
        if self.train is not None:
            yield from _surrogate(last_lines(self.train))
        if self.ledger is not None and live is not None:
            ahead = seen.lineage.lag(seen.step, live.number)
            age = wall_clock() - self.ledger.shipped_at
            yield GaugeMetricFamily("ostinato_live_version", "Number of the live version.", value=live.number)
            yield GaugeMetricFamily("ostinato_live_seconds", "Seconds since it became live.", value=max(0.0, age))
            yield GaugeMetricFamily("ostinato_ahead_steps", "Steps by which the trainer is ahead of it.", value=ahead)


def _people(rated: Iterable[RatedTurn]) -> Iterable[Metric]:
    newest = f"of people's newest {RATED} rated turns"
    share = GaugeMetricFamily("ostinato_acceptance", f"Share with a reward above 0, {newest}.", labels=["arm"])
    lower = GaugeMetricFamily("ostinato_acceptance_lower", "Its lower bound, 95%, users as clusters.", labels=["arm"])
    upper = GaugeMetricFamily("ostinato_acceptance_upper", "Its upper bound.", labels=["arm"])
    mean = GaugeMetricFamily("ostinato_reward_mean", f"Mean reward {newest}.", labels=["arm"])
    turns = GaugeMetricFamily("ostinato_rated_turns", "Number of these turns, by arm.", labels=["arm"])
    heard = GaugeMetricFamily("ostinato_heard_turns", "Number of these turns with feedback.", labels=["arm"])
    for row in sorted(acceptance_by_arm(rated), key=lambda row: row.arm):
        share.add_metric([row.arm], row.point.acceptance)
        lower.add_metric([row.arm], row.point.lower)
        upper.add_metric([row.arm], row.point.upper)
        mean.add_metric([row.arm], row.mean)
        turns.add_metric([row.arm], row.point.turns)
        heard.add_metric([row.arm], row.heard)
    return (share, lower, upper, mean, turns, heard)


def _dials_of(numbers: LearningNumbers) -> DialsNow | None:
    live = None if numbers.ledger is None else numbers.ledger.live
    assert numbers.summary is not None
    lines = [] if numbers.serve is None or numbers.adapt.mode == "off" else last_lines(numbers.serve)
    return dials_now(numbers.adapt, numbers.summary, None if live is None else live.hash, lines)


def _dials(found: DialsNow) -> Iterable[Metric]:
    effect = found.effect
    yield GaugeMetricFamily("ostinato_dials_fitted", "1 if the live version has a basis.", value=float(found.fitted))
    if effect is None:
        return
    people = GaugeMetricFamily("ostinato_dials_people", "People compared, by side.", labels=["side"])
    share = GaugeMetricFamily(
        "ostinato_dials_acceptance", "Share of their turns with a reward above 0.", labels=["side"]
    )
    for side, count, accepted in ((DIALS, effect.people, effect.accepted), (HOLDOUT, effect.holdout, effect.held)):
        people.add_metric([side], count)
        if accepted is not None:
            share.add_metric([side], accepted)
    yield from (people, share)
    for name, description, value in (
        ("effect", "Acceptance of people with dials less that of the holdout.", effect.difference),
        ("effect_lower", "Its lower bound, which holds at every look, 95%.", effect.lower),
        ("effect_upper", "Its upper bound.", effect.upper),
        ("leaning_people", "People with dials whose answers differ from the base model's.", effect.leaning),
        ("token_kl", "Nats of KL divergence a steered token.", effect.token_kl),
        ("budget_spent", "Mean share of an answer's budget (adapt.answer_budget) that was spent.", effect.spent),
    ):
        if (value is not None and effect.lower is not None) or name not in _INTERVAL:
            yield GaugeMetricFamily(f"ostinato_dials_{name}", description, value=value)


def _styles(found: Sequence[StyleEffect]) -> Iterable[Metric]:
    answers = {each.arm: each.turns for each in found}
    yield _counted("ostinato_style_answers", "People's answers, by their style.", "style", answers)
    gain = GaugeMetricFamily("ostinato_style_effect", "Reward more than without a style.", labels=["style"])
    lower = GaugeMetricFamily("ostinato_style_effect_lower", "Its lower bound, for one look, 95%.", labels=["style"])
    upper = GaugeMetricFamily("ostinato_style_effect_upper", "Its upper bound.", labels=["style"])
    for each in found:
        if each.gain is not None:
            gain.add_metric([each.arm], each.gain.mean)
            lower.add_metric([each.arm], each.gain.lower)
            upper.add_metric([each.arm], each.gain.upper)
    yield from (gain, lower, upper)


_INTERVAL = ("effect", "effect_lower", "effect_upper")  # told together, once there are people enough


def _compactions(found: CompactionsNow) -> Iterable[Metric]:
    counts = {"sampled": found.asked, "begun": found.begun}
    yield _counted(
        "ostinato_compactions", "Summaries of people's sessions, and windows that began with one.", "state", counts
    )
    rewards = found.rewards
    between = (None, None) if rewards is None or rewards.between is None else rewards.between
    for name, description, value in (
        (
            "tokens",
            "Median tokens of the newest summaries with which a window began.",
            found.tokens if found.seen else None,
        ),
        ("ratio", "Median of how many times longer the prompt was.", found.ratio if found.seen else None),
        ("facts_kept", "Share of the facts that answers named before a summary which it keeps.", found.kept),
        ("facts_found", "The same of those that answers name again after it.", found.found),
        (
            "reward_difference",
            "Mean reward of long sessions with a summary less that of those without.",
            None if rewards is None else rewards.with_summary - rewards.without,
        ),
        ("reward_difference_lower", "Its lower bound, 95%, people as clusters.", between[0]),
        ("reward_difference_upper", "Its upper bound.", between[1]),
    ):
        if value is not None:
            yield GaugeMetricFamily(f"ostinato_compaction_{name}", description, value=value)


def _branches(found: Sequence[BranchNow]) -> Iterable[Metric]:
    """Of tenants' branches, by tenant; none without any."""
    for name, description, figures in (
        (
            "version",
            "Number of the version that answers the tenant.",
            [each.version and each.version.number for each in found],
        ),
        (
            "parent_version",
            "The shared version that it began at.",
            [each.parent and each.parent.number for each in found],
        ),
        ("learned_turns", "Turns that it learned from.", [each.learned for each in found]),
        (
            "contrast",
            "Acceptance of its people less that of those on live.",
            [each.contrast and each.contrast.mean for each in found],
        ),
        (
            "contrast_lower",
            "Its lower bound, 95%, people as clusters.",
            [each.contrast and each.contrast.lower for each in found],
        ),
        ("contrast_upper", "Its upper bound.", [each.contrast and each.contrast.upper for each in found]),
        ("troubles", "What its workers wait for, and its alarms.", [len(each.troubles) for each in found]),
    ):
        family = GaugeMetricFamily(f"ostinato_branch_{name}", description, labels=["tenant"])
        for each, value in zip(found, figures, strict=True):
            if value is not None:
                family.add_metric([each.tenant], value)
        if family.samples:
            yield family


def _surrogate(lines: Sequence[Mapping[str, Any]]) -> Iterable[Metric]:
    """How well late rewards are predicted, by the trainer's newest line about it."""
    tenants = next((line["tenants"] for line in reversed(lines) if line["kind"] == "surrogate"), {})
    for name, description in (
        ("pairs", "Turns whose late reward was predicted before it was known, the newest."),
        ("correlation", "Correlation of their late rewards with what was predicted."),
        ("correlation_lower", "Its lower bound, 95%, people as clusters."),
        ("correlation_upper", "Its upper bound."),
        ("gap", "Predicted minus late reward in the mean, live's less control's."),
        ("gap_lower", "Its lower bound, 95%, people as clusters."),
        ("gap_upper", "Its upper bound."),
    ):
        family = GaugeMetricFamily(f"ostinato_surrogate_{name}", description, labels=["tenant"])
        for tenant, figures in sorted(tenants.items()):
            if name in figures:
                family.add_metric([tenant], figures[name])
        if family.samples:
            yield family


def _counted(name: str, description: str, label: str, counted: dict[str, int]) -> Metric:
    family = CounterMetricFamily(name, description, labels=[label])
    for value, count in sorted(counted.items()):
        family.add_metric([value], count)
    return family


async def watch_branches(branches: BranchReader, board: Path, numbers: LearningNumbers) -> None:
    """Until cancelled, set the tenants' branches in `numbers`. `board`: the file of the workers' states."""
    while True:
        numbers.branches = await branches.now(await asyncio.to_thread(read_board, board))
        await asyncio.sleep(_LEARNING_S)


async def watch_learning(log: RowLog, folds: Folds, ledger: ReleaseLedger, numbers: LearningNumbers) -> None:
    """Until cancelled, set the newest summary and ledger state in `numbers`. A failed read is tried again later."""
    while True:
        with contextlib.suppress(OstinatoError):
            numbers.ledger = await ledger.refresh()
            newest, kept = await asyncio.to_thread(log.newest), await folds.load(FOLD)
            if kept is not None and kept[0] <= newest:  # a summary of a longer log is another log's
                # written by another version: a new one is on its way
                with contextlib.suppress(KeyError, TypeError, ValueError):
                    moved = numbers.summary is None or numbers.summary.cursor != kept[0]
                    if moved:
                        # takes up to 70 ms with 20,000 open turns, so it must not run between two tokens of a stream
                        numbers.summary = await asyncio.to_thread(Summary.of, *kept)
                    numbers.behind = newest - kept[0]
                    if moved and numbers.summary is not None:
                        numbers.dials = await asyncio.to_thread(_dials_of, numbers)
                        numbers.styles = await asyncio.to_thread(numbers.summary.styles.effects)
        await asyncio.sleep(_LEARNING_S)
