"""The interface of a demo scenario: its settings, its simulated users, how its arms are shown, and what it measures at the end."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Protocol

from rich.console import RenderableType

from ostinato.app.evaluation import open_runner
from ostinato.app.storage import open_follower
from ostinato.config import Config
from ostinato.core.errors import Conflict, Unavailable
from ostinato.core.records import PolicyVersion
from ostinato.core.report import ItemScore
from ostinato.demo.users import UserStats
from ostinato.launch.views.observe import Observed
from ostinato.web.run_report import Calibration, Curve, HeldOut

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
    runner = open_runner(config.model_copy(update={"evaluate": settings}), url)
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
