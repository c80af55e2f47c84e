"""The housekeeping worker: bounds the run's disk use and saves the summary from which `ostinato status` starts.

Each round garbage-collects the weight store, drops rows of the log past their retention and removes partial files of killed writers.
A chore that fails is retried in the next round and does not stop the others. The worker may be killed at any instant.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from ostinato.app.retention import collect_weights, drop_old_rows
from ostinato.app.storage import Home, Run, home
from ostinato.config import Config
from ostinato.core.clock import wall_clock
from ostinato.core.errors import OstinatoError
from ostinato.launch.views.progress import Progress, kept_bytes
from ostinato.launch.workers.prepare import await_prepared
from ostinato.launch.workers.shutdown import unless
from ostinato.launch.workers.worker_main import WorkerContext, run_in_role
from ostinato.record.restore import sweep_restorations
from ostinato.status import summary

logger = logging.getLogger(__name__)

SUMMARY_S = 20.0
"""Seconds between two saves of the summary."""
LEFTOVER_AGE_S = 3600.0
"""Age in seconds beyond which a partial file must be the leftover of a killed writer."""


async def housekeeping(config: Config, context: WorkerContext) -> None:
    """Tidy up until told to stop. Raises what `run_in_role` raises."""
    tidying = asyncio.create_task(_tidy_this_machine(config))

    async def work(run: Run) -> None:
        tidying.cancel()
        await unless(context.stopping, _work(run, context))

    try:
        await run_in_role(config, context, "housekeeping", work)
    finally:
        tidying.cancel()


async def _tidy_this_machine(config: Config) -> None:
    """Remove leftovers from this machine's disk until cancelled, even while a worker on another machine has the role."""
    while True:
        with contextlib.suppress(OSError):  # tried again in the next round
            remove_leftovers(home(config).root, wall_clock() - LEFTOVER_AGE_S)
        await asyncio.sleep(config.housekeeping.every_s)


async def _work(run: Run, context: WorkerContext) -> None:
    context.pulse.begin("waiting for version 0")  # another worker makes it, with its own time limit
    await await_prepared(run)
    rounds = Rounds(run, context)
    context.pulse.begin("reading the log")
    seen, read = await summary.summarise(run.log, run.folds, await run.log.append())
    if read:
        await rounds.attempt("the summary", lambda: _save_summary(run, seen))
    while True:
        with context.pulse.during("tidying up", run.config.supervise.work_s):
            await rounds.tidy()
        until = asyncio.get_running_loop().time() + run.config.housekeeping.every_s
        while (left := until - asyncio.get_running_loop().time()) > 0:
            context.pulse.begin("waiting for the next round")
            await rounds.attempt("the summary", lambda: _update_summary(run, seen))
            await asyncio.sleep(min(SUMMARY_S, left))


async def _update_summary(run: Run, seen: summary.Summary) -> str:
    return await _save_summary(run, seen) if await summary.catch_up(seen, run.log) else ""


async def _save_summary(run: Run, seen: summary.Summary) -> str:
    await summary.keep(seen, run.folds)
    return ""


class Rounds:
    """The chores of a run. Their reports go to the progress file; a failed chore is the worker's `trouble` until it succeeds."""

    def __init__(self, run: Run, context: WorkerContext) -> None:
        self._run = run
        self._progress = Progress(run.home.progress("housekeeping"), kept_bytes(run.config))
        self._failing: dict[str, str] = {}
        context.pulse.trouble = lambda: "; ".join(self._failing.values()) or None

    async def tidy(self) -> None:
        started = wall_clock()
        chores: list[tuple[str, Callable[[], Awaitable[str]]]] = [
            ("leftovers", self._leftovers),
            ("who was forgotten", self._forgotten),
        ]
        if self._run.config.housekeeping.collect:
            chores.append(("weights", self._weights))
        if self._run.config.record.retain_days is not None:
            chores.append(("log", self._log))
        said = {name: text for name, chore in chores if (text := await self.attempt(name, chore))}
        for name, text in said.items():
            logger.info("%s: %s", name, text)
        self._progress.write("tidied", seconds=round(wall_clock() - started, 2), said=said, failing=list(self._failing))

    async def attempt(self, name: str, chore: Callable[[], Awaitable[str]]) -> str:
        """Run a chore and return its report; "" if it did nothing or failed."""
        try:
            done = await chore()
        except (OstinatoError, OSError) as error:
            if self._failing.get(name) != f"{name}: {error}":
                logger.warning("%s could not be tidied up: %s", name, error)
            self._failing[name] = f"{name}: {error}"
            return ""
        self._failing.pop(name, None)
        return done

    async def _weights(self) -> str:
        found = await collect_weights(self._run)
        if not found.deleted.objects:
            return ""
        return f"deleted {len(found.gone)} versions, {found.deleted.bytes / 1e6:.1f} MB; kept {found.kept.bytes / 1e6:.1f} MB"

    async def _log(self) -> str:
        kept = await self._run.folds.load(summary.FOLD)
        dropped = await drop_old_rows(self._run, 0 if kept is None else kept[0])
        return f"dropped {dropped} old segments of the log" if dropped else ""

    async def _forgotten(self) -> str:
        told = await self._run.log.note_forgotten()
        return f"wrote to the log that {told} were forgotten" if told else ""

    async def _leftovers(self) -> str:
        gone = remove_leftovers(self._run.home.root, wall_clock() - LEFTOVER_AGE_S)
        return f"removed {', '.join(gone)}" if gone else ""


def remove_leftovers(root: Path, before: float) -> list[str]:
    """Remove killed writers' partial files and unfinished restorations of the log that were last written before the time `before`.

    Returns their names. Raises OSError.
    """
    gone = sweep_restorations(Home(root).log, before)
    for folder in (root, *(root / name for name in ("logs", "folds", "checkpoints", "erasure"))):
        for path in folder.glob("*.*"):
            half = path.suffix == ".partial" or (folder.name == "folds" and path.suffix[1:].isdecimal())
            with contextlib.suppress(FileNotFoundError):  # its writer has just renamed it
                if half and path.is_file() and path.stat().st_mtime < before:
                    path.unlink()
                    gone.append(path.name)
    return gone
