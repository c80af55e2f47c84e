"""`ostinato status` and `ostinato log`: a run as it stands, for people."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from ostinato.app.numerics import stamped
from ostinato.app.storage import Home, home, open_log, open_store
from ostinato.config import Config
from ostinato.core.clock import wall_clock
from ostinato.core.errors import NotFound
from ostinato.core.numerics import Contract, differences, same_arithmetic
from ostinato.core.records import (
    Alarm,
    Batch,
    Delivered,
    Holdback,
    Quarantine,
    ReleaseEvent,
    Reward,
    Row,
    Signal,
    Stamp,
    Turn,
)
from ostinato.launch.views.observe import RunObserver
from ostinato.launch.views.screen import panel
from ostinato.launch.workers.release import gateway_url
from ostinato.record.folds import FileFolds
from ostinato.reward.accounting import Accounting, account
from ostinato.weights.version.content import VERSIONS

KINDS: dict[str, set[type]] = {
    "all": {Turn, Delivered, Signal, Reward, Quarantine, Holdback, Batch, ReleaseEvent, Stamp, Alarm},
    "turns": {Turn},
    "signals": {Signal},
    "rewards": {Reward},
    "quarantines": {Quarantine},
    "holdbacks": {Holdback},
    "batches": {Batch},
    "releases": {ReleaseEvent},
    "contracts": {Stamp},
    "alarms": {Alarm},
}
SHOWN = 60


def _existing(config: Config) -> None:
    if not Home(config.run.directory).log.exists():
        raise NotFound(f"no run in {config.run.directory}; start one with `ostinato up`, or --set run.directory=...")


async def show_status(config: Config, console: Console) -> None:
    """One screen. Raises NotFound if the run does not exist."""
    _existing(config)
    with open_log(config) as log:
        seen = await RunObserver(home(config), log).look()
        found = await account(log, FileFolds(home(config).folds), config.reward)
        contracts = list((await stamped(log)).values())
        console.print(
            panel(seen, wall_clock(), f"run {config.run.directory}  {gateway_url(home(config)) or 'not serving'}")
        )
    refs = await open_store(config).refs()
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, root in sorted(refs.items()):
        if not name.startswith(VERSIONS):
            table.add_row(f"refs/{name}", root[:16])
    console.print(table)
    for contract in contracts:
        alike = contract == contracts[-1] or same_arithmetic(contract, contracts[-1])
        away = "" if alike else f"; apart from the newest in {apart(contracts[-1], contract)}"
        console.print(f"numerics {parts(contract)}{away}", highlight=False, markup=False, soft_wrap=True)
    for text in accounted(found, wall_clock()):
        console.print(text, highlight=False, markup=False, soft_wrap=True)


def accounted(found: Accounting, now: float) -> list[str]:
    """Where every turn stands, what became of feedback, and what stands to be looked at."""
    state = "balanced" if found.balanced else "NOT BALANCED"
    held = sum(found.held.values())
    wait = "" if found.oldest_wait is None else f", the longest for {max(0.0, now - found.oldest_wait):.0f} s"
    lines = [
        f"{found.ingested} turns = {found.trained} trained + {held} held back + {found.waiting} waiting{wait}: {state}",
        f"{found.rewarded} rewards, {sum(found.quarantined.values())} turns without ({_counts(found.quarantined)})",
        f"feedback that changed nothing: {found.late} late, {found.retracted} taken back after training, {found.foreign} about "
        f"another tenant's turns, {found.moot} about turns without reward, {found.excess} too many, {found.forgotten} about no turn "
        f"({found.orphans} wait for theirs)",
    ]
    lines += [
        f"feedback of {tenant}: {100 * each.usual:.0f}% of turns have some ({each.turns} turns){', SILENT NOW' if each.alarm else ''}"
        for tenant, each in sorted(found.coverage.items())
    ]
    return [*lines, *(f"ALARM {name}: ostinato log --kind alarms" for name in found.alarms)]


def _counts(counted: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in counted.items()) or "none"


def parts(contract: Contract) -> str:
    """A contract in one line: its id, then what it is made of."""
    return (
        f"{contract.id} = {contract.mode}, {contract.dtype}, {contract.threads} threads, rows {contract.rows}, block {contract.block}, "
        f"quantisation {contract.quantisation}, torch {contract.torch}, {contract.blas}, {contract.kernels}, {contract.isa}"
    )


def apart(one: Contract, other: Contract) -> str:
    """In what two contracts differ. Example: "dtype float32, not bfloat16"."""
    names = differences(one, other)
    return (
        "; ".join(f"{name} {getattr(other, name)}, not {getattr(one, name)}" for name in names)
        or "fast mode promises nothing"
    )


def line(row: Row) -> str:
    """A row in one line."""
    kind, text = _described(row)
    return f"{kind:10} {text}"


def _described(row: Row) -> tuple[str, str]:
    """What a row is, and what it says."""
    match row:
        case Turn():
            text = " ".join(row.text.split())[:SHOWN]
            said = f"{row.finish}  {len(row.sampled_ids)} tokens  {text!r}"
            return "turn", f"{row.id}  {row.user}  {row.arm}  v{row.oldest}  {said}"
        case Signal():
            return "signal", f"{row.turn}  {row.name}={row.value:g}  {row.source}  ({row.id})"
        case Delivered():
            return "delivered", ", ".join(row.turns)
        case Reward():
            return "reward", f"{row.turn}  {row.value:+.3f}  {row.function}  from {len(row.signals)} signals"
        case Quarantine() | Holdback():
            return type(row).__name__.lower(), f"{row.turn}  {row.reason}"
        case Batch() | ReleaseEvent() | Stamp() | Alarm():
            return _decided(row)


def _decided(row: Batch | ReleaseEvent | Stamp | Alarm) -> tuple[str, str]:
    match row:
        case Batch():
            return "batch", f"step {row.step}  {len(row.turns)} turns  reference {row.reference}"
        case ReleaseEvent():
            return "release", f"{row.action}  {row.policy}  {row.reason}"
        case Stamp():
            return "contract", f"{row.id}  {row.contract}"
        case Alarm():
            return "alarm", f"{row.state}  {row.name}  {row.reason}"


async def print_log(config: Config, kind: str, last: int, console: Console) -> None:
    """The newest rows of a kind, oldest first. Raises NotFound if the run does not exist."""
    _existing(config)
    with open_log(config) as log:
        for cursor, row in log.tail(last, KINDS[kind]):
            console.print(f"{cursor:>8}  {line(row)}", highlight=False, markup=False, soft_wrap=True)
