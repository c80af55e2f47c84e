"""One look at a run from the command line: the page's answers, whether or not a gateway runs."""

from __future__ import annotations

import contextlib
import math
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from ostinato.app.storage import Run, model_path, open_log
from ostinato.config import Config
from ostinato.core.clock import wall_clock
from ostinato.core.errors import OstinatoError
from ostinato.launch.views.page.run_facts import INDEX, RunFacts
from ostinato.record.sqlite import connect, driver, remove

PATIENCE_S = 60.0
"""How long one question may take for somebody who waits at a terminal."""


@contextlib.asynccontextmanager
async def looking(run: Run, *, turns_s: float = math.inf) -> AsyncGenerator[RunFacts]:
    """A run's facts: all decisions, and as many turns, the newest first, as can be read in `turns_s` seconds.

    Only the gateway writes the page's index. This look copies it and reads into the copy the rows that it lacks.
    """
    with tempfile.TemporaryDirectory(prefix="ostinato-") as folder, open_log(run.config) as log:
        index = Path(folder) / INDEX
        copy(run.home.folds / INDEX, index)
        facts = RunFacts(run, log, Spelling(run.config), wall_clock, index=index, patience_s=PATIENCE_S)
        try:
            await facts.feed.decided()
            until = time.monotonic() + turns_s
            while await facts.feed.step() and time.monotonic() < until:
                pass
            yield facts
        finally:
            facts.close()


def copy(index: Path, to: Path) -> None:
    """Copy the index as of one moment. If it is missing or unreadable there is no copy, and it is rebuilt from the log."""
    if not index.exists():
        return
    try:
        with (
            contextlib.closing(connect(index, write=False)) as source,
            contextlib.closing(driver.connect(to)) as target,
        ):
            source.backup(target)
    except driver.Error:
        remove(to)


class Spelling:
    """The bytes of a token, by the tokenizer of the run's model, which is loaded on first use. b"" for all if it cannot be loaded."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._bytes: Callable[[int], bytes] | None = None

    def __call__(self, token: int) -> bytes:
        if self._bytes is None:
            self._bytes = self._load()
        return self._bytes(token)

    def _load(self) -> Callable[[int], bytes]:
        from ostinato.model.renderer import HFRenderer

        try:
            return HFRenderer(model_path(self._config)).token_bytes
        except OstinatoError:
            return lambda _: b""
