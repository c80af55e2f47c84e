"""Log rotation of a worker's output file, by the worker itself: once a second it looks at the size of the file that it writes to.

A file that is too long is truncated in place, not renamed, because every program that the worker started writes to the same open file:
under another name it would be written on, unbounded and unseen. No pipe lies between, so nothing blocks on a full disk or dies with a
reader, and what a crash prints last is in the file.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

from ostinato.core.files import older, private

OUTPUT = "OSTINATO_OUTPUT"
"""Environment variable that holds the path of a supervised worker's output file."""
KEPT_BYTES = 16 << 20
LOOK_S = 1.0
_PART = 1 << 20
_LONGEST_LINE = 1 << 16


class Rotation(threading.Thread):
    """Keeps the output file at `most_bytes`, and the older part beside it at twice that, but for what is written in one second.

    Example: ``Rotation(Path("run/logs/serve.log"), 16_000_000).start()``
    """

    def __init__(self, path: Path, most_bytes: int) -> None:
        super().__init__(name="rotation", daemon=True)
        self._path, self._most_bytes = path, most_bytes
        self._one = threading.Lock()  # the last look is the main thread's

    def run(self) -> None:
        """Look at the file every `LOOK_S` seconds until the process ends."""
        while True:
            self.look()
            time.sleep(LOOK_S)

    def look(self) -> None:
        """Rotate the file if it is too long. An error, such as a full disk, is left to the next look."""
        with self._one, contextlib.suppress(OSError):
            rotate(self._path, self._most_bytes)


def rotation(most_bytes: int) -> Rotation | None:
    """The rotation of this process's output; None for a worker that was started by hand, whose output is its caller's own."""
    named = os.environ.pop(OUTPUT, None)  # not for programs that the worker starts
    if not named:
        return None
    path = Path(named)
    try:
        own = os.path.samestat(os.fstat(1), path.stat())
    except OSError:
        return None
    return Rotation(path, most_bytes) if own and path.is_file() else None


def rotate(path: Path, most_bytes: int) -> bool:
    """If a file that others append to exceeds `most_bytes`, move its newest part to `older(path)` and empty it. True if so.

    A line that is written between the last read and the truncation is lost, as is what a burst writes faster than it is copied. On a disk
    without room for the copy, a file of more than twice `most_bytes` is emptied all the same. Raises OSError.
    """
    with open(path, "r+b", buffering=0) as output:
        size = output.seek(0, os.SEEK_END)
        if size <= most_bytes:
            return False
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        try:
            with open(partial, "wb", opener=private) as kept:
                at = size - most_bytes
                head = os.pread(output.fileno(), _LONGEST_LINE, at - 1) if at else b"\n"
                at += max(0, head.find(b"\n"))  # the older part begins with a whole line, unless that is very long
                end = at + 2 * most_bytes
                while at < end and (part := os.pread(output.fileno(), min(_PART, end - at), at)):
                    kept.write(part)
                    at += len(part)
            partial.replace(older(path))
        except OSError:
            partial.unlink(missing_ok=True)
            if size <= 2 * most_bytes:
                raise
        output.truncate(0)
    return True
