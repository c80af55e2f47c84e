"""`ostinato demo`: the loop on a real model. Starts the same workers as `up`, runs simulated users against them, and reports."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Generator
from pathlib import Path
from typing import IO, Any, Literal, cast

import aiohttp
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.status import Status
from rich.table import Table
from rich.text import Text

from ostinato.app.machine import PLACE
from ostinato.app.storage import Home, home, open_log
from ostinato.config import Config, as_override
from ostinato.core.clock import wall_clock
from ostinato.core.errors import BadConfig, SandboxRefused
from ostinato.core.files import write_atomic
from ostinato.core.places import INSIDE_RUN
from ostinato.core.seams import Log
from ostinato.demo.users import UserStats
from ostinato.launch.commands.checks import check_start
from ostinato.launch.commands.crew import Launched, launch
from ostinato.launch.commands.report import write_report
from ostinato.launch.commands.scenarios import Copilot, Scenario, Tab, measure_held_out
from ostinato.launch.placing.address import await_gateway
from ostinato.launch.views.screen import published_line, release_line, run_option, say, step_line, swap_line
from ostinato.record.roles import hold
from ostinato.reward.accounting import account
from ostinato.run_directory import DEMO_MARKER
from ostinato.status import observed_run
from ostinato.status.progress_lines import last_lines, numerics_line
from ostinato.status.run_report import RunReport
from ostinato.worlds.sandbox import SandboxConfig, SingleRuns

Name = Literal["copilot", "tab"]


class _LossyStream:
    """A text stream that drops output that cannot be written, e.g. to a closed terminal, so that the demo still ends gracefully."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


def outlast_terminal(console: Console) -> None:
    """Make printing to the console never raise OSError from now on."""
    console.file = cast("IO[str]", _LossyStream(console.file))


SCENARIOS: dict[Name, Scenario] = {"copilot": Copilot(), "tab": Tab()}


def demo_overrides(scenario: Name, seed: int, directory: Path | None) -> tuple[str, ...]:
    """Return the demo's settings as `--set` words. The command line's own settings override them."""
    shown = SCENARIOS[scenario]
    place = directory or Path("runs") / f"{shown.directory}-{seed}"
    return (
        as_override("run.directory", str(place)),
        "listen.port=0",
        "serve.control_share=0.2",
        f"serve.arm_salt='demo-{seed}'",
        "reward.options={window=10.0}",
        "reward.max_staleness=8",
        "release.outcomes.maturity_s=10.0",
        "release.cooldown_s=60.0",  # the default of six hours would outlast the demo
        "engine.block=16",
        "learn.publish_every=3",
        "learn.max_lead=8",
        "train.learning_rate=3e-5",
        "evaluate.gate.margin=0.1",
        "evaluate.gate.total_margin=0.115",  # 96 items cannot resolve less than 11.4 points, and the demo says so
        "evaluate.gate.candidates_per_week=20",  # over the whole demo
        "evaluate.gate.sealed_share=0.0",  # too few items to hold any back
        "evaluate.gate.first_draws=2",
        "evaluate.gate.max_draws=4",
        "evaluate.opinions=false",  # the simulated users state none
        "evaluate.runner.concurrency=48",
        f"evaluate.runner.seed={seed}",
        *shown.settings,
    )


async def choose(asked: Name | None, sandbox: SandboxConfig, console: Console) -> Name:
    """Return the scenario to run: the requested one, otherwise the copilot, or tab if this machine cannot sandbox the copilot's code.

    Raises SandboxRefused if the copilot was requested and this machine cannot sandbox its code.
    """
    if asked == "tab":
        return asked
    try:
        async with SingleRuns(sandbox) as runs:
            await runs.check()
    except SandboxRefused as error:
        if asked is not None:
            raise SandboxRefused(f"{error} Without it: --scenario tab, which runs no code") from error
        instead = "Going on with --scenario tab, which runs no code."
        say(console, f"the copilot's functions need a sandbox: {error} {instead}", "yellow")
        return "tab"
    return "copilot"


def check_emptied(config: Config) -> None:
    """Raise BadConfig if the run's directory is not empty and not an earlier demo's."""
    place = config.run.directory
    if place.exists() and not (place / DEMO_MARKER).exists() and any(not is_kept(path) for path in place.iterdir()):
        raise BadConfig(f"run.directory {place} is not empty and not an earlier demo's; give --directory another place")


