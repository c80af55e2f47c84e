"""`ostinato adapt`: fits the dials' basis to the live version, checks it on a safety suite and writes it to the log; approves styles; shows
and resets people's dials.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ostinato.adapt.config import MOST_DRAWS, SafetyConfig
from ostinato.adapt.dials import DialAdaptation
from ostinato.adapt.fit import PROMPTS
from ostinato.adapt.privacy import PrivacyBudget
from ostinato.adapt.safety import silenced
from ostinato.adapt.styles import ALARM, UNSAFE, StyleAdaptation, StyleApprovals, approval, styles_of
from ostinato.app.dials import BasisCheck, CheckedCorner, Rise, Safety, check_live, check_styles, fit_live
from ostinato.app.storage import Run, existing_home, open_log, open_run, rows_of
from ostinato.config import Config
from ostinato.core.arm_assignment import ANONYMOUS, branch_of
from ostinato.core.clock import wall_clock
from ostinato.core.errors import BadConfig
from ostinato.core.lines import lines_of
from ostinato.core.notices import Alarm, AlarmState
from ostinato.core.records import Arm, Consent, Person, PolicyVersion, SteeringBasis
from ostinato.core.steering import NO_STYLE, DialSet, NotSteered, SetBy, StylesView
from ostinato.launch.commands.log import check_tenant
from ostinato.launch.commands.weights import find_version
from ostinato.launch.views.audit import audited, login
from ostinato.launch.views.screen import ago, counting_bars, plain, say
from ostinato.record.person_cache import PersonCacheView
from ostinato.release.auto.estimating import style_effects
from ostinato.release.ledger import ReleaseLedger
from ostinato.status.dials import refused_bases
from ostinato.status.progress_lines import last_lines
from ostinato.weights.follow.follower import line_of

_MOST_BYTES = 1 << 20
_FULL = 0.9  # base share of violations in a family above which a rise can hardly be detected


async def fit(
    config: Config, prompts: Path | None, *, each: int, tokens: int, seed: int, console: Console, version: str = "live"
) -> None:
    """Fit a basis and write it to the log, after a safety check if `adapt.safety.suite` is set. Raises NotFound, BadConfig, StorageFull."""
    existing_home(config)
    asked = PROMPTS if prompts is None else read_prompts(prompts)
    policy = None if version == "live" else (await find_version(config, version)).policy
    with open_run(config) as run:
        names = None if policy is None else await _live_names(run)
        with counting_bars() as told:
            found = await fit_live(
                run, asked, each=each, tokens=tokens, seed=seed, on_progress=told, version=policy, names=names
            )
        table = Table("attribute", "explained on other prompts", "dial")
        for name, share in found.explained.items():
            table.add_row(name, f"{share:.0%}", "yes" if name in found.basis.names else "no")
        console.print(table)
        basis, checked = found.basis, None
        if config.adapt.safety.suite:
            with counting_bars() as told:
                checked = await check_live(run, basis, seed=seed, on_progress=told, version=policy)
            # a basis for a version other than live must keep the live basis's dials: failed ones are silenced, not removed
            basis = (checked.kept or basis) if names is None else silenced(basis, checked.dropped)
        await run.log.append(SteeringBasis.of(basis, wall_clock()))
        if checked is not None:
            show_check(checked, config.adapt.safety, console)
    told = f"of {len(basis.tokens_M)} tokens, for the version {basis.weights[:12]}"
    say(console, f"basis {basis.hash} {told}, is in the log")


async def _live_names(run: Run) -> tuple[str, ...] | None:
    """Return the names of the dials in the live version's basis; None without a basis."""
    live, names = await run.follower.resolve("live"), None
    async for row in rows_of(run.log, SteeringBasis):
        if live is not None and row.weights == live.hash:
            names = row.names
    return names


async def check(config: Config, *, seed: int, console: Console) -> bool:
    """Check the live version's basis, if it has one, and the styles on the safety suite. Return True if all were shown to be safe.

    Writes to the log the basis without the dials that failed, and which styles are unsafe. Raises NotFound, BadConfig, Unavailable,
    StorageFull.
    """
    existing_home(config)
    with open_run(config) as run:
        with counting_bars() as told:
            found = await check_live(run, None, seed=seed, on_progress=told, styles=styles_of(config.adapt))
        await _note_styles(config, run, found)
        if found.dropped and found.basis is not None and found.kept is not None:
            await run.log.append(SteeringBasis.of(found.kept, wall_clock()))
        show_check(found, config.adapt.safety, console)
        if found.dropped and found.basis is not None and found.kept is not None:
            say(console, f"basis {found.kept.hash} is in the log in the place of {found.basis.hash}")
    return found.safe


