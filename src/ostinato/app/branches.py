"""Trained branches of tenants: each has a run of its own, fed with the tenant's rows from the log of the serving run.

The branch's run is in ``branches/TENANT`` of the serving run's directory, with its own log, folds, checkpoints and release ledger. It
shares the gateway and the weight store, in which it has refs of its own. Its log is a copy of that tenant's rows and nobody else's:
training cannot learn from rows that are not in its log, and code that reads a run's log need not know about tenants.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Callable, Collection, Generator, Sequence
from dataclasses import replace
from pathlib import Path

from ostinato.app.storage import Home, Run, home, open_log, open_run, point_ref, serving_run
from ostinato.config import Config, RunConfig
from ostinato.core.arm_assignment import BRANCH_REFS, BRANCHES
from ostinato.core.clock import wall_clock
from ostinato.core.errors import BadConfig, Conflict, OstinatoError
from ostinato.core.files import write_atomic
from ostinato.core.notices import Forgotten
from ostinato.core.records import Arm, ConsentGiven, Delivered, PolicyVersion, Row, Signal, SteeringBasis, Turn
from ostinato.core.seams import Cursor, Folds
from ostinato.record.config import Encrypt
from ostinato.record.folds import pack_fold, unpack_fold
from ostinato.record.rowlog import RowLog
from ostinato.run_directory import BEST_EVALUATION_REF, EVALUATION_REF

# ---------------------------------------------------------------- settings


def branch_config(config: Config, tenant: str) -> Config:
    """Return the settings of the run that trains a tenant's branch: those of the serving run without what only that one does.

    No trials on users, no best or learner arm and no rollouts; the serving run collects weights; the tenant's own suites come first. An
    encrypted log has a key per user, because copied rows may be encrypted per user, and each user must stay forgettable alone.
    """
    judged = config.evaluate
    named = (*judged.tenant_suites.get(tenant, ()), judged.suite, *judged.further_suites)
    files = list(dict.fromkeys(filter(None, named)))
    record = config.record
    if record.encrypt is not Encrypt.NONE:
        record = record.model_copy(update={"encrypt": Encrypt.USER})
    suites = {"suite": files[0] if files else "", "further_suites": tuple(files[1:])}
    return config.model_copy(
        update={
            "run": RunConfig(directory=home(config).branch(tenant), tenant=tenant),
            "record": record,
            "serve": config.serve.model_copy(update={"branches": (), "learner_share": 0.0}),
            "learn": config.learn.model_copy(update={"tenants": (), "source": "people"}),
            "evaluate": judged.model_copy(update={**suites, "tenant_suites": {}}),
            "release": config.release.model_copy(update={"canary": False, "best_arm": False}),
            "housekeeping": config.housekeeping.model_copy(update={"collect": False}),
        }
    )


def branch_configs(config: Config) -> list[Config]:
    """Return the settings of each branch's run."""
    return [branch_config(config, tenant) for tenant in config.learn.tenants]


def branches_begun(config: Config, tenant: str | None = None) -> list[Config]:
    """Return the settings of each branch's run that has a log, whether or not it is still trained; of one tenant's alone if it is given.

    Raises OSError if the branches cannot be listed: treating that as none would leave people unforgotten and collect weights in use.
    """
    place = Home(config.run.directory).branch("")
    with contextlib.suppress(FileNotFoundError):
        names = [tenant] if tenant else sorted(os.listdir(place))
        return [branch_config(config, name) for name in names if (place / name / "log").exists()]
    return []


@contextlib.contextmanager
def open_branches(config: Config) -> Generator[Callable[[], Sequence[Run]]]:
    """Yield a function that returns the runs of the branches that are trained and have begun. Each is opened once and closed at the end."""
    with contextlib.ExitStack() as stack:
        opened: dict[str, Run] = {}

        def runs() -> Sequence[Run]:
            for each in branches_begun(config) if config.learn.tenants else ():
                tenant = each.run.tenant
                if tenant in config.learn.tenants and tenant not in opened:
                    opened[tenant] = stack.enter_context(open_run(each))
            return [opened[tenant] for tenant in sorted(opened)]

        yield runs


