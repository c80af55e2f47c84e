"""The state of a tenant's branch for an operator: its version, what it learned, its gate, and its people compared with those on live."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ostinato.core.clock import wall_clock
from ostinato.core.errors import OstinatoError
from ostinato.core.records import Arm, PolicyVersion
from ostinato.evaluate.acceptance import difference_of
from ostinato.evaluate.statistics import Estimate
from ostinato.release.ledger import ReleaseLedger
from ostinato.run_directory import Run
from ostinato.status.run_state import RunFolds
from ostinato.status.summary import RatedTurn, Summary
from ostinato.status.worker_status import WorkerBoard

_FRESH_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchNow:
    """A branch that is trained, at one moment.

    `version` answers the tenant; `parent` is the shared version from which training last started. `learned`: turns trained on in `step`
    steps. `gate`: the newest event of its release ledger; "" before the first. `contrast`: the acceptance of the branch's people minus that
    of the tenant's people who were randomized to stay on the shared version, over the newest rated turns, with a 95% interval clustered by
    person; None unless both have turns. `answered`, `stayed`: the number of turns on each side. `troubles`: sentences.
    """

    tenant: str
    version: PolicyVersion | None
    parent: PolicyVersion | None
    learned: int
    step: int
    gate: str
    contrast: Estimate | None
    answered: int
    stayed: int
    troubles: tuple[str, ...]

    @property
    def beside(self) -> str:
        """The contrast in words, or what is missing for it."""
        if self.contrast is None:
            return "nothing to compare with live yet (serve.branch_holdout)"
        found, turns = self.contrast, f"{self.answered} turns beside {self.stayed} on live"
        if found.df == 0.0:
            return f"{100 * found.mean:+.1f} pp beside live, too few people for an interval ({turns})"
        return f"{100 * found.mean:+.1f} pp beside live, 95% [{100 * found.lower:+.1f}, {100 * found.upper:+.1f}] ({turns})"


def branch_line(found: BranchNow) -> str:
    """Describe a branch in one line.

    Example: "branch of acme: v45 from v41; 812 turns learned in 31 steps; shipped v45: better; +4.1 pp beside live, 95% [+0.3, +7.9] (...)"
    """
    version, parent = (_named(each) for each in (found.version, found.parent))
    parts = [
        f"branch of {found.tenant}: {version} from {parent}",
        f"{found.learned} turns learned in {found.step} steps",
    ]
    return "; ".join([*parts, *([found.gate] if found.gate else []), found.beside, *found.troubles])


def _named(policy: PolicyVersion | None) -> str:
    return "nothing yet" if policy is None else f"v{policy.number}"


def contrast_of(rated: Iterable[RatedTurn]) -> tuple[Estimate | None, int, int]:
    """Return the branch's acceptance minus the shared version's, from the rated turns of the branch's own log, and the turns on each side.

    People who could not have been assigned to the other side are left out: unverified users, and turns from before the branch existed.
    """
    sides: dict[str, list[tuple[tuple[str, str], bool]]] = {Arm.LIVE.value: [], Arm.CONTROL.value: []}
    for each in rated:
        if each.served.arm in sides and each.served.by_chance:
            sides[each.served.arm].append((each.served.person, each.value > 0))
    own, shared = sides[Arm.LIVE.value], sides[Arm.CONTROL.value]
    return difference_of(own, shared) if own and shared else None, len(own), len(shared)


class BranchReader:
    """Reads the state of a run's branches, at most every `_FRESH_S` seconds, continuing in each log where the last reading stopped.

    `opened` returns the runs of the branches that have begun.
    """

    def __init__(self, opened: Callable[[], Sequence[Run]]) -> None:
        self._opened, self._lock = opened, asyncio.Lock()
        self._folds: dict[str, RunFolds] = {}
        self._at = 0.0
        self._seen: tuple[BranchNow, ...] = ()

    async def now(self, board: WorkerBoard | None) -> tuple[BranchNow, ...]:
        """Return the branches, by tenant. One whose log cannot be read is included, with the reason as its trouble."""
        async with self._lock:
            now = wall_clock()
            if not 0.0 <= now - self._at < _FRESH_S:
                self._at = now
                with contextlib.suppress(OstinatoError, OSError):  # if one cannot be opened, its own workers report it
                    self._seen = tuple([await self._look(run, board) for run in self._opened()])
            return self._seen

    async def _look(self, run: Run, board: WorkerBoard | None) -> BranchNow:
        tenant = run.config.run.tenant
        unread: tuple[str, ...] = ()
        folds = self._folds.get(tenant)
        if folds is None:
            folds = RunFolds(run.log, run.folds, run.config.reward, ReleaseLedger(run.log, wall_clock))
            self._folds[tenant] = folds
        try:
            await folds.catch_up()
        except OstinatoError as error:
            unread = (f"its log cannot be read: {error}",)
        refs: dict[str, PolicyVersion | None] = {}
        for ref in ("live", "base"):
            with contextlib.suppress(OstinatoError):
                refs[ref] = await run.follower.resolve(ref)
        seen = folds.summary
        contrast, answered, stayed = contrast_of(seen.rated)
        return BranchNow(
            tenant=tenant,
            version=refs.get("live"),
            parent=refs.get("base"),
            learned=folds.accounts.trained,
            step=seen.step,
            gate=_gate(seen),
            contrast=contrast,
            answered=answered,
            stayed=stayed,
            troubles=(
                *unread,
                *_troubles(tenant, board),
                *(f"alarm {name}: {why}" for name, (why, _) in seen.alarms.items()),
            ),
        )


def _gate(seen: Summary) -> str:
    if not seen.releases:
        return ""
    last = seen.releases[-1]
    return f"{last.action.replace('_', ' ')} v{last.number}: {last.reason.partition(';')[0]}"


def _troubles(tenant: str, board: WorkerBoard | None) -> list[str]:
    """Return what the branch's workers are waiting for, and why one is down."""
    own = [] if board is None else [worker for worker in board.workers if worker.name.endswith(f"@{tenant}")]
    down = [
        f"{each.name} is down: {each.reason or 'no reason was given'}" for each in own if each.condition == "failed"
    ]
    return [*down, *(f"{each.name} waits: {each.trouble}" for each in own if each.trouble)]