async def _note_styles(config: Config, run: Run, found: BasisCheck) -> None:
    """Record in the log which styles are unsafe, and which are no longer unsafe."""
    approvals = await _approvals(config, run)
    for each in found.styles:
        if each.style is None or found.policy is None:
            continue
        unsafe = each.found is Safety.UNSAFE
        if unsafe or approvals.unsafe(each.style.arm, found.policy):
            more = _where_unsafe(each) if unsafe else "no family of prompts has more violations for certain"
            why = f"{each.whole.prompts} prompts of {config.adapt.safety.suite}: {more} with {found.policy}"
            now, shared = wall_clock(), not config.run.tenant
            row = approval(each.style, found.policy, passed=not unsafe, why=why, at=now, shared=shared, kind=UNSAFE)
            await run.log.append(row)


async def _approvals(config: Config, run: Run) -> StyleApprovals:
    approvals = StyleApprovals(config.adapt.styles.versions)
    async for row in rows_of(run.log, Alarm):
        approvals.take(row)
    return approvals


async def approve(config: Config, *, seed: int, console: Console, version: str = "live") -> bool:
    """Evaluate every style with a version and record in the log which are approved. Return True if all are.

    Raises NotFound, BadConfig, Unavailable, StorageFull.
    """
    existing_home(config)
    manifest = None if version == "live" else await find_version(config, version)
    policy, shared = (None, not config.run.tenant) if manifest is None else (manifest.policy, not line_of(manifest.run))
    with open_run(config) as run:
        await _clear_removed_styles(run, config.adapt.styles.prompts)
        with counting_bars() as told:
            tried, found = await check_styles(run, seed=seed, on_progress=told, version=policy)
        table = Table("style", "scores more than none by", "bounds", "tasks", "approved")
        margin = config.adapt.styles.margin
        for each in found:
            bounds = f"{100 * each.lower:+.1f} to {100 * each.upper:+.1f}"
            why = f"scores {100 * each.gain:+.1f} pp, bounds {bounds}, margin {100 * margin:g}, on {each.tasks} tasks with {tried}"
            row = approval(each.style, tried, passed=each.passed, why=why, at=wall_clock(), shared=shared)
            await run.log.append(row)
            table.add_row(
                each.style.name, f"{100 * each.gain:+.1f} pp", bounds, str(each.tasks), "yes" if each.passed else "no"
            )
        console.print(table)
    say(console, f"for the version {tried}; a margin of {100 * margin:g} pp")
    return all(each.passed for each in found)


async def _clear_removed_styles(run: Run, configured: Collection[str]) -> None:
    """Clear the alarms of styles that are no longer configured."""
    newest = {row.name: row async for row in rows_of(run.log, Alarm)}
    for name, row in newest.items():
        style = name.partition(":")[2]
        if name.startswith((ALARM, UNSAFE)) and row.state is AlarmState.RAISED and style not in configured:
            why, now = f"the style {style!r} is configured no longer", wall_clock()
            gone = replace(row, id=f"{name}:{now:.6f}", state=AlarmState.CLEARED, reason=why, at=now, detail={})
            await run.log.append(gone)


# ---------------------------------------------------------------- result of a safety check


def show_check(found: BasisCheck, rules: SafetyConfig, console: Console) -> None:
    """Print the result for each corner (extreme dial setting) and style, overall and by family, and which dials were dropped."""
    margin, tried = rules.margin, (*found.corners, *found.styles)
    table = Table("corner", "violations above the base's", "bounds", "prompts", "needed", "tokens", "found")
    for each in tried:
        verdict = Text(plain(_verdict(each, margin)))
        table.add_row(Text(plain(each.corner.name)), *_cells(each.whole), f"{each.tokens:.0f}", verdict)
    console.print(table)
    say(
        console,
        f"the base model: {found.base:.1%} violations, {found.tokens:.0f} tokens an answer; margin {100 * margin:g} pp",
    )
    if len(found.families) > 1:
        _show_families(found, tried, console)
    if full := [family for family, (share, _) in found.families.items() if share >= _FULL]:
        say(
            console,
            f"in {', '.join(full)} the base model itself violates nearly always, so a rise can hardly show there",
        )
    if found.small:
        say(
            console,
            f"in {', '.join(found.small)} there are too few prompts for adapt.safety.alpha: not even a rise in all would show",
        )
    if found.basis is None:
        say(console, "the version has no basis, so only styles were tried")
    if found.dropped and found.basis is not None:
        left = "no dial is left, and nobody's answers lean" if len(found.dropped) == len(found.basis.names) else ""
        say(console, f"dropped: {', '.join(found.dropped)}{'; ' if left else ''}{left}")
    if refused := [each.style.name for each in found.styles if each.style and each.found is Safety.UNSAFE]:
        say(console, f"unsafe styles, dealt to nobody: {', '.join(refused)}")
    _show_open(tried, rules.draws, console)


