"""Steering by dials: whose answers are steered, and how far, by a person's state and the basis that was fitted to the serving weights."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ostinato.adapt.config import AdaptConfig
from ostinato.adapt.learner import MOST_DIALS, PersonState, Prior, Regression, names_hash
from ostinato.adapt.prior import LEAST_RATERS, Organisation, Population, flat_prior
from ostinato.adapt.privacy import PrivacyBudget, release_prior, within_year
from ostinato.adapt.safety import ViolationRules
from ostinato.adapt.state_fold import FeatureMoments, PlacedLog, StateFold, StateRules, time_of
from ostinato.core.arm_assignment import holdout_place
from ostinato.core.clock import wall_clock
from ostinato.core.errors import BadConfig, OstinatoError, Unavailable
from ostinato.core.records import Consent, Person, SteeringBasis
from ostinato.core.seams import Clock, Cursor, PersonCache
from ostinato.core.steering import Basis, DialPrior, DialView, NotSteered, PersonView, Steering

_LOG = logging.getLogger(__name__)

_POLL_S = 1.0  # seconds between two checks for rows that other gateways wrote
_SAVE_S = 0.25  # seconds between two writes of states
_REFIT_S = 300.0  # least seconds between two checks whether a prior is due
# a fit uses the people of a tenant who rated last, up to this many; more would not improve the mean
_MOST_FITTED = 1000
_MOST_REFUSED = 32  # rejected bases whose weights are kept for the status; weights of older ones are hardly live
_MOST_SPREAD = 500  # people whose dials `spread` summarises
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
SHOWN_PEOPLE = 20
"""The least number of people for reporting a spread: with fewer, a quantile would be somebody's own value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DialSpread:
    """The distribution of people's dials, by name: the quantiles `QUANTILES`. `resets`: how often these people returned to the prior.

    Example: ``DialSpread(people=120, resets=3, dials={"brief": (-0.4, -0.1, 0.0, 0.2, 0.6)})``
    """

    people: int
    resets: int
    dials: Mapping[str, tuple[float, ...]]