def check_branches(config: Config, *, on_ray: bool = False) -> None:
    """Raise BadConfig if `learn.tenants` cannot be trained with these settings."""
    trained, served, judged = config.learn.tenants, config.serve.branches, config.evaluate.tenant_suites
    if lacking := sorted({*trained} - {*served}):
        raise BadConfig(
            f"learn.tenants names {lacking[0]!r}, and serve.branches does not: add it there, or leave it out here"
        )
    if lacking := sorted({*judged} - {*trained}):
        raise BadConfig(
            f"evaluate.tenant_suites names {lacking[0]!r}, and learn.tenants does not: add it there, or leave it out here"
        )
    if not trained:
        return
    for there, setting, remedy in (
        (on_ray, "up --on ray", "train them with `ostinato up` on one machine"),
        (config.record.url, "record.url", "keep the log in run.directory"),
        (config.serve.auto.arms, "serve.auto", "Auto deals their calls to shared arms: leave its arms out"),
    ):
        if there:
            raise BadConfig(
                f"learn.tenants and {setting} do not go together yet; {remedy}, or leave learn.tenants empty"
            )
    check_copied_keys(config)


def check_copied_keys(config: Config) -> None:
    """Raise BadConfig if a branch would copy encrypted rows into an unencrypted log, from which nobody could be forgotten."""
    keys = Home(config.run.directory).keys
    if config.record.encrypt is Encrypt.NONE and keys.exists():
        raise BadConfig(
            f"record.encrypt is 'none', and rows of the log lie under the keys in {keys}: copied for learn.tenants, nobody could be "
            "forgotten in them; set it to 'tenant' or 'user', or leave learn.tenants empty"
        )


# ---------------------------------------------------------------- starting and restarting a branch


async def begin_branch(run: Run, say: Callable[[str], None]) -> None:
    """Start a branch at the live version: set its refs, and take the optimizer's moments from the trainer that made the version.

    Waits until there is a live version and, if it was trained, a checkpoint. Safe to kill anywhere: the ref `live` is set last.
    """
    from ostinato.train.checkpoint import newest_step  # brings torch

    shared, looks = home(serving_run(run.config)), 0
    while True:
        start = await run.follower.resolve("control")
        if start is not None and (not start.number or newest_step(shared.checkpoints)):
            break
        if looks % _LOOKS_PER_MESSAGE == 0:  # repeated, since this may take longer than a start may
            say("waiting for the version that is live, and the shared trainer's first checkpoint")
        looks += 1
        await asyncio.sleep(_LOOK_S)
    if start.number and not newest_step(run.home.checkpoints):
        await asyncio.to_thread(take_checkpoint, shared.checkpoints, run.home.checkpoints)
    for ref in ("base", "live"):
        held = await run.store.read_ref(ref)
        if held is None or ref == "base":
            await run.store.move_ref(ref, held, start.hash)


_LOOK_S, _LOOKS_PER_MESSAGE = 0.5, 240


_OFFERED, _JUDGED = ("candidate", "previous"), ("best", EVALUATION_REF, BEST_EVALUATION_REF)
OWN_REFS = ("live", "base", *_OFFERED, *_JUDGED)
"""The refs of the run that trains a branch."""


async def begin_anew(run: Run, start: PolicyVersion) -> None:
    """Detach a branch from its earlier versions before a restart at `start`.

    `base`, near which training is kept, becomes `start`; no earlier version is offered for release or compared with. Idempotent. The
    earlier versions are kept as long as the ledger and a restarted trainer need them.
    """
    await leave_versions(run, {held for ref in OWN_REFS if (held := await run.store.read_ref(ref))}, start.hash)
    await point_ref(run.store, "base", start.hash)


