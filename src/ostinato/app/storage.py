"""Where a run lives: its directory, its log, its weights."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ostinato.config import Config, RunConfig
from ostinato.core.arm_assignment import BRANCHES, branch_of, branch_ref
from ostinato.core.clock import wall_clock
from ostinato.core.errors import BadConfig, NotFound, StorageFull
from ostinato.core.files import make_private, write_atomic
from ostinato.core.records import Arm
from ostinato.core.seams import Cursor, Log, R
from ostinato.record.config import RecordConfig
from ostinato.run_directory import BEST_EVALUATION_REF, EVALUATION_REF, LEARNER_TEST_REF, MARK, SERVED_REFS, Home, Run

if TYPE_CHECKING:  # a process that only needs paths, such as the supervisor, must not load the stores' code
    from ostinato.core.retry import Patience
    from ostinato.core.seams import Folds
    from ostinato.record.postgres.log import PostgresLog
    from ostinato.record.roles import FencingToken, Tenure
    from ostinato.record.rowlog import RowLog
    from ostinato.weights.follow.follower import Follower
    from ostinato.weights.store.interface import KeptStore, RefStore

logger = logging.getLogger(__name__)


def served_refs(config: Config) -> tuple[str, ...]:
    """The refs whose versions a gateway holds. The verified release is included if some users stay on it, a training step and the next if
    some follow training, the newest version if rollouts in simulated worlds are learned from, and tenants' branches, with what a branch's
    gate measures.
    """
    learner = (Arm.LEARNER.value, LEARNER_TEST_REF) if config.serve.learner_share else ()
    verified = (Arm.VERIFIED.value,) if config.release.best_arm else ()
    branches = map(branch_of, config.serve.branches)
    judged = [branch_ref(each, ref) for each in config.learn.tenants for ref in (EVALUATION_REF, BEST_EVALUATION_REF)]
    return (
        *SERVED_REFS,
        *verified,
        *learner,
        *branches,
        *judged,
        *(() if config.learn.source == "people" else (Arm.WORLD.value,)),
    )


def live_last(refs: Sequence[str]) -> tuple[str, ...]:
    """The refs in the order in which a gateway loads them at its start: live after people's other arms, because it answers the users of an
    arm that is not loaded, who would then have changed arms.
    """
    others = [
        ref for ref in refs if ref.startswith(BRANCHES) or (ref in set(Arm) and Arm(ref).people and ref != Arm.LIVE)
    ]
    return (*others, *(ref for ref in refs if ref not in others))


def operator_key(config: Config, place: Home | None = None) -> str:
    """The key that lets a process of the run name a weight slot: `serve.admin_key`, which hosts can share, or the one at `place`, by
    default where the gateway serves.
    """
    shared = config.serve.admin_key
    return (place or home(serving_run(config))).admin_key() if shared is None else shared.get_secret_value()


_SUBDIRECTORIES = frozenset(
    {"log", "logs", "folds", "weights", "checkpoints", "relay", "machine", "branches", ".cache"}
)


def home(config: Config) -> Home:
    """The run's directory, made if need be, and closed to other users if it holds nothing but a run. Raises StorageFull."""
    place = config.run.directory
    try:
        said = make_private(place, lambda: _is_only_a_run(place))
    except OSError as error:
        raise StorageFull(f"run.directory {place} cannot be created: {error.strerror}; name another place") from error
    if said:
        _warn_once(said)
    return Home(place)


def existing_home(config: Config) -> Home:
    """The run's directory, of which nothing is made. Raises NotFound if no run is there, and none has its log elsewhere."""
    place = Home(config.run.directory)
    if not place.log.exists() and not config.record.url:
        raise NotFound(f"no run in {config.run.directory}; start one with `ostinato up`, or --set run.directory=...")
    return place


def serving_run(config: Config) -> Config:
    """The settings of the run whose gateway serves a tenant's branch, from those of the run that trains it; others as they are."""
    if not config.run.tenant:
        return config
    return config.model_copy(update={"run": RunConfig(directory=config.run.directory.absolute().parents[1])})


def _is_only_a_run(place: Path) -> bool:
    return all(each.name in _SUBDIRECTORIES or not each.is_dir() for each in place.iterdir())


