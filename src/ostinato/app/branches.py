"""Tenants' branches that are trained: a run of its own for each, fed with its tenant's rows of the log of the run that serves.

The run lies in ``branches/TENANT`` of the one that serves and has a log, folds, checkpoints and a release ledger of its own. It shares the
weight store, under refs of its own, and the gateway. Its log is a copy of that tenant's rows, and of nobody else's: what is not in a log
cannot be learned from, and everything that reads a run's log needs not know of tenants.
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
    """The settings of the run that trains a tenant's branch: those of the run that serves, without what it alone does.

    No trials on users, no best or learner arm and no rollouts; weights are collected by the run that serves; tenants' suites come first.
    What is encrypted lies under a key for each user: of the rows that are copied some may, too, and then all must be forgettable alone.
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
    """The settings of each branch's run."""
    return [branch_config(config, tenant) for tenant in config.learn.tenants]


def branches_begun(config: Config, tenant: str | None = None) -> list[Config]:
    """The settings of each branch's run that has a log, whether or not it is trained now; of one tenant's alone, if it is named.

    Raises OSError if they cannot be listed: nobody may be forgotten, and no weights collected, as if there were none.
    """
    place = Home(config.run.directory).branch("")
    with contextlib.suppress(FileNotFoundError):
        names = [tenant] if tenant else sorted(os.listdir(place))
        return [branch_config(config, name) for name in names if (place / name / "log").exists()]
    return []


@contextlib.contextmanager
def open_branches(config: Config) -> Generator[Callable[[], Sequence[Run]]]:
    """A function that returns the runs of the branches that are trained and have begun, opened once and closed at the end."""
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
    """Raise BadConfig for `learn.tenants` that cannot be trained here."""
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
    """Raise BadConfig if a branch would copy rows that lie under keys into a log without any, where nobody could be forgotten."""
    keys = Home(config.run.directory).keys
    if config.record.encrypt is Encrypt.NONE and keys.exists():
        raise BadConfig(
            f"record.encrypt is 'none', and rows of the log lie under the keys in {keys}: copied for learn.tenants, nobody could be "
            "forgotten in them; set it to 'tenant' or 'user', or leave learn.tenants empty"
        )


# ---------------------------------------------------------------- the beginning


async def begin_branch(run: Run, say: Callable[[str], None]) -> None:
    """Let a branch begin at the version that is live: its refs, and the moments of the trainer that made the version.

    Waits until there is such a version and, if it was trained, a checkpoint. Can be killed anywhere: the ref `live` comes last.
    """
    from ostinato.train.checkpoint import newest_step  # brings torch

    shared, looks = home(serving_run(run.config)), 0
    while True:
        start = await run.follower.resolve("control")
        if start is not None and (not start.number or newest_step(shared.checkpoints)):
            break
        if looks % _LOOKS_A_WORD == 0:  # said again, since this may take longer than a start may
            say("waiting for the version that is live, and the shared trainer's first checkpoint")
        looks += 1
        await asyncio.sleep(_LOOK_S)
    if start.number and not newest_step(run.home.checkpoints):
        await asyncio.to_thread(take_checkpoint, shared.checkpoints, run.home.checkpoints)
    for ref in ("base", "live"):
        held = await run.store.read_ref(ref)
        if held is None or ref == "base":
            await run.store.move_ref(ref, held, start.hash)


_LOOK_S, _LOOKS_A_WORD = 0.5, 240


_OFFERED, _JUDGED = ("candidate", "previous"), ("best", EVALUATION_REF, BEST_EVALUATION_REF)
OWN_REFS = ("live", "base", *_OFFERED, *_JUDGED)
"""The refs of the run that trains a branch."""


async def begin_anew(run: Run, start: PolicyVersion) -> None:
    """Leave what a branch was before it began at another version: from now on that one is `base`, which its training is kept near, and
    nothing of before is offered for release or compared with.

    May be called again after a kill. The versions of before are kept as long as the ledger and a trainer's restart need them.
    """
    await leave_versions(run, {held for ref in OWN_REFS if (held := await run.store.read_ref(ref))}, start.hash)
    await point_ref(run.store, "base", start.hash)


async def leave_versions(run: Run, left: Collection[str], start: str) -> None:
    """Let no ref of a branch's gate name the versions with these roots: none is offered, and `start` is in the place of the judged ones,
    so that a gateway unloads these. Raises Conflict if another process moves one at this moment.
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
    """The trained versions of the run that serves that refs of tenants' branches name, as where one began, by these refs."""
    from ostinato.weights.follow.follower import run_of  # the supervisor has no use for it

    found: dict[str, PolicyVersion] = {}
    for ref in await run.store.refs():
        if ref.startswith((BRANCHES, BRANCH_REFS)):
            policy = await run.follower.resolve(ref)
            if policy is not None and policy.number and not (await run_of(run.store, policy)).startswith(BRANCHES):
                found[ref] = policy
    return found


