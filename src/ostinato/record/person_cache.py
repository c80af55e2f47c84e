"""A cache, beside the log, of one value per person (the per-person state of a fold), each encrypted under the person's key.

It may be deleted at any time; it is then rebuilt from the log. A row is found by an HMAC of tenant and user, whose secret is stored beside
the file, so that a copy of the file alone identifies nobody. Destroying a person's key (`ostinato forget`) makes the value unreadable in
every copy.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Collection, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from ostinato.core.errors import Corrupt, StorageFull
from ostinato.core.files import write_atomic
from ostinato.core.records import Person
from ostinato.core.seams import Cursor, PersonValue
from ostinato.record.codec.turns import KeyDestroyed
from ostinato.record.config import Encrypt
from ostinato.record.keys import KeyRing, Scope
from ostinato.record.sqlite import connect, create, driver, remove, transaction, translate, translated

FORMAT = 1
_KEY_BYTES = 16  # of a person's row key
_SECRET_BYTES = 32
_CROWDED = "crowded "  # + a tenant's row key: values of some of its people were evicted
_STATEMENTS = (
    # `at`: the cursor up to which the value was folded; `secret`: the number of its encryption key.
    # Not WITHOUT ROWID, because a value of a kilobyte does not fit into a page of an index.
    "CREATE TABLE people (person BLOB PRIMARY KEY, tenant BLOB NOT NULL, at INTEGER NOT NULL, secret INTEGER, value BLOB NOT NULL)",
    "CREATE INDEX people_by_age ON people (tenant, at)",
    "CREATE TABLE state (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    f"PRAGMA user_version={FORMAT}",
)


class SqlPersonCache:
    """`core.seams.PersonCache` in an SQLite file. Reads and writes may come from two threads; one process uses a file.

    Args:
        path: the file; its HMAC secret is stored beside it, with the suffix ``.key``.
        ring: the log's keys; None if nothing is encrypted.
        mode: whether a value is encrypted under the tenant's key or the user's.
        most: people per tenant; beyond that, the values that have not changed for longest are evicted.

    Raises BadConfig, StorageFull.

    Example::

        values = SqlPersonCache(run / "folds" / "people.sqlite", ring, Encrypt.USER, most=100_000)
        cursor, note = values.begin("dials@1")
        ann = ("acme", "ann")
        values.write(cursor + 9, "{}", {ann: (cursor + 7, values.key(ann), b"...")})
    """

    def __init__(self, path: Path, ring: KeyRing | None, mode: Encrypt, *, most: int) -> None:
        self._path, self._ring, self._mode, self._most = path, None if mode is Encrypt.NONE else ring, mode, most
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._secret = _secret(path.with_suffix(".key"))
            self._read, self._write = self._open()
        except driver.Error as error:
            raise translate(error, path) from error
        except OSError as error:
            raise StorageFull(f"{path} cannot be created: {error}; free space or repair the disk") from error

    def close(self) -> None:
        """Close the connections."""
        self._read.close()
        self._write.close()

    def begin(self, rules: str, older: str | None = None) -> tuple[Cursor, str]:
        rules = self._rules(rules)
        with translated(self._path):
            state = dict(self._read.execute("SELECT name, value FROM state").fetchall())
            if state.get("rules") == rules:
                return int(state["cursor"]), state["note"]
            if older is not None and state.get("rules") == self._rules(older):
                with transaction(self._write):
                    self._put_state(rules=rules)
                return int(state["cursor"]), state["note"]
            with transaction(self._write):
                self._write.execute("DELETE FROM people")
                self._write.execute("DELETE FROM state WHERE name LIKE ?", (f"{_CROWDED}%",))
                self._put_state(rules=rules, cursor="0", note="")
        return 0, ""

    def key(self, person: Person) -> int | None:
        if self._ring is None:
            return None
        tenant, user = person
        return self._ring.living(Scope(tenant, user=user if self._mode is Encrypt.USER else None))

    def load(self, person: Person) -> bytes | None:
        _, row = self._row_keys(person)
        with translated(self._path):
            found = self._read.execute("SELECT secret, value FROM people WHERE person = ?", (row,)).fetchone()
        return None if found is None or found[0] != self.key(person) else self._decrypted(row, *found)

    def newest(self, tenant: str, most: int, without: Collection[Person] = ()) -> list[bytes]:
        """May be called from any thread."""
        of, left_out = self._tenant(tenant)[0], {self._row_keys(person)[1] for person in without}
        found = list[bytes]()
        with translated(self._path):
            if self._ring is not None:
                self._ring.refresh()
            with closing(connect(self._path, write=False)) as read:
                rows = read.execute(
                    "SELECT person, secret, value FROM people WHERE tenant = ? ORDER BY at DESC, person DESC", (of,)
                )
                for person, secret, value in rows:
                    if len(found) >= most:
                        break
                    with suppress(Corrupt):
                        plain = None if person in left_out else self._decrypted(person, secret, value)
                        if plain is not None:
                            found.append(plain)
        return found[::-1]

    def write(self, cursor: Cursor, note: str, values: Mapping[Person, PersonValue | None]) -> None:
        """Write without fsync: a cache that a power cut sets back is folded again from its earlier cursor."""
        with translated(self._path):
            rows = {self._row_keys(person): self._encrypted(person, value) for person, value in values.items()}
            kept = [(row, tenant, *sealed) for (tenant, row), sealed in rows.items() if sealed is not None]
            with transaction(self._write):
                gone = [(row,) for (_, row), sealed in rows.items() if sealed is None]
                self._write.executemany("DELETE FROM people WHERE person = ?", gone)
                self._write.executemany("INSERT OR REPLACE INTO people VALUES (?, ?, ?, ?, ?)", kept)
                for tenant in sorted({tenant for _, tenant, *_ in kept}):
                    self._limit(tenant)
                self._put_state(cursor=str(cursor), note=note)

    def count(self, tenant: str) -> int:
        query = "SELECT count(*) FROM people WHERE tenant = ?"
        with translated(self._path):
            return self._read.execute(query, (self._tenant(tenant)[0],)).fetchone()[0]

    def crowded(self, tenant: str) -> bool:
        """Return True if a tenant's cache is full, or had evictions since `begin` last reset it for new rules. Raises Unavailable."""
        query = "SELECT 1 FROM state WHERE name = ?"
        with translated(self._path):
            dropped = self._read.execute(query, (_CROWDED + self._tenant(tenant)[0].hex(),)).fetchone()
        return dropped is not None or self.count(tenant) >= self._most

    def pseudonym(self, person: Person) -> str:
        """Return a pseudonym of a person, 32 hexadecimal digits, which cannot be computed without this cache's secret."""
        return self._row_keys(person)[1].hex()

    # ------------------------------------------------------------ rows

    def _rules(self, rules: str) -> str:
        """Return the rules as stored: with a fingerprint of the HMAC secret, because under another secret no value would be found."""
        return f"{rules} {self._tenant('')[0].hex()}"

    def _limit(self, tenant: bytes) -> None:
        excess = "(SELECT count(*) FROM people WHERE tenant = :tenant) - :most"
        dropped = self._write.execute(
            "DELETE FROM people WHERE person IN (SELECT person FROM people WHERE tenant = :tenant ORDER BY at, person "
            f"LIMIT max(0, {excess}))",
            {"tenant": tenant, "most": self._most},
        )
        if dropped.rowcount > 0:
            self._put_state(**{_CROWDED + tenant.hex(): "1"})

    def _decrypted(self, row: bytes, key: int | None, value: bytes) -> bytes | None:
        """Return a stored value; None if its key was destroyed, or if only one of log and value is encrypted. Raises Corrupt."""
        if self._ring is None or key is None:
            return value if self._ring is None and key is None else None
        try:
            return self._ring.decrypt(key, row, value)
        except KeyDestroyed:
            return None

    def _encrypted(self, person: Person, value: PersonValue | None) -> tuple[Cursor, int | None, bytes] | None:
        """Return a value's columns; None if it must not be kept."""
        if value is None or value[1] != self.key(person):
            return None
        at, key, plain = value
        if self._ring is None:
            return at, None, plain
        if key is None:  # the log has no key for this person's text, so the value cannot be encrypted
            return None
        try:
            return at, key, self._ring.encrypt(key, self._row_keys(person)[1], plain)
        except KeyDestroyed:
            return None

    def _row_keys(self, person: Person) -> tuple[bytes, bytes]:
        """Return the row keys of the tenant and of the person."""
        tenant, secret = self._tenant(person[0])
        return tenant, hmac.digest(secret, person[1].encode(), "sha256")[:_KEY_BYTES]

    def _tenant(self, tenant: str) -> tuple[bytes, bytes]:
        """Return a tenant's row key, and the HMAC secret for the row keys of its people."""
        digest = hmac.digest(self._secret, tenant.encode(), "sha512")
        return digest[:8], digest[32:]

    def _put_state(self, **values: str) -> None:
        self._write.executemany("INSERT OR REPLACE INTO state VALUES (?, ?)", list(values.items()))

    def _open(self) -> tuple[Any, Any]:
        """Return a read and a write connection to the file; recreate a file that is damaged or has another format."""
        for attempt in range(2):
            create(self._path, _build)
            try:
                read, write = connect(self._path, write=False), connect(self._path, write=True)
                if read.execute("PRAGMA user_version").fetchone() == (FORMAT,):
                    read.execute("SELECT count(*) FROM state").fetchone()
                    # with a WAL this risks recent commits in a power cut but no corruption, and commits need no fsync
                    write.execute("PRAGMA synchronous=NORMAL")
                    return read, write
                read.close()
                write.close()
            except driver.DatabaseError as error:
                if attempt or not isinstance(translate(error, self._path), Corrupt):
                    raise
            remove(self._path)
        raise Corrupt(f"{self._path} cannot be created; remove it")


