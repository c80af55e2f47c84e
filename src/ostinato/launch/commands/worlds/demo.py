"""`ostinato demo worlds`: a cold start. A model trains in a world, must clear a quality bar and a canary on simulated users, and goes live.

A control arm of users always gets the base model. Nothing is learned from users here, so the difference between the arms is what the
model learned in the world.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from ostinato.app.roles import open_roles
from ostinato.app.storage import home, open_follower, open_log
from ostinato.app.suites import open_runner, open_task_suite
from ostinato.app.trainer import open_desk
from ostinato.app.worlds import function_tasks
from ostinato.config import Config, as_override
from ostinato.core.clock import wall_clock
from ostinato.core.errors import NoSignal
from ostinato.core.records import Arm, PolicyVersion
from ostinato.core.seams import Log
from ostinato.launch.commands.checks import check_start
from ostinato.launch.commands.crew import Launched, launch
from ostinato.launch.commands.demo import await_feedback, demo_run, served, show, traffic
from ostinato.launch.commands.report import write_report
from ostinato.launch.commands.scenarios import Copilot, with_final_seed
from ostinato.launch.commands.worlds.train import CREW, follow
from ostinato.launch.views.screen import say
from ostinato.reward.accounting import account
from ostinato.reward.pipeline import RewardDesk
from ostinato.reward.runners import asker_of
from ostinato.run_directory import EVALUATION_REF
from ostinato.status.observed_run import RunObserver
from ostinato.status.progress_lines import last_lines
from ostinato.status.worlds_figures import Phases, Solved, last_word, worlds_report
from ostinato.worlds.tasks.tasksets import save

PROVING = ("serve", "release")
DRAWS = 2
"""Tries at each held-out task in the final measurement."""
_LOOK_S = 0.5
_MOST_LINES = 1 << 24


def worlds_demo_overrides(seed: int, directory: Path | None) -> tuple[str, ...]:
    """Return the demo's settings as `--set` words. The command line's own settings override them."""
    place = directory or Path("runs") / f"demo-worlds-{seed}"
    tasks = (place / "functions.jsonl").absolute()
    return (
        as_override("run.directory", str(place)),
        "listen.port=0",
        "engine.block=16",
        # the world
        "learn.source='worlds'",
        as_override("worlds.file", str(tasks)),
        f"worlds.seed={seed}",
        "worlds.group=8",
        "worlds.groups=16",
        "worlds.concurrency=64",
        "worlds.window=32",
        "worlds.epochs=0",
        "worlds.measure_every=256",
        "train.learning_rate=3e-5",
        "train.turn_tokens=40",
        "learn.publish_every=1",  # the last step's weights are the candidate
        "learn.checkpoint_every=10",
        # the bar and the gate
        f"evaluate.bars=[{{{as_override('taskset', str(tasks))}, at_least=0.15}}]",  # the base model's rate, too low to clear the bar
        "evaluate.suite=demo",
        "evaluate.gate.margin=0.1",
        "evaluate.gate.total_margin=0.1",
        "evaluate.gate.candidates_per_week=1",  # one in the whole demo
        "evaluate.gate.sealed_share=0.0",
        "evaluate.gate.first_draws=4",
        "evaluate.gate.max_draws=4",
        "evaluate.runner.concurrency=48",
        f"evaluate.runner.seed={seed}",
        # canary and trial on users
        "serve.control_share=0.3",
        f"serve.arm_salt='demo-worlds-{seed}'",
        "reward.options={window=10.0}",
        "release.canary=true",
        "release.cooldown_s=60.0",
        "release.outcomes.maturity_s=10.0",
        # a few minutes with few turns say little about tail latency and rare events
        "release.metrics=[{name='latency_p99', role='diagnostic'}, {name='feedback_coverage', tolerance=0.1}]",
        "release.trial.slot_s=10.0",
        "release.trial.shares=[0.5]",  # fifty users are too few for a ramp
        "release.trial.margin=0.1",
        "release.trial.min_people=5.0",
        "release.trial.min_turns=100.0",
        "release.trial.most_turns_a_day=1000.0",  # the demo's day has ten minutes
        "release.trial.better_after_s=60.0",
        "release.trial.holdback=0.1",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The division of time: seconds of training in the world, and seconds with users."""

    training_s: float
    users_s: float

    @classmethod
    def of(cls, minutes: float, training: float) -> Plan:
        """Divide the minutes. `training`: the share of training in the world."""
        return cls(training_s=60.0 * minutes * training, users_s=60.0 * minutes * (1.0 - training))