def take_checkpoint(shared: Path, own: Path) -> None:
    """Adopt the shared trainer's newest checkpoint. A trainer that replaces it meanwhile has a newer one."""
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


# ---------------------------------------------------------------- the tenant's rows


_CHUNK = 500
_FOLD = "branch"
_WATCH_S, _BLIND_S = 20.0, 600.0
_KINDS: set[type] = {Turn, Signal, Delivered, ConsentGiven, SteeringBasis, Forgotten}
_ARMS = {Arm.BRANCH: Arm.LIVE, Arm.SHARED: Arm.CONTROL}


def copied_fold(branch: Config) -> Path:
    """The file that says how far the log of the run that serves was copied; without it, it is read from its beginning."""
    return Home(branch.run.directory).folds / f"{_FOLD}.fold"


def read_copied_upto(branch: Config) -> Cursor:
    """How far the log of the run that serves was copied; 0 if that is not known."""
    try:
        return unpack_fold(copied_fold(branch).read_bytes())[0]
    except (OSError, ValueError):
        return 0


def write_copied_upto(branch: Config, upto: Cursor) -> None:
    """Say how far the log was copied, while no trainer of the branch is up. Raises OSError."""
    path = copied_fold(branch)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomic(path, pack_fold(upto, {}), durable=True)


async def copied_upto(folds: Folds, log: RowLog) -> Cursor:
    """How far the log of the run that serves was copied, by the branch's folds. Rows that are copied again are not kept twice."""
    kept = await folds.load(_FOLD)
    return 0 if kept is None or kept[0] > log.newest() else kept[0]


class CopyWatch:
    """Tells for how long no row was copied into a branch's log although some wait. Only its trainer copies, between its steps; all else
    that reads the log, as the branch's guard, sees nothing new meanwhile.

    `trouble`: what a person should know of it, "" if all is well. Call `close` when done.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._log = run, open_log(serving_run(run.config))
        self._waits: tuple[Cursor, float] | None = None  # the first row that waits, and since when
        self.trouble = ""

    def close(self) -> None:
        """Close the log that is copied from."""
        self._log.close()

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            try:
                await self.look(wall_clock())
            except OstinatoError as error:
                self.trouble = f"how far the branch's log was copied cannot be read: {error}"
            await asyncio.sleep(_WATCH_S)

    async def look(self, now: float) -> None:
        """Compare how far was copied with what is there, at the time `now` in seconds. Raises Corrupt, Unavailable."""
        upto, waits, self.trouble = await copied_upto(self._run.folds, self._log), self._waits, ""
        first = await anext((cursor async for cursor, _ in self._log.read(upto, _KINDS)), None)
        if first is None or waits is None or upto >= waits[0]:
            self._waits = None if first is None else (first, now)
        elif now - waits[1] >= _BLIND_S:
            minutes, tenant = (now - waits[1]) / 60, self._run.config.run.tenant
            self.trouble = (
                f"rows have waited for {minutes:.0f} minutes to be copied into the branch's log, so the guard is blind: train@{tenant} "
                "copies them between its steps; see what holds it, or roll the branch back by hand if need be"
            )


class TenantRows:
    """Copies one tenant's rows into its branch's log, in their order, exactly once: rows have identities, and a log keeps each once.

    Turns that the branch answered are its `live` ones, and those of the tenant's people who stayed on the shared version its `control`; of
    others of this tenant nothing is copied but signals. What was erased is not copied, and erasing goes on here.

    Raises BadConfig as `check_copied_keys`.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._tenant = run, run.config.run.tenant
        check_copied_keys(serving_run(run.config))
        self._log = open_log(serving_run(run.config))
        self._cursor: Cursor | None = None

    def close(self) -> None:
        """Close the log that is copied from."""
        self._log.close()

    async def copy(self) -> int:
        """Copy what has come since. Returns how many rows. Raises StorageFull, Unavailable."""
        if self._cursor is None:
            self._cursor = await copied_upto(self._run.folds, self._log)
        count = 0
        rows: list[Row] = []
        upto = self._cursor
        async for cursor, row in self._log.read(upto, _KINDS):
            rows.append(row)
            upto = cursor
            if len(rows) >= _CHUNK or isinstance(row, Forgotten):
                count += await self._write(rows, upto)
                rows = []
        return count + (await self._write(rows, upto) if rows else 0)

    async def _write(self, rows: Sequence[Row], upto: Cursor) -> int:
        """Append the tenant's of these rows, and then save how far they reach."""
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
        """Erase what was copied before somebody was forgotten there, once: who comes back afterwards is somebody new."""
        # its id is made of the number that a key has there; this log writes rows of its own about the keys that it destroys
        done = replace(row, id=f"copied-{row.id}", key=0)
        ring = self._run.log.keys  # None: nothing of the copy was ever encrypted
        if ring is None or await self._run.log.find(Forgotten, [(done.id,)]):
            return
        await self._run.log.destroy_keys(ring, row.tenant, row.user)
        await self._run.log.append(done)
