"""`ostinato status`: the present state of a run, for people, or as JSON."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import asdict
from typing import Any

from rich.console import Console

from ostinato.app.storage import Home, open_folds, open_log, open_store
from ostinato.config import Config
from ostinato.core.clock import wall_clock
from ostinato.core.errors import StorageFull, Unavailable
from ostinato.core.numerics import Contract, same_arithmetic
from ostinato.launch.commands.log import existing
from ostinato.launch.placing.address import read_address
from ostinato.launch.placing.worker_status import STALE_S, read_board
from ostinato.launch.views import summary
from ostinato.launch.views.contracts import apart, parts
from ostinato.launch.views.disk import disk_use
from ostinato.launch.views.observe import DEMO_MARKER
from ostinato.launch.views.overview import Overview, arm_rows, overview, workers
from ostinato.launch.views.progress import last_lines, numerics_line
from ostinato.launch.views.releasing import releasing_json
from ostinato.launch.views.tenants import unproven_users
from ostinato.release.ledger import ReleaseLedger, State
from ostinato.reward.accounting import Accounting, account
from ostinato.weights.version.content import VERSIONS

# ---------------------------------------------------------------- as JSON


def as_json(run: Overview) -> dict[str, Any]:
    """The run as JSON types. `up` is null before the first `ostinato up`; `up.alive` is false once it ended, was killed or hangs.

    `arms` are over the newest rated turns, as on the screen.
    """
    board, seen = run.board, run.summary
    return {
        "directory": run.directory,
        "url": run.url,
        "at": run.now,
        "up": board
        and {
            "alive": board.ended is None and run.now - board.at <= STALE_S,
            "pid": board.pid,
            "heard_at": board.at,
            "ended": board.ended,
        },
        "workers": [asdict(worker) for worker in board.workers] if board else [],
        "alarms": {name: {"reason": reason, "since": since} for name, (reason, since) in sorted(seen.alarms.items())},
        "arms": {row.arm: asdict(row.point) | {"newest_version": row.newest} for row in arm_rows(run)},
        "unproven_users": run.unproven or None,
        "steps": seen.step,
        "tokens": seen.tokens,
        "signals": seen.signals,
        "signals_by_name": dict(seen.names),
        "releases": [asdict(line) for line in seen.releases],
        **releasing_json(run.ledger, run.lines.get("release", ())),
        "refs": dict(run.refs),
        "lent": next((line for line in reversed(run.lines.get("serve", ())) if line["kind"] == "lent"), None),
        "turns": asdict(run.accounting) | {"balanced": run.accounting.balanced},
        "disk": {**run.disk, "free": run.free},
    }


# ---------------------------------------------------------------- for people


_WORTH_KEEPING = 10_000  # rows: if more were read, the summary is kept so that the next look need not read them again


async def show_status(config: Config, console: Console, *, machine: bool = False) -> None:
    """Print one screen, or one JSON object for a machine.

    Raises NotFound if the run does not exist; Unavailable if its log cannot be reached. The screen then still shows the workers, which say
    that they wait for it.
    """
    place = existing(config)
    try:
        seen, accounting, ledger = await _read(config)
    except Unavailable:
        for part in [] if machine else workers(read_board(place.workers), wall_clock()):
            console.print(part, highlight=False, soft_wrap=True)
        raise
    shown = await _look(config, place, seen, ledger, accounting)
    if machine:
        console.print_json(data=as_json(shown), highlight=False)
        return
    for part in overview(shown):
        console.print(part, highlight=False, soft_wrap=True)
    for line in [*_contracts(seen), *filter(None, [numerics_line(shown.lines["serve"])])]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


async def _read(config: Config) -> tuple[summary.Summary, Accounting, State]:
    """The summary, the accounting and the release state, computed from the log."""
    folds = open_folds(config)
    with open_log(config) as log:
        seen, rows = await summary.summarise(log, folds, log.newest())
        accounting = await account(log, folds, config.reward)
        ledger = await ReleaseLedger(log, wall_clock).refresh()
    if rows > _WORTH_KEEPING:
        with contextlib.suppress(StorageFull):
            await summary.keep(seen, folds)
    return seen, accounting, ledger


async def _look(config: Config, place: Home, seen: summary.Summary, ledger: State, accounting: Accounting) -> Overview:
    every = await open_store(config).refs()
    refs = {name: root for name, root in every.items() if not name.startswith(VERSIONS)}
    held = {
        "log": place.log,
        "weights": place.weights,
        "checkpoints": place.checkpoints,
        "worker logs": place.root / "logs",
    }
    return Overview(
        directory=str(config.run.directory),
        url=read_address(place.address),
        who="simulated users" if (place.root / DEMO_MARKER).exists() else "arm",
        now=wall_clock(),
        board=read_board(place.workers),
        summary=seen,
        ledger=ledger,
        rules=config.release,
        accounting=accounting,
        lines={name: last_lines(place.progress(name)) for name in ("train", "serve", "release", "housekeeping")},
        refs=refs,
        disk={name: disk_use(path) for name, path in held.items()},
        free=shutil.disk_usage(place.root).free,
        unproven=unproven_users(config),
    )


def _contracts(seen: summary.Summary) -> list[str]:
    contracts = [(stamped, Contract.from_json(each)) for stamped, each in seen.contracts.items()]
    lines: list[str] = []
    for stamped, contract in contracts:
        newest = contracts[-1][1]
        alike = contract == newest or same_arithmetic(contract, newest)
        away = "" if alike else f"; differs from the newest: {apart(newest, contract)}"
        lines.append(f"numerics {parts(contract, stamped)}{away}")
    return lines
