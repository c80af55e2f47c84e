"""Loads the weights that refs point to, and tells people about a version that cannot be loaded."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from ostinato.app.serving import Serving
from ostinato.app.storage import live_last
from ostinato.core.clock import wall_clock
from ostinato.core.errors import BadWeights, StorageFull, Unavailable
from ostinato.core.records import Arm
from ostinato.core.seams import Log
from ostinato.core.weights import Snapshot
from ostinato.launch.views.progress import Progress
from ostinato.launch.workers.settling import settle
from ostinato.release.alarms import note

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
ALARM = "weights:{ref}"
"""The name of the alarm that stands while the version of a ref cannot be loaded."""


class WeightLoader:
    """Loads whatever the refs point to, now and whenever they move.

    Args:
        serving: the engine and the follower.
        log: gets an alarm for each ref whose version cannot be loaded.
        progress: is told of each swap.
        on_live: called when the live weights can be served for the first time.
    """

    def __init__(self, serving: Serving, log: Log, progress: Progress, on_live: Callable[[], None]) -> None:
        self._serving, self._log, self._progress, self._on_live = serving, log, progress, on_live
        self._loaded: set[str] = set()
        self._failing: dict[str, str] = {}
        self._told: dict[str, str | None] = {}

    def trouble(self) -> str | None:
        """What cannot be loaded and why; None if all is well."""
        return "; ".join(f"{ref} cannot be loaded: {why}" for ref, why in self._failing.items()) or None

    async def run(self, refs: Sequence[str]) -> None:
        """Follow the refs until cancelled. Raises BadWeights if nothing is served and the live version can never be."""
        telling = asyncio.create_task(self._tell())
        try:
            await self._serving.follower.watch(refs, self._load, on_error=self._failed, at_start=live_last(refs))
        finally:
            telling.cancel()

    async def _load(self, slot: str, snapshot: Snapshot) -> None:
        swap = await self._serving.engine.load(slot, snapshot)
        if not self._loaded:  # the first weights: no request was answered yet
            settle()
        if slot == Arm.LIVE and slot not in self._loaded:
            self._on_live()
        self._loaded.add(slot)
        self._failing.pop(slot, None)
        self._serving.gateway.state.metrics.swapped(swap)
        self._progress.swapped(swap)

    def _failed(self, ref: str, error: Exception) -> None:
        logger.error("ref %s: the weights stay as they are: %s", ref, error)
        if isinstance(error, BadWeights) and ref == Arm.LIVE and ref not in self._loaded:
            raise error
        self._failing[ref] = str(error)

    async def _tell(self) -> None:
        """Raise and clear the alarms. A log that cannot be written for a while is tried again."""
        while True:
            for ref in self._loaded | self._failing.keys():
                why = self._failing.get(ref)
                if self._told.get(ref, "") == why:
                    continue
                try:
                    await note(
                        self._log,
                        ALARM.format(ref=ref),
                        raised=why is not None,
                        why=why or f"the version of {ref} is loaded",
                        at=wall_clock(),
                    )
                    self._told[ref] = why
                except (StorageFull, Unavailable) as error:
                    logger.warning("the alarm about %s is not written yet: %s", ref, error)
            await asyncio.sleep(_LOOK_S)
