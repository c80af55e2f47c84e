"""`ostinato train --world FILE`: gateway, trainer and rollout worker under one supervisor, with a line per step."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ostinato.app.storage import home
from ostinato.app.worlds import check_steps, open_taskset
from ostinato.config import Config, as_override
from ostinato.launch.commands.checks import check_same_model, check_start
from ostinato.launch.commands.crew import Launched, launch
from ostinato.launch.views.screen import say
from ostinato.launch.workers.shutdown import until_stopped
from ostinato.record.roles import hold
from ostinato.status.progress_lines import Lines

# ---------------------------------------------------------------- progress lines


RECENT_STEPS = 20
# counts all groups, including those that no step uses because all their rollouts have the same reward
RECENT_GROUPS = 64


def idle_share(steps: Sequence[Mapping[str, Any]]) -> float:
    """Return the share of time between the first and the last step's end in which the trainer waited for input; 0 before the second step.

    `steps`: its progress lines about steps, oldest first.
    """
    if len(steps) < 2:
        return 0.0
    passed_s = float(steps[-1]["at"]) - float(steps[0]["at"])
    computed_s = sum(float(step["seconds"]) for step in steps[1:])
    return max(0.0, 1.0 - computed_s / passed_s) if passed_s > 0 else 0.0


class WorldScreen:
    """Turns progress lines of the trainer and the rollout worker into lines for the terminal. `step`: the last step taken; `stored`: the
    last step whose version is stored.
    """

    def __init__(self) -> None:
        self.step = self.stored = self.flat = self.groups = 0
        self._steps: deque[Mapping[str, Any]] = deque(maxlen=RECENT_STEPS + 1)
        self._success: dict[str, str] = {}
        self._drawn: deque[float] = deque(maxlen=RECENT_GROUPS)
        self._shapes: deque[Mapping[str, Any]] = deque(maxlen=RECENT_GROUPS)

    def take(self, line: Mapping[str, Any]) -> list[str]:
        """Take one progress line, and return the lines to print."""
        match line["kind"]:
            case "step":
                self.step = max(self.step, int(line["step"]))
                self._steps.append(line)
                return [self._told(line)]
            case "published":
                self.stored = max(self.stored, int(line["number"]))
            case "refused":
                return [f"step {int(line['step']) + 1:>4}  refused: {line['why']}"]
            case "group":
                self.groups += 1
                self.flat += bool(line["flat"])
                if line.get("tokens"):
                    self._shapes.append(line)
                if line.get("reward") is not None:
                    self._drawn.append(float(line["reward"]))
            case "measured":
                share = line["solved"] / line["of"] if line["of"] else 0.0
                self._success[line["split"]] = f"{100 * share:.0f}% of {line['of']}"
                return [f"measured   {line['split']}: {line['solved']} of {line['of']} solved ({100 * share:.0f}%)"]
            case _:
                pass
        return []

    def _told(self, step: Mapping[str, Any]) -> str:
        shown = "".join(f"  {split} {what}" for split, what in self._success.items())
        drawn = f" (all drawn recently {sum(self._drawn) / len(self._drawn):.3f})" if self._drawn else ""
        return (
            f"step {step['step']:>4}  reward {step['reward_mean']:.3f}{drawn}  {step['episodes']:.0f} rollouts  lag {step['lag_mean']:.1f} "
            f"(at most {step['lag_max']:.0f})  KL {step.get('kl_k1', 0.0):+.4f}  ESS {step['ess']:.2f}  {step['seconds']:.1f} s  "
            f"trainer idle {100 * idle_share(list(self._steps)):.0f}%  groups without contrast {self.flat} of {self.groups}"
            f"{_lengths(self._shapes)}{shown}"
        )


def _lengths(groups: Sequence[Mapping[str, Any]]) -> str:
    """Describe the rollouts of these groups: mean tokens, turns and summaries per rollout, and the shares that hit the length limit or the
    time limit, or failed.
    """
    tokens = sorted(int(each) for group in groups for each in group["tokens"])
    if not tokens:
        return ""
    count = len(tokens)
    ninth = tokens[-(-9 * count // 10) - 1]  # 90th percentile
    turns = sum(int(each) for group in groups for each in group["turns"]) / count
    cut, late, failed = (sum(int(group[name]) for group in groups) / count for name in ("cut", "timeouts", "failed"))
    summaries = sum(int(group.get("summaries", 0)) for group in groups) / count
    told = f", {summaries:.1f} summaries" if summaries else ""
    return (
        f"  recently {sum(tokens) / count:.0f} tokens (p90 {ninth}) and {turns:.1f} turns a rollout{told}, "
        f"{100 * cut:.0f}% cut at the length limit, {100 * late:.0f}% out of time, {100 * failed:.0f}% failed"
    )


# ---------------------------------------------------------------- the command


CREW = ("serve", "train", "rollout")
_LOOK_S = 0.5


async def train_in_world(config: Config, steps: int, console: Console) -> None:
    """Train until `steps` steps were taken, every task was drawn `worlds.epochs` times, or Ctrl-C.

    Raises BadConfig, Conflict if the run is up already, WorkerFailed if a worker fails for good.
    """
    await check_start(config)
    check_same_model(config)
    tasks = open_taskset(config)
    check_steps(config, tasks)
    stopping = until_stopped()

    def note(worker: str, what: str) -> None:
        _show(console, f"{worker:10} {what}")

    with hold(home(config).root, "up"):
        count = f"{len(tasks.tasks)} tasks ({tasks.hash[:12]})"
        _show(console, f"{tasks.name}: {count}; the run is in {config.run.directory}")
        async with launch(config, note, names=CREW) as launched:
            _show(console, f"{launched.url}/worlds shows it once the model is loaded")
            await launched.during(follow(launched, steps, stopping, console))


async def follow(launched: Launched, steps: int, stopping: asyncio.Event, console: Console) -> None:
    """Show the workers' progress until `steps` steps are stored, no rollouts are left to learn from, or `stopping` is set."""
    screen, sources = WorldScreen(), [Lines(launched.home.progress(worker)) for worker in ("rollout", "train")]
    for lines in sources:  # lines of an earlier start are not shown
        for line in lines.new():
            screen.take(line)
    begun = screen.step
    if begun:
        _show(console, f"going on after step {begun}")
    while not stopping.is_set():
        for lines in sources:
            for line in lines.new():
                for text in screen.take(line):
                    _show(console, text)
        done = launched.doing("rollout").startswith("done")
        stored = screen.step == begun or screen.stored >= (screen.step if done else steps)
        if steps and screen.step >= steps and stored:
            return
        if done and stored:
            of = f" of {steps}" if steps else ""
            _show(console, f"ended at step {screen.step}{of}: every task was drawn worlds.epochs times")
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), _LOOK_S)


