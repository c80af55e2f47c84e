"""`Weather` controls the faults that a preloaded library (`weather.c`) injects into a run's processes while they run."""

from __future__ import annotations

import mmap
import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("weather.c")
_FIELDS = ("sync_us", "clock_ns", "full")


class Weather:
    """A file that all processes of the run have mapped. Example: ``weather.set(full=1)``; ``weather.clear()``."""

    def __init__(self, directory: Path) -> None:
        self._library, path = directory / "weather.so", directory / "weather"
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", self._library, SOURCE, "-ldl"], check=True)
        path.write_bytes(bytes(8 * len(_FIELDS)))
        self._path = path
        with path.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), 0)

    def environment(self) -> dict[str, str]:
        """Environment variables that put a process under these faults."""
        return {"LD_PRELOAD": str(self._library), "OSTINATO_WEATHER": str(self._path)}

    def set(self, **values: int) -> None:
        """Set `sync_us` (extra microseconds per sync), `clock_ns` (nanoseconds that the clock is ahead) or `full` (1 for a full disk)."""
        for name, value in values.items():
            at = 8 * _FIELDS.index(name)
            self._shared[at : at + 8] = struct.pack("<q", value)

    def clear(self) -> None:
        """Remove all faults."""
        self.set(sync_us=0, clock_ns=0, full=0)
