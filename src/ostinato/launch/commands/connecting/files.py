"""Settings files on disk: written whole or not at all, with what was there before kept beside, so that it can be put back exactly.

The backup is written before the file and removed after it was restored: whoever is killed in between leaves a file that is as it was,
or one that can be undone.
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
    """What was there before. `wrote` are SHA-256s of what we wrote, the newest last; `made` is how many directories above it
    are ours.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    wrote: list[str]
    before: str | None
    mode: int | None
    made: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A settings file as it was found; `text` and `mode` are None if it is not there.

    Attributes:
        path: as the agent knows it.
        real: where a link leads; the same as `path` if it is none.
        backup: of an earlier change, if there was one.
        keep: what the backup is called after the file's name.
    """

    path: Path
    real: Path
    text: str | None
    mode: int | None
    backup: Backup | None
    keep: str

    @property
    def kept(self) -> Path:
        """Where the backup lies."""
        return _beside(self.path, self.keep)

    @property
    def ours(self) -> bool:
        """True if it is as we left it, so that it can be undone."""
        return self.backup is not None and self.text is not None and _digest(self.text) in self.backup.wrote

    @property
    def changed(self) -> bool:
        """True if we wrote it and somebody has changed it since: what was there before cannot be put back without loss."""
        return self.backup is not None and not self.ours and self.text != self.backup.before

    @property
    def base(self) -> str | None:
        """The text to start from: what was there before us, unless somebody has changed it since."""
        return self.backup.before if self.ours and self.backup is not None else self.text

    def new_mode(self, *, secret: bool) -> int:
        """The permissions that it is to have; `secret`: it holds a key."""
        before = self.backup.mode if self.ours and self.backup is not None else None
        return _SECRET_MODE if secret else next((mode for mode in (before, self.mode) if mode is not None), _NEW_MODE)


def look(path: Path, *, within: Path | None = None, keep: str = "before-ostinato") -> Settings:
    """A settings file and its backup.

    Args:
        path: the file, which may not be there.
        within: a directory that no link may lead out of; None: it may.
        keep: tells backups of one command from those of another.

    Raises:
        BadConfig: it cannot be read, is no UTF-8 text or no plain file, or a link leads out.
    """
    real = Path(os.path.realpath(path))
    if within is not None and not real.is_relative_to(os.path.realpath(within)):
        raise BadConfig(f"{path} leads to {real}, out of {within}; remove the link, or use --scope user")
    text, mode = _read(real)
    return Settings(path=path, real=real, text=text, mode=mode, backup=_read_backup(_beside(path, keep)), keep=keep)


def write(found: Settings, text: str, *, secret: bool) -> None:
    """Write it, and keep what was there before our first change. Raises Conflict if it is not as it was found, StorageFull."""
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


def _backup(found: Settings, text: str, made: int) -> Backup:
    """What is kept: of several changes, what was there before the first."""
    old, new = found.backup, _digest(text)
    made += 0 if old is None else old.made
    if old is None or not found.ours:
        return Backup(wrote=[new], before=found.text, mode=found.mode, made=made)
    # the digest of what is there now stays: whoever is killed before the file is written leaves it so
    return Backup(wrote=[_digest(found.text or ""), new], before=old.before, mode=old.mode, made=made)


def restored(found: Settings) -> Backup:
    """What undoing puts back. Raises NotFound if nothing was written, Conflict if the file was changed since."""
    if found.backup is None:
        raise NotFound(f"{found.path}: nothing to undo, since {found.kept} is not there")
    if found.changed:
        raise Conflict(
            f"{found.path} was changed since it was connected, so it is left as it is. What was there before stands in {found.kept} "
            'under "before": take our settings out by hand, and delete that file'
        )
    return found.backup


def undo(found: Settings) -> None:
    """Put back what was there before, bytes and permissions. Raises as `restored` does, and Conflict, BadConfig, StorageFull."""
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
        with contextlib.suppress(OSError):  # something else lies there by now
            directory.rmdir()


def amend(found: Settings, text: str | None, before: str | None) -> None:
    """Write it (None: delete it), and let undoing an earlier change put back `before`, amended likewise. Raises as `write` does."""
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


def _unchanged(found: Settings) -> None:
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
    """Make a directory and those above it; how many were not there."""
    missing = [each for each in (directory, *directory.parents) if not each.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    return len(missing)


def _put(path: Path, text: str, mode: int, *, exact: bool) -> None:
    """Temporary file, fsync, rename, fsync of the directory. `exact`: the mode is not narrowed by the umask."""
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