def _show_families(found: BasisCheck, tried: Sequence[CheckedCorner], console: Console) -> None:
    """Print each family's share of violations by the base model, and the corner or style with the largest rise."""
    told = ", ".join(f"{family} {share:.0%} of {count}" for family, (share, count) in found.families.items())
    say(console, f"the base model's by family: {told}")
    if not tried:
        return
    table = Table("family", "the base's", "worst corner", "above the base's", "bounds", "prompts", "needed", "found")
    for family, (share, _) in found.families.items():
        worst = max(tried, key=lambda each: each.families[family].lower)
        rise = worst.families[family]
        names = Text(plain(family)), f"{share:.0%}", Text(plain(worst.corner.name))
        table.add_row(*names, *_cells(rise), rise.found.value)
    console.print(table)


def _show_open(tried: Sequence[CheckedCorner], draws: int, console: Console) -> None:
    """Print the corners and styles without a conclusion, and the number of prompts that would give one."""
    unknown = [each for each in tried if each.found is Safety.OPEN]
    if not unknown:
        return
    needed = max(each.whole.needed for each in unknown)
    names, sides = ", ".join(each.corner.name for each in unknown), len(tried) + 1
    again = math.ceil(draws * needed / min(each.whole.prompts for each in unknown))
    more = f"; with these prompts it takes adapt.safety.draws = {again} at least" if again <= MOST_DRAWS else ""
    say(
        console,
        f"not shown to be safe, and kept: {names}. Give adapt.safety.suite a file of {needed} prompts ({needed * draws * sides} answers in "
        f"all), or widen adapt.safety.margin{more}",
    )


def _cells(rise: Rise) -> tuple[str, str, str, str]:
    bounds = f"{100 * rise.lower:+.1f} to {100 * rise.upper:+.1f}"
    return f"{100 * rise.rise:+.1f} pp", bounds, str(rise.prompts), str(rise.needed)


def _verdict(each: CheckedCorner, margin: float) -> str:
    """Return the finding in words; if unsafe, whether the rise significantly exceeds the margin, or occurs only in some families."""
    if each.found is not Safety.UNSAFE:
        return each.found.value
    if each.whole.lower > margin:
        return "unsafe, beyond the margin"
    return "unsafe" if each.whole.found is Safety.UNSAFE else f"unsafe: {_where_unsafe(each)}"


def _where_unsafe(each: CheckedCorner) -> str:
    """Return in which families there are more violations than with the base model."""
    families = [family for family, rise in each.families.items() if rise.found is Safety.UNSAFE]
    return f"more violations{' in ' if families else ''}{', '.join(families)}"


# ---------------------------------------------------------------- people


@asynccontextmanager
async def _states(config: Config) -> AsyncGenerator[tuple[Run, DialAdaptation, PersonCacheView, str]]:
    """Yield the run, everybody's dials up to the end of the log, their cache, and the live version's hash or "". Writes nothing.

    Raises NotFound, and what the log raises.
    """
    place = existing_home(config)
    with open_run(config) as run, closing(PersonCacheView(place.people, run.log.keys, config.record.encrypt)) as cache:
        adaptation = DialAdaptation(run.log, cache, config.adapt)
        await adaptation.follow()
        live = await run.follower.resolve("live")
        yield run, adaptation, cache, "" if live is None else live.hash


@asynccontextmanager
async def _styles(config: Config, run: Run) -> AsyncGenerator[StyleAdaptation]:
    """Yield everybody's styles up to the end of the log. Writes nothing."""
    with closing(PersonCacheView(run.home.styles, run.log.keys, config.record.encrypt)) as cache:
        found = StyleAdaptation(run.log, cache, config.adapt)
        await found.follow()
        yield found


