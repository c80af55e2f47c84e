"""The gateway's address file: its URL and the process that wrote it, by which a stale file is recognised."""

from __future__ import annotations

import os
from pathlib import Path


def read_address(path: Path, writer: int | None = None) -> str | None:
    """Return the gateway's URL; None if the file is missing or damaged, or if its writer is dead or is not process `writer`."""
    try:
        url, mark = path.read_text(errors="replace").splitlines()
        pid = int(mark.split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return url if mark == process_mark(pid) and writer in (None, pid) else None


def process_mark(pid: int) -> str | None:
    """Return a process's identity, its pid and, where the system reports it, its start time; None if the process is dead."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    try:
        # the program's name may contain anything but ends at the last ")"; the start time is field 22 of the line
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return f"{pid} 0"
    return None if fields[0] in "ZX" else f"{pid} {fields[19]}"
