"""`ostinato eval`, `ship`, `approve`, `refuse` and `rollback`: manual evaluation, release and rollback of a version.

`ostinato alarms` shows the active alarms with example turns, and accepts what an alarm found as intended. `ostinato release show` answers
the questions about a release: is it better, how sure is that, what changed, why did it not ship. The page gives the same answers.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Generator
from typing import cast

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ostinato.app.branches import branches_begun
from ostinato.app.evaluation import open_releases, open_suite
from ostinato.app.storage import Run, existing_home, home, open_follower, open_run, rows_of
from ostinato.app.suites import open_runner
from ostinato.config import Config
from ostinato.core.arm_assignment import branch_of
from ostinato.core.clock import wall_clock
from ostinato.core.durations import ago
from ostinato.core.errors import BadConfig, BadRequest, Conflict, NotFound, Unavailable
from ostinato.core.records import PolicyVersion, ReleaseEvent
from ostinato.core.seams import Log
from ostinato.evaluate.statistics import suite_mean
from ostinato.launch.commands.weights import find_version
from ostinato.launch.views.audit import audited, login
from ostinato.launch.views.page import open_facts
from ostinato.launch.views.screen import plain, run_option, say
from ostinato.release.monitors.watcher import accept, acceptable, standing
from ostinato.status.gateway_address import read_address
from ostinato.status.releases import ReleaseDetail, ReleaseLine
from ostinato.status.run_facts import RunFacts
from ostinato.web.page.release_answers import answers
from ostinato.web.page.templates import DASH, count, points


async def evaluate_slot(config: Config, slot: str, draws: int, console: Console) -> None:
    """Evaluate one slot of the running gateway on the suite. Raises Unavailable if no gateway is running, NotFound for an empty slot."""
    url = config.evaluate.gateway or read_address(home(config).address)
    if url is None:
        raise Unavailable(
            "no gateway is running here for this run; start one with `ostinato up`, or name another host's in evaluate.gateway"
        )
    policy = await open_follower(config).resolve(slot)
    if policy is None:
        raise NotFound(
            f"no ref {slot!r} in the weight store; use live, canary, previous, verified, learner, control or evaluation",
            field="slot",
        )
    runner = open_runner(config, url, open_suite(config))
    with console.status(f"{len(runner.suite.items)} items x {draws} draws against {slot} = {policy}"):
        scores = await runner.run(slot, policy, range(draws))
    mean = suite_mean(scores)
    console.print(f"{runner.suite.name} ({runner.suite.hash[:12]}): {slot} = {policy}")
    console.print(
        f"score {mean.mean:.3f}  95% [{mean.lower:.3f}, {mean.upper:.3f}]  {len(runner.suite.items)} items, {draws} draws"
    )


@contextlib.contextmanager
def _open_audited(config: Config, act: str, version: str | None, actor: str | None) -> Generator[tuple[Run, str]]:
    """Open the run and yield it with the actor's name. The action and its result are recorded in the audit trail."""
    who = actor or login()
    with audited(home(config), act, version=version or "", actor=who), open_run(config) as run:
        yield run, who


async def ship(config: Config, version: str, reason: str, actor: str | None, console: Console) -> None:
    """Release a published version to users without evaluation. Raises NotFound, and BadRequest if it is already live."""
    with _open_audited(config, "ship", version, actor) as (run, who):
        policy = (await find_version(config, version)).policy
        event = await open_releases(run).ship(policy, reason, actor=who)
    _say_live(config, event, console)


async def ship_branch(config: Config, version: str, tenant: str, actor: str | None, console: Console) -> None:
    """Release a published version to one tenant alone. A branch that is trained continues from it.

    Raises BadConfig unless `serve.branches` names the tenant, NotFound, Conflict if its branch moves meanwhile, BadRequest if the version
    is already there.
    """
    if tenant not in config.serve.branches:
        raise BadConfig(
            f"serve.branches does not name {tenant!r}: add it and restart the gateway, which then follows the branch"
        )
    who, ref = actor or login(), branch_of(tenant)
    with audited(home(config), "ship", version=version, tenant=tenant, actor=who), open_run(config) as run:
        manifest, held = await find_version(config, version, ref), await run.store.read_ref(ref)
        policy = manifest.policy
        before = None if held is None else await run.follower.resolve(ref)
        if held is not None and (begun := branches_begun(config, tenant)):
            with open_run(begun[0]) as branch:
                anew = manifest.run != ref and policy != before
                await open_releases(branch).ship(policy, f"shipped for {tenant}", actor=who, anew=anew)
        else:
            await run.store.move_ref(ref, held, policy.hash)
    back = "" if before is None else f" (was {before}; `ostinato ship v{before.number} --for {tenant}` takes it back)"
    follow = f"engines follow within {config.follow.interval_s:g} s"
    say(console, f"{policy} answers {tenant}'s calls{back}; {follow}")


