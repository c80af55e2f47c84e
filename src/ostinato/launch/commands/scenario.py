"""Demo scenarios: their interface, and the inline copilot, whose function bodies are judged by hidden tests in the sandbox.

A scenario has its settings and its simulated users, and says how its arms are shown and what it measures at the end.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Protocol

from rich.console import RenderableType

from ostinato.app.evaluation import open_suite
from ostinato.app.storage import open_follower
from ostinato.app.suites import open_runner
from ostinato.config import Config
from ostinato.core.errors import Conflict, Unavailable
from ostinato.core.records import PolicyVersion
from ostinato.core.report import ItemScore
from ostinato.demo import tasks as demo_tasks
from ostinato.demo.users import RequestOutcome, UsersConfig, UserStats, make_users, run_users
from ostinato.evaluate.statistics import mean_difference, paired_items, suite_mean
from ostinato.launch.views.screen import recent_acceptance
from ostinato.status import report_figures as figures
from ostinato.status.observed_run import Observed
from ostinato.status.run_report import Calibration, Curve, HeldOut
from ostinato.worlds.grading.completion import python_tests
from ostinato.worlds.sandbox import SingleRuns

FINAL_SEED = 1_000_003  # other draws than the gate saw: the last measurement must not use the draws that chose


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutScores:
    """The frozen first model and the live release on the held-out suite: same items, same seeds.

    Example: ``HeldOutScores(base=v0, base_scores=[...], final=v36, final_scores=[...])``
    """

    base: PolicyVersion
    base_scores: list[ItemScore]
    final: PolicyVersion
    final_scores: list[ItemScore]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioFindings:
    """A scenario's part of the report. `arms` and `suite` are rows of the summary: label, value.

    Example: ``ScenarioFindings(curves=(...), arms=[("acceptance, last third", "54%")], suite=[], notes=("Users are simulated.",))``
    """

    curves: tuple[Curve, ...]
    arms: list[tuple[str, str]]
    suite: list[tuple[str, str]]
    notes: tuple[str, ...]
    held_out: tuple[HeldOut, ...] = ()
    suggested: tuple[Curve, ...] = ()
    calibration: Calibration | None = None


class Scenario(Protocol):
    """A scenario of the demo."""

    title: str
    directory: str
    """The run's default directory, to which the seed is appended."""
    draws: int
    """Samples per held-out item at the end."""
    users: int
    """Simulated users."""

    def settings(self, seed: int) -> tuple[str, ...]:
        """Its own settings, as `--set` words."""
        ...

    async def crowd(self, config: Config, url: str, seconds: float, seed: int) -> UserStats:
        """Run its simulated users. Raises SandboxRefused if they need a sandbox that this machine cannot give."""
        ...

    def arms(self, seen: Observed, now: float) -> RenderableType:
        """The arms' present figures, for the screen."""
        ...

    def findings(
        self, seen: Observed, start: float, end: float, scores: HeldOutScores, config: Config
    ) -> ScenarioFindings:
        """Its results between `start` and `end` (Unix seconds) and on the held-out suite."""
        ...


async def measure_held_out(config: Config, seed: int, url: str, draws: int) -> HeldOutScores:
    """Measure the base (the frozen control slot) and the live release on the same items with fresh seeds."""
    follower = open_follower(config)
    runner_config = config.evaluate.runner.model_copy(update={"seed": FINAL_SEED + seed})
    settings = config.evaluate.model_copy(update={"runner": runner_config})
    config = config.model_copy(update={"evaluate": settings})
    runner = open_runner(config, url, open_suite(config))
    base = await follower.resolve("control")
    assert base is not None
    base_scores = await runner.run("control", base, range(draws))
    for _ in range(5):
        final = await follower.resolve("live")
        assert final is not None
        with contextlib.suppress(Conflict, Unavailable):  # a release may still move live while it is being measured
            final_scores = await runner.run("live", final, range(draws))
            return HeldOutScores(base=base, base_scores=base_scores, final=final, final_scores=final_scores)
    raise Unavailable("live kept moving while the final model was measured; run `ostinato eval` by hand")


# ---------------------------------------------------------------- the copilot


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
