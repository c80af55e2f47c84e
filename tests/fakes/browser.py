"""A gateway that serves the page on a port, and a tab of a real Chromium that opens it."""

import asyncio
import os
import shutil
import socket
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvicorn
from tests.deadlines import PATIENT_S, WHOLE_PROGRAM_S
from tests.fakes.page_world import PageWorld

from ostinato.serve.config import ServeConfig

playwright = pytest.importorskip("playwright.async_api", reason="Playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
AXE = Path(os.environ.get("OSTINATO_AXE", "/nonexistent"))
WIDTHS = (320, 360, 768, 1440)
"""Widths in CSS pixels. A window of 1280 pixels has 320 at a zoom of 400%."""
VIOLATIONS = "document.addEventListener('securitypolicyviolation', () => { window.broken = (window.broken || 0) + 1 })"


class Server:
    """A gateway that serves the page on a port, which it keeps when it is killed and restarted."""

    def __init__(self, worlds=None):
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = found.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.world = PageWorld(ServeConfig(), worlds=worlds)
        self._running = None

    async def start(self):
        self._server = uvicorn.Server(
            uvicorn.Config(self.world.app, port=self.port, log_config=None, lifespan="off", timeout_graceful_shutdown=1)
        )
        self._server.capture_signals = _no_signals
        self._running = asyncio.create_task(self._server.serve())
        async with asyncio.timeout(PATIENT_S):
            while not self._server.started:
                await asyncio.sleep(0.02)

    async def stop(self):
        self._server.should_exit = self._server.force_exit = True
        await self._running


def _no_signals():
    from contextlib import nullcontext

    return nullcontext()


@asynccontextmanager
async def browsing(server, **context):
    """A tab, and a list of its errors and warnings. Requests to other hosts than the server are listed too."""
    told = []
    async with playwright.async_playwright() as started:
        browser = await started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = await (await browser.new_context(**context)).new_page()
        tab.set_default_timeout(1000 * WHOLE_PROGRAM_S)
        tab.set_default_navigation_timeout(1000 * WHOLE_PROGRAM_S)
        await tab.add_init_script(VIOLATIONS)
        tab.on("pageerror", lambda error: told.append(f"error: {error}"))
        tab.on("console", lambda m: told.append(f"{m.type}: {m.text}") if m.type in ("error", "warning") else None)
        tab.on("request", lambda r: None if r.url.startswith(server.url) else told.append(f"outside: {r.url}"))
        try:
            yield tab, told
        finally:
            await browser.close()


async def check_widths(server, paths, scheme):
    """Check that every page fits every width, violates no content security policy, and reports no error but a 404."""
    async with browsing(server, color_scheme=scheme) as (tab, told):
        for path in paths:
            await tab.goto(server.url + path)
            for width in WIDTHS:
                await tab.set_viewport_size({"width": width, "height": 900})
                over = await tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
                assert over <= 0, (path, width)
            assert await tab.evaluate("window.broken || 0") == 0, path
        assert [each for each in told if "404" not in each] == []
