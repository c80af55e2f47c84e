"""The inline copilot: function bodies, judged by hidden tests in the sandbox."""

from __future__ import annotations

from rich.console import RenderableType

from ostinato.config import Config
from ostinato.demo import tasks as demo_tasks
from ostinato.demo.users import RequestOutcome, UsersConfig, UserStats, make_users, run_users
from ostinato.evaluate.statistics import mean_difference, paired_items, suite_mean
from ostinato.launch.commands.scenarios.scenario import HeldOutScores, ScenarioFindings
from ostinato.launch.views import report as figures
from ostinato.launch.views.observe import Observed
from ostinato.launch.views.screen import recent_acceptance
from ostinato.worlds.grading.completion import python_tests
from ostinato.worlds.sandbox import SingleRuns


class Copilot:
    """Implements `Scenario`."""

    title = "Inline copilot with simulated users"
    directory = "demo"
    draws = 2
    users = UsersConfig().count

    def settings(self, seed: int) -> tuple[str, ...]:
        """Settings for answers of up to 40 tokens."""
        return ("learn.batch=96", "train.turn_tokens=40", "evaluate.suite=demo", "evaluate.items=96")

    async def crowd(self, config: Config, url: str, seconds: float, seed: int) -> UserStats:
        """Fifty users, each with tasks of their favourite families."""
        tasks, _ = demo_tasks.split(demo_tasks.load())
        async with SingleRuns(config.sandbox) as sandbox:
            await sandbox.check()

            async def grade(task: demo_tasks.Blank, text: str) -> float:
                return await python_tests(task.head, text, task.tests, sandbox, config.evaluate.grade_timeout_s)

            users = UsersConfig(model=config.model.served_as)
            return await run_users(url, make_users(tasks, users, seed), tasks, grade, seconds, seed, users, unseen)

    def arms(self, seen: Observed, now: float) -> RenderableType:
        """The recent acceptance of each arm."""
        return recent_acceptance(seen, now)

    def findings(
        self, seen: Observed, start: float, end: float, scores: HeldOutScores, config: Config
    ) -> ScenarioFindings:
        """Acceptance over time, and the result on the held-out functions."""
        _, differences_I, _ = paired_items(scores.final_scores, scores.base_scores)
        difference = mean_difference(differences_I, lower_alpha=0.025, upper_alpha=0.025)
        items = len(differences_I)
        bounds = f"[{100 * difference.lower:+.1f}, {100 * difference.upper:+.1f}]"
        gain = f"{100 * difference.mean:+.1f} pp, 95% {bounds}, {items} items"
        sides = (("base", scores.base, scores.base_scores), ("final", scores.final, scores.final_scores))
        return ScenarioFindings(
            curves=figures.curves(seen, start, end),
            arms=figures.acceptance_rows(seen, start, end),
            suite=[("held-out suite, final minus base", gain)],
            notes=(
                "The users are simulated: programs that run the suggested body against hidden tests, with 5% wrong labels.",
                "The held-out families are never asked for by users; base and final are measured with fresh seeds.",
            ),
            held_out=tuple(
                figures.held_out(f"{name} (v{policy.number})", suite_mean(of), items) for name, policy, of in sides
            ),
        )


def unseen(_: RequestOutcome) -> None:
    """Ignores the outcome. The screen reads the log instead: it shows what the platform knows, not what the users know."""
