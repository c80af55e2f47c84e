"""Styles: operator-written additions to the system prompt as arms of a Bayesian bandit per person, with exact propensities.

A rating of an answer in style a is c + e_a + noise: c is the person's mean reward, and e_a the effect of the style; no style is an arm,
too. So a person's state is that of the dials' regression (`adapt.learner`) with one feature per arm, and shares the properties of dials'
states: the log's order does not matter, later ratings reduce the weight of old ones, a CUSUM returns a person to the prior, and the prior
is fitted to the population and to tenants.

**The odds** are those of Thompson sampling (1933): each arm with the probability that it is the best under the posterior. The integral over
the effects, which are correlated, is a quasi-Monte Carlo rule with fixed nodes: the share of 2,048 points of a rank-1 lattice (the
generalised golden ratio) at which the arm is best. An arm is drawn with exactly that share, mixed with the floor, so the recorded
propensity is that of the draw to the last bit, however accurate the rule is; as an integral it is accurate to 0.02.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from random import SystemRandom
from statistics import NormalDist

import numpy as np

from ostinato.adapt.config import AdaptConfig
from ostinato.adapt.dials import PersonAdaptation
from ostinato.adapt.learner import Floats, PersonPosterior, PersonState
from ostinato.adapt.safety import ViolationRules
from ostinato.adapt.state_fold import PlacedLog, StateFold, StateRules
from ostinato.core.clock import wall_clock
from ostinato.core.errors import OstinatoError
from ostinato.core.notices import Alarm, AlarmState
from ostinato.core.records import Consent, Person, Pick, PolicyVersion, Turn
from ostinato.core.seams import Clock, Cursor, PersonCache
from ostinato.core.steering import NO_STYLE, NotSteered, StylesView, StyleView

ALARM = "style:"
"""Prefix of the names of alarms that record the approval of styles: a cleared one is an approval."""
UNSAFE = "unsafe_style:"
"""Prefix of the names of alarms that withdraw an approval until a later safety check clears them."""
# the value of an arm's feature: the flat prior's slopes have a standard deviation of 0.055, so an arm's effect has one of 0.14
_ARM_FEATURE = 2.5
_NODES = 2048
_DEVIATIONS = 1.96  # half width of a 95% interval in standard deviations
_JITTER = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """A configured style. `arm`: its name and a hash of its text, so that another text is another style.

    Example: ``Style(name="concise", text="Answer in one sentence.").arm == "concise@a60d30c4"``
    """

    name: str
    text: str

    @property
    def arm(self) -> str:
        """Its name in the log."""
        return f"{self.name}@{blake2b(self.text.encode(), digest_size=4).hexdigest()}"


def styles_of(config: AdaptConfig) -> tuple[Style, ...]:
    """Return the configured styles."""
    return tuple(Style(name=name, text=text) for name, text in config.styles.prompts.items())


def approval(
    style: Style, policy: PolicyVersion, *, passed: bool, why: str, at: float, shared: bool = False, kind: str = ALARM
) -> Alarm:
    """Return the row that records the gate's finding about a style with this version; the newest row about a version and an arm counts.

    `shared`: the version is on no tenant's branch, so that later versions may inherit the finding. `kind`: `ALARM` for quality, `UNSAFE`
    for safety.
    """
    return Alarm(
        id=f"{kind}{style.arm}:{policy.hash[:16]}:{at:.6f}",
        name=f"{kind}{style.name}",
        state=AlarmState.CLEARED if passed else AlarmState.RAISED,
        reason=why,
        at=at,
        detail={"arm": style.arm, "weights": policy.hash, "number": policy.number, "shared": shared},
    )


class StyleApprovals:
    """The approvals of styles by version, from the log's alarms.

    Example: ``approvals.holds("concise@a60d30c4", live)``
    """

    def __init__(self, versions: int) -> None:
        self._versions = versions
        # by arm and weights: the version's number, whether the style passed, and whether the version is on no tenant's branch
        self._found: dict[str, dict[str, tuple[int, bool, bool]]] = {}
        self._unsafe: dict[str, dict[str, tuple[int, bool, bool]]] = {}  # the same for safety, failures only

    def take(self, row: Alarm) -> None:
        """Apply a row of the log; rows that are about no style are ignored."""
        if not row.name.startswith((ALARM, UNSAFE)) or "arm" not in row.detail:
            return
        arm, weights, passed = str(row.detail["arm"]), str(row.detail["weights"]), row.state is AlarmState.CLEARED
        told = (int(row.detail["number"]), passed, row.detail.get("shared") is True)
        if row.name.startswith(ALARM):
            self._found.setdefault(arm, {})[weights] = told
        elif passed:
            self._unsafe.get(arm, {}).pop(weights, None)
        else:
            self._unsafe.setdefault(arm, {})[weights] = told

    def unsafe(self, arm: str, policy: PolicyVersion) -> bool:
        """Return true if an arm was found unsafe with this version, and not found safe since."""
        return policy.hash in self._unsafe.get(arm, {})

    def holds(self, arm: str, policy: PolicyVersion, *, shared: bool = True) -> bool:
        """Return true if an arm is approved for a version, by the finding for that version or an inherited one.

        It inherits the finding for the newest earlier version on no tenant's branch that is at most `versions` older. `shared` is false for
        a version of a tenant's branch, for which only its own approval counts.
        """
        found = self._found.get(arm, {}) | self._unsafe.get(arm, {})
        if policy.hash in found:
            return found[policy.hash][1]
        oldest = policy.number - self._versions
        before = [told for told in found.values() if told[2] and oldest <= told[0] < policy.number]
        return shared and bool(before) and max(before)[1]


def thompson_odds(mean_A: Floats, covariance_AA: Floats, floor: float) -> Floats:
    """Return the probabilities with which each of A arms is drawn: at least `floor` each, the rest by how likely each is the best.

    Raises numpy.linalg.LinAlgError for a covariance that is not positive definite.
    """
    size = len(mean_A)
    root_AA = np.linalg.cholesky(covariance_AA + _JITTER * np.eye(size))
    best_N = np.argmax(mean_A + _normal_nodes(size) @ root_AA.T, axis=1)
    return floor + (1.0 - size * floor) * np.bincount(best_N, minlength=size) / _NODES


@lru_cache(maxsize=16)
def _normal_nodes(size: int) -> Floats:
    """Return standard normal points, shape [2048, size], the same everywhere."""
    ratio = 2.0
    for _ in range(64):  # fixed-point iteration for the root of x^(size + 1) = x + 1
        ratio = (1.0 + ratio) ** (1.0 / (size + 1))
    steps_A = ratio ** -np.arange(1.0, size + 1)
    uniform_NA = np.modf(0.5 + np.arange(1.0, _NODES + 1)[:, None] * steps_A)[0]
    inverse = NormalDist().inv_cdf
    return np.array([[inverse(min(1.0 - 1e-9, max(1e-9, place))) for place in row] for row in uniform_NA.tolist()])


class StyleFold(StateFold):
    """Everybody's states, folded from ratings of answers in a style: one feature per arm."""

    def _features(self, turn: Turn) -> tuple[float, ...] | None:
        """Return one feature per arm, non-zero for the arm that was drawn; None if the answer counts for nobody's state."""
        rules, style = self._rules, turn.style
        allowed = turn.consent in (Consent.ADAPT, Consent.YES) and turn.tenant not in rules.without
        if style is None or not allowed or style.arm not in rules.names:
            return None
        return tuple(_ARM_FEATURE * (name == style.arm) for name in rules.names)


