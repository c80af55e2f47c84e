"""The demo scenario "tab": suggests the next item of a list, or nothing where nobody can know it. Simulated users accept what they meant.

Its figures: how often the model suggests, and how many suggestions are accepted, per arm.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

from rich.console import RenderableType
from rich.table import Table

from ostinato.app.evaluation import open_suite
from ostinato.config import Config
from ostinato.core.records import Arm, Person
from ostinato.core.report import ItemScore
from ostinato.demo.tab import NOTHING, Line, T, is_meant, make_typists, split_lines
from ostinato.demo.users import UsersConfig, UserStats, run_users
from ostinato.evaluate.statistics import Estimate, Tally, mean_difference, paired_items
from ostinato.evaluate.suggestions import ArmChange, Tallies, by_item, by_user, change, ratio
from ostinato.evaluate.suites import Item
from ostinato.launch.commands.scenario import HeldOutScores, ScenarioFindings, unseen
from ostinato.launch.views.screen import RECENT_S
from ostinato.status.arms import WINDOWS
from ostinato.status.observed_run import Observed
from ostinato.status.report_figures import last_third
from ostinato.status.run_report import CalibratedFamily, Calibration, Curve, CurvePoint, OutcomeShare, Suggesting

# ---------------------------------------------------------------- suggestions


def share_curves(seen: Observed, start: float, end: float) -> tuple[tuple[Curve, ...], tuple[Curve, ...]]:
    """(share of requests with a suggestion, share of suggestions accepted) per arm, in equal windows from `start` to `end`.

    A window with fewer than two users of an arm has no point, because it does not show how much users differ.
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
    found = ratio(tally)
    if found is None:
        return None
    return CurvePoint(t=minutes, mean=found.mean, lower=found.lower, upper=found.upper, n=_total(tally))


def _curves(points: dict[Arm, list[CurvePoint]]) -> tuple[Curve, ...]:
    return tuple(Curve(arm=arm.value, points=tuple(line)) for arm, line in points.items())


def recent_suggestions(seen: Observed, now: float) -> Table:
    """The arms over the last two minutes."""
    recent = seen.between(now - RECENT_S, now + 1.0)
    newest = {turn.arm: turn.oldest for turn, _ in recent}
    table = Table(box=None, pad_edge=False, show_header=True, header_style="dim")
    for name in (
        "simulated users",
        "suggestions per request",
        "accepted of these",
        "requests, last 2 min",
        "policy",
    ):
        table.add_column(name)
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


def arm_summary(seen: Observed, start: float, end: float) -> list[tuple[str, str]]:
    """Both shares per arm over the last third of the run, and live against control: label, value."""
    last = by_user(last_third(seen, start, end))
    found: list[tuple[str, str]] = []
    for arm, tallies in sorted(last.items(), key=lambda pair: pair[0] is Arm.CONTROL):
        requests, suggestions = _total(tallies.suggested), _total(tallies.accepted)
        found += [
            (
                f"suggestions per request, {arm.value} arm, last third",
                f"{_percent(ratio(tallies.suggested))} of {requests}",
            ),
            (f"accept rate, {arm.value} arm, last third", f"{_percent(ratio(tallies.accepted))} of {suggestions}"),
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
    """Two policies' scores over a suite of `suggestion` items, family by family."""
    family = {item.id: item.family for item in items}
    old, new = (by_item(scores, family, threshold) for scores in (before, after))
    return Calibration(
        threshold=threshold,
        families=tuple(
            CalibratedFamily(family=name, before=_suggesting(old[name]), after=_suggesting(new[name])) for name in old
        ),
    )


def side_rows(found: Calibration) -> list[tuple[str, str]]:
    """How often the first and the last model suggest where that pays, and where it does not: label, value.

    It pays in a family where the share of the last model's suggestions that are right exceeds the threshold. The first model's share
    counts if the last made no suggestion.
    """
    sides: dict[bool, list[CalibratedFamily]] = {True: [], False: []}
    for each in found.families:
        right = each.after.accepted or each.before.accepted
        sides[right is not None and right.mean > found.threshold].append(each)
    return [
        (
            f"held-out answers with a suggestion, where it {'pays' if pays else 'does not pay'}",
            _before_and_after(families, len(found.families)),
        )
        for pays, families in sides.items()
    ]


def _before_and_after(families: Sequence[CalibratedFamily], of: int) -> str:
    if not families:
        return "no such family"
    before, after = (
        math.fsum(policy.suggested.mean for policy in policies) / len(families)
        for policies in ([each.before for each in families], [each.after for each in families])
    )
    return f"{100 * before:.1f}% before, {100 * after:.1f}% after, {len(families)} of {of} families"


def _suggesting(tallies: Tallies) -> Suggesting:
    suggested = _share(tallies.suggested)
    if suggested is None:
        raise ValueError("a family of fewer than two items says nothing of how much items differ; give it more")
    return Suggesting(suggested=suggested, accepted=_share(tallies.accepted))


def _share(tally: Tally) -> OutcomeShare | None:
    found = ratio(tally)
    return (
        None if found is None else OutcomeShare(mean=found.mean, lower=found.lower, upper=found.upper, n=_total(tally))
    )


# ---------------------------------------------------------------- the scenario


USERS = UsersConfig(count=80, think_s=8.0, ignore_share=0.0)
"""A plugin knows of each suggestion whether Tab was pressed, so none is ignored. Of eighty users the control arm has about sixteen."""


class Tab:
    """Implements `Scenario`."""

    title = "Tab with simulated users: when to suggest nothing"
    directory = "demo-tab"
    draws = 16
    users = USERS.count

    def settings(self, seed: int) -> tuple[str, ...]:
        """Settings for answers of two or three tokens. So few tokens carry the whole decision that a nat per token is not drift."""
        return (
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
        """All users type lines of every family."""
        lines, _ = split_lines()
        dice = random.Random(f"{seed}/meant")

        async def grade(line: Line, text: str) -> float:
            return is_meant(line, text, dice)

        users = USERS.model_copy(update={"model": config.model.served_as})
        return await run_users(url, make_typists(lines, users, seed), lines, grade, seconds, seed, users, unseen)

    def arms(self, seen: Observed, now: float) -> RenderableType:
        """How often something is suggested, and how much of it is accepted."""
        return recent_suggestions(seen, now)

    def findings(
        self, seen: Observed, start: float, end: float, scores: HeldOutScores, config: Config
    ) -> ScenarioFindings:
        """Both shares over time, and on the held-out lines where suggestions are made."""
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
    """Number of outcomes."""
    return sum(count for _, count in tally.values())