async def approve(config: Config, version: str | None, reason: str, actor: str | None, console: Console) -> None:
    """Release the version that waits for approval. Raises NotFound if none or another one waits, Conflict if live moves meanwhile."""
    with _open_audited(config, "approve", version, actor) as (run, who):
        policy = None if version is None else (await find_version(config, version)).policy
        event = await open_releases(run).approve(policy, reason, actor=who)
    _say_live(config, event, console)


async def refuse(config: Config, version: str | None, reason: str, actor: str | None, console: Console) -> None:
    """Block the version that waits for approval. Raises NotFound as `approve` does."""
    with _open_audited(config, "refuse", version, actor) as (run, who):
        policy = None if version is None else (await find_version(config, version)).policy
        event = await open_releases(run).refuse(policy, reason, actor=who)
    say(console, f"{event.policy} never ships by itself; live is still {event.previous}")


_AFTER_ROLLBACK_S = 60.0
"""Seconds after a rollback in which the next one must name its version: whoever asks for it may not have seen the first."""


async def roll_back(config: Config, version: str | None, reason: str, actor: str | None, console: Console) -> None:
    """Roll back `live`. Raises NotFound for a version that was never released, Conflict if none is named right after another rollback."""
    with _open_audited(config, "roll back", version, actor) as (run, who):
        target, releases = None if version is None else await _released(run.log, version), open_releases(run)
        seen = await releases.ledger.refresh()
        # another host's clock may be ahead
        back_s = abs(wall_clock() - seen.rollbacks[-1].at) if seen.rollbacks else math.inf
        if target is None and back_s < _AFTER_ROLLBACK_S:
            raise Conflict(
                f"live went back to {seen.live} {ago(back_s)} ago: nothing was done; to go back further, name the version "
                "(`ostinato rollback v7`)"
            )
        event = await releases.rollback(target, reason, actor=who, expected=seen.live if target is None else None)
    follow = f"engines follow within {config.follow.interval_s:g} s"
    say(console, f"live is {event.policy} again (was {event.previous}); {follow}")


def _say_live(config: Config, event: ReleaseEvent, console: Console) -> None:
    follow = f"engines follow within {config.follow.interval_s:g} s"
    say(console, f"live is {event.policy} (was {event.previous}); {follow}. `ostinato rollback` takes it back")


async def _released(log: Log, name: str) -> PolicyVersion:
    """Return the released version with this number (v12 or 12) or whose root hash starts with these digits. Raises NotFound."""
    known: dict[str, PolicyVersion] = {}
    async for row in rows_of(log, ReleaseEvent):
        if row.action == "shipped":
            known[row.policy.hash] = row.policy
    number = re.fullmatch(r"v?(\d{1,9})", name)
    found = [each for each in known.values() if number and each.number == int(number.group(1))]
    found = found or [each for root, each in known.items() if len(name) >= 4 and root.startswith(name)]
    if len(found) != 1:
        released = ", ".join(f"v{number}" for number in sorted({each.number for each in known.values()})) or "nothing"
        why = f"{len(found)} releases match {name!r}: give more of the root" if found else f"{name} was never released"
        raise NotFound(f"{why}; released: {released}", field="version")
    return found[0]


# ---------------------------------------------------------------- alarms


_TURNS = 5
"""Number of an alarm's newest turns that are printed."""


async def show_alarms(config: Config, console: Console) -> None:
    """Print all active alarms, the newest last. Raises NotFound if the run does not exist."""
    existing_home(config)
    with open_run(config) as run:
        found = await standing(run.log)
    if not found:
        console.print("no active alarms", style="green")
    for name, alarm in found.items():
        since = f"  since {ago(wall_clock() - alarm.at)}"
        console.print(Text.assemble(("◷ ", "yellow"), (plain(name), "bold"), (since, "dim")))
        say(console, f"  {plain(alarm.reason)}")
        turns = alarm.detail.get("turns")
        if isinstance(turns, list) and turns:
            named = ", ".join(plain(str(turn)) for turn in cast("list[object]", turns)[-_TURNS:])
            say(console, f"  example turns: {named}", "dim")
        ends = f"ostinato alarms accept {name}" if acceptable(name) else "it ends when its cause does"
        say(console, f"  {plain(ends)}", "dim")