async def leave_versions(run: Run, left: Collection[str], start: str) -> None:
    """Remove the versions with these roots from the refs of a branch's gate: offered ones are deleted, judged ones are set to `start`, so
    that a gateway unloads those versions. Raises Conflict if another process moves a ref at the same time.
    """
    for ref in (*_OFFERED, *_JUDGED):
        held = await run.store.read_ref(ref)
        if held is None or held not in left or held == start:
            continue
        if ref in _OFFERED:
            await run.store.delete_ref(ref, held)
        else:
            await run.store.move_ref(ref, held, start)


async def held_by_branches(run: Run) -> dict[str, PolicyVersion]:
    """Return the serving run's trained versions that refs of tenants' branches name, such as where a branch began, as {ref: version}."""
    from ostinato.weights.follow.follower import run_of  # the supervisor has no use for it

    found: dict[str, PolicyVersion] = {}
    for ref in await run.store.refs():
        if ref.startswith((BRANCHES, BRANCH_REFS)):
            policy = await run.follower.resolve(ref)
            if policy is not None and policy.number and not (await run_of(run.store, policy)).startswith(BRANCHES):
                found[ref] = policy
    return found


def take_checkpoint(shared: Path, own: Path) -> None:
    """Copy the shared trainer's newest checkpoint by hard links. If its trainer replaces it in the meantime, take the newer one."""
    from ostinato.app.checkpoints import link_checkpoint
    from ostinato.train.checkpoint import adopt, partial_of, stored

    links = own / "taken"
    for _ in range(100):
        with contextlib.suppress(FileNotFoundError):
            linked = link_checkpoint(stored(shared)[0], links)
            partial = partial_of(own, linked.name)
            shutil.rmtree(partial, ignore_errors=True)
            adopt(linked.rename(partial))
            links.rmdir()
            return
    raise Conflict(f"the checkpoints in {shared} change faster than one can be taken; try again")


# ---------------------------------------------------------------- copying the tenant's rows


_CHUNK_ROWS = 500
_FOLD = "branch"
_WATCH_S, _STALLED_S = 20.0, 600.0
_KINDS: set[type] = {Turn, Signal, Delivered, ConsentGiven, SteeringBasis, Forgotten}
_ARMS = {Arm.BRANCH: Arm.LIVE, Arm.SHARED: Arm.CONTROL}


def copied_fold(branch: Config) -> Path:
    """Return the fold file with the cursor up to which the serving run's log was copied. Without it copying starts from the beginning."""
    return Home(branch.run.directory).folds / f"{_FOLD}.fold"


def read_copied_upto(branch: Config) -> Cursor:
    """Return the cursor up to which the serving run's log was copied; 0 if unknown."""
    try:
        return unpack_fold(copied_fold(branch).read_bytes())[0]
    except (OSError, ValueError):
        return 0


def write_copied_upto(branch: Config, upto: Cursor) -> None:
    """Save the cursor up to which the log was copied, while no trainer of the branch runs. Raises OSError."""
    path = copied_fold(branch)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomic(path, pack_fold(upto, {}), durable=True)


async def copied_upto(folds: Folds, log: RowLog) -> Cursor:
    """Return the cursor up to which the serving run's log was copied, from the branch's folds. Copying rows twice does no harm."""
    kept = await folds.load(_FOLD)
    return 0 if kept is None or kept[0] > log.newest() else kept[0]


