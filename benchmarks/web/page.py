"""First paint and bytes of the web page's views in a real Chromium, on an index of many turns and releases.

    python -m benchmarks.web.page --turns 1000000 --releases 10000     (needs Playwright and a chromium)

The index is filled by SQL as in `benchmarks.web.questions`. The newest turns and one release with a trial are in a real log and reach
the index as they do in a run. The page is served by the gateway's own app over a fake engine. Each view is opened once with an empty
cache, which gives the bytes, and then `--repeats` times with the cache filled. First paint is the browser's own figure
(`first-contentful-paint`), from the start of the navigation.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import socket
import statistics
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn
from benchmarks.web.questions import RESULTS, fill
from playwright.async_api import Page as Tab
from playwright.async_api import async_playwright

from ostinato.app.storage import Run, open_log, open_run
from ostinato.config import load
from ostinato.core.records import Arm, PolicyVersion, ReleaseEvent, Row, Span, Turn
from ostinato.launch.views.page import RunActions
from ostinato.serve.config import ServeConfig
from ostinato.serve.gateway import create_app
from ostinato.status.log_index import open_index
from ostinato.status.run_facts import INDEX, RunFacts
from ostinato.status.worlds.run_worlds import RunWorlds
from ostinato.testing.engine import FakeEngine
from ostinato.testing.log import MemoryLog
from ostinato.testing.records import a_turn
from ostinato.testing.renderer import ByteRenderer
from ostinato.web.page.app import Pages

OLD, NEW = (PolicyVersion(number=number, hash=f"{number:02d}" * 32) for number in (90, 91))
TURNS = 240
TIMES = """() => { const nav = performance.getEntriesByType('navigation')[0];
  const paint = performance.getEntriesByName('first-contentful-paint')[0];
  const files = performance.getEntriesByType('resource').filter(each => !each.name.includes('/events'));
  return { first_byte: nav.responseStart, paint: paint ? paint.startTime : null,
    bytes: nav.decodedBodySize + files.reduce((sum, each) => sum + each.decodedBodySize, 0) } }"""
TEXT = "```python\ndef add(a, b):\n    # the sum\n    return a + b\n```\nDo you want tests, too?"


def newest_rows() -> list[Row]:
    """A release with a trial, turns of both versions, and the gate's evaluation turns of both."""
    reading = {"enough": True, "worse": False, "not_worse": True, "better": False, "sees": 0.03}
    events = [
        ("shipped", OLD, None, {}),
        ("evaluated", NEW, OLD, {"report": _report()}),
        ("canary", NEW, OLD, {"share": 0.5, "salt": "s"}),
        *(
            ("ramped", NEW, OLD, {"share": 0.5, "reading": {**reading, **_bounds(0.01, 0.2 / look, 40.0 * look)}})
            for look in range(1, 6)
        ),
        ("shipped", NEW, OLD, {"share": 0.9, "reading": {**reading, **_bounds(0.012, 0.03, 420.0)}}),
    ]
    ledger = [
        ReleaseEvent(
            id=f"r{at}", action=action, policy=policy, previous=previous, reason=action, detail=detail, at=1e6 + at
        )
        for at, (action, policy, previous, detail) in enumerate(events)
    ]
    turns = [_turn(at, OLD if at % 2 else NEW, Arm.LIVE if at % 2 else Arm.CANARY) for at in range(TURNS)]
    asked = [_turn(TURNS + at, OLD if at % 2 else NEW, Arm.EVAL) for at in range(40)]
    return [*ledger[:3], *turns, *asked, *ledger[3:]]