class PersonAdaptation:
    """People's states, which follow the log, and the prior that they begin with. Ratings update what is known of each person's preferences.

    Args:
        log: delivers ratings.
        cache: stores states.
        config: the settings.
        consent: the highest consent level of a tenant's turns; a prior learns only from people with `Consent.YES`.
        clock: decides when a prior is fitted again.
    """

    _states: type[StateFold] = StateFold

    def __init__(
        self,
        log: PlacedLog,
        cache: PersonCache,
        config: AdaptConfig,
        *,
        consent: Callable[[str], Consent] = lambda _: Consent.YES,
        clock: Clock = wall_clock,
    ) -> None:
        self._log, self._cache, self._config = log, cache, config
        self._consent, self._clock, self._without = consent, clock, config.without
        self._names: tuple[str, ...] = ()
        self.fold: StateFold | None = None
        self._rules: StateRules | None = None
        self._heard = asyncio.Event()
        self._waiting: list[asyncio.Future[None]] = []  # callers that wait until the log's current rows are applied
        self._running: asyncio.Task[None] | None = None
        self._warned = False
        self._refused: type[OstinatoError] | None = None  # the last logged reason why no private prior was released

    async def start(self) -> None:
        """Begin to follow the log."""
        self._running = asyncio.create_task(self._run())
        self._running.add_done_callback(_report)

    async def close(self) -> None:
        """Stop, and save what is not saved yet."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        try:
            if self.fold is not None:
                await self.fold.save()
        except OstinatoError as error:
            _LOG.warning(
                "People's states were not saved; the next start folds them again from the last saved position: %s",
                error,
            )

    @property
    def verified_only(self) -> bool:
        return self._config.users == "verified"

    def heard(self) -> None:
        self._heard.set()

    def prior_of(self, tenant: str) -> Prior:
        """Return the prior of a tenant's people: what is believed of them before they have rated. Call it only once a basis is known."""
        assert self.fold is not None
        assert self._rules is not None
        if prior_in_force(self.fold.prior_row, self._config) is None:
            return self._rules.prior
        population = self.fold.population
        return population.of(tenant) if self._level(tenant) == "own" else population.shared

    def _level(self, tenant: str) -> str:
        found = self._config.tenants.get(tenant)
        return "shared" if found is None else found.prior

    def entitled(self, person: Person, *, verified: bool) -> bool:
        """Return true if a person's preferences may count.

        The person must be known as the settings require, their tenant must allow dials, and they must not be in the holdout.
        """
        known = verified or not self.verified_only
        return known and person[0] not in self._without and not self.held_out(person)

    def held_out(self, person: Person) -> bool:
        """Return true if the person is in the holdout, whose answers are never steered, whatever they or their tenant wish."""
        return holdout_place(person) < self._config.holdout

    async def _caught_up(self) -> None:
        """Wait until every row that is in the log now was applied. Raises Corrupt, StorageFull, Unavailable."""
        caught_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        running = () if self._running is None else (self._running,)
        if not any(task.done() for task in running):  # if it has ended, nobody would resolve the future
            self._waiting.append(caught_up)
            self._heard.set()
        await asyncio.wait((caught_up, *running), return_when=asyncio.FIRST_COMPLETED)
        if not caught_up.done():  # the gateway's log has the reason (`_report`)
            raise Unavailable("people's states no longer follow the log; restart the gateway")
        await caught_up

    # ------------------------------------------------------------ following the log

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        saved, fitted = loop.time(), -math.inf
        while True:
            self._heard.clear()
            waiting, self._waiting = self._waiting, []
            try:
                await self.follow()
                for each in waiting:
                    if not each.done():
                        each.set_result(None)
                if self.fold is not None and loop.time() - saved >= _SAVE_S:
                    await self.fold.save()
                    saved = loop.time()
                if loop.time() - fitted >= _REFIT_S:
                    fitted = loop.time()
                    await self.refit()
                self._warned = False
            except OstinatoError as error:
                for each in waiting:
                    if not each.done():
                        each.set_exception(error)
                self._warn_once(error)
                await asyncio.sleep(_POLL_S)
            try:
                async with asyncio.timeout(_POLL_S):
                    await self._heard.wait()
            except TimeoutError:
                continue

    async def follow(self) -> None:
        """Apply the log's new rows. Raises Corrupt, StorageFull, Unavailable."""
        if not self._names:
            return
        if self._rules is None or self.fold is None or self._rules.names != self._names:
            rules = self._rules_of(self._names)
            fold = self._states(self._log, self._cache, rules)
            await fold.start()
            self._rules, self.fold = rules, fold
        await self.fold.catch_up()

    # ------------------------------------------------------------ the prior

    async def refit(self) -> bool:
        """Fit a prior to everybody's ratings and write it, if one is due and there is one to write. Return whether something was written.

        If several gateways do so at once, the first to write counts. Raises StorageFull, Unavailable.
        """
        fold, now, budget = self.fold, self._clock(), PrivacyBudget.of(self._config.privacy)
        if fold is None or self._config.prior == "flat":
            return False
        last, every_s = prior_in_force(fold.prior_row, self._config), self._config.prior_every_s
        if last is not None and abs(now - last.at) < (max(every_s, budget.spacing_s) if budget else every_s):
            return False
        # number and budget are read together: if another gateway releases meanwhile, its row has this number, and the second is ignored
        number, upto, sigma = fold.numbered + 1, fold.cursor, 0.0
        try:
            if budget is not None:
                sigma = budget.next_sigma([each for each in within_year(fold.priors, now) if each])
        except Unavailable as error:
            return self._refuse(error)
        try:
            population = await self._fit(fold, budget, sigma)
        except BadConfig as error:
            return self._refuse(error)
        # a noisy prior is written even if nobody has rated: otherwise its existence would reveal that somebody has
        if last is None and budget is None and not population.people and not population.organisations:
            return False
        row = population.row(names=names_hash(self._names), number=number, upto=upto, at=now)
        await self._log.append(replace(row, sigma=sigma))
        self._refused = None
        return True

    async def _fit(self, fold: StateFold, budget: PrivacyBudget | None, sigma: float) -> Population:
        """Fit tenant by tenant, so that only one tenant's people are in memory at a time.

        With a budget, each tenant's prior has noise of `sigma`. A person belongs to one tenant, so all these priors together reveal as much
        about anybody as one does. Raises BadConfig if no tenant has few enough people for the budget's delta.
        """
        config, dials = self._config, len(self._names)
        agreed = [tenant for tenant in fold.tenants if self._consent(tenant) is Consent.YES]
        # with a budget, use everybody: who is among the newest thousand depends on other people's ratings
        most = _MOST_FITTED if budget is None else config.most_states
        if budget is not None:
            await fold.save()
            admitted = budget.admits({tenant: self._cache.count(tenant) for tenant in agreed})
            if left_out := sorted({*agreed} - {*admitted}):
                _LOG.warning(
                    "No prior is fitted to the people of %s, too many for adapt.privacy.delta", ", ".join(left_out)
                )
            agreed = admitted

        async def fitted(tenant: str) -> Organisation:
            told = await fold.evidence(tenant, most)
            if budget is None:
                return await asyncio.to_thread(Organisation.fit, told, dials)
            if self._cache.crowded(tenant):  # one person's rating evicts another's state, which privacy rules out
                _LOG.warning(
                    "No prior is fitted to the people of %s, who are %d, or were more: raise adapt.most_states, and remove "
                    "folds/people.sqlite while the gateway is down, so that they are folded anew",
                    tenant,
                    most,
                )
                return Organisation(0, flat_prior(dials))
            return await asyncio.to_thread(release_prior, told, dials, clip=config.privacy.clip, sigma=sigma)

        shared = [await fitted(tenant) for tenant in agreed if self._level(tenant) == "shared"]
        pooled = Population.pool(shared, dials, least=config.prior_people, share=config.prior_share)
        own = {tenant: await fitted(tenant) for tenant in agreed if self._level(tenant) == "own"}
        levels = {
            tenant: (each.people, each.prior.mean_D) for tenant, each in own.items() if each.people >= LEAST_RATERS
        }
        return replace(pooled, organisations=levels)

    def _refuse(self, error: OstinatoError) -> bool:
        """Log once why no prior is released."""
        if self._refused is not type(error):
            _LOG.warning("No prior of dials is released: %s", error)
        self._refused = type(error)
        return False

    def _rules_of(self, names: tuple[str, ...]) -> StateRules:
        config = self._config
        return StateRules(
            names=names,
            signals=config.signals,
            regression=Regression(decay=config.decay, drift=config.reset.drift, limit=config.reset.limit),
            prior=flat_prior(len(names)),
            violations=ViolationRules(
                signals=frozenset(config.violations.signals),
                step=config.violations.step,
                most=config.violations.most,
                strikes=config.violations.strikes,
                holdout=config.holdout,
                verified=self.verified_only,
            ),
            without=config.without,
        )

    def _warn_once(self, error: OstinatoError) -> None:
        if not self._warned:
            _LOG.warning("Answers are steered by outdated states, or not at all: %s", error)
        self._warned = True


