"""The file that says where a run's gateway listens: its URL, and which process wrote it, so that a stale file is ignored."""

from __future__ import annotations

import contextlib
import os
import urllib.parse
from pathlib import Path

from ostinato.core.private import replace_text

_ANY = {"0.0.0.0", "::", "[::]"}


def write_address(path: Path, url: str) -> None:
    """Record that this process serves at `url`. The file is written atomically."""
    replace_text(path, f"{url}\n{_mark(os.getpid())}\n")


def read_address(path: Path, writer: int | None = None) -> str | None:
    """The gateway's URL; None if the file is missing or damaged, or if the process that wrote it is dead or is not `writer`."""
    try:
        url, mark = path.read_text(errors="replace").splitlines()
        pid = int(mark.split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return url if mark == _mark(pid) and writer in (None, pid) else None


def reachable(url: str, node: str) -> str:
    """The URL of a gateway on `node` as other machines reach it: a wildcard address is replaced by the node's own.

    Example: ``reachable("http://0.0.0.0:8321", "10.0.0.7") == "http://10.0.0.7:8321"``
    """
    parts = urllib.parse.urlsplit(url)
    host = f"[{node}]" if ":" in node else node
    return f"{parts.scheme}://{host}:{parts.port}" if parts.hostname in _ANY and node else url


def remove_address(path: Path) -> None:
    """Remove the file: nobody serves there any more."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def _mark(pid: int) -> str | None:
    """Identifies a process by its pid and, where the system reports it, its start time; None if the process is dead."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    try:
        # the program's name, which may hold anything, ends at the last ")"; then come the state, ..., and as the 22nd field the start
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return f"{pid} 0"
    return None if fields[0] in "ZX" else f"{pid} {fields[19]}"
