"""`ostinato demo --scenario personal`: simulated people with different preferences, which their dials learn, beside a holdout group.

First a basis is fitted to the demo's model. Then a first wave of people rates answers through the gateway of a run that trains nothing, a
prior is fitted to their ratings, and a second wave starts from this prior. At the end people with dials are compared with the holdout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from ostinato.adapt.dials import DialAdaptation
from ostinato.adapt.fit import ATTRIBUTES, PROMPTS, FittedBasis
from ostinato.app.dials import fit_live
from ostinato.app.storage import home, open_folds, open_log, open_run
from ostinato.config import Config, as_override
from ostinato.core.arm_assignment import holdout_place
from ostinato.core.clock import wall_clock
from ostinato.core.errors import BadConfig
from ostinato.core.records import Person, SteeringBasis
from ostinato.demo.personal import Measures, PeopleStats, RatedAnswer, balanced_ids, make_people, run_people
from ostinato.evaluate.acceptance import share_of
from ostinato.evaluate.statistics import clustered_difference
from ostinato.launch.commands.checks import check_start
from ostinato.launch.commands.crew import launch
from ostinato.launch.commands.demo import demo_run, outlast_terminal, served
from ostinato.launch.commands.report import write_report
from ostinato.launch.views.screen import bar, bare_table, counting_bar, run_option, say
from ostinato.launch.workers.prepare import prepare
from ostinato.record.person_cache import PersonCacheView
from ostinato.release.ledger import ReleaseLedger
from ostinato.status.arms import curves
from ostinato.status.dials import DIALS, HOLDOUT, DialsNow, dials_line, dials_now
from ostinato.status.progress_lines import last_lines
from ostinato.status.run_report import RunReport
from ostinato.status.run_state import RunFolds
from ostinato.status.summary import RatedTurn, Served

TENANT = "default"
_WORKERS = ("serve", "train", "housekeeping")  # the trainer computes rewards; it takes no step (learn.batch)
_TOKENS = 20  # length of an answer, in the fit and to people
_STRONG = 0.1  # explained share from which people may wish for an attribute; if none reaches it, for the best one
_MOST_WISHES = 3  # attributes that people wish for
_WINDOW_S = 3.0
_SETTLE_S = 60.0  # longest wait for the last rewards
_FOLLOWED_S = 2.0  # time in which a gateway has folded and saved the newest log rows
_STAGES = 3  # parts of the second wave that the screen shows


@dataclass(frozen=True, slots=True, kw_only=True)
class PersonalSize:
    """The demo's size. `each`: answers per question for the fit; `first`, `second`: (people per side, answers per person) of each wave."""

    each: int = 16
    first: tuple[int, int] = (24, 8)
    second: tuple[int, int] = (110, 8)


def personal_overrides(seed: int, directory: Path | None) -> tuple[str, ...]:
    """Return the scenario's settings as `--set` words. The command line's own settings override them."""
    place = directory or Path("runs") / f"demo-personal-{seed}"
    return (
        as_override("run.directory", str(place)),
        "listen.port=0",
        "adapt.mode=dials",
        "adapt.users=declared",
        "adapt.holdout=0.5",
        "adapt.cap=0.3",
        "adapt.answer_budget=8.0",
        "adapt.prior_people=20",
        "adapt.prior_every_s=60.0",
        f"reward.options={{window={_WINDOW_S}}}",
        "learn.batch=1000000",  # never reached: only the dials change, no weights
        "engine.block=16",
    )


