"""Settings files on disk, written atomically, with a backup of the previous state beside each, so that it can be restored exactly.

The backup is written before the file, and removed after the file is restored. A process that is killed in between leaves a file that is
unchanged, or whose change can be undone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from ostinato.core.errors import BadConfig, Conflict, NotFound, StorageFull

_SECRET_MODE = 0o600
_NEW_MODE = 0o644
_MOST_BYTES = 4 * 1024 * 1024


class Backup(BaseModel):
    """A file's state before our change. `before` and `mode` are its text and permissions, None if it did not exist; `wrote` are SHA-256s of
    what we wrote, the newest last; `made` is how many directories above the file we created.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    wrote: list[str]
    before: str | None
    mode: int | None
    made: int


@dataclass(frozen=True, slots=True, kw_only=True)
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
            _put(found.kept, f"{_backup(found, text, made).model_dump_json(indent=2)}\n", _SECRET_MODE, exact=True)
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
            new = backup.model_copy(update={"wrote": wrote, "before": before})
            _put(found.kept, f"{new.model_dump_json(indent=2)}\n", _SECRET_MODE, exact=True)
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
        return Backup.model_validate_json(text)
    except ValidationError as error:
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


def _put(path: Path, text: str, mode: int, *, exact: bool) -> None:
    """Write to a temporary file, fsync it, rename it and fsync the directory. `exact`: the mode is not narrowed by the umask."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode & 0o777)
        with os.fdopen(fd, "wb") as file:
            if exact:
                os.fchmod(fd, mode)
            file.write(text.encode())
            file.flush()
            os.fsync(fd)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _refused(path: Path, error: OSError) -> StorageFull:
    return StorageFull(f"{path} cannot be written ({error.strerror}); make room, or change its owner or permissions")
