"""Demo scenarios: the inline copilot and "tab". Each defines its settings, its simulated users and its measurements.

The copilot's function bodies are graded by hidden tests in the sandbox. "tab" suggests the next item of a list, or nothing where it cannot
be known; simulated users accept what they meant. Its figures per arm: suggestions per request, and the share of them that is accepted.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table

from ostinato.app.evaluation import open_suite
from ostinato.app.storage import open_follower
from ostinato.app.suites import open_runner
from ostinato.config import Config
from ostinato.core.errors import Conflict, Unavailable
from ostinato.core.records import Arm, Person, PolicyVersion
from ostinato.core.report import ItemScore
from ostinato.demo import tasks as demo_tasks
from ostinato.demo.tab import NOTHING, Line, T, is_meant, make_typists, split_lines
from ostinato.demo.users import RequestOutcome, UsersConfig, UserStats, make_users, run_users
from ostinato.evaluate.statistics import Estimate, Tally, mean_difference, paired_items, suite_mean
from ostinato.evaluate.suggestions import ArmChange, Tallies, by_item, by_user, change, ratio
from ostinato.evaluate.suites import Item
from ostinato.launch.views.screen import arms_table, bare_table
from ostinato.status import observed_run
from ostinato.status.arms import WINDOWS, acceptance_by_arm
from ostinato.status.run_report import (
    CalibratedFamily,
    Calibration,
    Curve,
    CurvePoint,
    HeldOut,
    OutcomeShare,
    Suggesting,
)
from ostinato.status.summary import rated_turn
from ostinato.worlds.grading.completion import python_tests
from ostinato.worlds.sandbox import SingleRuns

FINAL_SEED = 1_000_003  # fresh draws: the gate selected the winner by its own, which would bias the final measurement
RECENT_S = 120.0
# releases that may interrupt the final measurement; without traffic, training soon runs out of turns for more
_LAST_RELEASES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutScores:
    """Scores of the frozen first model and the live release on the held-out suite, with the same items and seeds."""

    base: PolicyVersion
    base_scores: list[ItemScore]
    final: PolicyVersion
    final_scores: list[ItemScore]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioFindings:
    """A scenario's part of the report. `arms` and `suite` are rows of the summary: (label, value)."""

    curves: tuple[Curve, ...]
    arms: list[tuple[str, str]]
    suite: list[tuple[str, str]]
    notes: tuple[str, ...]
    held_out: tuple[HeldOut, ...] = ()
    suggested: tuple[Curve, ...] = ()
    calibration: Calibration | None = None


def with_final_seed(config: Config, seed: int) -> Config:
    """Return the settings of the final measurement, whose draws the gate never saw."""
    runner = config.evaluate.runner.model_copy(update={"seed": FINAL_SEED + seed})
    return config.model_copy(update={"evaluate": config.evaluate.model_copy(update={"runner": runner})})


async def measure_held_out(config: Config, seed: int, url: str, draws: int) -> HeldOutScores:
    """Evaluate the base (the frozen control slot) and the live release on the same items with fresh seeds."""
    follower = open_follower(config)
    config = with_final_seed(config, seed)
    runner = open_runner(config, url, open_suite(config))
    base = await follower.resolve("control")
    assert base is not None
    base_scores = await runner.run("control", base, range(draws))
    for _ in range(_LAST_RELEASES):
        final = await follower.resolve("live")
        assert final is not None
        with contextlib.suppress(Conflict, Unavailable):  # a release may move live during the measurement
            final_scores = await runner.run("live", final, range(draws))
            return HeldOutScores(base=base, base_scores=base_scores, final=final, final_scores=final_scores)
    raise Unavailable("live kept moving while the final model was measured; run `ostinato eval` by hand")


# ---------------------------------------------------------------- the copilot


