"""Prometheus metrics of a run, beside the gateway's own on `GET /metrics`: workers, alarms, disk and learning. No tenant sees them.

The learning metrics (acceptance, rewards, steps, releases) come from the summary that the housekeeping worker stores, so a gateway reads no
log rows for them. Every gateway of a run reports the same values, so dashboards must take their maximum, not their sum.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
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

_ALARM_POLL_S = 5.0


class RunNumbers(Collector):
    """Collects metrics of the workers, the disk and the alarms: reads the supervisor's board and the disk at each scrape.

    `watch_alarms` keeps the names of the raised alarms in `alarms`.
    """

    def __init__(self, board: Path) -> None:
        self._board = board
        self.alarms: set[str] = set()

    def collect(self) -> Iterable[Metric]:
        names = sorted(self.alarms)
        yield _labelled("name", names, "alarm", "1 for each active alarm in the log.", [1.0] * len(names))
        with contextlib.suppress(OSError):  # without the disk the other metrics are still reported
            free = shutil.disk_usage(self._board.parent).free
            yield _gauge("disk_free_bytes", "Free bytes on the disk of the run's directory.", free)
        board, now = read_board(self._board), wall_clock()
        if board is None or board.ended is not None:
            return
        yield _gauge("up_heard_seconds", "Seconds since the last sign of life of `ostinato up`.", now - board.at)
        workers = board.workers
        of = partial(_labelled, "worker", [each.name for each in workers])
        running = [each.condition == "running" for each in workers]
        yield of("worker_running", "1 while the worker runs.", running)
        troubled = [each.trouble is not None for each in workers]
        yield of("worker_trouble", "1 while it waits for a disk or a store.", troubled)
        doing = [max(0.0, now - each.doing_since) for each in workers]
        yield of("worker_doing_seconds", "Seconds in its current activity.", doing)
        restarts = [each.restarts for each in workers]
        yield of("worker_restarts", "Number of restarts.", restarts, CounterMetricFamily)


def _gauge(name: str, description: str, value: float) -> Metric:
    return GaugeMetricFamily(f"ostinato_{name}", description, value=value)


def _labelled(
    label: str,
    names: Iterable[str],
    metric: str,
    description: str,
    values: Iterable[float | None],
    kind: type[GaugeMetricFamily | CounterMetricFamily] = GaugeMetricFamily,
) -> Metric:
    """Return a metric family with a sample for each name whose value is not None."""
    family = kind(f"ostinato_{metric}", description, labels=[label])
    for name, value in zip(names, values, strict=True):
        if value is not None:
            family.add_metric([name], value)
    return family


def _counted(metric: str, description: str, label: str, counted: Mapping[str, int]) -> Metric:
    names = sorted(counted)
    return _labelled(label, names, metric, description, [counted[name] for name in names], CounterMetricFamily)


async def watch_alarms(log: RowLog, standing: set[str]) -> None:
    """Until cancelled, keep the names of the raised alarms in `standing`. A failed read of the log is retried."""
    cursor = 0
    while True:
        with contextlib.suppress(OstinatoError):
            newest = await asyncio.to_thread(log.newest)
            async for _, row in log.read(cursor, {Alarm}):
                if isinstance(row, Alarm):
                    (standing.add if row.state is AlarmState.RAISED else standing.discard)(row.name)
            cursor = newest  # rows appended meanwhile are read twice, in order, which is harmless
        await asyncio.sleep(_ALARM_POLL_S)


# ---------------------------------------------------------------- learning


_LEARNING_POLL_S = 30.0
_ACTIONS = {"shipped": 0, "blocked": 0, "rolled_back": 0}
"""Exported as 0 from the start, because Prometheus misses the first increase of a counter that appears with it."""


@dataclass(slots=True, eq=False)
class LearningNumbers(Collector):
    """Collects the learning metrics from the values that `watch_learning` and `watch_branches` last set.

    `behind`: number of log rows after the summary; `adapt`: the settings of dials; `serve`: the serving worker's progress file, which lists
    the refused bases; `train`: the trainer's, which says how well late rewards are predicted; None if none are.
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
        """Yield the metric families of one scrape; only those of branches until there is a summary."""
        yield from _branches(self.branches)
        seen = self.summary
        if seen is None:
            return
        yield from _people(seen.rated)
        yield _gauge("step", "Optimizer steps in the log.", seen.step)
        yield _counted("releases", "Lines of the release ledger, by action.", "action", _ACTIONS | seen.actions)
        yield _counted("held_turns", "Turns held back from training, by reason.", "reason", seen.held)
        yield _gauge("summary_behind_rows", "Rows of the log that are not in these numbers yet.", self.behind)
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
            age = wall_clock() - self.ledger.shipped_at
            yield _gauge("live_version", "Number of the live version.", live.number)
            yield _gauge("live_seconds", "Seconds since it became live.", max(0.0, age))
            ahead = seen.lineage.lag(seen.step, live.number)
            yield _gauge("ahead_steps", "Steps by which the trainer is ahead of it.", ahead)


