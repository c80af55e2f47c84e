"""Whose answers lean, and how far: dials from a person's state, for the basis that was fitted to the weights that answer."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import replace

from ostinato.adapt.config import AdaptConfig
from ostinato.adapt.learner import MOST_DIALS, PersonState, Prior, Regression, names_hash
from ostinato.adapt.prior import FEWEST, Organisation, Population, flat_prior
from ostinato.adapt.safety import ViolationRules
from ostinato.adapt.state_fold import PlacedLog, StateFold, StateRules, in_holdout
from ostinato.core.clock import wall_clock
from ostinato.core.errors import OstinatoError
from ostinato.core.records import Consent, Person, SteeringBasis
from ostinato.core.seams import Clock, Cursor, PersonCache
from ostinato.core.steering import Basis, Steering

_LOG = logging.getLogger(__name__)

_POLL_S = 1.0  # between two looks for what other gateways heard
_SAVE_S = 0.25  # between two writes of states
_REFIT_S = 300.0  # from one look at everybody's ratings to the next, at least
_FITTED = 1000  # people of a tenant, those who rated last, that a fit takes: more would make a mean no better


class DialAdaptation:
    """`core.seams.Adaptation` by dials. Its states follow the log; it never delays a request or a feedback for that.

    Args:
        log: tells ratings and bases; the newest basis' names are the dials that people have.
        cache: keeps states.
        config: the settings.
        consent: what may be done with a tenant's turns at most; a prior learns from those of `Consent.YES` only.
        clock: decides when a prior is fitted anew.

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
        consent: Callable[[str], Consent] = lambda _: Consent.YES,
        clock: Clock = wall_clock,
    ) -> None:
        self._log, self._cache, self._config = log, cache, config
        self._consent, self._clock = consent, clock
        self._read: Cursor = 0  # of the bases
        self._names: tuple[str, ...] = ()
        self._bases: dict[str, Basis] = {}  # by the hash of the weights
        self.fold: StateFold | None = None
        self._rules: StateRules | None = None
        self._heard = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._troubled = False

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
            _LOG.warning("People's states were not saved, and are folded on from an earlier place: %s", error)

    def steering(self, person: Person, *, weights: str, verified: bool) -> Steering | None:
        config, fold, rules, basis = self._config, self.fold, self._rules, self._bases.get(weights)
        if fold is None or rules is None or basis is None or basis.names != rules.names:
            return None
        if person[0] in rules.without or (config.users == "verified" and not verified) or self.held_out(person):
            return None
        try:
            state = fold.state(person)
        except OstinatoError as error:
            self._trouble(error)
            return None
        state = state or PersonState.new(names_hash(rules.names), len(rules.names))
        posterior = state.posterior(self.prior_of(person[0]), rules.regression)
        cap = config.cap / 2 if state.strikes else config.cap
        dials = posterior.dials(
            fold.moments.fisher_KK, tokens=fold.moments.tokens, nats=cap, strength=rules.regression.strength
        )
        return Steering(basis=basis, dials=dials, cap=cap, budget=config.answer_budget)

    def prior_of(self, tenant: str) -> Prior:
        """What is believed of a tenant's people before they have rated. Only once a basis is known."""
        assert self.fold is not None
        assert self._rules is not None
        if self._config.prior == "flat":
            return self._rules.prior
        population = self.fold.population
        return population.of(tenant) if self._level(tenant) == "own" else population.shared

    def _level(self, tenant: str) -> str:
        found = self._config.tenants.get(tenant)
        return "shared" if found is None else found.prior

    def held_out(self, person: Person) -> bool:
        """True if the person is one of those whose answers never lean, whatever they or their tenant wish."""
        return in_holdout(person, self._config.holdout)

    def heard(self) -> None:
        self._heard.set()

    # ------------------------------------------------------------ following the log

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        saved, fitted = loop.time(), -math.inf
        while True:
            self._heard.clear()
            try:
                await self.follow()
                if self.fold is not None and loop.time() - saved >= _SAVE_S:
                    await self.fold.save()
                    saved = loop.time()
                if loop.time() - fitted >= _REFIT_S:
                    fitted = loop.time()
                    await self.refit()
                self._troubled = False
            except OstinatoError as error:
                self._trouble(error)
                await asyncio.sleep(_POLL_S)
            try:
                async with asyncio.timeout(_POLL_S):
                    await self._heard.wait()
            except TimeoutError:
                continue

    async def follow(self) -> None:
        """Take in the log's new rows, with new bases. Raises Corrupt, StorageFull, Unavailable."""
        async for seq, row in self._log.read(self._read, {SteeringBasis}):
            if isinstance(row, SteeringBasis):
                self._know(row)
            self._read = seq
        if not self._names:
            return
        if self._rules is None or self.fold is None or self._rules.names != self._names:
            rules = self._rules_of(self._names)
            fold = StateFold(self._log, self._cache, rules)
            await fold.start()
            self._rules, self.fold = rules, fold
        await self.fold.catch_up()

    # ------------------------------------------------------------ the prior

    async def refit(self) -> bool:
        """Write a prior that is fitted to everybody's ratings now, if it is time for one, and one is known or can be fitted.

        Of several gateways that do so at once, the first to write counts. True if something was written. Raises StorageFull, Unavailable.
        """
        fold, now = self.fold, self._clock()
        if fold is None or self._config.prior == "flat":
            return False
        last = fold.prior_row
        if last is not None and abs(now - last.at) < self._config.prior_every_s:
            return False
        upto, population = fold.cursor, await self._fit(fold)
        if last is None and not population.people and not population.organisations:
            return False
        number = 1 if last is None else last.number + 1
        await self._log.append(population.row(names=names_hash(self._names), number=number, upto=upto, at=now))
        return True

    async def _fit(self, fold: StateFold) -> Population:
        """Tenant by tenant, so that the people of one are in memory at a time."""
        config, dials = self._config, len(self._names)
        agreed = [tenant for tenant in fold.tenants if self._consent(tenant) is Consent.YES]

        async def fitted(tenant: str) -> Organisation:
            people = await fold.evidence(tenant, _FITTED)
            return await asyncio.to_thread(Organisation.fit, people, dials)

        shared = [await fitted(tenant) for tenant in agreed if self._level(tenant) == "shared"]
        pooled = Population.pool(shared, dials, least=config.prior_people, share=config.prior_share)
        own = {tenant: await fitted(tenant) for tenant in agreed if self._level(tenant) == "own"}
        levels = {tenant: (each.people, each.prior.mean_D) for tenant, each in own.items() if each.people >= FEWEST}
        return replace(pooled, organisations=levels)

    def _know(self, row: SteeringBasis) -> None:
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
        self._bases[basis.weights], self._names = basis, basis.names

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
            ),
            without=frozenset(tenant for tenant, each in config.tenants.items() if each.prior == "off"),
        )

    def _trouble(self, error: OstinatoError) -> None:
        if not self._troubled:
            _LOG.warning("Answers lean by what was known before, or not at all: %s", error)
        self._troubled = True


def _report(running: asyncio.Task[None]) -> None:
    """Log why following the log has ended, unless it was stopped."""
    if not running.cancelled() and (error := running.exception()) is not None:
        _LOG.error("People's states follow the log no longer; restart the gateway.", exc_info=error)