async def demo_worlds(config: Config, *, seed: int, plan: Plan, out: Path, console: Console) -> None:
    """Train in the world, evaluate, run the canary and serve; write report.html and report.json into `out`.

    Raises Conflict if the same demo is running, NoSignal if there was no time for a step, WorkerFailed if a worker fails for good.
    """
    began = wall_clock()

    def note(worker: str, what: str) -> None:
        say(console, f"{worker:10} {what}")

    with demo_run(config, out):
        save(function_tasks(), Path(config.worlds.file))
        await check_start(config)
        async with launch(config, note, names=CREW) as launched:
            await _train(launched, plan.training_s, console)
        trained = wall_clock()
        candidate = await open_follower(config).resolve("candidate")
        if candidate is None:
            minutes = f"{plan.training_s / 60:.1f} minutes of the world"
            raise NoSignal(f"no step was taken in {minutes}; give it more --minutes")
        async with launch(config, note, names=PROVING) as launched:
            with open_log(config) as log:
                users_s, times = plan.users_s, (began, trained)
                await launched.during(_prove(config, launched, log, candidate, seed, users_s, times, out, console))


async def _train(launched: Launched, seconds: float, console: Console) -> None:
    """Train in the world for `seconds` after the gateway is ready, and print a line per step."""
    with console.status("starting") as status:
        await launched.during(served(launched, status, ("live", "control", Arm.WORLD.value)))
    say(console, f"training in the world for {seconds / 60:.1f} minutes")
    stopping = asyncio.Event()
    ending = asyncio.get_running_loop().call_later(seconds, stopping.set)
    try:
        await launched.during(follow(launched, 0, stopping, console))
    finally:
        ending.cancel()


async def _prove(
    config: Config,
    launched: Launched,
    log: Log,
    candidate: PolicyVersion,
    seed: int,
    users_s: float,
    times: tuple[float, float],
    out: Path,
    console: Console,
) -> None:
    """Evaluate the candidate, serve it to users if it clears the bar, measure it and write the report. `times`: training's start and
    end.
    """
    observer = RunObserver(home(config), log)
    with console.status("starting") as status:
        url = await served(launched, status, ("live", "control"))
    async with _rewarded(config, log):
        with console.status(f"the bar and the gate judge {candidate}: held-out tasks in the world, and the suite"):
            passed = await _judged(observer, candidate)
        judged, asked, failed = wall_clock(), 0, 0
        if passed:
            stats = await traffic(config, Copilot(), seed, url, users_s / 60, observer, console)
            asked, failed = stats.asked, sum(outcome.kind == "failed" for outcome in stats.outcomes)
        ended = wall_clock()
        if passed:
            await await_feedback(config, console)
    with console.status("measuring the first and the last model in the world, with unseen draws"):
        solved = await _solved(config, seed, candidate, url)
    phases = Phases(began=times[0], trained=times[1], judged=judged, ended=ended, measured=wall_clock())
    seen = await observer.look()
    page = worlds_report(
        seen,
        candidate,
        phases,
        solved,
        measured=last_lines(home(config).progress("rollout"), _MOST_LINES),
        found=await account(log, config=config.reward),
        asked=(asked, failed),
        seed=seed,
        model=config.model.served_as,
    )
    (out / "report.json").write_text(page.to_json(), encoding="utf-8")
    show(page, out, console)
    if not passed:
        say(console, f"{candidate} was not tried on users: {last_word(seen, candidate)}", "yellow")
    await write_report(config, out / "report.html", console, page)


async def _judged(observer: RunObserver, candidate: PolicyVersion) -> bool:
    """Wait for the verdict. Return True if the candidate may be served to users."""
    while True:
        seen = await observer.look()
        said = {event.action for event in seen.releases if event.policy == candidate}
        if said & {"blocked", "canary", "shipped"}:
            return "blocked" not in said
        await asyncio.sleep(_LOOK_S)


async def _solved(config: Config, seed: int, candidate: PolicyVersion, url: str) -> Solved:
    """Evaluate base and candidate on the held-out tasks. The candidate answers in the evaluation slot."""
    config = with_final_seed(config, seed)
    base = await open_follower(config).resolve("control")
    assert base is not None
    run = open_runner(config, url, open_task_suite(config.worlds.file, config)).run
    return Solved(
        before=await run(Arm.CONTROL.value, base, range(DRAWS)),
        after=await run(EVALUATION_REF, candidate, range(DRAWS)),
    )


@contextlib.asynccontextmanager
async def _rewarded(config: Config, log: Log) -> AsyncGenerator[None]:
    """Compute rewards of users' turns inside the block, as the trainer would, but learn nothing. Raises what that raised."""
    with contextlib.closing(open_roles(config).take("train")):
        asker = asker_of(config.reward)
        await asker.open()
        desk = open_desk(config, log, asker=asker)
        polling = asyncio.create_task(_poll(desk))
        try:
            yield
            if polling.done():
                polling.result()
            await desk.poll()
        finally:
            polling.cancel()
            await asyncio.gather(polling, return_exceptions=True)
            await desk.close()


async def _poll(desk: RewardDesk) -> None:
    while True:
        await desk.poll()
        await asyncio.sleep(_LOOK_S)