class Copilot:
    """Fifty simulated users to whom function bodies are suggested. `directory`: prefix of the run's default directory; `draws`: per
    held-out item.

    `settings`, as `--set` words: for answers of up to 40 tokens, and a machine on which the gate's verdict takes as long as several steps.
    """

    title = "Inline copilot with simulated users"
    directory = "demo"
    draws = 2
    users = UsersConfig().count
    settings = (
        "learn.batch=64",  # a step of 96 turns takes 1.5 times as long, which delays the first candidate
        "learn.publish_every=2",  # the first version is hardly trained, and its evaluation would delay the second's
        "evaluate.gate.share_draws=true",  # a verdict then needs one or two thirds of the answers, so turns are less stale
        # without bf16 instructions, a candidate that needs more than one interim analysis is five or more steps old when it ships
        "learn.max_lead=12",
        "reward.max_staleness=12",
        "serve.control_share=0.25",  # ten of fifty users would leave the interval wide, and there are more turns than are trained on
        "train.learning_rate=4e-5",  # at 1e-4, turns that are two steps old are nearly useless
        "train.turn_tokens=40",
        "train.kl_beta=0.0",  # saves a forward pass of the whole batch after a release; the anchor still bounds the drift
        "train.anchor_tokens=256",  # one micro-batch of three
        "evaluate.suite=demo",
        "evaluate.items=96",
    )

    async def crowd(self, config: Config, url: str, seconds: float, seed: int) -> UserStats:
        """Run fifty users, each with tasks of their favourite families."""
        tasks, _ = demo_tasks.split(demo_tasks.load())
        async with SingleRuns(config.sandbox) as sandbox:
            await sandbox.check()

            async def grade(task: demo_tasks.Blank, text: str) -> float:
                return await python_tests(task.head, text, task.tests, sandbox, config.evaluate.grade_timeout_s)

            users = UsersConfig(model=config.model.served_as)
            return await run_users(url, make_users(tasks, users, seed), tasks, grade, seconds, seed, users, _unseen)

    def arms(self, seen: observed_run.Observed, now: float) -> RenderableType:
        """Return a table of each arm's recent acceptance."""
        recent = acceptance_by_arm(rated_turn(*each) for each in seen.between(now - RECENT_S, now + 1.0))
        return arms_table(recent, "simulated users", "last 2 min")

    def findings(
        self, seen: observed_run.Observed, start: float, end: float, scores: HeldOutScores, config: Config
    ) -> ScenarioFindings:
        """Return acceptance over time, and the result on the held-out functions."""
        _, differences_I, _ = paired_items(scores.final_scores, scores.base_scores)
        difference = mean_difference(differences_I, lower_alpha=0.025, upper_alpha=0.025)
        items = len(differences_I)
        bounds = f"[{100 * difference.lower:+.1f}, {100 * difference.upper:+.1f}]"
        gain = f"{100 * difference.mean:+.1f} pp, 95% {bounds}, {items} items"
        sides = (("base", scores.base, scores.base_scores), ("final", scores.final, scores.final_scores))
        return ScenarioFindings(
            curves=observed_run.curves(seen, start, end),
            arms=observed_run.acceptance_rows(seen, start, end),
            suite=[("held-out suite, final minus base", gain)],
            notes=(
                "The users are simulated: programs that run the suggested body against hidden tests, with 5% wrong labels.",
                "The held-out families are never asked for by users; base and final are measured with fresh seeds.",
            ),
            held_out=tuple(
                observed_run.held_out(f"{name} (v{policy.number})", suite_mean(of), items) for name, policy, of in sides
            ),
        )


def _unseen(_: RequestOutcome) -> None:
    """Ignore an outcome: the screen reads the log, since it shows what the platform knows and not what the users know."""


# ---------------------------------------------------------------- tab: suggestions


def share_curves(seen: observed_run.Observed, start: float, end: float) -> tuple[tuple[Curve, ...], tuple[Curve, ...]]:
    """Return the curves of (share of requests with a suggestion, share of suggestions accepted) per arm, in equal time windows.

    A window with fewer than two users of an arm has no point, since no variance between users can be estimated.
    """
    width = (end - start) / WINDOWS
    suggested: dict[Arm, list[CurvePoint]] = {}
    accepted: dict[Arm, list[CurvePoint]] = {}
    for index in range(WINDOWS):
        low = start + index * width
        for arm, tallies in by_user(seen.between(low, low + width)).items():
            for lines, tally in ((suggested, tallies.suggested), (accepted, tallies.accepted)):
                point = _point((low + width - start) / 60, tally)
                if point is not None:
                    lines.setdefault(arm, []).append(point)
    return _curves(suggested), _curves(accepted)


