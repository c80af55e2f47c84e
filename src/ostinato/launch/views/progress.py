"""Progress files: JSON lines on steps, publications and swaps that workers write for people. The gateway's metrics, `status` and the demo
read them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ostinato.config import Config
from ostinato.core.clock import wall_clock
from ostinato.core.files import older, private
from ostinato.core.weights import Learned, Swap
from ostinato.launch.placing.process import KEPT_BYTES

if TYPE_CHECKING:
    from ostinato.adapt.dials import DialSpread
    from ostinato.app.numerics import NumericsMode
    from ostinato.app.server_loans import Lent
    from ostinato.release.pace import Pace
    from ostinato.reward.surrogate import SurrogateQuality
    from ostinato.weights.publish.publisher import Published

logger = logging.getLogger(__name__)


def kept_bytes(config: Config) -> int:
    """Return the size in bytes beyond which a progress file is rotated."""
    return int(1e6 * config.housekeeping.log_mb)


class Progress:
    """Appends lines to one file. A line that cannot be written is dropped. A file beyond `most_bytes` is rotated to `older`."""

    def __init__(self, path: Path, most_bytes: int = KEPT_BYTES) -> None:
        self._path, self._most_bytes = path, most_bytes
        self._torn = True  # the file may end with half a line, left by a killed process or a full disk

    def write(self, kind: str, **fields: Any) -> None:
        """Append a JSON line with the kind, the time and the fields."""
        self.append(json.dumps({"kind": kind, "at": wall_clock(), **fields}))

    def append(self, line: str) -> None:
        """Append `line` as it is. It must not contain a line break."""
        try:
            with open(self._path, "a", encoding="utf-8", opener=private) as file:
                torn, self._torn = self._torn and file.tell() > 0, True
                file.write("\n" * torn + line + "\n")
                full = file.tell() > self._most_bytes
                self._torn = False
                if full:
                    self._rotate(file)
        except OSError as error:
            logger.warning("progress line lost: %s", error)

    def _rotate(self, file: TextIO) -> None:
        """Rotate the file unless another of its writers already did. A second rotation would overwrite the older part with a file that
        was just begun.
        """
        fcntl.flock(file, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), self._path.stat()):
                self._path.replace(older(self._path))

    def learned(self, learned: Learned) -> None:
        self.write("step", step=learned.step, **learned.metrics)

    def paced(self, pace: Pace) -> None:
        """Record how many releases the traffic can support."""
        self.write("pace", **asdict(pace))

    def published(self, done: Published) -> None:
        size = f"{done.bytes / 1e6:.2f} MB, {done.ratio:.0f}x smaller than full"
        logger.info("published %s (%s, %s) in %.2f s", done.policy, done.kind, size, done.seconds)
        self.write(
            "published",
            number=done.policy.number,
            hash=done.policy.hash,
            form=done.kind,
            bytes=done.bytes,
            full_bytes=done.full_bytes,
            changed=done.changed,
            seconds=done.seconds,
        )

    def computing(self, mode: NumericsMode) -> None:
        """Record the engine's numerics mode and its reason."""
        self.write("numerics", mode=mode.mode, why=mode.why, line=str(mode))

    def lent(self, lent: Lent) -> None:
        """Record how many servers are lent from people to rollouts."""
        if lent.why:
            logger.info("to rollouts: %s", lent.why)
        self.write("lent", **asdict(lent))

    def surrogate(self, qualities: Mapping[str, SurrogateQuality]) -> None:
        """Record how well late rewards are predicted, by tenant."""
        self.write("surrogate", tenants={tenant: each.figures() for tenant, each in qualities.items()})

    def dials(self, spread: DialSpread) -> None:
        self.write("dials", **asdict(spread))

    def bases(self, refused: Sequence[str]) -> None:
        """Record the hashes of the weights whose basis is refused because it moves protected tokens."""
        self.write("bases", refused=[*refused])

    def swapped(self, swap: Swap) -> None:
        logger.info("%s is now %s: pause %.2f ms, %d streams", swap.slot, swap.policy, 1e3 * swap.pause_s, swap.streams)
        self.write(
            "swapped",
            slot=swap.slot,
            number=swap.policy.number,
            hash=swap.policy.hash,
            pause_s=swap.pause_s,
            streams=swap.streams,
        )