def check_servers(config: Config) -> None:
    """Raise BadConfig if a vLLM engine has fewer servers than the demo loads versions at once: its releases would get stuck."""
    needed = ["live", "control", "previous", "a candidate", *["the best"] * config.evaluate.gate.sample_best]
    wanted = len(needed) - 1 + config.engine.replicas.get("live", 1)
    if config.engine.kind == "vllm" and len(config.engine.urls) < wanted:
        raise BadConfig(
            f"engine.urls names {len(config.engine.urls)} vLLM servers, and the demo needs {wanted}: each holds one version "
            f"({', '.join(needed)})"
        )


def empty(place: Path) -> None:
    """Remove an earlier demo's files, but not the lock files: a process that holds a lock must not lose it."""
    for path in place.iterdir():
        if is_kept(path):
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    write_atomic(place / DEMO_MARKER, "made by `ostinato demo`; emptied by the next one\n", durable=False)


def is_kept(path: Path) -> bool:
    """Return True for what survives a demo: the run's lock files, and the caches, which are here if the home directory is read-only."""
    return path.name in (INSIDE_RUN, PLACE) or (path.name.startswith(".") and path.name.endswith(".lock"))


@contextlib.contextmanager
def demo_run(config: Config, out: Path) -> Generator[None]:
    """Lock the run's directory for this demo, empty it, and create `out`.

    Raises BadConfig as `check_emptied`, Conflict if the same demo is running.
    """
    check_emptied(config)
    out.mkdir(parents=True, exist_ok=True)
    with hold(home(config).root, "up"):
        empty(config.run.directory)
        yield


async def demo(config: Config, *, scenario: Name, seed: int, minutes: float, out: Path, console: Console) -> None:
    """Run the whole loop for `minutes` of simulated traffic and write report.html and report.json into `out`.

    Raises Conflict if the same demo is running, WorkerFailed if a worker fails for good.
    """
    outlast_terminal(console)
    await check_start(config)
    check_servers(config)
    ends: list[str] = []

    def note(worker: str, what: str) -> None:
        if "starts again" in what:
            ends.append(f"{worker} {what}")

    with demo_run(config, out):
        async with launch(config, note) as launched:
            with console.status("starting") as status:
                url = await launched.during(served(launched, status, ("live", "control")))
            if words := numerics_line(last_lines(launched.home.progress("serve"))):
                say(console, words, "yellow")
            say(console, f"page: {url}/ while it runs\nrun: {config.run.directory}; now and afterwards:")
            for command in ("status", "release show live", "log"):
                say(console, f"  ostinato {command} {run_option(config)}")
            with open_log(config) as log:
                running = _run(config, SCENARIOS[scenario], seed, minutes, out, console, url, log)
                await launched.during(running)
    for end in ends:
        say(console, end, "red")


async def served(launched: Launched, status: Status, slots: tuple[str, ...]) -> str:
    """Wait until the gateway serves these slots, and show its activity meanwhile. Return its URL."""
    waiting = asyncio.ensure_future(ready(launched.home, slots))
    while not waiting.done():
        status.update(f"serve: {launched.doing('serve')}")
        await asyncio.wait({waiting}, timeout=0.5)
    return await waiting


async def ready(place: Home, slots: tuple[str, ...]) -> str:
    """Wait until the run's gateway serves these slots. Return its URL."""
    async with aiohttp.ClientSession(headers={"X-Ostinato-Key": place.admin_key()}) as session:
        while True:
            url = await await_gateway(place)
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(f"{url}/health", timeout=aiohttp.ClientTimeout(total=10)) as response:
                    loaded = (await response.json()).get("slots", {})
                    if all(slot in loaded for slot in slots):
                        return url
            await asyncio.sleep(0.2)