@functools.cache
def _warn_once(line: str) -> None:
    logger.warning("%s", line)


def open_log(config: Config, token: FencingToken | None = None, patience: Patience | None = None) -> RowLog:
    """The run's log: in its directory, or at `record.url`. Raises BadConfig for a log that this version does not read.

    `token`: the fencing token of a role, shown with each write. `patience`: how an open log waits for an unreachable server.

    If the log is in Postgres, a file in the directory says so. Other commands find the run by it, and it keeps the run from continuing
    with another log.
    """
    from ostinato.record.log import SqlLog

    place = home(config)
    _check_whose(config, place)
    if config.record.url:
        return _open_elsewhere(config, place, token, patience)
    return SqlLog.open(place.log, wall_clock, config.record)


def _check_whose(config: Config, place: Home) -> None:
    """Raise BadConfig for a directory whose run has its log elsewhere than the settings say."""
    if config.record.url and any(place.log.glob("*.db")):
        raise BadConfig(
            f"the run in {place.root} has a log of its own in {place.log}; leave record.url empty, or move it with `ostinato log copy`"
        )
    if not config.record.url and place.elsewhere.exists():
        raise BadConfig(
            f"the log of the run in {place.root} is in Postgres; name it in record.url, or bring it here with `ostinato log copy`"
        )


def _open_elsewhere(config: Config, place: Home, token: FencingToken | None, patience: Patience | None) -> RowLog:
    log = _postgres().open(config.record, wall_clock, token=token, patience=patience)
    try:
        place.log.mkdir(mode=0o700, parents=True, exist_ok=True)
        known = place.elsewhere.read_text().strip() if place.elsewhere.exists() else ""
        if known and known != log.name:
            raise BadConfig(
                f"the run in {place.root} belongs to the log {known}, and record.url names {log.name}; name the right database and "
                "schema, or another run.directory"
            )
        if not known:
            write_atomic(place.elsewhere, f"{log.name}\n", durable=True)
    except BaseException:
        log.close()
        raise
    return log


async def rows_of(log: Log, kind: type[R]) -> AsyncIterator[R]:
    """The log's rows of one kind, oldest first. Raises as `Log.read`."""
    async for _, row in log.read(0, {kind}):
        if isinstance(row, kind):
            yield row


def check_elsewhere(config: Config) -> None:
    """Check that this host can work on a run of which it has no files. Creates nothing.

    Raises NotFound if there is no log at `record.url`; BadConfig if `weights.url` does not name the run's weights; Unavailable.
    """
    name, there = log_elsewhere(config.record)
    if not there:
        raise NotFound(f"no run's log at {name}; correct record.url or record.namespace")
    if not config.weights.url:
        raise BadConfig(
            "record.url names the run's log, and nothing its weights, which are not here; name them in weights.url"
        )


def log_elsewhere(record: RecordConfig) -> tuple[str, bool]:
    """The name, for people, of the log in Postgres, and whether it exists yet. Creates nothing. Raises BadConfig, Unavailable."""
    _postgres()
    from ostinato.record.postgres.log import server_of
    from ostinato.record.postgres.schema import has_log

    server = server_of(record)
    return server.name, server.ask(lambda connection: has_log(connection, server))


def check_log(config: Config) -> None:
    """Raise BadConfig for a log that cannot be this run's, or settings of Postgres that cannot work. Asks no server, creates nothing."""
    _check_whose(config, Home(config.run.directory))
    if config.record.url:
        _postgres()
        from ostinato.record.postgres.log import server_of

        server_of(config.record)


LogPlace = Path | RecordConfig
"""A directory of segments, or a schema of a Postgres database."""


def named_log(config: Config, place: str) -> LogPlace:
    """The log that is named by a run's directory, or by the URL of a Postgres database."""
    if place.startswith(("postgresql://", "postgres://")):
        return config.record.model_copy(update={"url": place})
    return Home(Path(place).expanduser()).log


async def copy_rows_of(
    config: Config, source: LogPlace, target: LogPlace, on_row: Callable[[Cursor, Cursor], None]
) -> Cursor:
    """Copy a log to another place. Raises as `record.copying.copy_log`."""
    from ostinato.record.backup import copy_log

    for place, instead in (
        (source, "name that database"),
        (target, "name another directory, and move the run's files there"),
    ):
        if isinstance(place, Path) and (place / MARK).exists():
            raise BadConfig(f"{place} says that its run's log is in Postgres; {instead}")
    with _open_place(config, source, 1) as opened:
        return await copy_log(opened, lambda first: _open_place(config, target, first), on_row)