def _turn(at: int, policy: PolicyVersion, arm: Arm) -> Turn:
    made = a_turn(
        f"real-{at}:0",
        user=f"user{at % 37}",
        arm=arm,
        prompt=tuple(range(at // 2, at // 2 + 60)),
        sampled=tuple(range(120)),
        ended_at=1e6 + at,
    )
    return replace(made, text=f"{TEXT} {at}", spans=(Span(policy=policy, tokens=120),))


def _bounds(difference: float, half: float, people: float) -> dict[str, Any]:
    effect = {"difference": difference, "variance": 1e-4, "people": people, "turns": 5 * people}
    return {"effect": effect, "lower": difference - half, "upper": difference + half}


def _report() -> dict[str, Any]:
    figures = {"difference": 0.02, "lower": -0.01, "upper": 0.05, "items": 120, "draws": 2, "margin": 0.1}
    means = {"candidate_mean": 0.54, "live_mean": 0.52, "power": 0.9, "verdict": "SHIP"}
    return {"suite": "held-out", **means, **figures}


@asynccontextmanager
async def served(run: Run, facts: RunFacts) -> AsyncGenerator[str]:
    """Serve the gateway's app on a free port."""
    pages = Pages(
        facts,
        RunWorlds(run.home, run.config, run.log, ByteRenderer().token_bytes),
        RunActions(run),
        lambda: 1e6 + 600.0,
    )
    app = create_app(
        engine=FakeEngine(lambda request: "hello"), renderer=ByteRenderer(), log=MemoryLog(), config=ServeConfig(),
        clock=lambda: 1e6 + 600.0, model_name="m", admin_keys=[], page=pages.routes,
    )  # fmt: skip
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    server = uvicorn.Server(
        uvicorn.Config(app, port=port, log_config=None, lifespan="off", timeout_graceful_shutdown=1)
    )
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.02)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        pages.close()
        server.should_exit = server.force_exit = True
        await serving


async def measured(url: str, paths: dict[str, str], repeats: int) -> list[dict[str, Any]]:
    """One row per page."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    rows: list[dict[str, Any]] = []
    async with async_playwright() as started:
        browser = await started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, path in paths.items():
            context = await browser.new_context(viewport={"width": 1440, "height": 900})
            tab = await context.new_page()
            first = await _open(tab, url + path)
            again = [await _open(tab, url + path) for _ in range(repeats)]
            paints = sorted(each["paint"] for each in again)
            rows.append(
                {
                    "page": name,
                    "kilobytes": first["bytes"] / 1e3,
                    "first_paint_cold_ms": first["paint"],
                    "first_byte_median_ms": statistics.median(each["first_byte"] for each in again),
                    "first_paint_median_ms": statistics.median(paints),
                    "first_paint_p95_ms": paints[min(len(paints) - 1, round(0.95 * len(paints)))],
                }
            )
            await context.close()
        await browser.close()
    return rows


async def _open(tab: Tab, address: str) -> dict[str, Any]:
    await tab.goto(address, wait_until="load")
    # not wait_for_function: it evaluates a string in the page, which the page's policy forbids
    while not await tab.evaluate("performance.getEntriesByName('first-contentful-paint').length"):
        await asyncio.sleep(0.01)
    return await tab.evaluate(TIMES)


async def run_it(asked: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    config = load(None, [f"run.directory='{folder / 'run'}'", "release.canary=true"])
    with open_run(config) as run, open_log(config) as log:
        index = run.home.folds / INDEX
        index.parent.mkdir(parents=True, exist_ok=True)
        fill(index, asked.turns, asked.releases, offset=-8 * (asked.turns + asked.releases))
        db = open_index(index)
        db.execute("INSERT INTO state VALUES ('decided', 0), ('low', 0), ('high', 0)")
        db.close()
        await run.log.append(*newest_rows())
        facts = RunFacts(run, log, lambda token: bytes([32 + token % 90]))
        while await facts.feed.step():
            pass
        paths = {
            "Now": "/",
            "Releases": "/releases",
            "one release, by its users": f"/releases/{NEW.hash}",
            "one release of 10,000": f"/releases/{asked.releases // 2 * 2654435761:064x}",
            "Turns": "/turns",
            "Turns of one user": "/turns?user=user17",
            "one turn": "/turns/real-3:0",
            "Learning": "/learning",
            "Monitors": "/monitors",
            "Weights": "/weights",
            "Playground": "/playground",
        }
        async with served(run, facts) as url:
            found = await measured(url, paths, asked.repeats)
        facts.close()
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=1_000_000)
    parser.add_argument("--releases", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--name", default="page_paint")
    asked = parser.parse_args()
    load_before = os.getloadavg()
    with tempfile.TemporaryDirectory() as folder:
        rows = asyncio.run(run_it(asked, Path(folder)))
    print(f"{asked.turns:,} turns, {asked.releases:,} releases; {os.cpu_count()} processors, load {load_before[0]:.1f}")
    print(f"{'page':26} {'kB':>6} {'first byte ms':>14} {'paint ms':>9} {'p95':>7} {'cold':>7}")
    for row in rows:
        print(
            f"{row['page']:26} {row['kilobytes']:6.0f} {row['first_byte_median_ms']:14.1f} {row['first_paint_median_ms']:9.0f} "
            f"{row['first_paint_p95_ms']:7.0f} {row['first_paint_cold_ms']:7.0f}"
        )
    result = {
        "turns": asked.turns, "releases": asked.releases, "repeats": asked.repeats, "load_at_start": load_before, "cpus": os.cpu_count(),
        "rows": rows,
    }  # fmt: skip
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{asked.name}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