async def accept_alarm(config: Config, name: str, reason: str, actor: str | None, console: Console) -> None:
    """Accept an alarm's finding as intended, which ends the alarm. Raises NotFound and BadRequest as `accept` does."""
    place = existing_home(config)
    with audited(place, "accept alarm", name=name, actor=actor or login()), open_run(config) as run:
        row = await accept(run.log, name, reason, actor or login(), wall_clock())
    console.print(Text(f"{row.name} ended; it is not raised again for a finding of this size"))


# ---------------------------------------------------------------- one release, shown


TURNS_S = 5.0
"""Seconds spent on reading turns that are not yet in the gateway's index."""
_STYLES = {"good": "green", "wait": "yellow", "bad": "bold red"}
_SIGNS = {"good": "✓", "wait": "◷", "bad": "✕"}


async def show_release(config: Config, version: str, console: Console) -> None:
    """Print the four answers about a release and the interim analyses behind them. Raises NotFound, BadRequest."""
    existing_home(config)
    with open_run(config) as run:
        async with open_facts(run, turns_s=TURNS_S) as facts:
            found = await find_release(facts, version)
            unread = facts.feed.unread_turns
    line = found.line
    state = "live" if line.live else line.state.replace("_", " ")
    console.print(Text.assemble((f"v{line.policy.number}", "bold"), f"  {state}  {line.policy.hash[:16]}"))
    for answer in answers(found, run_option(config)):
        console.print()
        console.print(Text(answer.question, "bold"))
        say(console, f"  {_SIGNS[answer.state]} {plain(answer.verdict)}", _STYLES[answer.state])
        for detail in filter(None, answer.details):
            say(console, f"    {plain(detail)}")
    if unread > 0:
        older = f"{count(unread)} older rows of the log were not read"
        say(console, f"\n{older}: behaviour is computed from the newest turns", "dim")
    for table in (_trial(found), _gate(found)):
        if table.row_count:
            console.print()
            console.print(table)


async def find_release(facts: RunFacts, version: str) -> ReleaseDetail:
    """Return the release named by "live", a number (v12) or the first digits of its root hash. Raises NotFound, BadRequest."""
    wanted, before = version.strip().lower(), None
    number = wanted.removeprefix("v")
    while True:
        page = await facts.releases(before)
        if wanted == "live" and page.live is not None:
            return await _detail(facts, page.live.hash)
        matching = [line for line in page.rows if _matches(line, wanted, number)]
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


def _matches(line: ReleaseLine, wanted: str, number: str) -> bool:
    by_root = len(wanted) >= 6 and line.policy.hash.startswith(wanted)
    return by_root or (number.isdecimal() and line.policy.number == int(number))


async def _detail(facts: RunFacts, root: str) -> ReleaseDetail:
    found = await facts.release(root)
    if found is None:
        raise NotFound(
            f"the ledger has nothing about {root[:16]}; `ostinato weights log` lists the versions", field="version"
        )
    return found


def _trial(found: ReleaseDetail) -> Table:
    table = Table("action", "share", "change, pp", "bounds, pp", "people", "turns", "finding", title="looks at users")
    for look in found.evidence.trial[-10:]:
        goal = look.goal
        share = DASH if look.share is None else f"{100 * look.share:g}%"
        change = (points(goal.difference), f"{points(goal.lower)} to {points(goal.upper)}")
        table.add_row(look.action, share, *change, count(goal.people), count(look.turns), look.finding)
    return table


def _gate(found: ReleaseDetail) -> Table:
    table = Table("suite", "against", "items x draws", "change, pp", "bounds, pp", "margin", "verdict", title="gate")
    for look in found.looks[-10:]:
        change = (points(look.difference), f"{points(look.lower)} to {points(look.upper)}", f"{100 * look.margin:g}")
        asked = (Text(plain(look.suite)), f"v{look.against.number}", f"{look.items} x {look.draws}")
        table.add_row(*asked, *change, look.verdict)
    return table