class StyleAdaptation(PersonAdaptation):
    """Implements `core.seams.StyleDealer` by each person's ratings. It never delays a request or feedback to catch up with the log.

    Args:
        log: delivers ratings, and which styles are approved.
        cache: stores states.
        config: the settings.
        consent: the highest consent level of a tenant's turns; a prior learns only from people with `Consent.YES`.
        clock: decides when a prior is fitted again.
        chance: a number in [0, 1) for each draw.

    Example::

        styles = StyleAdaptation(log, cache, config.adapt)
        await styles.start()
        styles.deal(("acme", "ann"), styles.texts([live]))
    """

    _states = StyleFold

    def __init__(
        self,
        log: PlacedLog,
        cache: PersonCache,
        config: AdaptConfig,
        *,
        consent: Callable[[str], Consent] = lambda _: Consent.YES,
        clock: Clock = wall_clock,
        chance: Callable[[], float] | None = None,
    ) -> None:
        super().__init__(log, cache, config, consent=consent, clock=clock)
        self._chance = chance or SystemRandom().random
        # sorted by arm, so that their order in the configuration does not matter
        self._styles = {style.arm: style for style in sorted(styles_of(config), key=lambda style: style.arm)}
        self._names = (NO_STYLE, *self._styles)
        self._approvals, self._read = StyleApprovals(config.styles.versions), Cursor(0)

    @property
    def none(self) -> str:
        return NO_STYLE

    @property
    def arms(self) -> Mapping[str, str]:
        return {NO_STYLE: NO_STYLE, **{style.name: arm for arm, style in self._styles.items()}}

    def texts(self, policies: Collection[PolicyVersion], *, shared: bool = True) -> Mapping[str, str]:
        holds = self._approvals.holds
        return {
            arm: style.text
            for arm, style in self._styles.items()
            if policies and all(holds(arm, policy, shared=shared) for policy in policies)
        }

    def deal(self, person: Person, arms: Collection[str]) -> Pick | None:
        if not arms:
            return None
        try:
            odds = self.odds(person, [NO_STYLE, *arms])
        except OstinatoError as error:
            self._warn_once(error)
            return None
        if not odds:
            return None
        place, edge = self._chance(), 0.0
        for arm, chance in odds.items():
            edge += chance
            if place < edge:
                return Pick(arm=arm, odds=odds)
        return Pick(arm=max(odds, key=odds.__getitem__), odds=odds)  # rounding left the sum just below 1

    def odds(self, person: Person, arms: Sequence[str]) -> dict[str, float]:
        """Return the probability with which a person's next conversation draws each of these arms; {} before the log was read.

        An arm that the person set by hand is certain, or no style if that arm is not among `arms`. Raises Unavailable.
        """
        fold, rules = self.fold, self._rules
        if fold is None or rules is None:
            return {}
        state = fold.state_or_new(person)
        if (held := _held(state, rules)) is not None:
            return {held if held in arms else NO_STYLE: 1.0}
        posterior = self._posterior(state, person, rules)
        places = [rules.names.index(arm) for arm in arms]
        mean_A = _ARM_FEATURE * posterior.mean_D[places]
        covariance_AA = _ARM_FEATURE**2 * posterior.covariance_DD[np.ix_(places, places)]
        odds_A = thompson_odds(mean_A, covariance_AA, self._config.styles.floor)
        return {arm: float(chance) for arm, chance in zip(arms, odds_A, strict=True)}

    def _posterior(self, state: PersonState, person: Person, rules: StateRules) -> PersonPosterior:
        state = replace(state, held=())  # a choice by hand is no rating
        return state.posterior(self.prior_of(person[0]), rules.regression)

    async def shown(self, person: Person, *, policies: Collection[PolicyVersion], shared: bool = True) -> StylesView:
        await self._caught_up()
        return self.view(person, policies=policies, shared=shared)

    def view(self, person: Person, *, policies: Collection[PolicyVersion], shared: bool = True) -> StylesView:
        """As `shown`, from the rows applied so far."""
        fold, rules, arms = self.fold, self._rules, [NO_STYLE, *self.texts(policies, shared=shared)]
        if fold is None or rules is None:
            return StylesView(styles=(), held=None, off=NotSteered.STYLES)
        off = None
        if person[0] in rules.without:
            off = NotSteered.TENANT
        elif self.held_out(person):
            off = NotSteered.HOLDOUT
        elif len(arms) == 1:
            off = NotSteered.STYLES
        state = fold.state_or_new(person)
        odds = self.odds(person, arms)
        told, names = self._posterior(state, person, rules), {arm: name for name, arm in self.arms.items()}
        styles: list[StyleView] = []
        for number, arm in enumerate(rules.names):
            more = _ARM_FEATURE * float(told.mean_D[number] - told.mean_D[0])
            covariance_DD = told.covariance_DD
            spread = covariance_DD[number, number] + covariance_DD[0, 0] - 2.0 * covariance_DD[number, 0]
            wide = _DEVIATIONS * _ARM_FEATURE * float(np.sqrt(max(0.0, spread)))
            chance = odds.get(arm, 0.0) if arm in arms else None
            styles.append(StyleView(name=names[arm], value=more, low=more - wide, high=more + wide, chance=chance))
        held = _held(state, rules)
        rated = state.evidence(state.prior(rules.prior, rules.regression), rules.regression).ratings
        return StylesView(styles=tuple(styles), held=None if held is None else names[held], off=off, ratings=rated)

    async def follow(self) -> None:
        """Apply the log's new rows, including new approvals. Raises Corrupt, StorageFull, Unavailable."""
        async for seq, row in self._log.read(self._read, {Alarm}):
            if isinstance(row, Alarm):
                self._approvals.take(row)
            self._read = seq
        await super().follow()

    async def refit(self) -> bool:
        """Fit the prior as for dials, but not if that has noise (`adapt.privacy`): styles then keep the flat prior and spend no budget."""
        return False if self._config.privacy.epsilon else await super().refit()

    def _rules_of(self, names: tuple[str, ...]) -> StateRules:
        return replace(super()._rules_of(names), violations=ViolationRules())


def _held(state: PersonState, rules: StateRules) -> str | None:
    """Return the arm that a person set by hand."""
    return next((rules.names[number] for number, value in state.held if value > 0.0), None)