async def _run(
    config: Config,
    scenario: Scenario,
    seed: int,
    minutes: float,
    out: Path,
    console: Console,
    url: str,
    log: Log,
) -> None:
    start, observer = wall_clock(), observed_run.RunObserver(home(config), log)
    stats = await traffic(config, scenario, seed, url, minutes, observer, console)
    end = wall_clock()
    await await_feedback(config, console)
    with console.status("measuring base and final model on the held-out suite, with draws the gate never saw"):
        scores = await measure_held_out(config, seed, url, scenario.draws)
    seen = await observer.look()
    found = await account(log, config=config.reward)
    findings = scenario.findings(seen, start, end, scores, config)
    extra = [
        *findings.suite,
        ("user requests, failed", f"{stats.asked}, {sum(outcome.kind == 'failed' for outcome in stats.outcomes)}"),
        ("given up by impatient users", str(sum(outcome.kind == "abandoned" for outcome in stats.outcomes))),
        ("failed tries by kind", ", ".join(f"{count} {kind}" for kind, count in stats.failures.items()) or "none"),
        ("turns accounted for", "all, once each" if found.balanced else f"NOT BALANCED: {found}"),
    ]
    page = RunReport(
        title=scenario.title,
        seed=seed,
        minutes=round((end - start) / 60, 1),
        model=config.model.served_as,
        users=len({outcome.user for outcome in stats.outcomes}),
        curves=findings.curves,
        suggested=findings.suggested,
        calibration=findings.calibration,
        releases=observed_run.marks(seen, start),
        gates=observed_run.gates(seen, start),
        deltas=observed_run.deltas(seen),
        pauses=observed_run.pauses(seen),
        held_out=findings.held_out,
        accounting=observed_run.accounting_rows(found),
        summary=observed_run.summary(seen, findings.arms, extra),
        notes=findings.notes,
    )
    (out / "report.json").write_text(page.to_json(), encoding="utf-8")
    show(page, out, console)
    if not seen.shipped():
        steps = f"{len(seen.steps)} steps in {minutes:g} minutes" if seen.steps else f"no step in {minutes:g} minutes"
        say(console, f"Nothing was released: {steps} are too few. Try again with more, as in --minutes 40.", "yellow")
    await write_report(config, out / "report.html", console, page)


async def await_feedback(config: Config, console: Console) -> None:
    """Wait until the feedback window of the last answers has passed."""
    with console.status("waiting for the last feedback to mature"):
        await asyncio.sleep(float(config.reward.options.get("window", 30.0)) + 2.0)


async def traffic(
    config: Config,
    scenario: Scenario,
    seed: int,
    url: str,
    minutes: float,
    observer: observed_run.RunObserver,
    console: Console,
) -> UserStats:
    """Run the simulated users, and show a live screen of the run meanwhile."""
    started, told = time.monotonic(), 0.0
    working = asyncio.ensure_future(scenario.crowd(config, url, minutes * 60, seed))
    try:
        with Live(console=console, refresh_per_second=2, transient=False) as live:
            while not working.done():
                seen = await observer.look()
                passed = (time.monotonic() - started) / 60
                head = f"{passed:.1f} of {round(minutes, 1):g} min, {scenario.users} simulated users on {url}"
                live.update(_panel(seen, head, scenario.arms(seen, wall_clock())))
                if not console.is_terminal and passed >= told:  # without a terminal the panel is shown at the end only
                    say(console, head)
                    told = passed + 1.0
                await asyncio.wait({working}, timeout=1.0)
    finally:
        working.cancel()
    return working.result()


def _panel(seen: observed_run.Observed, head: str, arms: RenderableType) -> RenderableType:
    """Return the demo's whole screen. `arms` is the scenario's view of the arms."""
    parts: list[RenderableType] = [Text(head, "bold"), arms]
    if seen.steps:
        parts.append(Text("\n".join(step_line(step) for step in seen.steps[-3:]), "dim"))
    if seen.published:
        parts.append(Text(published_line(seen.published[-1]), "dim"))
    live = [swap for swap in seen.swaps if swap["slot"] == "live"]
    if live:
        parts.append(Text(swap_line(live[-1]), "dim"))
    parts.extend(release_line(event.action, event.policy.number, event.reason) for event in seen.releases[-6:])
    held = ", ".join(f"{count} {reason}" for reason, count in seen.held.most_common(4))
    parts.append(
        Text(f"{seen.turns} turns, {seen.tokens} tokens, {seen.signals} signals; held back: {held or 'none'}", "dim")
    )
    return Group(*parts)


def show(page: RunReport, out: Path, console: Console) -> None:
    """Print the summary table."""
    table = Table(title=page.title, show_header=False, title_justify="left")
    for label, value in page.summary:
        table.add_row(label, value)
    console.print(table)
    say(console, f"figures: {out / 'report.json'}")
