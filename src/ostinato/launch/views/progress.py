"""JSON lines that workers leave for people: steps, publications, swaps. `status` and the demo read them; no worker does."""

from __future__ import annotations

import contextlib
import json
import logging
from pathlib import Path
from typing import Any

from ostinato.core.clock import wall_clock
from ostinato.core.weights import Learned, Swap
from ostinato.weights.publish.publisher import Published

logger = logging.getLogger(__name__)


class Progress:
    """Appends lines to one file; a full disk loses a line, never the work."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._torn = True  # the last line may be half a line: an earlier process, or a disk that filled within it

    def write(self, kind: str, **fields: Any) -> None:
        """One line with the kind, the time and the fields."""
        try:
            with self._path.open("a", encoding="utf-8") as file:
                torn, self._torn = self._torn and file.tell() > 0, True
                file.write("\n" * torn + json.dumps({"kind": kind, "at": wall_clock(), **fields}) + "\n")
            self._torn = False
        except OSError as error:
            logger.warning("progress line lost: %s", error)

    def learned(self, learned: Learned) -> None:
        """What an optimizer step did."""
        self.write("step", step=learned.step, **learned.metrics)

    def published(self, done: Published) -> None:
        """What a publication cost."""
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

    def swapped(self, swap: Swap) -> None:
        """What a hot swap cost."""
        logger.info("%s is now %s: pause %.2f ms, %d streams", swap.slot, swap.policy, 1e3 * swap.pause_s, swap.streams)
        self.write(
            "swapped",
            slot=swap.slot,
            number=swap.policy.number,
            hash=swap.policy.hash,
            pause_s=swap.pause_s,
            streams=swap.streams,
        )


class Lines:
    """Reads the lines that were added since the last look; a line still being written waits for the next look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0

    def new(self) -> list[dict[str, Any]]:
        """Complete new lines, oldest first. Half a line that a full disk or a killed process left is passed over."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        found: list[dict[str, Any]] = []
        for line in whole.splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return found