def _open_place(config: Config, place: LogPlace, first: Cursor) -> RowLog:
    if isinstance(place, Path):
        from ostinato.record.log import SqlLog

        return SqlLog.open(place, wall_clock, config.record, first=first)
    return _postgres().open(place, wall_clock, first=first)


def _postgres() -> type[PostgresLog]:
    try:
        from ostinato.record.postgres.log import PostgresLog
    except ImportError as error:
        raise BadConfig(f"record.url needs psycopg ({error}): pip install 'ostinato[postgres]'") from error
    return PostgresLog


def open_folds(config: Config, token: FencingToken | None = None, patience: Patience | None = None) -> Folds:
    """The folds of the run's log, stored where the log is. `token` and `patience` as for `open_log`."""
    from ostinato.record.folds import FileFolds

    if not config.record.url:
        return FileFolds(home(config).folds)
    from ostinato.record.postgres.log import PostgresFolds
    from ostinato.record.postgres.server import LogServer

    return PostgresFolds(LogServer.of(config.record).fenced(token), patience)


def open_store(config: Config, tenure: Tenure | None = None) -> KeptStore:
    """The run's weight store: a directory, or the store that `weights.url` names. `tenure`: the role in which refs are moved.

    The run that trains a tenant's branch uses that of the run that serves, with refs of its own.
    """
    from ostinato.weights.store.branch import BranchStore
    from ostinato.weights.store.directory import DirectoryStore
    from ostinato.weights.store.factory import open_url
    from ostinato.weights.store.interface import unfenced

    if config.run.tenant:
        return BranchStore(open_store(serving_run(config), tenure), config.run.tenant)
    fence = unfenced if tenure is None else tenure.check
    if config.weights.url:
        return open_url(config.weights, fence)
    store = DirectoryStore(home(config).weights, fence=fence)
    if said := make_private(store.root):  # an earlier version made it
        _warn_once(said)
    return store


async def point_ref(store: RefStore, ref: str, root: str) -> None:
    """Let a ref name a version, unless it does. Raises Conflict if another process moves it at this moment."""
    held = await store.read_ref(ref)
    if held != root:
        await store.move_ref(ref, held, root)


def store_place(config: Config, seen_as: str = "") -> dict[str, object]:
    """The settings with which another program opens the weight store. `seen_as`: its name for the store; "": the same as ours."""
    named = seen_as or config.weights.url or str(home(config).weights.resolve())
    return {"url": named, "options": dict(config.weights.options)}


def open_follower(config: Config) -> Follower:
    """Reads versions out of the run's weight store."""
    from ostinato.weights.follow.follower import Follower

    return Follower(open_store(config), config.follow)


def open_cached_store(config: Config) -> RefStore:
    """The run's weight store for reading only, through the directory `follow.cache` if that is set."""
    from ostinato.weights.relay import RelayStore
    from ostinato.weights.store.directory import DirectoryStore

    store = open_store(config)
    if config.follow.cache is None:
        return store
    return RelayStore(store, DirectoryStore(config.follow.cache.expanduser()), config.relay)


@contextlib.contextmanager
def open_run(config: Config, tenure: Tenure | None = None, patience: Patience | None = None) -> Generator[Run]:
    """The run's log and weights. The log is closed at the end. `tenure`: the role in which it is written. `patience` as for `open_log`."""
    from ostinato.weights.follow.follower import Follower

    token = None if tenure is None else tenure.token
    place, store = home(config), open_store(config, tenure)
    with open_log(config, token, patience) as log:
        yield Run(
            config=config,
            home=place,
            log=log,
            folds=open_folds(config, token, patience),
            store=store,
            follower=Follower(store, config.follow),
        )


def model_path(config: Config, progress: Callable[[str], None] | None = None) -> Path:
    """The checked directory of the model that training starts from."""
    from ostinato.model.load import resolve

    return resolve(config.model.source, config.model.cache, progress)
