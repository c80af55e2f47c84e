"""A run's directory and stores: the paths of its files, and the log, the folds and the weights once they are open."""

from __future__ import annotations

import os
import re
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ostinato.core.arm_assignment import branch_of
from ostinato.core.errors import BadConfig
from ostinato.core.files import write_atomic
from ostinato.record.roles import hold

if TYPE_CHECKING:  # a process that only needs paths, such as the supervisor, must not load the stores' code
    from ostinato.config import Config
    from ostinato.core.seams import Folds
    from ostinato.record.rowlog import RowLog
    from ostinato.weights.follow.follower import Follower
    from ostinato.weights.store.interface import KeptStore

DEMO_MARKER = "demo"
"""A file of this name marks a run of `ostinato demo`, whose users are programs."""
MARK = "postgres"
"""Name of the file in the log's directory that says which Postgres log is used instead."""
EVALUATION_REF = "evaluation"
BEST_EVALUATION_REF = "evaluation-best"
LEARNER_TEST_REF = "learner-test"
SERVED_REFS = ("live", "control", "canary", "previous", EVALUATION_REF, BEST_EVALUATION_REF)


@dataclass(frozen=True, slots=True)
class Home:
    """The paths of a run."""

    root: Path

    @property
    def log(self) -> Path:
        """The append-only log: a directory of segments."""
        return self.root / "log"

    @property
    def keys(self) -> Path:
        """The keys that encrypt people's text. The file exists only if `record.encrypt` was ever on."""
        return self.root / "log-keys.db"

    @property
    def elsewhere(self) -> Path:
        """The file that names the log if it is in Postgres."""
        return self.log / MARK

    @property
    def folds(self) -> Path:
        """Snapshots of the folds of the log. They may be deleted and are then rebuilt."""
        return self.root / "folds"

    @property
    def people(self) -> Path:
        """The cache of people's dials. It may be deleted and is then rebuilt from the log."""
        return self.folds / "people.sqlite"

    @property
    def styles(self) -> Path:
        """The cache of people's styles. It may be deleted and is then rebuilt from the log."""
        return self.folds / "styles.sqlite"

    @property
    def weights(self) -> Path:
        """The weight store."""
        return self.root / "weights"

    def branch(self, tenant: str) -> Path:
        """The directory of the run that trains a tenant's branch."""
        return self.root / "branches" / tenant

    @property
    def checkpoints(self) -> Path:
        """The trainer's checkpoints."""
        return self.root / "checkpoints"

    @property
    def checkpoint_wanted(self) -> Path:
        """Flag file: requests a checkpoint that holds every step taken so far. The trainer removes it."""
        return self.root / "checkpoint.wanted"

    @property
    def erasure(self) -> Path:
        """Replays of the training without forgotten people: requests, replays in progress and certificates."""
        return self.root / "erasure"

    @property
    def address(self) -> Path:
        """The file to which the gateway writes its URL."""
        return self.root / "gateway.url"

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.root / "config.json"

    @property
    def name(self) -> str:
        """The directory's name."""
        return self.root.resolve().name

    @property
    def draining(self) -> Path:
        """The engine servers that are draining, one URL per line."""
        return self.root / "draining"

    @property
    def rollouts(self) -> Path:
        """The rollout worker's journal."""
        return self.root / "rollouts.jsonl"

    @property
    def finished(self) -> Path:
        """The rollouts that ended for good, one JSON line each."""
        return self.root / "finished.jsonl"

    @property
    def audit(self) -> Path:
        """The audit trail: operators' actions, sign-ins and wrong keys."""
        return self.root / "audit.jsonl"

    @property
    def workers(self) -> Path:
        """The workers' states, as `ostinato up` last wrote them."""
        return self.root / "workers.json"

    @property
    def scale(self) -> Path:
        """The requested number of rollout workers while `ostinato up --on ray` runs."""
        return self.root / "scale.json"

    def worker_log(self, worker: str) -> Path:
        """A worker's output."""
        return self.root / "logs" / f"{worker}.log"

    def progress(self, worker: str) -> Path:
        """A worker's progress file: JSON lines for people to follow."""
        return self.root / f"{worker}.jsonl"

    def admin_key(self) -> str:
        """Return the run's own operator key; generate and store it the first time. With it the release worker may choose a weight slot.

        Several processes may call this at once, and any may be killed, so the file is written atomically. An empty or truncated file is
        replaced. Raises BadConfig for a file that everybody can access.
        """
        path = self.root / "admin.key"
        if key := _whole_key(path):
            return key
        with hold(self.root, "admin-key", wait_s=10.0):
            if key := _whole_key(path):  # another process was quicker
                return key
            key = secrets.token_urlsafe(_KEY_BYTES)
            write_atomic(path, key, durable=True)
        return key


_KEY_BYTES = 32


def _whole_key(path: Path) -> str | None:
    """Return the key in the file; None if the file is missing or damaged. Raises BadConfig for a file that everybody can access."""
    try:
        with path.open(errors="replace") as file:
            mode, key = stat.S_IMODE(os.fstat(file.fileno()).st_mode), file.read().strip()
    except FileNotFoundError:
        return None
    if not re.fullmatch(r"[A-Za-z0-9_-]{43}", key):
        return None
    if mode & 0o007:
        raise BadConfig(
            f"every user may access {path} (mode {mode:03o}), the run's operator key: delete it and a new one is made at the next start, "
            f"or remove that permission: chmod 600 {path}"
        )
    return key


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run's durable stores, opened once per process."""

    config: Config
    home: Home
    log: RowLog
    folds: Folds
    store: KeptStore
    follower: Follower

    @property
    def name(self) -> str:
        """The name under which this run publishes: its directory's name or its branch's."""
        return branch_of(self.config.run.tenant) if self.config.run.tenant else self.home.name