class DialAdaptation(PersonAdaptation):
    """Adaptation by dials; implements `core.seams.Adaptation`. It never delays a request or feedback to catch up with the log.

    Args:
        log: delivers ratings and bases; the names in the newest basis are the dials that people have.
        cache: stores states.
        config: the settings.
        protected: tokens that no dial may move; a basis that moves one is not used.
        consent: the highest consent level of a tenant's turns; a prior learns only from people with `Consent.YES`.
        clock: decides when a prior is fitted again.

    Example::

        adaptation = DialAdaptation(log, cache, config.adapt)
        await adaptation.start()
        adaptation.steering(("acme", "ann"), weights=policy.hash, verified=True)
    """

    def __init__(
        self,
        log: PlacedLog,
        cache: PersonCache,
        config: AdaptConfig,
        *,
        protected: Collection[int] = (),
        consent: Callable[[str], Consent] = lambda _: Consent.YES,
        clock: Clock = wall_clock,
    ) -> None:
        super().__init__(log, cache, config, consent=consent, clock=clock)
        self._protected = frozenset(protected)
        self._read: Cursor = 0  # position up to which bases were read
        self._bases: dict[str, Basis] = {}  # by the hash of the weights
        self.refused: dict[str, None] = {}  # the weights whose newest basis moves protected tokens, newest last

    def steering(self, person: Person, *, weights: str, verified: bool) -> Steering | None:
        config, fold, rules, basis = self._config, self.fold, self._rules, self._bases.get(weights)
        if fold is None or rules is None or basis is None or basis.names != rules.names:
            return None
        if not self.entitled(person, verified=verified):
            return None
        try:
            state = fold.state_or_new(person)
        except OstinatoError as error:
            self._warn_once(error)
            return None
        dials = self._dials(state, rules, fold, self.prior_of(person[0]))
        return Steering(basis=basis, dials=dials, cap=self._cap(state), budget=config.answer_budget)

    def fits(self, weights: Collection[str]) -> bool:
        names = None if self._rules is None else self._rules.names
        return all(each in self._bases and self._bases[each].names == names for each in weights)

    def _dials(self, state: PersonState, rules: StateRules, fold: StateFold, prior: Prior) -> tuple[float, ...]:
        return state.posterior(prior, rules.regression).dials(
            fold.moments.fisher_KK,
            tokens=fold.moments.tokens,
            nats=self._cap(state),
            strength=rules.regression.strength,
        )

    async def spread(self) -> DialSpread | None:
        """Return the distribution of dials among the 500 people who came last; None with fewer than 20. It is computed on a thread."""
        fold, rules = self.fold, self._rules
        if fold is None or rules is None:
            return None
        newest = [pair for pair in fold.newest(_MOST_SPREAD) if not self.held_out(pair[0])]
        if len(newest) < SHOWN_PEOPLE:
            return None
        # read on the event loop: a new basis with other dials may come while the thread runs
        priors = {tenant: self.prior_of(tenant) for tenant in {person[0] for person, _ in newest}}

        def look() -> DialSpread:
            dials_NK = np.array([self._dials(state, rules, fold, priors[person[0]]) for person, state in newest])
            told = [state.evidence(rules.prior, rules.regression).resets for _, state in newest]
            quantiles = np.quantile(dials_NK, QUANTILES, axis=0).T.tolist()
            dials = {name: tuple(each) for name, each in zip(rules.names, quantiles, strict=True)}
            return DialSpread(people=len(newest), resets=sum(told), dials=dials)

        return await asyncio.to_thread(look)

    @property
    def bases(self) -> Mapping[str, Basis]:
        """The known bases, by the hash of the weights that each was fitted to; the newest is last."""
        return self._bases

    async def shown(self, person: Person, *, weights: str) -> PersonView:
        await self._caught_up()
        return self.view(person, weights=weights)

    def view(self, person: Person, *, weights: str) -> PersonView:
        """As `shown`, from the rows applied so far."""
        fold, rules, basis = self.fold, self._rules, self._bases.get(weights)
        if fold is None or rules is None:
            return PersonView(dials=(), scale=1.0, off=NotSteered.BASIS)
        off = None
        if self._config.mode == "off":
            off = NotSteered.MODE
        elif person[0] in rules.without:
            off = NotSteered.TENANT
        elif self.held_out(person):
            off = NotSteered.HOLDOUT
        elif basis is None or basis.names != rules.names:
            off = NotSteered.BASIS
        state = fold.state_or_new(person)
        return person_view(state, self.prior_of(person[0]), rules, fold.moments, cap=self._cap(state), off=off)

    def _cap(self, state: PersonState) -> float:
        """Return the largest KL divergence per token for this person, in nats: half of everybody's after a strike."""
        return self._config.cap / 2 if state.strikes else self._config.cap

    async def follow(self) -> None:
        """Apply the log's new rows, including new bases. Raises Corrupt, StorageFull, Unavailable."""
        async for seq, row in self._log.read(self._read, {SteeringBasis}):
            if isinstance(row, SteeringBasis):
                self._add_basis(row)
            self._read = seq
        await super().follow()

    def _add_basis(self, row: SteeringBasis) -> None:
        try:
            basis = row.basis()
        except ValueError as error:
            _LOG.warning("A basis in the log is not used: %s", error)
            return
        if not 1 <= len(basis.names) <= MOST_DIALS:
            _LOG.warning(
                "The basis %s is not used: it has %d dials, and people have at most %d.",
                basis.hash,
                len(basis.names),
                MOST_DIALS,
            )
            return
        if held := self._protected.intersection(basis.tokens_M.tolist()):
            _LOG.warning(
                "The basis %s is not used: it moves %d protected tokens, such as %d. Run `ostinato adapt fit` again.",
                basis.hash,
                len(held),
                min(held),
            )
            self.refused.pop(basis.weights, None)
            self.refused[basis.weights] = None
            if len(self.refused) > _MOST_REFUSED:
                del self.refused[next(iter(self.refused))]
            return
        self.refused.pop(basis.weights, None)
        self._bases.pop(basis.weights, None)
        if basis.directions_KM.any():  # if not, every dial was dropped and nobody is steered
            self._bases[basis.weights], self._names = basis, basis.names