def _point(minutes: float, tally: Tally) -> CurvePoint | None:
    if (found := ratio(tally)) is None:
        return None
    return CurvePoint(t=minutes, mean=found.mean, lower=found.lower, upper=found.upper, n=_total(tally))


def _curves(points: dict[Arm, list[CurvePoint]]) -> tuple[Curve, ...]:
    return tuple(Curve(arm=arm.value, points=tuple(line)) for arm, line in points.items())


def recent_suggestions(seen: observed_run.Observed, now: float) -> Table:
    """Return a table of the arms over the last two minutes."""
    recent = seen.between(now - RECENT_S, now + 1.0)
    newest = {turn.arm: turn.oldest for turn, _ in recent}
    shares = ("suggestions per request", "accepted of these")
    table = bare_table("simulated users", *shares, "requests, last 2 min", "policy")
    for arm, tallies in sorted(by_user(recent).items(), key=lambda pair: pair[0] is Arm.CONTROL):
        policy = newest[arm]
        table.add_row(
            arm.value + (" (frozen)" if arm is Arm.CONTROL else ""),
            _percent(ratio(tallies.suggested)),
            _percent(ratio(tallies.accepted)),
            str(_total(tallies.suggested)),
            "-" if policy is None else f"v{policy}",
        )
    return table


def arm_summary(seen: observed_run.Observed, start: float, end: float) -> list[tuple[str, str]]:
    """Return rows (label, value): both shares per arm over the last third of the run, and live against control."""
    last = by_user(observed_run.last_third(seen, start, end))
    found: list[tuple[str, str]] = []
    for arm, tallies in sorted(last.items(), key=lambda pair: pair[0] is Arm.CONTROL):
        of = (("suggestions per request", tallies.suggested), ("accept rate", tallies.accepted))
        found += [
            (f"{what}, {arm.value} arm, last third", f"{_percent(ratio(tally))} of {_total(tally)}")
            for what, tally in of
        ]
    nobody = Tallies(suggested={}, accepted={})
    live, control = last.get(Arm.LIVE, nobody), last.get(Arm.CONTROL, nobody)
    return [
        *found,
        ("suggestions, live against control", _changed(change(live.suggested, control.suggested))),
        ("accept rate, live against control", _changed(change(live.accepted, control.accepted))),
    ]


def _percent(share: Estimate | None) -> str:
    return "-" if share is None else f"{100 * share.mean:.1f}% [{100 * share.lower:.1f}, {100 * share.upper:.1f}]"


def _changed(found: ArmChange | None) -> str:
    if found is None:
        return "unknown: too few users, or a rate of zero in an arm"
    relative, points = found.relative, found.difference
    return (
        f"{100 * relative.mean:+.0f}%, 95% [{100 * relative.lower:+.0f}%, {100 * relative.upper:+.0f}%]; "
        f"{100 * points.mean:+.1f} pp [{100 * points.lower:+.1f}, {100 * points.upper:+.1f}], users as clusters"
    )


def calibrated(
    before: Sequence[ItemScore], after: Sequence[ItemScore], items: Sequence[Item], threshold: float
) -> Calibration:
    """Return two policies' suggestions over a suite of `suggestion` items, by family."""
    family = {item.id: item.family for item in items}
    old, new = (by_item(scores, family, threshold) for scores in (before, after))
    return Calibration(
        threshold=threshold,
        families=tuple(
            CalibratedFamily(family=name, before=_suggesting(old[name]), after=_suggesting(new[name])) for name in old
        ),
    )


def side_rows(found: Calibration) -> list[tuple[str, str]]:
    """Return rows (label, value): how often the first and the last model suggest where that pays, and where it does not.

    It pays in a family if the share of right ones among the last model's suggestions exceeds the threshold. If the last model made no
    suggestion, the first model's share counts.
    """
    sides: dict[bool, list[CalibratedFamily]] = {True: [], False: []}
    for each in found.families:
        right = each.after.accepted or each.before.accepted
        sides[right is not None and right.mean > found.threshold].append(each)
    rows = {pays: _before_and_after(families, len(found.families)) for pays, families in sides.items()}
    label = "held-out answers with a suggestion, where it"
    return [(f"{label} {'pays' if pays else 'does not pay'}", value) for pays, value in rows.items()]


