"""A worker's signs of life: one line a second on a pipe to the supervisor, the last one with the reason if it fails.

It is a pipe and not a file because a full disk must not make a healthy worker look dead. A line says what the worker does, for how long
and how long it may, so that an optimizer step of minutes is not taken for a hang, nor a hang for a step.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

PULSE_FD = "OSTINATO_PULSE_FD"
"""Environment variable that holds a worker's file descriptor of the pipe."""
LISTEN_FD = "OSTINATO_LISTEN_FD"
"""Environment variable that holds the file descriptor of the gateway's listening socket."""
PARENT = "OSTINATO_PARENT"
"""Environment variable that holds the supervisor's pid."""

LONGEST = {"doing": 400, "trouble": 1_000, "failed": 1_600}
"""The most bytes of each text as sent, so that a line stays below the size that a pipe writes atomically (4096 bytes)."""


SERVING = "serving on"
"""How the serving worker's activity begins once the live weights are loaded; its URL follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """A worker's report on itself.

    `for_s`: how long it has been doing this. `limit_s`: the longest this may take; None: no limit. `lag_s`: how long its event loop has
    not come round. `ready`: it is doing its actual work. `trouble`: what it is retrying. `failed`: why it ends; `certain`: a restart
    cannot help; `outside`: the cause lies outside the worker and passes, as a full disk does.

    Example: ``Sign(doing="taking step 12", for_s=3.1, limit_s=3600.0, lag_s=0.0)``
    """

    doing: str
    for_s: float = 0.0
    limit_s: float | None = None
    lag_s: float = 0.0
    ready: bool = False
    trouble: str | None = None
    failed: str | None = None
    certain: bool = False
    outside: bool = False

    def line(self) -> bytes:
        """The line to send."""
        texts = {
            key: _cut(value, most) for key, most in LONGEST.items() if isinstance(value := getattr(self, key), str)
        }
        return json.dumps(asdict(self) | texts).encode() + b"\n"


def read_sign(line: bytes) -> Sign | None:
    """Parse a line as sent; None if it is invalid, such as half a line of a killed worker."""
    try:
        return Sign(**json.loads(line))
    except (ValueError, TypeError):
        return None


def _cut(text: str, most: int) -> str:
    """The text on one line, cut to at most `most` bytes as JSON."""
    line = " ".join(text.split())
    while len(json.dumps(line)) > most:
        line = line[: len(line) * 3 // 4 - 3] + "..."
    return line