def _people(rated: Iterable[RatedTurn]) -> Iterable[Metric]:
    newest = f"of people's newest {RATED} rated turns"
    rows = sorted(acceptance_by_arm(rated), key=lambda row: row.arm)
    of, points = partial(_labelled, "arm", [row.arm for row in rows]), [row.point for row in rows]
    yield of("acceptance", f"Share with a reward above 0, {newest}.", [point.acceptance for point in points])
    yield of("acceptance_lower", "Its lower bound, 95%, users as clusters.", [point.lower for point in points])
    yield of("acceptance_upper", "Its upper bound.", [point.upper for point in points])
    yield of("reward_mean", f"Mean reward {newest}.", [row.mean for row in rows])
    yield of("rated_turns", "Number of these turns, by arm.", [point.turns for point in points])
    yield of("heard_turns", "Number of these turns with feedback.", [row.heard for row in rows])


def _dials_of(numbers: LearningNumbers) -> DialsNow | None:
    live = None if numbers.ledger is None else numbers.ledger.live
    assert numbers.summary is not None
    lines = [] if numbers.serve is None or numbers.adapt.mode == "off" else last_lines(numbers.serve)
    return dials_now(numbers.adapt, numbers.summary, None if live is None else live.hash, lines)


def _dials(found: DialsNow) -> Iterable[Metric]:
    effect = found.effect
    yield _gauge("dials_fitted", "1 if the live version has a basis.", found.fitted)
    if effect is None:
        return
    of = partial(_labelled, "side", (DIALS, HOLDOUT))
    yield of("dials_people", "People compared, by side.", (effect.people, effect.holdout))
    yield of("dials_acceptance", "Share of their turns with a reward above 0.", (effect.accepted, effect.held))
    if effect.lower is not None and effect.upper is not None:  # both exist once there are enough people
        yield _gauge("dials_effect", "Acceptance of people with dials less that of the holdout.", effect.difference)
        yield _gauge("dials_effect_lower", "Its lower bound, which holds at every look, 95%.", effect.lower)
        yield _gauge("dials_effect_upper", "Its upper bound.", effect.upper)
    leaning = "People with dials whose answers differ from the base model's."
    yield _gauge("dials_leaning_people", leaning, effect.leaning)
    yield _gauge("dials_token_kl", "Nats of KL divergence a steered token.", effect.token_kl)
    spent = "Mean share of an answer's budget (adapt.answer_budget) that was spent."
    yield _gauge("dials_budget_spent", spent, effect.spent)


def _styles(found: Sequence[StyleEffect]) -> Iterable[Metric]:
    answers = {each.arm: each.turns for each in found}
    yield _counted("style_answers", "People's answers, by their style.", "style", answers)
    gains = {each.arm: each.gain for each in found if each.gain is not None}
    of = partial(_labelled, "style", gains)
    yield of("style_effect", "Reward more than without a style.", [gain.mean for gain in gains.values()])
    lower = [gain.lower for gain in gains.values()]
    yield of("style_effect_lower", "Its lower bound, for one look, 95%.", lower)
    yield of("style_effect_upper", "Its upper bound.", [gain.upper for gain in gains.values()])


