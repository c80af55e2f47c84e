"""`ostinato report`: the run's page, with a demo's measurements, as one HTML file."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from ostinato.app.storage import existing_home, open_run
from ostinato.config import Config
from ostinato.core.errors import StorageFull
from ostinato.launch.views.page import open_facts
from ostinato.status.run_facts import RunFacts
from ostinato.status.run_report import RunReport
from ostinato.web.report import ReportFacts, render

RELEASES = 20
"""Number of the newest versions that are shown with their evidence."""


async def write_report(config: Config, out: Path, console: Console, demo: RunReport | None = None) -> None:
    """Write the file. Raises NotFound if the run does not exist, StorageFull if `out` cannot be written."""
    existing_home(config)
    with open_run(config) as run, console.status("reading the log"):
        async with open_facts(run) as facts:
            page = render(demo, await recorded(facts))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise StorageFull(f"{out} cannot be written: {error.strerror}; name another place with --out") from error
    console.print(f"report: {out}, {len(page.encode()) / 1e3:.0f} kB", highlight=False)


async def recorded(facts: RunFacts) -> ReportFacts:
    """Return the facts that the page would show now."""
    releases = await facts.releases(None)
    found = [await facts.release(line.policy.hash) for line in releases.rows[:RELEASES]]
    return ReportFacts(
        run=await facts.now(),
        releases=releases,
        details=tuple(each for each in found if each is not None),
        learning=await facts.learning(),
        alarms=await facts.alarms(None),
        weights=await facts.weights(),
    )