class CopyWatch:
    """Watches that rows are copied into a branch's log. Only the branch's trainer copies, between steps; readers of that log, such as the
    branch's guard, see nothing new while it stalls.

    `trouble`: what the operator should know; "" if all is well. Call `close` when done.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._log = run, open_log(serving_run(run.config))
        # the first row that is not copied yet, and when that was first seen
        self._waits: tuple[Cursor, float] | None = None
        self.trouble = ""

    def close(self) -> None:
        """Close the source log."""
        self._log.close()

    async def run(self) -> None:
        """Look every `_WATCH_S` seconds until cancelled."""
        while True:
            try:
                await self.look(wall_clock())
            except OstinatoError as error:
                self.trouble = f"how far the branch's log was copied cannot be read: {error}"
            await asyncio.sleep(_WATCH_S)

    async def look(self, now: float) -> None:
        """Compare the copied cursor with the source log at the time `now` (Unix seconds). Raises Corrupt, Unavailable."""
        upto, waits, self.trouble = await copied_upto(self._run.folds, self._log), self._waits, ""
        first = await anext((cursor async for cursor, _ in self._log.read(upto, _KINDS)), None)
        if first is None or waits is None or upto >= waits[0]:
            self._waits = None if first is None else (first, now)
        elif now - waits[1] >= _STALLED_S:
            minutes, tenant = (now - waits[1]) / 60, self._run.config.run.tenant
            self.trouble = (
                f"rows have waited for {minutes:.0f} minutes to be copied into the branch's log, so the guard is blind: train@{tenant} "
                "copies them between its steps; see what holds it, or roll the branch back by hand if need be"
            )


class TenantRows:
    """Copies one tenant's rows into its branch's log, in order and exactly once, because a log ignores rows whose identity it has.

    Turns that the branch answered become `live` turns; those of the tenant's people who stayed on the shared version become `control`.
    Other turns of the tenant are not copied, but their signals are. Erased turns are not copied, and erasures are carried out here too.

    Raises BadConfig like `check_copied_keys`.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._tenant = run, run.config.run.tenant
        check_copied_keys(serving_run(run.config))
        self._log = open_log(serving_run(run.config))
        self._cursor: Cursor | None = None

    def close(self) -> None:
        """Close the source log."""
        self._log.close()

    async def copy(self) -> int:
        """Copy the rows that are new since the last call and return how many were copied. Raises StorageFull, Unavailable."""
        if self._cursor is None:
            self._cursor = await copied_upto(self._run.folds, self._log)
        count = 0
        rows: list[Row] = []
        upto = self._cursor
        async for cursor, row in self._log.read(upto, _KINDS):
            rows.append(row)
            upto = cursor
            if len(rows) >= _CHUNK_ROWS or isinstance(row, Forgotten):
                count += await self._write(rows, upto)
                rows = []
        return count + (await self._write(rows, upto) if rows else 0)

    async def _write(self, rows: Sequence[Row], upto: Cursor) -> int:
        """Append those of the rows that belong to the tenant, then save the cursor."""
        own = [copied async for copied in self._copied(rows)]
        await self._run.log.append(*own)
        last = rows[-1]
        if isinstance(last, Forgotten) and last.tenant == self._tenant:
            await self._forget(last)
        await self._run.folds.save(_FOLD, upto, {})
        self._cursor = upto
        return len(own)

    async def _copied(self, rows: Sequence[Row]) -> AsyncIterator[Row]:
        turns = {row.id for row in rows if isinstance(row, Turn) and self._is_own(row)}
        asked = [(turn,) for row in rows if isinstance(row, Delivered) for turn in row.turns if turn not in turns]
        turns |= {turn.id for turn in await self._run.log.find(Turn, asked)}
        for row in rows:
            if isinstance(row, Turn) and self._is_own(row):
                yield replace(row, arm=_ARMS[row.arm])
            elif isinstance(row, Delivered):
                if own := tuple(turn for turn in row.turns if turn in turns):
                    yield replace(row, turns=own)
            elif isinstance(row, SteeringBasis) or (
                isinstance(row, Signal | ConsentGiven) and row.tenant == self._tenant
            ):
                yield row

    def _is_own(self, turn: Turn) -> bool:
        return turn.tenant == self._tenant and turn.arm in _ARMS and not turn.redacted

    async def _forget(self, row: Forgotten) -> None:
        """Erase, once, what was copied before somebody was forgotten in the source log. If they come back, they count as somebody new."""
        # the source row's id contains a key number of that log; this log writes `Forgotten` rows of its own for the keys it destroys
        done = replace(row, id=f"copied-{row.id}", key=0)
        ring = self._run.log.keys  # None: nothing of the copy was ever encrypted
        if ring is None or await self._run.log.find(Forgotten, [(done.id,)]):
            return
        await self._run.log.destroy_keys(ring, row.tenant, row.user)
        await self._run.log.append(done)
