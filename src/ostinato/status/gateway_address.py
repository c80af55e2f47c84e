"""The gateway's address, read from the file that it writes: its URL and the process that wrote it, so that a stale file is ignored."""

from __future__ import annotations

import os
from pathlib import Path


def read_address(path: Path, writer: int | None = None) -> str | None:
    """The gateway's URL; None if the file is missing or damaged, or if the process that wrote it is dead or is not `writer`."""
    try:
        url, mark = path.read_text(errors="replace").splitlines()
        pid = int(mark.split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return url if mark == process_mark(pid) and writer in (None, pid) else None


def process_mark(pid: int) -> str | None:
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
