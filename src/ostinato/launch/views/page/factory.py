"""The page of a run, from its files to its routes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator

from ostinato.app.storage import Run, open_log
from ostinato.core.audit import Audit
from ostinato.core.clock import wall_clock
from ostinato.core.seams import Renderer
from ostinato.launch.views.page.acts import RunActs
from ostinato.launch.views.page.run_queries import RunFacts
from ostinato.launch.views.page.worlds.facts import RunWorlds
from ostinato.record.rowlog import RowLog
from ostinato.serve.gateway import Page
from ostinato.web.page.app import Pages


class RunPage:
    """The page in the serving worker: its routes, the task that keeps its index up to date, and its closing."""

    def __init__(self, run: Run, log: RowLog, audit: Audit) -> None:
        self._run, self._log, self._audit = run, log, audit
        self._facts: RunFacts | None = None
        self._worlds: RunWorlds | None = None
        self._pages: Pages | None = None

    def routes(self, renderer: Renderer) -> Page:
        """The routes for a gateway with this renderer. Call it once."""
        self._facts = RunFacts(self._run, self._log, renderer.token_bytes)
        self._worlds = RunWorlds(
            self._run.home,
            self._run.config,
            self._log,
            renderer.token_bytes,
            readers=renderer.reader,
            shipped=self._facts.shipped,
        )
        self._pages = Pages(self._facts, self._worlds, RunActs(self._run), wall_clock, self._audit)
        return self._pages.routes

    async def keep(self, stopping: asyncio.Event) -> None:
        """Keep the index up to date with the log until cancelled. When `stopping` is set, end the viewers' streams and go on."""
        assert self._facts is not None
        assert self._pages is not None
        keeping = asyncio.create_task(self._facts.feed.keep())
        try:
            ending = asyncio.create_task(stopping.wait())
            await asyncio.wait({keeping, ending}, return_when=asyncio.FIRST_COMPLETED)
            ending.cancel()
            self._pages.close()
            if keeping.done():
                keeping.result()
            await keeping
        finally:
            keeping.cancel()

    def close(self) -> None:
        """Close the index and the threads."""
        if self._pages is not None:
            self._pages.end()
        if self._worlds is not None:
            self._worlds.close()
        if self._facts is not None:
            self._facts.close()


@contextlib.contextmanager
def open_page(run: Run, audit: Audit) -> Generator[RunPage]:
    """The page of a run, with a log connection of its own. `audit` receives what is done on it."""
    with open_log(run.config) as log:
        page = RunPage(run, log, audit)
        try:
            yield page
        finally:
            page.close()