@dataclass(slots=True, kw_only=True)
class _Seen:
    """The people's ratings by wave, with a `share` of people held out, and the run's own view of its dials at the end."""

    share: float
    waves: list[PeopleStats] = field(default_factory=list[PeopleStats])
    dials: DialsNow | None = None

    def side(self, answer: RatedAnswer) -> str:
        return HOLDOUT if holdout_place((TENANT, answer.person)) < self.share else DIALS

    def turn(self, answer: RatedAnswer) -> RatedTurn:
        served = Served(arm=self.side(answer), person=(TENANT, answer.person), started_at=answer.at, number=None)
        return RatedTurn(served=served, value=float(answer.accepted), heard=True)

    @property
    def rated(self) -> list[RatedAnswer]:
        return [each for wave in self.waves for each in wave.rated]

    def stages(self, answers: int) -> dict[str, list[RatedAnswer]]:
        """Return the rated answers by stage: the first wave, and thirds of the second wave's `answers` per person."""
        found: dict[str, list[RatedAnswer]] = {}
        for wave, stats in enumerate(self.waves):
            for each in stats.rated:
                part = (each.number - 1) * _STAGES // answers
                low, high = -(-part * answers // _STAGES) + 1, -(-(part + 1) * answers // _STAGES)
                name = f"second wave, answers {low} to {high}" if wave else "first wave"
                found.setdefault(name, []).append(each)
        return found

    def expected(self, rated: Sequence[RatedAnswer]) -> str:
        """Return the mean probability of acceptance with dials minus the holdout's, with its 95% interval clustered by person."""
        sides: dict[str, dict[Person, tuple[float, float]]] = {DIALS: {}, HOLDOUT: {}}
        for each in rated:
            side = sides[self.side(each)]
            person: Person = (TENANT, each.person)
            good, count = side.get(person, (0.0, 0.0))
            side[person] = good + each.probability, count + 1.0
        if min(map(len, sides.values())) < 2:
            return "too few people rated"
        found = clustered_difference(sides[DIALS], sides[HOLDOUT])
        return f"{100 * found.mean:+.1f} pp, 95% [{100 * found.lower:+.1f}, {100 * found.upper:+.1f}]"


async def personal_demo(
    config: Config, *, seed: int, out: Path, console: Console, size: PersonalSize = PersonalSize()
) -> bool:
    """Fit a basis, let two waves of simulated people ask and rate, compare, and write report.html and report.json into `out`.

    Returns True if people with dials were shown to accept more than the holdout: the interval that the product reports lies above 0.
    Raises Conflict if the same demo is running, WorkerFailed if a worker fails for good, BadConfig if no attribute can be steered.
    """
    outlast_terminal(console)
    await check_start(config)
    if not 0.05 <= config.adapt.holdout <= 0.95:
        raise BadConfig(f"adapt.holdout is {config.adapt.holdout:g}: the demo compares with it; set 0.05 to 0.95")
    seen = _Seen(share=config.adapt.holdout)
    with demo_run(config, out):
        fitted, measures = await _fit(config, size.each, seed, console)
        async with launch(config, lambda worker, what: None, names=_WORKERS) as launched:
            with console.status("starting") as status:
                url = await launched.during(served(launched, status, ("live",)))
            say(console, f"page: {url}/ while it runs; run: {config.run.directory}")
            say(console, f"  ostinato status {run_option(config)}")
            await launched.during(_traffic(config, url, fitted, measures, seed, size, seen, console))
    return await _conclude(config, seen, seed, size, out, console)


async def _fit(config: Config, each: int, seed: int, console: Console) -> tuple[FittedBasis, Measures]:
    """Fit a basis and write it to the log. Return it and the attributes that people judge by: those that dials explain well."""
    with open_run(config) as run, counting_bar() as shown:
        tasks = {what: shown.add_task(what, total=None) for what in ("answers", "score features")}

        def tell(what: str, done: int, total: int) -> None:
            shown.update(tasks[what], completed=done, total=total)

        await prepare(run, lambda _: None)
        fitted = await fit_live(run, PROMPTS, each=each, tokens=_TOKENS, seed=seed, on_progress=tell)
        await run.log.append(SteeringBasis.of(fitted.basis, wall_clock()))
    names = [name for name in fitted.basis.names if name != "brief"]  # people cannot see why an answer ended
    if not names:
        raise BadConfig(
            "no attribute of this model's text can be steered, so people could wish for nothing: set model.source to another"
        )
    names.sort(key=lambda name: -fitted.explained[name])
    wished = [name for name in names if fitted.explained[name] >= _STRONG][:_MOST_WISHES] or names[:1]
    told = ", ".join(f"{name} {100 * fitted.explained[name]:.0f}%" for name in fitted.basis.names)
    say(console, f"fitted dials; explained on other questions: {told}")
    wish = f"the simulated people wish for {', '.join(wished)}: most for more of it, each in other proportions, some for less"
    usual = f"adapt.cap; the default is {type(config.adapt)().cap:g}"
    say(console, f"{wish}; a token may move by {config.adapt.cap:g} nats ({usual})")
    return fitted, {name: ATTRIBUTES[name] for name in wished}


async def _traffic(
    config: Config,
    url: str,
    fitted: FittedBasis,
    measures: Measures,
    seed: int,
    size: PersonalSize,
    seen: _Seen,
    console: Console,
) -> None:
    """Run both waves with a live chart, and fit the prior between them."""
    measured = {name: fitted.measured[name] for name in measures}
    for wave, (count, answers) in enumerate((size.first, size.second), 1):
        people, stats = make_people(balanced_ids(TENANT, wave, count, seen.share), measured, seed), PeopleStats()
        seen.waves.append(stats)
        rating = run_people(
            url, people, PROMPTS, measures,
            answers=answers, seed=seed, model=config.model.served_as, tokens=_TOKENS, stats=stats,
        )  # fmt: skip
        working = asyncio.ensure_future(rating)
        try:
            with Live(console=console, refresh_per_second=2, transient=True) as live:
                while not working.done():
                    head = f"wave {wave}, {len(people)} simulated people: {len(stats.rated)} of {len(people) * answers} answers"
                    live.update(_chart(seen, size, head))
                    await asyncio.wait({working}, timeout=1.0)
        finally:
            working.cancel()
        working.result()
        for kind, failed in stats.failures.items():
            say(console, f"{failed} calls failed: {kind}", "yellow")
        if wave == 1:
            say(console, await _fit_prior(config))
    with console.status("waiting for the last rewards"):
        seen.dials = await _settled(config)


async def _fit_prior(config: Config) -> str:
    """Fit a prior to the ratings so far and write it to the log, as a gateway does periodically. Return the result in words."""
    await asyncio.sleep(_FOLLOWED_S)
    with (
        open_run(config) as run,
        closing(PersonCacheView(run.home.people, run.log.keys, config.record.encrypt)) as cache,
    ):
        adaptation = DialAdaptation(run.log, cache, config.adapt, consent=config.privacy.at_most)
        await adaptation.follow()
        await adaptation.refit()
        await adaptation.follow()
        people = 0 if adaptation.fold is None else adaptation.fold.population.people
    await asyncio.sleep(_FOLLOWED_S)
    return f"a prior from {people} people's ratings" if people else "no prior: too few people have rated"


async def _settled(config: Config) -> DialsNow | None:
    """Wait until all ratings are rewards, and return the run's view of its dials."""
    until = wall_clock() + _WINDOW_S + _SETTLE_S
    with open_log(config) as log:
        folds = RunFolds(log, open_folds(config), config.reward, ReleaseLedger(log, wall_clock))
        while True:
            await folds.catch_up()
            if not folds.summary.unrated or wall_clock() >= until:
                break
            await asyncio.sleep(0.5)
    live = folds.ledger.state.live
    lines = last_lines(home(config).progress("serve"))
    return dials_now(config.adapt, folds.summary, None if live is None else live.hash, lines)


def _chart(seen: _Seen, size: PersonalSize, head: str) -> RenderableType:
    """Return a chart of both sides' acceptance by stage with 95% intervals, and its mean probability, which is less noisy."""
    table = bare_table("", "simulated people", "accepted", "", "95%", "expected", "answers")
    for stage, rated in seen.stages(size.second[1]).items():
        for side, words in ((DIALS, "with dials"), (HOLDOUT, "held out")):
            mine = [each for each in rated if seen.side(each) == side]
            if not mine:
                continue
            point = share_of(((TENANT, each.person), each.accepted) for each in mine)
            accepted = (f"{100 * point.acceptance:.0f}%", f"{100 * point.lower:.0f} to {100 * point.upper:.0f}")
            expected = f"{100 * sum(each.probability for each in mine) / len(mine):.0f}%"
            name = stage if side == DIALS else ""
            table.add_row(name, words, bar(point), *accepted, expected, str(point.turns))
    return Group(Text(head, "bold"), table)


async def _conclude(config: Config, seen: _Seen, seed: int, size: PersonalSize, out: Path, console: Console) -> bool:
    console.print(_chart(seen, size, "Simulated people with different wishes"))
    rated, second = seen.rated, seen.waves[-1].rated
    effect = None if seen.dials is None else seen.dials.effect
    shown = effect is not None and effect.lower is not None and effect.lower > 0.0
    rows = [
        ("answers rated", str(len(rated))),
        ("expected acceptance, second wave, dials minus holdout", seen.expected(second)),
        ("expected acceptance, both waves, dials minus holdout", seen.expected(rated)),
    ]
    for label, value in rows[1:]:
        say(console, f"{label}: {value}")
    if seen.dials is not None:
        say(console, dials_line(seen.dials))
        rows.append(("as `ostinato status` says it, both waves", dials_line(seen.dials).removeprefix("dials: ")))
    if shown:
        say(console, "shown: people with dials accept more than the holdout", "green")
    else:
        say(console, "not shown that people with dials accept more", "yellow")
    start, end = min((each.at for each in rated), default=0.0), max((each.at for each in rated), default=0.0)
    turns = [seen.turn(each) for each in rated]
    page = RunReport(
        title="Simulated people with different wishes: dials beside the holdout",
        seed=seed,
        minutes=round((end - start) / 60, 2),
        model=config.model.served_as,
        users=len({each.person for each in rated}),
        curves=curves(turns, start, end) if end > start else (),
        summary=tuple(rows),
        notes=_notes(config),
    )
    (out / "report.json").write_text(page.to_json(), encoding="utf-8")
    await write_report(config, out / "report.html", console, page)
    return shown


def _notes(config: Config) -> tuple[str, ...]:
    adapt, usual = config.adapt, type(config.adapt)()
    return (
        "The people are simulated: programs that accept an answer with a probability that rises with a few attributes of its text. Most "
        "wish for more of them, each in proportions of their own, and some for less.",
        "They wish for nothing but what dials move well: it is easier than a product's case.",
        f"A token may move by {adapt.cap:g} nats (adapt.cap) and an answer by {adapt.answer_budget:g} (adapt.answer_budget); the defaults "
        f"are {usual.cap:g} and {usual.answer_budget:g}.",
        "The second wave begins with a prior that was fitted to what the first wave's ratings say.",
        "Nothing was trained: what differs between the two lines is people's dials alone.",
    )