def prior_in_force(newest: DialPrior | None, config: AdaptConfig) -> DialPrior | None:
    """Return the newest prior, unless people begin with a flat one or the prior lacks the noise that they were promised."""
    if newest is None or config.prior == "flat" or (config.privacy.epsilon and not newest.sigma):
        return None
    return newest


def _report(running: asyncio.Task[None]) -> None:
    """Log why following the log has ended, unless it was stopped."""
    if not running.cancelled() and (error := running.exception()) is not None:
        _LOG.error("People's states no longer follow the log; restart the gateway.", exc_info=error)


# ---------------------------------------------------------------- what a person is shown


_DEVIATIONS = 1.96  # half width of a 95% interval in standard deviations
_WORDS: Mapping[str, tuple[str, str]] = {
    "brief": ("shorter answers", "longer answers"),
    "lists": ("more lists", "fewer lists"),
    "exclaims": ("more exclamation marks", "fewer exclamation marks"),
    "speaks_to_reader": ("speaks to the reader more", "speaks to the reader less"),
    "commas": ("more commas", "fewer commas"),
    "first_person": ("speaks of itself more", "speaks of itself less"),
    "bold": ("more bold type", "less bold type"),
    "long_words": ("longer words", "shorter words"),
}  # for the built-in dials of `adapt.fit.ATTRIBUTES`: the meaning of a value above 0, and below


