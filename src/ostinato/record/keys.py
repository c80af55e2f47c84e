"""The keys that encrypt user text, in a file of their own. Destroying a key makes its texts permanently unreadable (crypto-shredding).

There is one key per tenant, or per user of a tenant, plus one per turn whose signals came before the turn itself, when its user was not
known yet. Keys are 256 random bits; values are encrypted with AES-GCM with 96-bit random nonces, bound to their column and row.

`assign_keys` chooses the key of each text that is written. `rekey` rotates the master key without touching the rows of the log.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ostinato.core.errors import BadConfig, Corrupt, NotFound, StorageFull, Unavailable
from ostinato.core.records import Signal, Turn
from ostinato.core.seams import Clock
from ostinato.core.steering import DialSet
from ostinato.record.codec.kinds import SIGNALS
from ostinato.record.codec.turns import KeyDestroyed, Ready
from ostinato.record.config import Encrypt
from ostinato.record.sqlite import connect, create, driver, is_busy, transaction, translate, translated

_NONCE_BYTES = 12
_CLEAR, _WRAPPED = b"\0", b"\1"  # first byte of a stored key
# least bytes of a master key without white space at its ends; 32 random bytes have fewer in one case in 20 million
_MIN_MASTER_BYTES = 28
_CACHED = 20_000  # most keys in memory; beyond that the cache is emptied
_WAIT_S = 5.0
_REPORT_S = 86_400.0  # how long a destroyed key is reported even if its owner has a new one

_SCHEMA = (
    "CREATE TABLE keys (id INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL, scope TEXT NOT NULL, secret BLOB, "
    "forgotten_at REAL)",
    "CREATE UNIQUE INDEX living ON keys (scope) WHERE secret IS NOT NULL",
    "CREATE INDEX tenants ON keys (tenant) WHERE secret IS NOT NULL",
)


@dataclass(frozen=True, slots=True)
class Scope:
    """The owner of a key: a tenant, a user, or a turn whose user is not known yet.

    Example: ``Scope("acme", user="ann")``
    """

    tenant: str
    user: str | None = None
    turn: str | None = None

    @property
    def name(self) -> str:
        """The scope as stored in the key file."""
        return json.dumps([self.tenant, self.user, self.turn])


class MasterKey:
    """Wraps (encrypts) the keys of one file. Without a master key (`master` None) they are stored as they are.

    `field` names the setting or option that `master` comes from. Raises BadConfig for a file that cannot be read or is too short.
    """

    def __init__(self, keys: Path, master: Path | None, field: str = "record.master_key") -> None:
        self._keys, self._field = keys, field
        self._cipher = None if master is None else _read_master(master, field)

    @property
    def none(self) -> bool:
        """True if there is no master key."""
        return self._cipher is None

    def wrap(self, key: bytes, scope: str) -> bytes:
        """Return a key in its stored form."""
        if self._cipher is None:
            return _CLEAR + key
        nonce = os.urandom(_NONCE_BYTES)
        return _WRAPPED + nonce + self._cipher.encrypt(nonce, key, scope.encode())

    def unwrap(self, stored: bytes, scope: str) -> bytes:
        """The inverse of `wrap`; also accepts a key that was never wrapped. Raises BadConfig if another master key wrapped it."""
        if stored[:1] == _CLEAR:
            return stored[1:]
        if self._cipher is None:
            raise BadConfig(
                f"the keys in {self._keys} are wrapped with a master key; name its file in record.master_key"
            )
        try:
            return self._cipher.decrypt(stored[1 : 1 + _NONCE_BYTES], stored[1 + _NONCE_BYTES :], scope.encode())
        except (InvalidTag, ValueError) as error:  # ValueError: a damaged key, shorter than a nonce
            raise BadConfig(f"{self._field} does not open the keys in {self._keys}; name the right file") from error

    def wraps(self, stored: bytes, scope: str) -> bool:
        """Return True if this master key wrapped the stored key."""
        if self._cipher is None or stored[:1] == _CLEAR:
            return False
        try:
            self.unwrap(stored, scope)
        except BadConfig:
            return False
        return True


class KeyRing:
    """The file of keys. Thread-safe; any number of processes may use one file.

    Raises BadConfig if the keys are wrapped with another master key; Corrupt, StorageFull, Unavailable.
    """

    def __init__(self, path: Path, master: Path | None, clock: Clock) -> None:
        self._path = path
        self.clock = clock
        self._master = MasterKey(path, master)
        self._lock = threading.RLock()
        self._numbers: dict[Scope, int] = {}
        self._ciphers: dict[int, AESGCM | None] = {}
        try:
            create(path, _build, journal="delete")
            self._db = _connected(path)
            self._seen = self._version()
            self._check_schema()
            self._wrap_clear_keys()
        except driver.Error as error:
            raise translate(error, path) from error
        except OSError as error:
            raise StorageFull(f"{path} cannot be created: {error}; free space or repair the disk") from error

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def refresh(self) -> None:
        """Empty the key cache if another process has changed the file. Cheap; called before each batch of rows."""
        with self._lock:
            version = self._version()
            if version != self._seen or len(self._ciphers) > _CACHED:
                self._seen = version
                self._numbers.clear()
                self._ciphers.clear()

    def numbers(self, scopes: Iterable[Scope]) -> dict[Scope, int]:
        """Return the key number of each scope. Missing keys are created, durably on return. Raises the driver's errors."""
        wanted = set(scopes)
        with self._lock:
            unknown = sorted(wanted.difference(self._numbers), key=lambda scope: scope.name)
            if missing := [scope for scope in unknown if not self._find(scope)]:
                with transaction(self._db):
                    self._check_master()  # `rekey` may have changed it since this process started
                    made = [scope for scope in missing if not self._find(scope)]
                    for scope in made:
                        stored = self._master.wrap(AESGCM.generate_key(256), scope.name)
                        row = (scope.tenant, scope.name, stored)
                        self._db.execute("INSERT INTO keys (tenant, scope, secret) VALUES (?, ?, ?)", row)
                for scope in made:
                    self._find(scope)
            return {scope: self._numbers[scope] for scope in wanted}

    def living(self, scope: Scope) -> int | None:
        """Return the number of a scope's current key; None if it has none, or any process has destroyed it. Raises Unavailable."""
        with self._lock, translated(self._path):
            self.refresh()
            return self._numbers[scope] if scope in self._numbers or self._find(scope) else None

    def encrypt(self, number: int, associated: bytes, plain: bytes) -> bytes:
        """Encrypt under a key. Raises KeyDestroyed."""
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._cipher(number).encrypt(nonce, plain, associated)

    def decrypt(self, number: int, associated: bytes, blob: bytes) -> bytes:
        """Decrypt. Raises KeyDestroyed; Corrupt if the bytes were damaged or moved to another column or row."""
        cipher = self._cipher(number)
        try:
            return cipher.decrypt(blob[:_NONCE_BYTES], blob[_NONCE_BYTES:], associated)
        except (InvalidTag, ValueError) as error:  # ValueError: fewer bytes than a nonce
            raise Corrupt(f"what is stored under key {number} was changed; restore the log from a copy") from error

    def waiting_turns(self, tenant: str) -> list[str]:
        """Return the turns that have keys of their own because their signals came first. Raises Unavailable."""
        query = "SELECT scope FROM keys WHERE tenant = ? AND secret IS NOT NULL"
        with self._lock, translated(self._path):
            rows = self._retried(lambda: self._db.execute(query, (tenant,)).fetchall())
        scopes = [json.loads(scope) for (scope,) in rows]
        return [turn for _, _, turn in scopes if turn is not None]

    def destroyed(self) -> list[tuple[int, Scope]]:
        """Return the destroyed keys of tenants and users with their numbers, oldest first. Raises Unavailable.

        A key that was destroyed more than a day ago is left out if its owner has a new one.
        """
        query = (
            "SELECT id, scope FROM keys AS old WHERE secret IS NULL AND (forgotten_at > :since OR NOT EXISTS "
            "(SELECT 1 FROM keys AS new WHERE new.scope = old.scope AND new.secret IS NOT NULL)) ORDER BY id"
        )
        since = {"since": self.clock() - _REPORT_S}
        with self._lock, translated(self._path):
            rows = self._retried(lambda: self._db.execute(query, since).fetchall())
        scopes = ((number, Scope(*json.loads(scope))) for number, scope in rows)
        return [(number, scope) for number, scope in scopes if scope.turn is None]

    def forget(self, tenant: str, scopes: Sequence[Scope] | None) -> int:
        """Destroy these keys of a tenant, or all (None), and return how many. The file is rewritten, so that no trace stays in it.

        Raises StorageFull, Unavailable; then retry.
        """
        named = json.dumps(None if scopes is None else [scope.name for scope in scopes])
        statement = (
            "UPDATE keys SET secret = NULL, forgotten_at = :at WHERE tenant = :tenant AND secret IS NOT NULL "
            "AND (:named = 'null' OR scope IN (SELECT value FROM json_each(:named)))"
        )
        with self._lock, translated(self._path):
            try:
                values = {"at": self.clock(), "tenant": tenant, "named": named}
                count = self._retried(lambda: self._db.execute(statement, values).rowcount)
                self._retried(lambda: self._db.execute("VACUUM"))
            finally:
                self._numbers.clear()
                self._ciphers.clear()
        return count

    # ------------------------------------------------------------ one key

    def _find(self, scope: Scope) -> bool:
        query = "SELECT id FROM keys WHERE scope = ? AND secret IS NOT NULL"
        found = self._db.execute(query, (scope.name,)).fetchone()
        if found is not None:
            self._numbers[scope] = found[0]
        return found is not None

    def _cipher(self, number: int) -> AESGCM:
        with self._lock:
            if number not in self._ciphers:
                self._ciphers[number] = self._read(number)
            cipher = self._ciphers[number]
        if cipher is None:
            raise KeyDestroyed(f"key {number}")
        return cipher

    def _read(self, number: int) -> AESGCM | None:
        found = self._db.execute("SELECT scope, secret FROM keys WHERE id = ?", (number,)).fetchone()
        if found is None:
            raise Corrupt(f"{self._path} lacks key {number}, which encrypts rows of the log; restore it from a copy")
        return None if found[1] is None else AESGCM(self._master.unwrap(found[1], found[0]))

    # ------------------------------------------------------------ the file

    def _check_schema(self) -> None:
        if self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'keys'").fetchone() is None:
            raise Corrupt(
                f"{self._path} is not a file of keys; restore it from a copy: what they encrypt cannot be read"
            )

    def _check_master(self) -> None:
        """Raise BadConfig unless the master key unwraps a key. One is enough, because all are wrapped with the same master key."""
        query = "SELECT scope, secret FROM keys WHERE secret IS NOT NULL ORDER BY substr(secret, 1, 1) DESC LIMIT 1"
        found = self._db.execute(query).fetchone()
        if found is not None:
            self._master.unwrap(found[1], found[0])

    def _wrap_clear_keys(self) -> None:
        """Check the master key, and wrap keys that were created before there was a master key."""
        self._check_master()
        if self._master.none:
            return
        clear = "SELECT 1 FROM keys WHERE substr(secret, 1, 1) = ?"
        if self._db.execute(clear, (_CLEAR,)).fetchone() is None:
            return
        self._retried(self._wrap)
        self._retried(lambda: self._db.execute("VACUUM"))

    def _wrap(self) -> None:
        with transaction(self._db):
            rewrap(self._db, self._master, self._master)

    def _version(self) -> int:
        return self._db.execute("PRAGMA data_version").fetchone()[0]

    def _retried(self, act: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + _WAIT_S
        while True:
            try:
                return act()
            except driver.Error as error:
                if not is_busy(error) or time.monotonic() > deadline:
                    raise


def _connected(path: Path) -> Any:
    """Return a connection to a file of keys, in which deleted data leaves no trace."""
    db = connect(path, write=True)
    db.execute("PRAGMA synchronous=EXTRA")
    db.execute("PRAGMA secure_delete=ON")
    return db


def _build(db: Any) -> None:
    for statement in _SCHEMA:
        db.execute(statement)


def _read_master(path: Path, field: str) -> AESGCM:
    try:
        data = path.expanduser().read_bytes()
    except OSError as error:
        raise BadConfig(f"{field}: {path} cannot be read: {error}") from error
    # strip the line feed that an editor adds; random bytes may begin or end with white space, too
    secret = data.strip()
    if len(data) < 32 or len(secret) < _MIN_MASTER_BYTES:
        raise BadConfig(f"{field}: {path} holds {len(secret)} bytes; write 32 or more random ones into it")
    return AESGCM(hashlib.sha256(secret).digest())


# ---------------------------------------------------------------- which key encrypts a text


Owners = Mapping[str, tuple[str, str]]
"""Turn id -> (tenant, user)."""


def assign_keys(rows: Sequence[Ready], mode: Encrypt, ring: KeyRing, known: Callable[[Sequence[str]], Owners]) -> None:
    """Assign a key to each row's text; new keys are durable on return. `known` returns the owners of turns in the log."""
    if mode is Encrypt.NONE:
        return
    ring.refresh()
    owners = _owners(rows, known) if mode is Encrypt.USER else {}
    scopes: list[tuple[Ready, Scope]] = []
    for row in rows:
        if isinstance(row.row, Turn) or (isinstance(row.row, DialSet) and row.said is not None):
            scopes.append((row, Scope(row.row.tenant, row.row.user if mode is Encrypt.USER else None)))
        elif row.kind is SIGNALS and row.said is not None:
            scopes.append((row, _scope(mode, cast("Signal", row.row), owners)))
    numbers = ring.numbers(scope for _, scope in scopes)
    for row, scope in scopes:
        row.secret = numbers[scope]


def _owners(rows: Sequence[Ready], known: Callable[[Sequence[str]], Owners]) -> Owners:
    """Return the owners of all turns that signals with text refer to, without unknown turns."""
    fresh = {row.row.id: (row.row.tenant, row.row.user) for row in rows if isinstance(row.row, Turn)}
    referenced = dict.fromkeys(row.row.turn for row in rows if isinstance(row.row, Signal) and row.said is not None)
    older = [turn for turn in referenced if turn not in fresh]
    return {**fresh, **(known(older) if older else {})}


def _scope(mode: Encrypt, signal: Signal, owners: Owners) -> Scope:
    """Return the key scope of a signal's text: its turn's user, or the turn itself if the turn is not known yet."""
    if mode is Encrypt.TENANT:
        return Scope(signal.tenant)
    tenant, user = owners.get(signal.turn, (None, None))
    return Scope(signal.tenant, user=user) if tenant == signal.tenant else Scope(signal.tenant, turn=signal.turn)


# ---------------------------------------------------------------- rotating the master key


NEW_MASTER = "--new-master"


def rekey(keys: Path, old: Path | None, new: Path) -> int:
    """Wrap every key in the file `keys` with the master key in the file `new`; return how many keys there are.

    `old` is the file of the present master key; None if the keys are not wrapped. All keys change in one transaction, so that a process
    killed at any instant leaves all of them under one master key. Then the file is rewritten, so that no trace of the old wrapping stays.
    A second call completes what a killed call began. No other process may use the file, because it would keep the old master key.

    Raises:
        NotFound: there is no such file.
        BadConfig: a master key cannot be read or is too short, or neither of the two unwraps the keys.
        Corrupt, StorageFull: the file is either unchanged or already under the new master key; retry.
        Unavailable: another process uses the file.
    """
    before, after = MasterKey(keys, old), MasterKey(keys, new, NEW_MASTER)
    if not keys.exists():
        raise NotFound(f"there are no keys in {keys}: nothing of this log is encrypted (record.encrypt)")
    try:
        with closing(_connected(keys)) as db:
            with transaction(db, "EXCLUSIVE"):
                count = rewrap(db, before, after)
            db.execute("VACUUM")
            return count
    except driver.Error as error:
        if is_busy(error):
            raise Unavailable(f"another process uses {keys}; stop the run's workers, then try again") from error
        raise translate(error, keys) from error


def rewrap(db: Any, before: MasterKey, after: MasterKey) -> int:
    """Unwrap with `before` and wrap with `after` every key not yet under `after`; return how many keys there are. Raises BadConfig."""
    stored = db.execute("SELECT id, scope, secret FROM keys WHERE secret IS NOT NULL").fetchall()
    changed = [
        (after.wrap(before.unwrap(secret, scope), scope), number)
        for number, scope, secret in stored
        if not after.wraps(secret, scope)
    ]
    db.executemany("UPDATE keys SET secret = ? WHERE id = ?", changed)
    return len(stored)
