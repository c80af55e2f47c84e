"""Settings files of other programs on disk: shown as a diff, agreed to by a person, written atomically, with a backup beside each.

The backup is written before the file, and removed after the file is restored. A process that is killed in between leaves a file that is
unchanged, or whose change can be undone. The diff shows no secret, neither ours nor any that was there before.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import os
import stat
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from ostinato_client.connect.agent_settings import Json, lines_of
from ostinato_client.connect.errors import BadConfig, Conflict, NotFound, StorageFull
from ostinato_client.connect.terminal import hidden, plain

_SECRET_MODE = 0o600
_NEW_MODE = 0o644
_MOST_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class Backup:
    """A file's state before our change. `before` and `mode` are its text and permissions, None if it did not exist; `wrote` are SHA-256s of
    what we wrote, the newest last; `made` is how many directories above the file we created.
    """

    wrote: list[str]
    before: str | None
    mode: int | None
    made: int

    def to_json(self) -> str:
        """The text of the backup's file."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"

    @staticmethod
    def from_json(text: str) -> Backup:
        """The backup in a file's text. Raises ValueError for any other text."""
        value: object = json.loads(text)
        if not isinstance(value, dict):
            raise ValueError("no JSON object")
        fields = cast(Json, value)
        if fields.keys() != {"wrote", "before", "mode", "made"}:
            raise ValueError("other fields than a backup's")
        wrote, before, mode, made = (fields[name] for name in ("wrote", "before", "mode", "made"))
        fine = (
            isinstance(wrote, list)
            and all(isinstance(each, str) for each in cast("list[Any]", wrote))
            and (before is None or isinstance(before, str))
            and (mode is None or type(mode) is int)
            and type(made) is int
        )
        if not fine:
            raise ValueError("a field of another type than a backup's")
        (before or "").encode()  # half a character could not be written
        return Backup(wrote=wrote, before=before, mode=mode, made=made)


@dataclass(frozen=True)
class SettingsFile:
    """A settings file as it was found; `text` and `mode` are None if it is not there.

    Attributes:
        path: the path that the agent uses.
        real: `path` with all links resolved.
        backup: the backup of an earlier change, if there was one.
        keep: the part of the backup's name that follows the file's name.
    """

    path: Path
    real: Path
    text: str | None
    mode: int | None
    backup: Backup | None
    keep: str

    @property
    def kept(self) -> Path:
        """The path of the backup."""
        return _beside(self.path, self.keep)

    @property
    def ours(self) -> bool:
        """True if the file is as we left it, so that our change can be undone."""
        return self.backup is not None and self.text is not None and _digest(self.text) in self.backup.wrote

    @property
    def changed(self) -> bool:
        """True if somebody changed the file after we wrote it, so that its previous state cannot be restored without loss."""
        return self.backup is not None and not self.ours and self.text != self.backup.before

    @property
    def base(self) -> str | None:
        """The text to start from: the text before our change, unless somebody has changed the file since."""
        return self.backup.before if self.ours and self.backup is not None else self.text

    def new_mode(self, *, secret: bool) -> int:
        """The permissions for the new file; `secret`: it holds a key."""
        before = self.backup.mode if self.ours and self.backup is not None else None
        return _SECRET_MODE if secret else next((mode for mode in (before, self.mode) if mode is not None), _NEW_MODE)


def look(path: Path, *, within: Path | None = None, keep: str = "before-ostinato") -> SettingsFile:
    """Read a settings file and its backup.

    Args:
        path: the file, which may not exist.
        within: a directory that links may not lead out of; None: they may lead anywhere.
        keep: tells backups of one command from those of another.

    Raises:
        BadConfig: the file cannot be read, is not UTF-8 text or not a plain file of at most 4 MiB, or a link leads out of `within`.
    """
    real = Path(os.path.realpath(path))
    if within is not None and not real.is_relative_to(os.path.realpath(within)):
        raise BadConfig(f"{path} leads to {real}, out of {within}; remove the link, or use --scope user")
    text, mode = _read(real)
    return SettingsFile(path=path, real=real, text=text, mode=mode, backup=_read_backup(_beside(path, keep)), keep=keep)


def write(found: SettingsFile, text: str, *, secret: bool) -> None:
    """Write the file, and back up its state before our first change. Raises Conflict if it changed since it was read, StorageFull."""
    _unchanged(found)
    try:
        made = _make(found.real.parent)
        if not found.changed:
            _put(found.kept, _backup(found, text, made).to_json(), _SECRET_MODE, exact=True)
        _put(found.real, text, found.new_mode(secret=secret), exact=secret or found.mode is not None)
    except OSError as error:
        if found.backup is None:
            with contextlib.suppress(OSError):
                found.kept.unlink()
        raise _refused(found.path, error) from error


