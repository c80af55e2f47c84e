"""Settings files of other programs on disk: shown as a diff, agreed to by a person, written atomically, with a backup beside each.

The backup is written before the file, and removed after the file is restored. A process that is killed in between leaves a file that is
unchanged, or whose change can be undone. The diff shows no secret, neither ours nor any that was there before.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import os
import re
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError
from rich.console import Console
from rich.text import Text

from ostinato.core.errors import BadConfig, Conflict, NotFound, StorageFull
from ostinato.core.files import write_atomic
from ostinato.core.lines import lines_of
from ostinato.launch.commands.agent_settings import PLACEHOLDER
from ostinato.launch.views.screen import plain

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


def _refused(path: Path, error: OSError) -> StorageFull:
    return StorageFull(f"{path} cannot be written ({error.strerror}); make room, or change its owner or permissions")


# ---------------------------------------------------------------- asking first


_STYLES = {"+": "green", "-": "red", "@": "cyan"}


def agreed(console: Console, question: str, *, yes: bool) -> bool:
    """True if a person agrees, or did so beforehand (`yes`). Raises BadConfig if there is no terminal to ask at."""
    if yes:
        return True
    if not sys.stdin.isatty():
        raise BadConfig("nothing was written: there is no terminal to ask at; add --yes to agree")
    try:
        answer = console.input(f"{question} (y/N) ", markup=False)
    except EOFError:
        answer = ""
    if answer.strip().lower() in ("y", "yes"):
        return True
    say(console, ["nothing was written"])
    return False


def show(console: Console, lines: Sequence[str]) -> None:
    """Print the lines of a diff."""
    for line in lines:
        console.print(Text(line, _STYLES.get(line[:1], "")), soft_wrap=True)


def say(console: Console, lines: Sequence[str]) -> None:
    """Print lines as they are."""
    for line in lines:
        console.print(Text(plain(line)), soft_wrap=True)


# ---------------------------------------------------------------- masking secrets


_LEAST = 12  # the shortest key, in characters, of which the last four may be shown
_NAMES = "key|token|secret|passw|auth|credential|cookie|bearer|header"
_NAMED = re.compile(
    rf"""(['"]?[\w.-]*(?:{_NAMES})[\w.-]*['"]?\s*[:=]\s*)("(?:\\.|[^"\\])*"|'[^']*'|(?:bearer|basic)\s+[^\s'"]+|[^\s,'"{{\[][^\s,]*)""",
    re.IGNORECASE,
)
_BARE = re.compile(
    r"(?<![\w-])(?:(?:sk|pk|rk|ghp|gho|github_pat|glpat|xox[a-z]|hf)[-_]|AKIA)[A-Za-z0-9_-]{8,}"
    r"|(?<=bearer )[^\s\"']+|(?<=://)[^\s/@\"']+:[^\s/@\"']+(?=@)|(?<![\w-])(?=\w*\d)(?=\w*[A-Za-z])\w{24,}(?![\w-])",
    re.IGNORECASE,
)
_NO_SECRET = re.compile(r"""['"]?(?:true|false|null|[\d.]+|[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+|)['"]?,?""")


def masked(key: str) -> str:
    """A key as it may be shown. Example: ``masked("sk-0123456789abcdef") == "sk-…cdef"``"""
    kind = "sk-" if key.startswith("sk-") else ""
    return f"{kind}…{key[-4:]}" if len(key) >= _LEAST else "…"


def hidden(text: str, key: str | None) -> str:
    """A line in which the key is masked, and any other value that is named like a secret or looks like one."""
    if key:
        text = text.replace(key, masked(key))
    text = _NAMED.sub(lambda found: found[1] + _value(found[2]), text)
    return _BARE.sub(lambda found: masked(found[0]), text)


def _value(value: str) -> str:
    quote = value[0] if value[0] in "\"'" else ""
    bare = value.strip(quote) if quote else value
    if "…" in bare or bare == PLACEHOLDER or _NO_SECRET.fullmatch(value):
        return value
    return f"{quote}{masked(bare)}{quote}"


def diff(name: str, before: str | None, after: str | None, key: str | None) -> list[str]:
    """A unified diff of a file's change, with secrets masked; None: the file does not exist."""
    old, new = ([] if text is None else lines_of(text) for text in (before, after))
    names = ("/dev/null" if before is None else name, "/dev/null" if after is None else name)
    lines = difflib.unified_diff(old, new, *names, lineterm="")
    return [plain(hidden(line, key)) for line in lines]


def _put(path: Path, text: str, mode: int, *, exact: bool) -> None:
    write_atomic(path, text, durable=True, mode=mode, exact=exact)
