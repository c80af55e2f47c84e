"""Tab: suggests the next item of a list, or nothing where nobody can know it. Simulated users accept what they meant."""

from __future__ import annotations

import random

from rich.console import RenderableType

from ostinato.app.evaluation import open_suite
from ostinato.config import Config
from ostinato.demo.tab import NOTHING, Line, T, is_meant, make_typists, split_lines
from ostinato.demo.users import UsersConfig, UserStats, run_users
from ostinato.evaluate.statistics import mean_difference, paired_items
from ostinato.launch.commands.scenarios.copilot import unseen
from ostinato.launch.commands.scenarios.scenario import HeldOutScores, ScenarioFindings
from ostinato.launch.views import suggestions as figures
from ostinato.launch.views.observe import Observed

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
        return figures.recent_suggestions(seen, now)

    def findings(
        self, seen: Observed, start: float, end: float, scores: HeldOutScores, config: Config
    ) -> ScenarioFindings:
        """Both shares over time, and on the held-out lines where suggestions are made."""
        suggested, accepted = figures.curves(seen, start, end)
        _, differences_I, _ = paired_items(scores.final_scores, scores.base_scores)
        gain = mean_difference(differences_I, lower_alpha=0.025, upper_alpha=0.025)
        value = f"{gain.mean:+.3f}, 95% [{gain.lower:+.3f}, {gain.upper:+.3f}], {len(differences_I)} lines"
        calibration = figures.calibration(scores.base_scores, scores.final_scores, open_suite(config).items, T)
        return ScenarioFindings(
            curves=accepted,
            suggested=suggested,
            arms=figures.rows(seen, start, end),
            suite=[("mean reward on held-out lines, final minus base", value), *figures.side_rows(calibration)],
            calibration=calibration,
            notes=(
                "The users are simulated: programs that mean one next item and accept only that, with 5% wrong labels.",
                f"Reward: {1 - T:g} for an accepted suggestion, {-T:g} for a rejected one, 0 for none.",
                "The held-out lines are never typed by users; both models are measured with fresh seeds and judged without noise.",
            ),
        )