class PersonCacheView(SqlPersonCache):
    """A snapshot of the cache beside the process that uses the file; writes stay in memory.

    It is empty if the file is missing or cannot be read.

    Example: ``PersonCacheView(run / "folds" / "people.sqlite", ring, Encrypt.USER)``
    """

    def __init__(self, path: Path, ring: KeyRing | None, mode: Encrypt) -> None:
        self._path, self._ring, self._mode = path, None if mode is Encrypt.NONE else ring, mode
        self._written = dict[Person, PersonValue | None]()
        self._secret, self._read = secrets.token_bytes(_SECRET_BYTES), None
        with suppress(driver.Error, OSError, ValueError):
            secret = bytes.fromhex(path.with_suffix(".key").read_text())
            read = connect(path, write=False)
            read.execute("BEGIN")  # all later reads see the snapshot of the first one
            if read.execute("PRAGMA user_version").fetchone() == (FORMAT,):
                read.execute("SELECT count(*) FROM state").fetchone()
                self._secret, self._read = secret, read

    def close(self) -> None:
        if self._read is not None:
            self._read.close()

    def begin(self, rules: str, older: str | None = None) -> tuple[Cursor, str]:
        if self._read is not None:
            state = dict(self._read.execute("SELECT name, value FROM state").fetchall())
            if state.get("rules") in [self._rules(each) for each in (rules, older) if each is not None]:
                return int(state["cursor"]), state["note"]
            self._read.close()
            self._read = None
        self._written.clear()
        return 0, ""

    def load(self, person: Person) -> bytes | None:
        if person in self._written:
            written = self._written[person]
            return None if written is None or written[1] != self.key(person) else written[2]
        return None if self._read is None else super().load(person)

    def write(self, cursor: Cursor, note: str, values: Mapping[Person, PersonValue | None]) -> None:
        self._written.update(values)

    def people(self) -> int:
        """Return how many people have a value."""
        if self._read is None:
            return sum(written is not None for written in self._written.values())
        count = self._read.execute("SELECT count(*) FROM people").fetchone()[0]
        for person, written in self._written.items():
            row = (self._row_keys(person)[1],)
            known = self._read.execute("SELECT 1 FROM people WHERE person = ?", row).fetchone() is not None
            count += (written is not None) - known
        return count


def _build(db: Any) -> None:
    for statement in _STATEMENTS:
        db.execute(statement)


def _secret(path: Path) -> bytes:
    """Return the secret in a file, created if missing. A truncated file is replaced; existing values are then no longer found."""
    with suppress(FileNotFoundError, ValueError):
        secret = bytes.fromhex(path.read_text())
        if len(secret) == _SECRET_BYTES:
            return secret
    secret = secrets.token_bytes(_SECRET_BYTES)
    write_atomic(path, secret.hex(), durable=True)
    return secret