def _show(console: Console, line: str) -> None:
    """Print a line. An output that cannot be written, e.g. on a full disk, must not stop the workers."""
    with contextlib.suppress(OSError):
        say(console, line)


# ---------------------------------------------------------------- overrides


def world_overrides(file: Path) -> tuple[str, ...]:
    """Return the settings of a run that learns from a taskset, as `--set` words. The command line's own settings override them.

    Example: ``world_overrides(Path("tasks.jsonl")) == ('learn.source="worlds"', 'worlds.file="/home/ann/tasks.jsonl"')``
    """
    return ('learn.source="worlds"', as_override("worlds.file", str(file.expanduser().absolute())))


def connect_overrides(url: str | None, cert: Path | None, key: Path | None, ca: Path | None) -> tuple[str, ...]:
    """Return the settings of a rollout worker for another machine's run, as `--set` words.

    Example: ``connect_overrides("https://t:8443", None, None, None) == ('learn.source="worlds"', 'worlds.connect.url="https://t:8443"')``
    """
    places = {"certificate": cert, "key": key, "authority": ca}
    files = [
        as_override(f"worlds.connect.{name}", str(path.expanduser().absolute()))
        for name, path in places.items()
        if path
    ]
    return (*(('learn.source="worlds"', as_override("worlds.connect.url", url)) if url else ()), *files)