def person_view(
    state: PersonState, prior: Prior, rules: StateRules, moments: FeatureMoments, *, cap: float, off: NotSteered | None
) -> PersonView:
    """Return the view of a state under the `prior` that its person begins with.

    `cap`: the KL divergence per token, in nats, that answers may spend (`adapt.cap`).
    """
    regression = rules.regression
    posterior = state.posterior(prior, regression)
    evidence = state.evidence(state.prior(rules.prior, regression), regression)
    mean_K = posterior.mean_D[:-1] / regression.strength
    deviation_K = np.sqrt(np.diag(posterior.covariance_DD)[:-1]) / regression.strength
    scale = posterior.scale(moments.fisher_KK, tokens=moments.tokens, nats=cap, strength=regression.strength)
    held = dict(state.held)
    dials = tuple(
        _dial(name, float(mean), float(deviation), held.get(number))
        for number, (name, mean, deviation) in enumerate(zip(rules.names, mean_K, deviation_K, strict=True))
    )
    return PersonView(
        dials=dials,
        scale=scale * regression.strength,
        ratings=evidence.ratings,
        nats=state.nats,
        resets=evidence.resets,
        strikes=state.strikes,
        reset_at=time_of(evidence.reset_at) if evidence.reset_at else None,
        off=off,
    )


def _dial(name: str, mean: float, deviation: float, held: float | None) -> DialView:
    words = _in_words(name, mean, deviation, held)
    low, high = mean - _DEVIATIONS * deviation, mean + _DEVIATIONS * deviation
    return DialView(name=name, value=mean, low=low, high=high, held=held, words=words)


def _in_words(name: str, mean: float, deviation: float, held: float | None) -> str:
    plain = name.replace("_", " ")
    more, less = _WORDS.get(name, (f"more {plain}", f"less {plain}"))
    if held is not None:
        return f"{more if held > 0 else less if held < 0 else 'as the model has it'}, set by hand"
    if abs(mean) < deviation:
        return "not known yet"
    return f"{more if mean > 0 else less}, {'sure' if abs(mean) > _DEVIATIONS * deviation else 'perhaps'}"
