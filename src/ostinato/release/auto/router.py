"""Auto's router: turns and rewards in, the probability of each arm out.

`Router` is a fold of the log, without clock, IO or randomness of its own. `FoldedRouter` keeps it up to date with the log.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ostinato.core.arm_assignment import EpisodePicks
from ostinato.core.errors import OstinatoError
from ostinato.core.fold import FoldFollower
from ostinato.core.notices import Forgotten
from ostinato.core.records import Arm, Finish, Person, Pick, Reward, Row, Turn
from ostinato.core.seams import Clock, Cursor, Folds, Log
from ostinato.release.alarms import note
from ostinato.release.auto.config import Metric, RouterConfig
from ostinato.release.auto.offpolicy import PropensityTest
from ostinato.release.auto.posterior import Belief, Posterior, Worth, drawn, probabilities, utility, with_failures

_RELEASES = 16  # releases kept beside the arms' current ones, as a rollback goes to one of the last few
# the name of the posterior of a release's failures, kept beside those of its metrics: 1 for a failed turn, 0 for an answer
_FAILED = "failed"
_FAILURE_DOUBT = 0.1  # the prior's weight in turns: failures are rare, so a pseudo-failure counts for a tenth of a turn
_FORMAT = 4  # of a snapshot. 1: failures were among the rewards; 1, 2: forgotten people were kept; 3: draws were forgotten too early


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmView:
    """What the router knows of an arm.

    `utility` is that of its current release. `cost` is the mean per turn, 0 while none is known. `turns` and `failed`, the turns that ended
    in an error, are over all releases that the arm had.

    Example: ``ArmView(arm="live", utility=Belief(mean=0.4, deviation=0.02, users=311.0), cost=0.0, turns=812, failed=3)``
    """

    arm: str
    utility: Belief
    cost: float
    turns: int
    failed: int


class Router:
    """Moves shares to the arms with the highest utility: the reward, less the price of money and time.

    A failed answer counts as the least reward. A release's failure rate is learned from all its turns, and the reward of its answers from
    the rated ones: few are rated, while all failures are seen at once. A tenant's people without a name are one user, and so are, with
    `users = "verified"`, all people whose identity the tenant did not prove.

    The posteriors belong to a release, whichever arm has it: a release that goes from canary to live takes them along, and after a rollback
    the earlier release has its own again. A new release begins with those of the live release, or else of its arm's last release, weighted
    by `kept`. An external model is one release for ever.

    Limitation: rewards that rise and fall for everybody, say at night, while shares change are not modelled. Rewards of such a time count
    mostly for the arm that had the larger share then.

    Args:
        arms: the names of the arms; rows about other arms are ignored.
        config: the router's settings.
        episodes: how many episodes keep their arm. If the gateway kept a draw that is forgotten here, it would be counted again, and more
            often for an arm whose people come back.

    Example::

        router = Router(["live", "large"], RouterConfig(price=2.0))
        router.apply(turn)
        router.apply(reward)
        router.odds({"live", "large"})  # {"live": 0.83, "large": 0.17}
    """

    def __init__(self, arms: Sequence[str], config: RouterConfig, episodes: int = 100_000) -> None:
        self._names, self._config, self._episodes = tuple(arms), config, episodes
        self._worth = Worth(
            weights={str(metric): weight for metric, weight in config.weights.items()}, price=config.price
        )
        self.forget()

    def forget(self) -> None:
        """Start from scratch."""
        self.propensities = PropensityTest()
        self._arms = {arm: _Arm(arm) for arm in self._names}
        self._releases: OrderedDict[str, dict[str, Posterior]] = OrderedDict()  # by metric; the latest seen last
        self._live = ""
        self._waiting: OrderedDict[str, tuple[str, Person]] = OrderedDict()  # by turn: the release and the person
        self._drawn = EpisodePicks(self._episodes)
        self._odds: dict[frozenset[str], dict[str, float]] = {}

    def odds(self, available: Collection[str]) -> Mapping[str, float]:
        """Return the probabilities with which to draw each available arm, in the order of the settings; {} if none is available."""
        known = frozenset(available).intersection(self._arms)
        if known and known not in self._odds:
            utilities = {arm: self._utility(arm) for arm in self._arms if arm in known}
            self._odds[known] = probabilities(utilities, min(self._config.floor, 1.0 / len(known)))
        return self._odds.get(known, {})

    def draw(self, available: Collection[str], place: float) -> Pick | None:
        """See `core.seams.Dealer`."""
        odds = self.odds(available)
        return Pick(arm=drawn(odds, place), odds=dict(odds)) if odds else None

    def apply(self, row: Turn | Reward | Forgotten) -> None:
        """Apply a row of the log. Rows must come in the log's order."""
        if isinstance(row, Forgotten):
            for known in self._releases.values():
                for posterior in known.values():
                    posterior.forget(row.covers)
            waiting = self._waiting.items()
            self._waiting = OrderedDict((turn, known) for turn, known in waiting if not row.covers(known[1]))
        elif isinstance(row, Turn):
            if row.auto is not None and row.counts:
                self._turn(row, row.auto)
        elif (found := self._waiting.pop(row.turn, None)) is not None:
            self._measure(found[0], found[1], "reward", row.value)

    def measure(self, arm: str, person: Person, metric: Metric, value: float) -> None:
        """Count a metric's value for one turn that did not fail, for the arm's current release. A metric without a weight is ignored."""
        release = self._arms[arm].release
        self._known(release)
        self._measure(release, person, metric, value)
        if metric == "reward":
            self._measure(release, person, _FAILED, 0.0)

    def views(self) -> list[ArmView]:
        """Return the router's view of every arm."""
        return [
            ArmView(arm=name, utility=self._utility(name), cost=arm.mean_cost, turns=arm.turns, failed=arm.failed)
            for name, arm in self._arms.items()
        ]

    def state(self) -> dict[str, Any]:
        """Return the whole state as JSON types."""
        return {
            "format": _FORMAT,
            "rules": self._rules,
            "arms": {name: arm.state() for name, arm in self._arms.items()},
            "releases": [
                [release, {metric: posterior.state() for metric, posterior in known.items()}]
                for release, known in self._releases.items()
            ],
            "live": self._live,
            "waiting": [[turn, release, *person] for turn, (release, person) in self._waiting.items()],
            "drawn": [[tenant, episode, pick.arm, dict(pick.odds)] for tenant, episode, pick in self._drawn],
            "propensities": self.propensities.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned, as far as the same arms and metrics still exist; a new arm starts from scratch.

        Raises ValueError, TypeError, LookupError or AttributeError for anything else; call `forget` then.
        """
        if state.get("format") != _FORMAT:
            raise ValueError(f"a snapshot of format {state.get('format', 1)}; this router reads format {_FORMAT}")
        if state["rules"] != self._rules:
            raise ValueError(
                "low, high, longest_s, rho or users of release.auto have changed, on which the snapshot's sums depend"
            )
        for name, arm in self._arms.items():
            if name in state["arms"]:
                arm.restore(state["arms"][name])
        self._releases.clear()
        for release, known in state["releases"]:
            for metric, posterior in self._known(str(release)).items():
                if metric in known:
                    posterior.restore(known[metric])
        self._live = str(state["live"])
        self._waiting = OrderedDict(
            (turn, (release, (tenant, user))) for turn, release, tenant, user in state["waiting"]
        )
        self._drawn = EpisodePicks(self._episodes)
        for tenant, episode, arm, odds in state["drawn"]:
            self._drawn.put(tenant, episode, Pick(arm=arm, odds=dict(odds)))
        self.propensities.restore(state["propensities"])
        self._odds.clear()

    @property
    def _rules(self) -> list[float | str]:
        """The settings on which the sums depend: they hold rewards as fractions of the range, by user, weighted by rho."""
        config = self._config
        return [config.low, config.high, config.longest_s, config.rho, config.users]

    def _utility(self, name: str) -> Belief:
        arm = self._arms[name]
        known = self._releases.get(arm.release) or self._new_posteriors()
        beliefs = {metric: each.belief() for metric, each in known.items()}
        if "reward" in beliefs:
            beliefs["reward"] = with_failures(beliefs["reward"], beliefs[_FAILED], self._config.low)
        return utility(beliefs, arm.mean_cost, self._worth)

    def _new_posteriors(self) -> dict[str, Posterior]:
        config = self._config
        blank: dict[str, Posterior] = {}
        for metric in config.weights:
            low, high = (config.low, config.high) if metric == "reward" else (0.0, config.longest_s)
            blank[metric] = Posterior(low=low, high=high, rho=config.rho)
        if "reward" in blank:
            blank[_FAILED] = Posterior(low=0.0, high=1.0, rho=config.rho, doubt=_FAILURE_DOUBT)
        return blank

    def _known(self, release: str, like: str = "") -> dict[str, Posterior]:
        """Return the posteriors of a release; a new one starts with those of the release `like`, faded."""
        if release not in self._releases:
            self._releases[release] = self._new_posteriors()
            for metric, posterior in self._releases.get(like, {}).items():
                self._releases[release][metric].restore(posterior.state())
                self._releases[release][metric].fade(self._config.kept)
        self._releases.move_to_end(release)
        idle = [each for each in self._releases if each not in {arm.release for arm in self._arms.values()}]
        for each in idle[:-_RELEASES]:
            if each != release:
                del self._releases[each]
        return self._releases[release]

    def _measure(self, release: str, person: Person, metric: str, value: float) -> None:
        posterior = self._releases.get(release, {}).get(metric)
        if posterior is not None:
            posterior.add(person, value)
            self._odds.clear()

    def _turn(self, turn: Turn, pick: Pick) -> None:
        self._draw(turn, Pick(arm=pick.arm, odds=pick.odds))
        arm = self._arms.get(pick.arm)
        if arm is None:
            return
        known = turn.verified or self._config.users == "declared"
        person = turn.person if known else (turn.tenant, "")
        release = turn.spans[-1].policy.hash if turn.spans else arm.release
        self._known(release, self._live or arm.release)
        arm.release = release
        if turn.arm is Arm.LIVE and turn.spans:
            self._live = release
        arm.turns += 1
        if pick.cost is not None:
            arm.cost, arm.priced = arm.cost + pick.cost, arm.priced + 1.0
        if turn.finish == Finish.ERROR:
            arm.failed += 1
            self._measure(release, person, _FAILED, 1.0)
        elif turn.finish.trainable:
            self._measure(release, person, _FAILED, 0.0)
            # the duration of a stopped answer says how long people waited, not how long it takes
            if turn.finish.complete:
                self._measure(release, person, "seconds", turn.ended_at - turn.started_at)
            self._waiting[turn.id] = (release, person)
            if len(self._waiting) > self._config.waiting:
                self._waiting.popitem(last=False)
        self._odds.clear()

    def _draw(self, turn: Turn, pick: Pick) -> None:
        """Count an episode's draw once, and again whenever its arm was not available and another was drawn."""
        if self._drawn.get(turn.tenant, turn.episode) != pick:
            self.propensities.add(pick.arm, pick.odds)
        self._drawn.put(turn.tenant, turn.episode, pick)


class _Arm:
    """One arm's sums, and the hash of the weights that answered its last turn (its name before the first turn or for an external model)."""

    def __init__(self, name: str) -> None:
        self.release = name
        self.turns = self.failed = 0
        self.cost = self.priced = 0.0

    @property
    def mean_cost(self) -> float:
        return self.cost / self.priced if self.priced else 0.0

    def state(self) -> dict[str, Any]:
        return {"release": self.release, "counts": [self.turns, self.failed, self.cost, self.priced]}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.release = str(state["release"])
        turns, failed, cost, priced = state["counts"]
        self.turns, self.failed, self.cost, self.priced = int(turns), int(failed), float(cost), float(priced)


# ---------------------------------------------------------------- the router on the log


logger = logging.getLogger(__name__)

NAME = "auto"
PROPENSITY_ALARM = f"{NAME}:propensities"
"""Name of the alarm that is raised once the logged propensities are rejected."""


class _Fold:
    """The router as a fold of the log."""

    kinds = frozenset({Turn, Reward, Forgotten})

    def __init__(self, router: Router) -> None:
        self._router = router

    async def begin(self, horizon: Cursor) -> Cursor:
        self._router.forget()
        return horizon

    def apply(self, seq: Cursor, row: Row) -> None:
        assert isinstance(row, Turn | Reward | Forgotten)
        self._router.apply(row)

    def state(self) -> dict[str, Any]:
        return {"router": self._router.state()}

    def restore(self, state: Mapping[str, Any]) -> bool:
        self._router.restore(state["router"])
        return True


class FoldedRouter:
    """A router kept up to date with a log. Only one process, the one that serves, may write.

    Args:
        log: the log to read, and to write an alarm to if the logged propensities are rejected.
        folds: where the router's state is saved.
        clock: Unix seconds, for alarms.
        arms: the names of the arms.
        config: the router's settings.
        episodes: how many episodes keep their arm (`serve.auto.episodes`).

    Example::

        folded = FoldedRouter(log, folds, clock, ["live", "large"], RouterConfig())
        await folded.catch_up()
        folded.router.odds({"live", "large"})
    """

    def __init__(
        self,
        log: Log,
        folds: Folds,
        clock: Clock,
        arms: Sequence[str],
        config: RouterConfig,
        episodes: int = 100_000,
    ) -> None:
        self.router = Router(arms, config, episodes)
        self._log, self._clock, self._config = log, clock, config
        self._follower = FoldFollower(log, _Fold(self.router), name=NAME, folds=folds, every=config.fold_rows)
        self._told = False

    async def catch_up(self, *, telling: bool = True) -> None:
        """Read the new rows. With `telling` (for the writer only), also save regularly and write alarms. Raises Corrupt, StorageFull."""
        await self._follower.catch_up(saving=telling)
        if telling:
            await self._tell()

    async def save(self) -> None:
        """Save the router's state. Raises StorageFull; the previous snapshot is kept then."""
        await self._follower.save()

    async def run(self) -> None:
        """Keep up with the log until cancelled. Errors are logged and retried; the odds then stay as they are."""
        while True:
            try:
                await self.catch_up()
            except OstinatoError as error:
                logger.warning("auto: the shares stay as they are, the log was not read to its end: %s", error)
            await asyncio.sleep(self._config.poll_s)

    async def _tell(self) -> None:
        """Raise the alarm if the logged propensities are rejected."""
        if not self._told and self.router.propensities.wrong(self._config.alpha):
            why = "the logged propensities of some arms do not match the draws; trust no estimate of the arms that `ostinato auto` names"
            await note(self._log, PROPENSITY_ALARM, raised=True, why=why, at=self._clock())
            self._told = True
