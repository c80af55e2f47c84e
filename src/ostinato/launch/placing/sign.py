"""A worker's signs of life: one line a second on a pipe to the supervisor, the last one with the reason if it fails.

The pipe and not a file: a full disk must not make a healthy worker look dead. A line says what the worker does, for how long and how
long it may, so that an optimizer step of minutes is not taken for a hang, nor a hang for a step.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

PULSE_FD = "OSTINATO_PULSE_FD"
"""Names the pipe's end in a worker's environment."""
LISTEN_FD = "OSTINATO_LISTEN_FD"
"""Names the gateway's listening socket in a worker's environment."""
PARENT = "OSTINATO_PARENT"
"""Names the supervisor's pid in a worker's environment."""

LONGEST = {"doing": 400, "trouble": 1_000, "failed": 1_600}
"""Bytes of each text as sent: a line stays below the size that a pipe takes whole (4096 bytes)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """What a worker says of itself.

    `for_s`: it has done this for so long. `limit_s`: the longest that may take; None: any time. `lag_s`: its event loop has not come
    round for so long. `ready`: it does what it is there for. `trouble`: what it is trying again. `failed`: why it ends; `certain`:
    starting it again cannot help; `outside`: the reason lies outside of it, as a full disk does, and passes.

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
        """As sent."""
        texts = {
            key: _cut(value, most) for key, most in LONGEST.items() if isinstance(value := getattr(self, key), str)
        }
        return json.dumps(asdict(self) | texts).encode() + b"\n"


def read_sign(line: bytes) -> Sign | None:
    """A line as sent, or None if it is none: half a line of a killed worker."""
    try:
        return Sign(**json.loads(line))
    except (ValueError, TypeError):
        return None


def _cut(text: str, most: int) -> str:
    """The text on one line and at most so many bytes long as JSON."""
    line = " ".join(text.split())
    while len(json.dumps(line)) > most:
        line = line[: len(line) * 3 // 4 - 3] + "..."
    return line