def _compactions(found: CompactionsNow) -> Iterable[Metric]:
    counts = {"sampled": found.asked, "begun": found.begun}
    yield _counted("compactions", "Summaries of people's sessions, and windows that began with one.", "state", counts)
    if found.seen:
        tokens = "Median tokens of the newest summaries with which a window began."
        yield _gauge("compaction_tokens", tokens, found.tokens)
        yield _gauge("compaction_ratio", "Median of how many times longer the prompt was.", found.ratio)
    if found.kept is not None:
        kept = "Share of the facts that answers named before a summary which it keeps."
        yield _gauge("compaction_facts_kept", kept, found.kept)
    if found.found is not None:
        again = "The same of those that answers name again after it."
        yield _gauge("compaction_facts_found", again, found.found)
    if (rewards := found.rewards) is not None:
        difference = "Mean reward of long sessions with a summary less that of those without."
        yield _gauge("compaction_reward_difference", difference, rewards.with_summary - rewards.without)
        if rewards.between is not None:
            lower, upper = rewards.between
            yield _gauge("compaction_reward_difference_lower", "Its lower bound, 95%, people as clusters.", lower)
            yield _gauge("compaction_reward_difference_upper", "Its upper bound.", upper)


def _branches(found: Sequence[BranchNow]) -> Iterable[Metric]:
    """Yield the metrics of tenants' branches, by tenant; none without branches."""
    of, contrasts = partial(_labelled, "tenant", [each.tenant for each in found]), [each.contrast for each in found]
    versions = [each.version and each.version.number for each in found]
    parents = [each.parent and each.parent.number for each in found]
    families = (
        of("branch_version", "Number of the version that answers the tenant.", versions),
        of("branch_parent_version", "The shared version that it began at.", parents),
        of("branch_learned_turns", "Turns that it learned from.", [each.learned for each in found]),
        of(
            "branch_contrast", "Acceptance of its people less that of those on live.", [c and c.mean for c in contrasts]
        ),
        of("branch_contrast_lower", "Its lower bound, 95%, people as clusters.", [c and c.lower for c in contrasts]),
        of("branch_contrast_upper", "Its upper bound.", [c and c.upper for c in contrasts]),
        of("branch_troubles", "What its workers wait for, and its alarms.", [len(each.troubles) for each in found]),
    )
    yield from (family for family in families if family.samples)


def _surrogate(lines: Sequence[Mapping[str, Any]]) -> Iterable[Metric]:
    """Yield how well late rewards are predicted, from the trainer's newest progress line about it."""
    tenants = next((line["tenants"] for line in reversed(lines) if line["kind"] == "surrogate"), {})
    names = sorted(tenants)
    for name, description in (
        ("pairs", "Turns whose late reward was predicted before it was known, the newest."),
        ("correlation", "Correlation of their late rewards with what was predicted."),
        ("correlation_lower", "Its lower bound, 95%, people as clusters."),
        ("correlation_upper", "Its upper bound."),
        ("gap", "Predicted minus late reward in the mean, live's less control's."),
        ("gap_lower", "Its lower bound, 95%, people as clusters."),
        ("gap_upper", "Its upper bound."),
    ):
        figures = [tenants[each].get(name) for each in names]
        family = _labelled("tenant", names, f"surrogate_{name}", description, figures)
        if family.samples:
            yield family


async def watch_branches(branches: BranchReader, board: Path, numbers: LearningNumbers) -> None:
    """Until cancelled, set the tenants' branches in `numbers`. `board`: the supervisor's status board."""
    while True:
        numbers.branches = await branches.now(await asyncio.to_thread(read_board, board))
        await asyncio.sleep(_LEARNING_POLL_S)


async def watch_learning(log: RowLog, folds: Folds, ledger: ReleaseLedger, numbers: LearningNumbers) -> None:
    """Until cancelled, set the newest summary and ledger state in `numbers`. A failed read is retried."""
    while True:
        with contextlib.suppress(OstinatoError):
            numbers.ledger = await ledger.refresh()
            newest, kept = await asyncio.to_thread(log.newest), await folds.load(FOLD)
            if kept is not None and kept[0] <= newest:  # otherwise it summarises another, longer log
                # a summary of another version of Ostinato cannot be parsed; a new one will replace it
                with contextlib.suppress(KeyError, TypeError, ValueError):
                    moved = numbers.summary is None or numbers.summary.cursor != kept[0]
                    if moved:
                        # takes up to 70 ms with 20,000 open turns, so it must not block the event loop between two tokens
                        numbers.summary = await asyncio.to_thread(Summary.of, *kept)
                    numbers.behind = newest - kept[0]
                    if moved and numbers.summary is not None:
                        numbers.dials = await asyncio.to_thread(_dials_of, numbers)
                        numbers.styles = await asyncio.to_thread(numbers.summary.styles.effects)
        await asyncio.sleep(_LEARNING_POLL_S)