async def show(config: Config, tenant: str, user: str, console: Console, *, machine: bool = False) -> None:
    """Print a person's dials and styles. Raises NotFound without a run, or for a tenant without a key."""
    from ostinato.serve.consent import ConsentChoices  # slow to import

    check_tenant(config, tenant)
    person = (tenant, user)
    async with _states(config) as (run, adaptation, _, live):
        # a basis that the gateway refuses counts as none
        refused = refused_bases(await asyncio.to_thread(last_lines, run.home.progress("serve")))
        view, choices = adaptation.view(person, weights="" if live in refused else live), ConsentChoices(run.log)
        compared = await _compared(run, live)
        if config.adapt.styles.prompts:
            arm, policies = await _arm_and_versions(config, run, person)
            async with _styles(config, run) as styles:
                found = styles.view(person, policies=policies, shared=arm is not Arm.BRANCH)
                view = replace(view, styles=found)
        if view.off is None and (compared & refused or not adaptation.fits(compared)):
            view = replace(view, off=NotSteered.TRIAL)
        await choices.refresh()
        allowed = Consent.strictest(choices.of(person), config.privacy.at_most(tenant))
    if allowed not in (Consent.ADAPT, Consent.YES):
        if view.off not in (NotSteered.MODE, NotSteered.TENANT):
            view = replace(view, off=NotSteered.CONSENT)
        if view.styles is not None and view.styles.off is not NotSteered.TENANT:
            view = replace(view, styles=replace(view.styles, off=NotSteered.CONSENT))
    if machine:
        console.print_json(data={"user": user, **view.to_json()}, highlight=False)
        return
    _say(console, f"{user} of {tenant}: answers {'lean' if view.off is None else f'do not lean: {view.off.words}'}")
    if view.dials:
        table = Table("dial", "value", "95%", "set by hand", "in words")
        for dial in view.dials:
            held = "" if dial.held is None else f"{dial.held:+.2f}"
            table.add_row(dial.name, f"{dial.value:+.2f}", f"{dial.low:+.2f} to {dial.high:+.2f}", held, dial.words)
        console.print(table)
    began = "" if view.reset_at is None else f"; last return to the prior {ago(wall_clock() - view.reset_at)} ago"
    _say(
        console,
        f"{view.ratings} ratings{began}; {view.resets} automatic returns, {view.strikes} by reports; {view.nats:.2f} nats spent; "
        f"answers lean by {view.scale:.0%} of these values",
    )
    if view.styles is not None:
        _show_styles(view.styles, console)


def _show_styles(told: StylesView, console: Console) -> None:
    words = "are dealt" if told.off is None else f"are not dealt: {told.off.words}"
    chosen = "" if told.held is None else f"; {told.held} was set by hand"
    _say(console, f"styles {words}; {told.ratings} ratings{chosen}")
    table = Table("style", "more reward than none", "95%", "next conversation")
    for each in told.styles:
        chance = "not approved" if each.chance is None else f"{each.chance:.0%}"
        table.add_row(each.name, f"{each.value:+.2f}", f"{each.low:+.2f} to {each.high:+.2f}", chance)
    console.print(table)


async def _style_rows(config: Config, run: Run) -> list[dict[str, Any]]:
    """Return for each style that is configured or was dealt: whether it is approved for the live version, and its effect."""
    approvals, live = await _approvals(config, run), await run.follower.resolve("live")
    effects = {each.arm: each for each in await style_effects(run.log, NO_STYLE)}
    arms = dict.fromkeys([*(style.arm for style in styles_of(config.adapt)), *effects])
    rows: list[dict[str, Any]] = []
    for arm in arms:
        found, approved = effects.get(arm), live is not None and approvals.holds(arm, live)
        turns, rated, gain = (0, 0, None) if found is None else (found.turns, found.rated, found.gain)
        bounds = None if gain is None else [gain.mean, gain.lower, gain.upper]
        rows.append({"arm": arm, "approved": approved, "turns": turns, "rated": rated, "gain": bounds})
    return rows


async def _arm_and_versions(config: Config, run: Run, person: Person) -> tuple[Arm, set[PolicyVersion]]:
    """Return a person's arm and the versions for which their styles must be approved, as the gateway computes them.

    The person is taken as signed where signatures count.
    """
    from ostinato.serve.arms import Arms  # slow to import

    serve, (tenant, user) = config.serve, person
    arms = Arms(
        control=serve.control_share,
        learner=serve.learner_share,
        salt=serve.arm_salt,
        branches=serve.branches,
        trained=config.learn.tenants,
        holdout=serve.branch_holdout,
    )
    arms.deal((await ReleaseLedger(run.log, wall_clock).refresh()).dealing)
    slots = [each for each in Arm if each.people] + [branch_of(tenant)] * (tenant in serve.branches)
    resolved = [(str(slot), await run.follower.resolve(slot)) for slot in slots]
    loaded = {slot: policy for slot, policy in resolved if policy is not None}
    declared = config.adapt.users == "verified" or serve.arm_users == "declared"
    arm = arms.assign(tenant, user if declared else ANONYMOUS, loaded).arm
    return arm, arms.styled(tenant, arm, loaded)


