"""Where a run is stored: its directory, log, folds and weight store."""

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

if TYPE_CHECKING:  # a process that needs only paths, such as the supervisor, must not import the stores
    from ostinato.core.retry import Patience
    from ostinato.core.seams import Folds
    from ostinato.record.postgres.log import PostgresLog
    from ostinato.record.roles import FencingToken, Tenure
    from ostinato.record.rowlog import RowLog
    from ostinato.weights.follow.follower import Follower
    from ostinato.weights.store.interface import KeptStore, RefStore

logger = logging.getLogger(__name__)


def served_refs(config: Config) -> tuple[str, ...]:
    """Return the refs whose versions a gateway holds.

    Beside the usual ones: the verified release if some users stay on it, the current and the next training step if some users follow
    training, the newest version if training uses rollouts in simulated worlds, and tenants' branches with the versions that a trained
    branch's gate measures.
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
    """Return the refs in the order in which a gateway loads them at its start: `live` after people's other arms.

    `live` answers the users of an arm that is not loaded, so that loading it first would move them to another arm.
    """
    others = [
        ref for ref in refs if ref.startswith(BRANCHES) or (ref in set(Arm) and Arm(ref).people and ref != Arm.LIVE)
    ]
    return (*others, *(ref for ref in refs if ref not in others))


def operator_key(config: Config, place: Home | None = None) -> str:
    """Return the key with which a process of the run may name a weight slot.

    `serve.admin_key`, which hosts can share, else the one in `place`, by default the serving run's directory.
    """
    shared = config.serve.admin_key
    return (place or home(serving_run(config))).admin_key() if shared is None else shared.get_secret_value()


_SUBDIRECTORIES = frozenset(
    {"log", "logs", "folds", "weights", "checkpoints", "relay", "machine", "branches", ".cache"}
)


def home(config: Config) -> Home:
    """Return the run's directory, created if missing, and closed to other users if it holds only a run. Raises StorageFull."""
    place = config.run.directory
    try:
        said = make_private(place, lambda: _is_only_a_run(place))
    except OSError as error:
        raise StorageFull(f"run.directory {place} cannot be created: {error.strerror}; name another place") from error
    if said:
        _warn_once(said)
    return Home(place)


def existing_home(config: Config) -> Home:
    """Return the run's directory without creating anything. Raises NotFound if it holds no run and no log in Postgres is configured."""
    place = Home(config.run.directory)
    if not place.log.exists() and not config.record.url:
        raise NotFound(f"no run in {config.run.directory}; start one with `ostinato up`, or --set run.directory=...")
    return place


def serving_run(config: Config) -> Config:
    """Return the settings of the run that serves a tenant's branch, given those of the branch's run; other settings unchanged."""
    if not config.run.tenant:
        return config
    return config.model_copy(update={"run": RunConfig(directory=config.run.directory.absolute().parents[1])})


def _is_only_a_run(place: Path) -> bool:
    return all(each.name in _SUBDIRECTORIES or not each.is_dir() for each in place.iterdir())


@functools.cache
def _warn_once(line: str) -> None:
    logger.warning("%s", line)


def open_log(config: Config, token: FencingToken | None = None, patience: Patience | None = None) -> RowLog:
    """Open the run's log: in its directory, or at `record.url`. Raises BadConfig for a log that this version cannot read.

    `token`: a role's fencing token, checked with each write. `patience`: how an open log waits for an unreachable server.

    If the log is in Postgres, a marker file in the directory names it. Other commands find the run by it, and it prevents the run from
    continuing with another log.
    """
    from ostinato.record.log import SqlLog

    place = home(config)
    _check_log_place(config, place)
    if config.record.url:
        return _open_elsewhere(config, place, token, patience)
    return SqlLog.open(place.log, wall_clock, config.record)


def _check_log_place(config: Config, place: Home) -> None:
    """Raise BadConfig if the run's log is not where the settings say."""
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
    """Yield the log's rows of one kind, oldest first. Raises like `Log.read`."""
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
            "record.url names the run's log, but its weights are not on this machine; name them in weights.url"
        )


def log_elsewhere(record: RecordConfig) -> tuple[str, bool]:
    """Return the name, for messages, of the log in Postgres, and whether it exists yet. Creates nothing. Raises BadConfig, Unavailable."""
    _postgres()
    from ostinato.record.postgres.log import server_of
    from ostinato.record.postgres.schema import has_log

    server = server_of(record)
    return server.name, server.ask(lambda connection: has_log(connection, server))


def check_log(config: Config) -> None:
    """Raise BadConfig for a log that cannot be this run's, or unusable Postgres settings. Contacts no server, creates nothing."""
    _check_log_place(config, Home(config.run.directory))
    if config.record.url:
        _postgres()
        from ostinato.record.postgres.log import server_of

        server_of(config.record)


LogPlace = Path | RecordConfig
"""A directory of segments, or a schema of a Postgres database."""


def named_log(config: Config, place: str) -> LogPlace:
    """Return the log of a run's directory or of a Postgres URL."""
    if place.startswith(("postgresql://", "postgres://")):
        return config.record.model_copy(update={"url": place})
    return Home(Path(place).expanduser()).log


async def copy_rows_of(
    config: Config, source: LogPlace, target: LogPlace, on_row: Callable[[Cursor, Cursor], None]
) -> Cursor:
    """Copy a log to another place. Raises like `record.backup.copy_log`."""
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
    """Return the folds of the run's log, stored where the log is. `token` and `patience` as in `open_log`."""
    from ostinato.record.folds import FileFolds

    if not config.record.url:
        return FileFolds(home(config).folds)
    from ostinato.record.postgres.log import PostgresFolds
    from ostinato.record.postgres.server import LogServer

    return PostgresFolds(LogServer.of(config.record).fenced(token), patience)


def open_store(config: Config, tenure: Tenure | None = None) -> KeptStore:
    """Return the run's weight store: a directory, or the store at `weights.url`. `tenure`: the role in which refs are moved.

    The run that trains a tenant's branch uses the serving run's store, with refs of its own.
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
    """Let a ref name a version, unless it does already. Raises Conflict if another process moves it at the same time."""
    held = await store.read_ref(ref)
    if held != root:
        await store.move_ref(ref, held, root)


def store_place(config: Config, seen_as: str = "") -> dict[str, object]:
    """Return the settings with which another program opens the weight store. `seen_as`: that program's URL of it; "": the same as ours."""
    named = seen_as or config.weights.url or str(home(config).weights.resolve())
    return {"url": named, "options": dict(config.weights.options)}


def open_follower(config: Config) -> Follower:
    """Return a reader of versions in the run's weight store."""
    from ostinato.weights.follow.follower import Follower

    return Follower(open_store(config), config.follow)


def open_cached_store(config: Config) -> RefStore:
    """Return the run's weight store for reading only, cached in the directory `follow.cache` if that is set."""
    from ostinato.weights.relay import RelayStore
    from ostinato.weights.store.directory import DirectoryStore

    store = open_store(config)
    if config.follow.cache is None:
        return store
    return RelayStore(store, DirectoryStore(config.follow.cache.expanduser()), config.relay)


@contextlib.contextmanager
def open_run(config: Config, tenure: Tenure | None = None, patience: Patience | None = None) -> Generator[Run]:
    """Open the run's log and weights; close the log at the end. `tenure`: the role that writes them. `patience` as in `open_log`."""
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
    """Return the verified directory of the model from which training starts."""
    from ostinato.model.load import resolve

    return resolve(config.model.source, config.model.cache, progress)
