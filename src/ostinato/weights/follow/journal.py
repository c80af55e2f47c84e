"""A follower's journal on disk: what it has delivered and what it is fetching, for restarts after a kill or while the store is unreachable.

One small JSON file, replaced atomically. It is not authoritative: the store's refs decide, and every version that the journal names is
verified like any other when it is fetched.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from ostinato.core.records import PolicyVersion
from ostinato.weights.store.disk import Disk, storage_refusals, sync_directory, write_new
from ostinato.weights.version.content import hash_of
from ostinato.weights.version.manifest import canonical

logger = logging.getLogger(__name__)

_MAX_BYTES = 1 << 20
_Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}\z")]


class Version(BaseModel):
    """A policy version in the journal's format."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    number: Annotated[int, Field(ge=0)]
    hash: _Hash

    @property
    def policy(self) -> PolicyVersion:
        """The `PolicyVersion` record."""
        return PolicyVersion(number=self.number, hash=self.hash)


class JournalEntry(BaseModel):
    """The state of one ref. `have`: the version delivered last (None: none yet); `want`: the version being fetched (None: none)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    have: Version | None = None
    want: Version | None = None


_Entries = TypeAdapter(dict[str, JournalEntry])


class Journal:
    """The journal of one follower process.

    Example: ``journal = Journal(Path("runs/a/follow.json")); journal.want("live", v17); ...; journal.have("live", v17)``
    """

    def __init__(self, path: Path, disk: Disk | None = None) -> None:
        self._path, self._disk = path, disk or Disk()
        self.entries: Mapping[str, JournalEntry] = self._read()
        """The entries, keyed by ref."""

    def want(self, ref: str, policy: PolicyVersion) -> None:
        """Record that `policy` is about to be fetched for `ref`. Durable on return. Raises StorageFull."""
        before = self.entries.get(ref, JournalEntry())
        if before.want is None or before.want.policy != policy:
            self._write({**self.entries, ref: JournalEntry(have=before.have, want=_version(policy))})

    def have(self, ref: str, policy: PolicyVersion) -> None:
        """Record that `policy` was verified and delivered. Durable on return. Raises StorageFull."""
        entry = JournalEntry(have=_version(policy))
        if self.entries.get(ref) != entry:
            self._write({**self.entries, ref: entry})

    def _read(self) -> dict[str, JournalEntry]:
        try:
            with self._path.open("rb") as file:
                check, _, data = file.read(_MAX_BYTES).partition(b" ")
            if check.decode("ascii", "replace") != hash_of(data):
                raise ValueError("its hash does not match its content")
            return _Entries.validate_json(data)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            logger.error("%s cannot be read (%s); continuing without it", self._path, str(error).splitlines()[0])
            return {}

    def _write(self, entries: dict[str, JournalEntry]) -> None:
        data = canonical(_Entries.dump_python(entries, mode="json"))
        # a fixed name, so that the next write removes what a kill has left
        partial = self._path.with_name(f"{self._path.name}.partial")
        with storage_refusals(f"writing {self._path}"):
            partial.unlink(missing_ok=True)
            write_new(self._disk, partial, hash_of(data).encode() + b" " + data)
            self._disk.rename(partial, self._path)
            sync_directory(self._disk, self._path.parent)
        self.entries = entries


def _version(policy: PolicyVersion) -> Version:
    return Version(number=policy.number, hash=policy.hash)