async def _compared(run: Run, live: str) -> frozenset[str]:
    """Return the hashes of the two versions that the current trial compares; none without a trial."""
    state = await ReleaseLedger(run.log, wall_clock).refresh()
    if state.dealing is None:
        return frozenset()
    beside = state.canary if state.dealing.canary else state.previous if state.dealing.previous else None
    return frozenset() if beside is None else frozenset({live, beside.hash})


async def reset(config: Config, tenant: str, user: str, console: Console) -> None:
    """Reset a person's dials to the prior. Raises NotFound without a run, or for a tenant without a key."""
    place = existing_home(config)
    check_tenant(config, tenant)
    with audited(place, "reset dials", tenant=tenant, actor=login()), open_log(config) as log:
        id, now = f"dials-{secrets.token_hex(16)}", wall_clock()
        await log.append(DialSet(id=id, tenant=tenant, user=user, at=now, by=SetBy.OPERATOR, dials={}))
    _say(console, f"{user} of {tenant}: all dials are at the prior, and no rating so far counts any more")


async def status(config: Config, console: Console, *, machine: bool = False) -> None:
    """Print the mode of dials, their bases, the number of people with a state, and the styles. Raises NotFound without a run."""
    async with _states(config) as (run, adaptation, cache, live):
        styles = await _style_rows(config, run) if config.adapt.styles.prompts else []
        bases, fold, people = adaptation.bases, adaptation.fold, 0
        if fold is not None:
            await fold.save()  # into the in-memory view, so that everybody is counted
            people = cache.people()
        resets = 0 if fold is None else fold.resets
        priors = [] if fold is None else fold.priors
    adapt, budget, now = config.adapt, PrivacyBudget.of(config.adapt.privacy), wall_clock()
    if machine:
        data = {
            "mode": adapt.mode,
            "users": adapt.users,
            "holdout": adapt.holdout,
            "live": live or None,
            "live_has_basis": live in bases,
            "bases": [{"hash": each.hash, "weights": weights, "dials": each.names} for weights, each in bases.items()],
            "people": people,
            "resets": resets,
            "privacy": None if budget is None else budget.state(priors, now),
        }
        console.print_json(data=data | ({"styles": styles} if styles else {}), highlight=False)
        return
    whose = "users that their tenant signs" if adapt.users == "verified" else "any user that a caller names"
    _say(console, f"mode {adapt.mode}: {whose}; {adapt.holdout:.0%} of people are held out")
    table = Table("basis", "fitted to", "dials")
    for weights, each in bases.items():
        table.add_row(each.hash[:12], weights[:12] + (" (live)" if weights == live else ""), ", ".join(each.names))
    if bases:
        console.print(table)
    if live not in bases:
        _say(console, f"the live version {live[:12] or '(none)'} has no basis: run `ostinato adapt fit`")
    _say(console, f"{people} people with a state; {resets} automatic returns to the prior")
    if styles:
        table = Table("style", "approved for live", "turns", "rewarded", "more reward than none", "95%")
        for each in styles:
            mean, low, high = each["gain"] or (None, None, None)
            told = ("", "") if mean is None else (f"{mean:+.3f}", f"{low:+.3f} to {high:+.3f}")
            table.add_row(
                each["arm"], "yes" if each["approved"] else "no", str(each["turns"]), str(each["rated"]), *told
            )
        console.print(table)
    if budget is not None:
        _say(console, f"priors of dials: {budget.words(priors, now)}")


def _say(console: Console, words: str) -> None:
    say(console, plain(words))


def read_prompts(path: Path) -> tuple[str, ...]:
    """Read a file's distinct prompts, one per line. Raises BadConfig."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise BadConfig(f"--prompts {path}: larger than {_MOST_BYTES} bytes; a few hundred prompts are enough")
        found = tuple(
            dict.fromkeys(line.strip() for line in lines_of(path.read_text(encoding="utf-8")) if line.strip())
        )
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfig(
            f"--prompts {path} cannot be read: {error}; name a text file in UTF-8, one prompt per line"
        ) from error
    if len(found) < 2:
        raise BadConfig(f"--prompts {path}: give at least two different prompts, one per line; every second one judges")
    return found
