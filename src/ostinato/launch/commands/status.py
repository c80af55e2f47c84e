"""`ostinato status`: a run's current state, for people or as JSON, from the log's summary, the status board and the progress files."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.console import Console, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from ostinato.app.branches import open_branches
from ostinato.app.storage import Home, existing_home, open_folds, open_log, open_store
from ostinato.config import Config
from ostinato.core.clock import wall_clock
from ostinato.core.durations import ago
from ostinato.core.errors import StorageFull, Unavailable
from ostinato.core.files import disk_use
from ostinato.core.numerics import Contract, contract_in_words, differences_in_words, same_arithmetic
from ostinato.core.records import Arm
from ostinato.launch.views import screen
from ostinato.launch.views.screen import plain, say
from ostinato.release.config import ReleaseConfig
from ostinato.release.ledger import ReleaseLedger, State
from ostinato.reward.accounting import Accounting
from ostinato.run_directory import DEMO_MARKER
from ostinato.status import summary
from ostinato.status.arms import acceptance_by_arm
from ostinato.status.branches import BranchNow, BranchReader, branch_line
from ostinato.status.compactions import compactions_line, compactions_now
from ostinato.status.config_warnings import config_warnings
from ostinato.status.dials import DialsNow, dials_line, dials_now
from ostinato.status.gateway_address import read_address
from ostinato.status.progress_lines import Lines, last_lines, numerics_line
from ostinato.status.run_state import RunFolds, releasing, releasing_json
from ostinato.status.summary import Summary
from ostinato.status.worker_status import WorkerBoard, WorkerStatus, read_board
from ostinato.weights.version.content import VERSIONS

# ---------------------------------------------------------------- accounting of turns


def accounts(found: Accounting, now: float) -> list[str]:
    """Return lines on the turns, their rewards, feedback without effect, staleness, and per tenant the feedback rate and late rewards."""
    state = "balanced" if found.balanced else "NOT BALANCED"
    held = sum(found.held.values())
    wait = "" if found.oldest_wait is None else f", the longest for {max(0.0, now - found.oldest_wait):.0f} s"
    lines = [
        f"{found.ingested} turns = {found.trained} trained + {held} held back ({_counts(found.held)}) + "
        f"{found.waiting} waiting{wait}: {state}",
        f"{found.rewarded} rewards; {sum(found.quarantined.values())} turns without a reward ({_counts(found.quarantined)})",
        f"feedback without effect: {found.late} late, {found.retracted} retracted after training, {found.foreign} about "
        f"another tenant's turns, {found.moot} about turns without a reward, {found.excess} over the limit, {found.forgotten} about "
        f"unknown turns ({found.orphans} still waiting for theirs)",
    ]
    if found.used is not None:
        lines.append(f"learned from: {100 * found.used:.0f}% of the last turns that could teach")
    if found.stale:
        shares = ", ".join(f"{100 * share:.0f}% of turns {band}" for band, share in found.stale.items())
        lines.append(f"too stale in rollouts that were taken, by tokens: {shares}")
    lines += [
        f"usual feedback of {tenant}: on {100 * each.usual:.0f}% of turns ({each.turns} turns){', SILENT NOW' if each.alarm else ''}"
        for tenant, each in sorted(found.coverage.items())
    ]
    lines += [f"{tenant}: {each.in_words()}" for tenant, each in sorted(found.surrogate.items())]
    return lines


def _counts(counted: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in counted.items()) or "none"


# ---------------------------------------------------------------- the screen


SHOWN_RELEASES = 6
_DOWN_HINT = (
    "{name} is not restarted automatically: fix the cause of its last exit, then restart `ostinato up`; or, to keep serving, start "
    "`ostinato {name}` beside it with the same options"
)
_STYLES = {"running": "green", "waiting": "yellow", "failed": "bold red"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """A run's current state. `lines`: the newest progress lines by worker; `disk`: bytes used by kind of data; `free`: bytes left;
    `ledger`: the release ledger's state; `rules`: the release worker's settings; `who`: the heading of the column of arms.

    `warnings`, by worker: what the configuration leaves unguarded. `dials`: None if nobody has any. `branches`: the tenants' branches that
    are trained. `tenant`: the tenant whose branch this run trains, or "".
    """

    directory: str
    url: str | None
    who: str
    now: float
    board: WorkerBoard | None
    summary: Summary
    ledger: State
    rules: ReleaseConfig
    accounting: Accounting
    lines: Mapping[str, Sequence[dict[str, Any]]]
    refs: Mapping[str, str]
    disk: Mapping[str, int]
    free: int
    warnings: Mapping[str, str] = field(default_factory=dict[str, str])
    dials: DialsNow | None = None
    branches: Sequence[BranchNow] = ()
    tenant: str = ""


def overview(run: Overview) -> list[RenderableType]:
    """Return the parts of the screen, in order."""
    parts: list[RenderableType] = [Text(f"run {run.directory}  {run.url or 'not serving'}", "bold")]
    parts += workers(run.board, run.now)
    parts += [
        Text.assemble(("alarm ", "bold red"), plain(f"{name}: {reason} ({ago(run.now - at)} ago)"))
        for name, (reason, at) in sorted(run.summary.alarms.items())
    ]
    parts += [Text(words, "yellow") for words in run.warnings.values()]
    parts += [Text(branch_line(each), "yellow" if each.troubles else "") for each in run.branches]
    parts += _arms(run)
    parts += [] if run.dials is None else [Text(dials_line(run.dials))]
    if (compactions := compactions_now(run.summary.compactions)) is not None:
        parts.append(Text(compactions_line(compactions)))
    parts += _learning(run)
    parts += [
        screen.release_line(each.action, each.number, each.reason, each.actor)
        for each in list(run.summary.releases)[-SHOWN_RELEASES:]
    ]
    parts += [Text(said, "yellow") for said in releasing(run.ledger, run.rules, run.lines.get("release", ()), run.now)]
    if run.refs:
        table = Table(box=None, show_header=False, pad_edge=False)
        for name, root in sorted(run.refs.items()):
            table.add_row(Text(plain(f"refs/{name}")), root[:16])
        parts.append(table)
    return [*parts, *_accounts(run), *_disk(run)]


def workers(board: WorkerBoard | None, now: float) -> list[RenderableType]:
    """Return a table of the workers, or one line if the supervisor never ran, ended, was killed or hangs."""
    if board is None:
        return [Text("no `ostinato up` has run here", "dim")]
    age = now - board.at
    if board.ended is not None:
        why, style = ("", "dim") if board.ended == "stopped" else (f": {board.ended}", "red")
        return [Text(f"`ostinato up` ended {ago(age)} ago{why}", style)]
    if not board.alive(now):
        return [Text(f"`ostinato up` (pid {board.pid}) was killed or hangs: no sign of life for {ago(age)}", "red")]
    table = screen.bare_table("worker", "", "activity", "for", "restarts", "last exit")
    for worker in board.workers:
        table.add_row(*_worker(worker, now))
    down = [worker.name for worker in board.workers if worker.condition == "failed"]
    return [table, *(Text(_DOWN_HINT.format(name=name), "red") for name in down)]


def _worker(worker: WorkerStatus, now: float) -> tuple[Text, ...]:
    where = f" on {worker.node}" if worker.node else ""
    condition = Text(f"{worker.condition}{where}", _STYLES.get(worker.condition, ""))
    trouble = f"; {worker.trouble}" if worker.trouble else ""
    end = "" if worker.reason is None else f"{worker.reason} ({ago(now - (worker.reason_at or now))} ago)"
    activity = Text(f"{worker.activity}{trouble}", "yellow" if trouble else "")
    rest = (ago(now - worker.activity_since), str(worker.restarts), end)
    return (Text(worker.name), condition, activity, *map(Text, rest))


def _arms(run: Overview) -> list[RenderableType]:
    rated = run.summary.rated
    names = ", ".join(f"{count} {name}" for name, count in run.summary.names.most_common())
    if not rated:
        waiting = f"; signals in total: {names}; a turn's count once its reward is settled" if names else ""
        return [Text(f"no answer has been rated yet{waiting}", "dim")]
    heard = sum(each.heard for each in rated)
    oldest = ago(run.now - rated[0].served.started_at)
    arms = acceptance_by_arm(rated)
    if run.tenant:  # in a branch's log, live is the branch, and control is the shared version
        arms = [replace(each, arm=_BRANCH_ARMS.get(each.arm, each.arm)) for each in arms]
    return [
        screen.arms_table(arms, run.who, f"newest {len(rated)}, oldest {oldest} ago"),
        Text(f"feedback on {100 * heard / len(rated):.0f}% of them; signals in total: {names or 'none'}", "dim"),
    ]


_BRANCH_ARMS = {Arm.LIVE.value: Arm.BRANCH.value, Arm.CONTROL.value: Arm.SHARED.value}


def _learning(run: Overview) -> list[RenderableType]:
    train, serve = run.lines.get("train", ()), run.lines.get("serve", ())
    parts = [screen.step_line(line) for line in train if line["kind"] == "step"][-3:]
    parts += [screen.published_line(line) for line in train if line["kind"] == "published"][-1:]
    parts += [f"after step {line['step']}: refused: {line['why']}" for line in train if line["kind"] == "refused"][-1:]
    swaps = [line for line in serve if line["kind"] == "swapped" and line["slot"] == "live"]
    parts += [screen.swap_line(line) for line in swaps[-1:]]
    parts += [screen.lent_line(line, run.now) for line in serve if line["kind"] == "lent"][-1:]
    return [Text(part, "dim") for part in parts]


def _accounts(run: Overview) -> list[RenderableType]:
    seen = run.summary
    actions = ", ".join(f"{count} {action}" for action, count in sorted(seen.actions.items()))
    return [
        *(Text(line) for line in accounts(run.accounting, run.now)),
        Text(f"{seen.tokens} tokens; {seen.step} steps; releases: {actions or 'none'}", "dim"),
    ]


def _disk(run: Overview) -> list[RenderableType]:
    sizes = ", ".join(f"{name} {decimal(size)}" for name, size in run.disk.items())
    parts = [Text(f"disk: {sizes}; {decimal(run.free)} free", "dim")]
    rounds = [line for line in run.lines.get("housekeeping", ()) if line["kind"] == "tidied"]
    if rounds:
        said = "; ".join(rounds[-1]["said"].values()) or "nothing to do"
        failing = f"; FAILED: {', '.join(rounds[-1]['failing'])}" if rounds[-1]["failing"] else ""
        parts.append(Text(f"housekeeping: {ago(run.now - rounds[-1]['at'])} ago, {said}{failing}", "dim"))
    return list(parts)


# ---------------------------------------------------------------- as JSON


def as_json(run: Overview) -> dict[str, Any]:
    """Return the state in JSON types. `up` is null before the first `ostinato up`; `up.alive` is false once it ended, was killed or hangs.

    `arms` cover the newest rated turns, as on the screen.
    """
    board, seen = run.board, run.summary
    compactions = compactions_now(seen.compactions)
    return {
        "directory": run.directory,
        "url": run.url,
        "at": run.now,
        "up": board and {"alive": board.alive(run.now), "pid": board.pid, "heard_at": board.at, "ended": board.ended},
        "workers": [asdict(worker) for worker in board.workers] if board else [],
        "alarms": {name: {"reason": reason, "since": since} for name, (reason, since) in sorted(seen.alarms.items())},
        "arms": {row.arm: asdict(row.point) | {"newest_version": row.newest} for row in acceptance_by_arm(seen.rated)},
        "dials": run.dials and asdict(run.dials),
        "compactions": compactions and asdict(compactions),
        "branches": {each.tenant: asdict(each) for each in run.branches},
        "unproven_users": run.warnings.get("train"),
        "warnings": list(run.warnings.values()),
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


# ---------------------------------------------------------------- the command


_SAVE_SUMMARY_ROWS = 10_000  # if more rows were read, save the summary, so that the next call need not


async def show_status(config: Config, console: Console, *, machine: bool = False) -> None:
    """Print one screen, or with `machine` one JSON object.

    Raises NotFound if the run does not exist, Unavailable if its log cannot be reached. In the latter case the workers, which wait for the
    log, are still printed.
    """
    place = existing_home(config)
    try:
        found = await _fold_log(config)
    except Unavailable:
        for part in [] if machine else workers(read_board(place.workers), wall_clock()):
            console.print(part, highlight=False, soft_wrap=True)
        raise
    shown = await _overview(config, place, found)
    if machine:
        console.print_json(data=as_json(shown), highlight=False)
        return
    for part in overview(shown):
        console.print(part, highlight=False, soft_wrap=True)
    for line in [*_contracts(found.summary), *filter(None, [numerics_line(Lines(place.progress("serve")).new())])]:
        say(console, line)


async def _fold_log(config: Config) -> RunFolds:
    """Return the summary, the accounting and the release state, folded from the log."""
    folds = open_folds(config)
    with open_log(config) as log:
        found = RunFolds(log, folds, config.reward, ReleaseLedger(log, wall_clock))
        rows = await found.catch_up()
    if rows > _SAVE_SUMMARY_ROWS:
        with contextlib.suppress(StorageFull):
            await summary.keep(found.summary, folds)
    return found


async def _overview(config: Config, place: Home, found: RunFolds) -> Overview:
    every = await open_store(config).refs()
    lines = {name: last_lines(place.progress(name)) for name in ("train", "serve", "release", "housekeeping")}
    live = found.ledger.state.live
    refs = {name: root for name, root in every.items() if not name.startswith(VERSIONS)}
    board = read_board(place.workers)
    with open_branches(config) as opened:
        branches = await BranchReader(opened).now(board)
    held = {"log": place.log, "weights": place.weights, "checkpoints": place.checkpoints}
    held["worker logs"] = place.root / "logs"
    return Overview(
        directory=str(config.run.directory),
        url=read_address(place.address),
        who="simulated users" if (place.root / DEMO_MARKER).exists() else "arm",
        now=wall_clock(),
        board=board,
        summary=found.summary,
        ledger=found.ledger.state,
        rules=config.release,
        accounting=found.accounts,
        lines=lines,
        refs=refs,
        disk={name: disk_use(path) for name, path in held.items()},
        free=shutil.disk_usage(place.root).free,
        warnings=config_warnings(config),
        dials=dials_now(config.adapt, found.summary, None if live is None else live.hash, lines["serve"]),
        branches=branches,
        tenant=config.run.tenant,
    )


def _contracts(seen: Summary) -> list[str]:
    contracts = [(stamped, Contract.from_json(each)) for stamped, each in seen.contracts.items()]
    lines: list[str] = []
    for stamped, contract in contracts:
        newest = contracts[-1][1]
        alike = contract == newest or same_arithmetic(contract, newest)
        away = "" if alike else f"; differs from the newest: {differences_in_words(newest, contract)}"
        lines.append(f"numerics {contract_in_words(contract, stamped)}{away}")
    return lines