def _backup(found: SettingsFile, text: str, made: int) -> Backup:
    """The backup to write: after several changes, the state before the first."""
    old, new = found.backup, _digest(text)
    made += 0 if old is None else old.made
    if old is None or not found.ours:
        return Backup(wrote=[new], before=found.text, mode=found.mode, made=made)
    # the digest of the present text stays, because a process that is killed before it writes the file leaves that text there
    return Backup(wrote=[_digest(found.text or ""), new], before=old.before, mode=old.mode, made=made)


def restored(found: SettingsFile) -> Backup:
    """The backup that undoing restores. Raises NotFound if nothing was written, Conflict if the file was changed since."""
    if found.backup is None:
        raise NotFound(f"{found.path}: nothing to undo, since {found.kept} is not there")
    if found.changed:
        raise Conflict(
            f"{found.path} was changed since it was connected, so it is left as it is. What was there before stands in {found.kept} "
            'under "before": take our settings out by hand, and delete that file'
        )
    return found.backup


def undo(found: SettingsFile) -> None:
    """Restore the file's previous bytes and permissions. Raises what `restored` raises, and Conflict, BadConfig, StorageFull."""
    backup = restored(found)
    _unchanged(found)
    try:
        if backup.before is None:
            found.real.unlink(missing_ok=True)
        elif found.text != backup.before or found.mode != backup.mode:
            _put(found.real, backup.before, _NEW_MODE if backup.mode is None else backup.mode, exact=True)
        found.kept.unlink()
    except OSError as error:
        raise _refused(found.path, error) from error
    for directory in list(found.real.parents)[: backup.made]:
        with contextlib.suppress(OSError):  # the directory holds something else by now
            directory.rmdir()


def amend(found: SettingsFile, text: str | None, before: str | None) -> None:
    """Write the file (None: delete it), and let undoing an earlier change restore `before`, amended likewise. Raises as `write` does."""
    _unchanged(found)
    backup = found.backup
    try:
        if backup is not None and found.ours:
            wrote = [_digest(each) for each in (found.text, text) if each is not None]
            new = replace(backup, wrote=wrote, before=before)
            _put(found.kept, new.to_json(), _SECRET_MODE, exact=True)
        if text is None:
            found.real.unlink(missing_ok=True)
        else:
            _put(found.real, text, _NEW_MODE if found.mode is None else found.mode, exact=found.mode is not None)
    except OSError as error:
        raise _refused(found.path, error) from error


def _unchanged(found: SettingsFile) -> None:
    if (found.text, found.mode) != _read(found.real):
        raise Conflict(f"{found.path} was changed in this moment; nothing was written. Run the command again")


def _read(real: Path) -> tuple[str | None, int | None]:
    try:
        status = real.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_BYTES:
            raise BadConfig(f"{real} is no plain file of at most 4 MiB; set it aside")
        return real.read_bytes().decode(), stat.S_IMODE(status.st_mode)
    except FileNotFoundError:
        return None, None
    except UnicodeDecodeError as error:
        raise BadConfig(f"{real} is no UTF-8 text; mend it or set it aside") from error
    except OSError as error:
        raise BadConfig(f"{real} cannot be read ({error.strerror}); change its owner or permissions") from error


def _read_backup(path: Path) -> Backup | None:
    text, _ = _read(path)
    if text is None:
        return None
    try:
        return Backup.from_json(text)
    except (ValueError, RecursionError) as error:
        raise BadConfig(f"{path}, which tells what was there before, is damaged; set it aside") from error


def _beside(path: Path, keep: str) -> Path:
    return path.with_name(f"{path.name}.{keep}.json")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _make(directory: Path) -> int:
    """Make a directory and its parents; returns how many were missing."""
    missing = [each for each in (directory, *directory.parents) if not each.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    return len(missing)


def _refused(path: Path, error: OSError) -> StorageFull:
    return StorageFull(f"{path} cannot be written ({error.strerror}); make room, or change its owner or permissions")


def diff(name: str, before: str | None, after: str | None, key: str | None) -> list[str]:
    """A unified diff of a file's change, with secrets masked; None: the file does not exist."""
    old, new = ([] if text is None else lines_of(text) for text in (before, after))
    names = ("/dev/null" if before is None else name, "/dev/null" if after is None else name)
    lines = difflib.unified_diff(old, new, *names, lineterm="")
    return [plain(hidden(line, key)) for line in lines]


def _put(path: Path, text: str, mode: int, *, exact: bool) -> None:
    """Replace a file durably and atomically: a reader sees the old file or the new one, never a part; `exact`: whatever the umask."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)  # of an earlier process with this number
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode & 0o777), "wb") as file:
            if exact:
                os.fchmod(file.fileno(), mode)
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
