"""Start-up time and peak memory of each component that reads the log when the product starts, one component per process.

    python -m benchmarks.record.starts desk DIRECTORY

The clock starts once the interpreter and the modules are loaded, since that time does not depend on the log.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from ostinato.app.retention import needed
from ostinato.app.storage import open_folds, open_log
from ostinato.config import Config
from ostinato.core.clock import wall_clock
from ostinato.core.records import Identity, Row, Turn
from ostinato.core.seams import Cursor, R
from ostinato.launch.commands.status import show_status
from ostinato.record.rowlog import RowLog
from ostinato.release.ledger import ReleaseLedger
from ostinato.release.metrics.config import OutcomeConfig
from ostinato.release.watch import Outcomes
from ostinato.reward.log_fold import LedgerFollower
from ostinato.serve.config import ServeConfig
from ostinato.serve.gateway import create_app
from ostinato.status import summary
from ostinato.testing.engine import FakeEngine
from ostinato.testing.renderer import ByteRenderer


@dataclass(frozen=True, slots=True)
class Start:
    """The cost of a start. `peak_mb`: peak of the whole process, including the interpreter and the modules."""

    seconds: float
    cpu_seconds: float
    peak_mb: float
    modules_mb: float


def config_of(run: Path) -> Config:
    return Config.model_validate({"run": {"directory": run}})


async def desk(config: Config) -> None:
    """The training worker's reward desk: its fold, and the rows after it."""
    plan = f"{config.reward.function} {sorted(config.reward.options.items())}"
    with open_log(config) as log:
        await LedgerFollower(log, config.reward, open_folds(config), plan).catch_up()


async def gateway(config: Config) -> None:
    """The gateway's start, over an engine that has no weights."""
    with open_log(config) as log:
        app = create_app(
            engine=FakeEngine(),
            renderer=ByteRenderer(),
            log=log,
            config=ServeConfig(),
            clock=wall_clock,
            model_name="m",
        )
        async with app.router.lifespan_context(app):
            pass


async def status(config: Config) -> None:
    """`ostinato status`."""
    await show_status(config, Console(file=io.StringIO()))


async def release_ledger(config: Config) -> None:
    """The release worker's ledger."""
    with open_log(config) as log:
        await ReleaseLedger(log, wall_clock).refresh()


async def release_outcomes(config: Config) -> None:
    """The release worker's window of outcomes."""
    with open_log(config) as log:
        await Outcomes(log, OutcomeConfig()).refresh()


async def housekeeping(config: Config) -> None:
    """The housekeeping worker: the summary from its fold, and which versions the run needs."""
    with open_log(config) as log:
        await summary.summarise(log, open_folds(config), log.newest())
        await needed(log, config)


READERS: Mapping[str, Callable[[Config], Coroutine[Any, Any, None]]] = {
    each.__name__: each for each in (desk, gateway, status, release_ledger, release_outcomes, housekeeping)
}


# ---------------------------------------------------------------- the folds that the readers start from


class _Since:
    """A log as if retention had dropped all rows up to `horizon`. Rows read from it are added to a summary too."""

    def __init__(self, log: RowLog, horizon: Cursor, seen: Callable[[int], None]) -> None:
        self.summary = summary.Summary(cursor=horizon)
        self._log = log
        self._horizon = horizon
        self._seen = seen
        self._turns = 0

    async def append(self, *rows: Row) -> Cursor:
        return await self._log.append(*rows)

    async def find(self, kind: type[R], identities: Sequence[Identity]) -> list[R]:
        return await self._log.find(kind, identities)

    async def horizon(self) -> Cursor:
        return self._horizon

    async def before_last(self, count: int, kind: type[Row]) -> Cursor:
        return max(self._horizon, await self._log.before_last(count, kind))

    async def read(self, after: Cursor, kinds: set[type]) -> AsyncIterator[tuple[Cursor, Row]]:
        async for seq, row in self._log.read(after, kinds | summary.KINDS):
            if type(row) in summary.KINDS:
                self.summary.apply(seq, row)
            if type(row) in kinds:
                yield seq, row
            if isinstance(row, Turn):
                self._turns += 1
                if self._turns % 1000 == 0:
                    self._seen(self._turns)


async def folded(run: Path, figures: Mapping[str, float], turns: int, seen: Callable[[int], None]) -> dict[str, float]:
    """Save the desk's fold and the summary, made from at most `turns` of the newest turns. Returns the cost of reading them."""
    config = config_of(run)
    plan = f"{config.reward.function} {sorted(config.reward.options.items())}"
    with open_log(config) as log:
        share = min(1.0, turns / figures["turns"])
        since = _Since(log, 0 if share == 1.0 else int(log.newest() * (1.0 - share)), seen)
        reading, cpu = LedgerFollower(since, config.reward, open_folds(config), plan), time.process_time()
        await reading.catch_up()
        await reading.save()
        await summary.keep(since.summary, open_folds(config))
    took = time.process_time() - cpu
    rows = figures["rows"] * share
    fold = {path.stem: path.stat().st_size for path in config.run.directory.joinpath("folds").iterdir()}
    return {
        "turns folded": figures["turns"] * share,
        "folding cpu us a row": took / rows * 1e6,
        **{f"{name}'s fold, bytes": float(length) for name, length in fold.items()},
    }


def _peak_mb() -> float:
    """This program's peak memory. `getrusage` is not used because it includes the process that started this one."""
    told = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in told.splitlines() if line.startswith("VmHWM")) / 1024


def main() -> None:
    reader, run = sys.argv[1], Path(sys.argv[2])
    modules = _peak_mb()
    wall, cpu = time.perf_counter(), time.process_time()
    asyncio.run(READERS[reader](config_of(run)))
    start = Start(time.perf_counter() - wall, time.process_time() - cpu, _peak_mb(), modules)
    print(json.dumps(asdict(start)))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
