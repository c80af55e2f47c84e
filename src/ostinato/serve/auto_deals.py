"""Which of Auto's arms answers an episode: drawn once, with the probabilities of that moment, and then kept."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import dataclass
from random import SystemRandom

from ostinato.core.arm_assignment import EpisodePicks
from ostinato.core.errors import Unavailable
from ostinato.core.generation import Chunk
from ostinato.core.records import Arm, Pick, Turn
from ostinato.core.seams import Dealer
from ostinato.serve.config import AutoArm, AutoConfig
from ostinato.serve.outside_models import Breaker, OutsideModel, OutsideQuery, key_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Deal:
    """An episode's arm, and the draw that is logged with its turns.

    Example: ``Deal(arm=AutoArm(name="live", slot="live"), pick=Pick(arm="live", odds={"live": 0.7, "large": 0.3}))``
    """

    arm: AutoArm
    pick: Pick

    @property
    def release(self) -> Arm:
        """The arm under which the episode's turns are logged."""
        return Arm.OUTSIDE if self.arm.slot is None else Arm(self.arm.slot)

    @property
    def propensity(self) -> float:
        """The probability of the draw."""
        return self.pick.odds[self.pick.arm]


class Deals:
    """Auto's arms. An episode keeps its arm until that is unavailable; then another is drawn, and that draw's probabilities are logged.

    An unavailable arm is not among the odds, so the logged odds are those of the actual draw. An arm is unavailable if its slot is empty,
    its release's trial is over, its outside model fails or is busy, or it may not answer the tenant. A call that fails outside counts as
    that arm's failure, and a replacement is drawn among the other arms.

    Args:
        config: the arms.
        dealer: draws among the available arms.
        chance: returns a uniform number in [0, 1) for each draw.
        keys: the environment variables that hold the outside models' keys; None: `os.environ`.

    Raises:
        BadConfig: a key's variable is not set.
    """

    def __init__(
        self,
        config: AutoConfig,
        dealer: Dealer,
        *,
        chance: Callable[[], float] | None = None,
        keys: Mapping[str, str] | None = None,
    ) -> None:
        self._config = config
        self._dealer = dealer
        self._chance = chance or SystemRandom().random
        self._arms = {arm.name: arm for arm in config.arms}
        environment = os.environ if keys is None else keys
        self._outside = {
            arm.name: OutsideModel(
                arm,
                key_of(arm, environment, f"serve.auto: arm {arm.name!r}"),
                _breaker(config),
                who=f"auto: arm {arm.name}",
            )
            for arm in config.arms
            if arm.slot is None
        }
        self._episodes = EpisodePicks(config.episodes)

    @property
    def name(self) -> str:
        """The model name that clients send."""
        return self._config.name

    async def start(self) -> None:
        """Start the outside models' clients."""
        for model in self._outside.values():
            await model.start()

    async def close(self) -> None:
        """Close the outside models' connections."""
        for model in self._outside.values():
            await model.close()

    def deal(self, tenant: str, episode: str, releases: Collection[str], failed: Collection[str] = frozenset()) -> Deal:
        """Return an episode's arm, given the slots that hold a release and the arms that have already failed to answer this call.

        Raises Unavailable if no arm is available.
        """
        there = [
            name for name, arm in self._arms.items() if name not in failed and self._available(arm, tenant, releases)
        ]
        pick = self._episodes.get(tenant, episode)
        if pick is None or pick.arm not in there:
            pick = self._dealer.draw(there, self._chance())
            if pick is None:
                raise Unavailable("None of Auto's arms can answer now; try again in a moment.")
        self._episodes.put(tenant, episode, pick)
        return Deal(arm=self._arms[pick.arm], pick=pick)

    def chunks(self, deal: Deal, asked: OutsideQuery) -> AsyncIterator[Chunk]:
        """Return an outside model's answer."""
        return self._outside[deal.arm.name].chunks(asked)

    def restore(self, turn: Turn) -> None:
        """Remember an episode's arm from a logged turn."""
        if turn.auto is not None and turn.auto.arm in self._arms:
            self._episodes.put(turn.tenant, turn.episode, Pick(arm=turn.auto.arm, odds=turn.auto.odds))

    def _available(self, arm: AutoArm, tenant: str, releases: Collection[str]) -> bool:
        if arm.tenants and tenant not in arm.tenants:
            return False
        return arm.slot in releases if arm.slot is not None else self._outside[arm.name].available


def _breaker(config: AutoConfig) -> Breaker:
    return Breaker(failures=config.failures, rest_s=config.rest_s, longest_s=config.longest_rest_s)