def _before_and_after(families: Sequence[CalibratedFamily], of: int) -> str:
    if not families:
        return "no such family"
    before = math.fsum(each.before.suggested.mean for each in families) / len(families)
    after = math.fsum(each.after.suggested.mean for each in families) / len(families)
    return f"{100 * before:.1f}% before, {100 * after:.1f}% after, {len(families)} of {of} families"


def _suggesting(tallies: Tallies) -> Suggesting:
    suggested = _share(tallies.suggested)
    if suggested is None:
        raise ValueError("a family of fewer than two items says nothing of how much items differ; give it more")
    return Suggesting(suggested=suggested, accepted=_share(tallies.accepted))


def _share(tally: Tally) -> OutcomeShare | None:
    if (found := ratio(tally)) is None:
        return None
    return OutcomeShare(mean=found.mean, lower=found.lower, upper=found.upper, n=_total(tally))


# ---------------------------------------------------------------- tab: the scenario


USERS = UsersConfig(count=80, think_s=8.0, ignore_share=0.0)
"""No suggestion is ignored, since an editor's plugin knows whether Tab was pressed. The control arm gets about 16 of the 80 users."""


class Tab:
    """Eighty simulated users whose lines are completed. A few tokens carry the whole decision, so `settings` tolerate a drift of one nat
    per token.
    """

    title = "Tab with simulated users: when to suggest nothing"
    directory = "demo-tab"
    draws = 16
    users = USERS.count
    settings = (
        "reward.function=ostinato.reward.functions:tab",
        f"reward.options={{window=10.0, t={T}, nothing='{NOTHING}'}}",
        "learn.batch=72",
        "train.turn_tokens=3",
        "train.anchor_kl=1.0",
        "train.anchor_limit=4.0",
        "evaluate.suite=demo-tab",
        "evaluate.runner.samples_per_request=8",
    )

    async def crowd(self, config: Config, url: str, seconds: float, seed: int) -> UserStats:
        """Run the users. All of them type lines of every family."""
        lines, _ = split_lines()
        dice = random.Random(f"{seed}/meant")

        async def grade(line: Line, text: str) -> float:
            return is_meant(line, text, dice)

        users = USERS.model_copy(update={"model": config.model.served_as})
        return await run_users(url, make_typists(lines, users, seed), lines, grade, seconds, seed, users, _unseen)

    def arms(self, seen: observed_run.Observed, now: float) -> RenderableType:
        """Return a table of how often something is suggested, and the share that is accepted."""
        return recent_suggestions(seen, now)

    def findings(
        self, seen: observed_run.Observed, start: float, end: float, scores: HeldOutScores, config: Config
    ) -> ScenarioFindings:
        """Return both shares over time, and where suggestions are made on the held-out lines."""
        suggested, accepted = share_curves(seen, start, end)
        _, differences_I, _ = paired_items(scores.final_scores, scores.base_scores)
        gain = mean_difference(differences_I, lower_alpha=0.025, upper_alpha=0.025)
        value = f"{gain.mean:+.3f}, 95% [{gain.lower:+.3f}, {gain.upper:+.3f}], {len(differences_I)} lines"
        calibration = calibrated(scores.base_scores, scores.final_scores, open_suite(config).suite.items, T)
        return ScenarioFindings(
            curves=accepted,
            suggested=suggested,
            arms=arm_summary(seen, start, end),
            suite=[("mean reward on held-out lines, final minus base", value), *side_rows(calibration)],
            calibration=calibration,
            notes=(
                "The users are simulated: programs that mean one next item and accept only that, with 5% wrong labels.",
                f"Reward: {1 - T:g} for an accepted suggestion, {-T:g} for a rejected one, 0 for none.",
                "The held-out lines are never typed by users; both models are measured with fresh seeds and judged without noise.",
            ),
        )


def _total(tally: Mapping[Person, tuple[float, int]]) -> int:
    """Return the number of outcomes."""
    return sum(count for _, count in tally.values())


Scenario = Copilot | Tab
