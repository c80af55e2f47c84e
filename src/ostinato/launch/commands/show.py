"""`ostinato release show`: is a release better, how sure is that, what changed, why did it not ship. The page says the same."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ostinato.app.storage import open_run
from ostinato.config import Config
from ostinato.core.errors import BadRequest, NotFound
from ostinato.launch.commands.log import existing, named
from ostinato.launch.views.page import looking
from ostinato.launch.views.screen import plain
from ostinato.status.releases import ReleaseDetail, ReleaseLine
from ostinato.status.run_facts import RunFacts
from ostinato.web.page.release_answers import answers
from ostinato.web.page.templates import DASH, count, points

TURNS_S = 5.0
"""How many seconds are spent on reading turns that the gateway has not put into its index."""
_STYLES = {"good": "green", "wait": "yellow", "bad": "bold red"}
_SIGNS = {"good": "✓", "wait": "◷", "bad": "✕"}


async def show_release(config: Config, version: str, console: Console) -> None:
    """Print four answers and the looks that they rest on. Raises NotFound, BadRequest."""
    existing(config)
    with open_run(config) as run:
        async with looking(run, turns_s=TURNS_S) as facts:
            found = await find_release(facts, version)
            unread = facts.feed.unread_turns
    line = found.line
    state = "live" if line.live else line.state.replace("_", " ")
    console.print(Text.assemble((f"v{line.policy.number}", "bold"), f"  {state}  {line.policy.hash[:16]}"))
    for answer in answers(found, named(config)):
        console.print()
        console.print(Text(answer.question, "bold"))
        console.print(Text(f"  {_SIGNS[answer.state]} {plain(answer.verdict)}", _STYLES[answer.state]), soft_wrap=True)
        for detail in filter(None, answer.details):
            console.print(Text(f"    {plain(detail)}"), soft_wrap=True)
    if unread > 0:
        console.print(
            f"\n{count(unread)} older rows of the log were not read: behaviour is computed from the newest turns",
            style="dim",
        )
    for table in (_trial(found), _gate(found)):
        if table.row_count:
            console.print()
            console.print(table)


async def find_release(facts: RunFacts, version: str) -> ReleaseDetail:
    """The release named by "live", a number (v12) or the first digits of its root. Raises NotFound, BadRequest."""
    wanted, before = version.strip().lower(), None
    number = wanted.removeprefix("v")
    while True:
        page = await facts.releases(before)
        if wanted == "live" and page.live is not None:
            return await _detail(facts, page.live.hash)
        matching = [line for line in page.rows if _is(line, wanted, number)]
        if len({line.policy.hash for line in matching}) > 1:
            raise BadRequest(
                f"{len(matching)} releases match {version!r}: give more digits of the hash", field="version"
            )
        if matching:
            return await _detail(facts, matching[0].policy.hash)
        if page.older is None:
            shown = ", ".join(f"v{line.policy.number}" for line in (await facts.releases(None)).rows[:8]) or "none"
            raise NotFound(
                f"the ledger has no release {version!r}; the newest: {shown}. A version that a newer one overtook before the gate looked "
                "at it has no line",
                field="version",
            )
        before = page.older


def _is(line: ReleaseLine, wanted: str, number: str) -> bool:
    by_root = len(wanted) >= 6 and line.policy.hash.startswith(wanted)
    return by_root or (number.isdecimal() and line.policy.number == int(number))


async def _detail(facts: RunFacts, root: str) -> ReleaseDetail:
    found = await facts.release(root)
    if found is None:
        raise NotFound(f"the ledger has nothing about {root[:16]}", field="version")
    return found


def _trial(found: ReleaseDetail) -> Table:
    table = Table("action", "share", "change, pp", "bounds, pp", "people", "turns", "finding", title="looks at users")
    for look in found.evidence.trial[-10:]:
        goal = look.goal
        share = DASH if look.share is None else f"{100 * look.share:g}%"
        bounds = f"{points(goal.lower)} to {points(goal.upper)}"
        table.add_row(
            look.action, share, points(goal.difference), bounds, count(goal.people), count(look.turns), look.finding
        )
    return table


def _gate(found: ReleaseDetail) -> Table:
    table = Table("suite", "against", "items x draws", "change, pp", "bounds, pp", "margin", "verdict", title="gate")
    for look in found.looks[-10:]:
        table.add_row(
            Text(plain(look.suite)),
            f"v{look.against.number}",
            f"{look.items} x {look.draws}",
            points(look.difference),
            f"{points(look.lower)} to {points(look.upper)}",
            f"{100 * look.margin:g}",
            look.verdict,
        )
    return table
