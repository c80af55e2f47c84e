"""SIMULATED people with different wishes. Nobody in this file is a person, and no figure made with it is about people.

Each asks questions over HTTP, reads each answer, and accepts it with a probability that rises with how much it is to their liking: most
like more exclamation marks or more commas, each in proportions of their own, and some the opposite. The endpoint sees what they accept and
reject alone.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp

from ostinato.core.arm_assignment import holdout_place
from ostinato.core.clock import wall_clock
from ostinato.demo.users import Failed, ask, send_feedback

Measures = Mapping[str, Callable[[str, bool], float]]
"""Attributes of an answer by name, each of its text and whether the model ended it itself."""
Measured = Mapping[str, Sequence[float]]
"""Each attribute of each of the model's usual answers."""

_STEEPNESS = 2.5  # of the logistic choice, per standard deviation of liking
_OWN = 0.8  # the deviation of people's wishes for an attribute, of which their mean is 1
_MOST = 3.0  # standard deviations to which an answer's attributes are clipped
_PATIENCE_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPerson:
    """A simulated person with a logistic choice model: a weight for each attribute, in standard deviations of the usual answers. Their
    squares sum to 1. `usual`: by attribute, mean and standard deviation of the usual answers.

    Example: ``SimulatedPerson(id="sim-1-007", wishes={"commas": -1.0}, usual={"commas": (0.1, 0.05)})``
    """

    id: str
    wishes: Mapping[str, float]
    usual: Mapping[str, tuple[float, float]]

    def acceptance(self, text: str, measures: Measures) -> float:
        """The probability that they accept an answer."""
        liking = 0.0
        for name, wish in self.wishes.items():
            mean, deviation = self.usual[name]
            liking += wish * min(_MOST, max(-_MOST, (measures[name](text, False) - mean) / deviation))
        return 1.0 / (1.0 + math.exp(-_STEEPNESS * liking))


@dataclass(frozen=True, slots=True, kw_only=True)
class RatedAnswer:
    """An answer that a simulated person rated: their `number`-th, from 1, at a Unix time. `probability`: that of accepting it.

    Example: ``RatedAnswer(person="sim-1-007", number=3, at=1e9, probability=0.7, accepted=True)``
    """

    person: str
    number: int
    at: float
    probability: float
    accepted: bool


@dataclass(slots=True, kw_only=True)
class PeopleStats:
    """What the simulated people rated, and what failed, by kind."""

    rated: list[RatedAnswer] = field(default_factory=list[RatedAnswer])
    failures: Counter[str] = field(default_factory=Counter[str])


def balanced_ids(tenant: str, wave: int, people: int, share: float) -> list[str]:
    """Names of a wave of which `people` are held out from dials by their hash, where `share` of all are, and as many are not. Endless for a
    share of 0 or 1.
    """
    left, found = {True: people, False: people}, list[str]()
    for number in itertools.count():
        name = f"sim-{wave}-{number:03d}"
        held = holdout_place((tenant, name)) < share
        if left[held]:
            left[held] -= 1
            found.append(name)
        if not any(left.values()):
            break
    return found


def make_people(ids: Sequence[str], measured: Measured, seed: int) -> list[SimulatedPerson]:
    """People of whom most wish for more of each attribute: weights around 1, by a normal distribution that has one in ten below 0."""
    usual = {name: (statistics.fmean(told), statistics.pstdev(told) or 1.0) for name, told in sorted(measured.items())}
    people: list[SimulatedPerson] = []
    for id in ids:
        dice = random.Random(f"{seed}/{id}")
        drawn = {name: dice.gauss(1.0, _OWN) for name in usual}
        length = math.hypot(*drawn.values())
        wishes = {name: wish / length for name, wish in drawn.items()}
        people.append(SimulatedPerson(id=id, wishes=wishes, usual=usual))
    return people


async def run_people(
    base_url: str,
    people: Sequence[SimulatedPerson],
    prompts: Sequence[str],
    measures: Measures,
    *,
    answers: int,
    seed: int,
    model: str,
    tokens: int,
    stats: PeopleStats,
) -> None:
    """Let all people ask and rate at the same time, each `answers` times, one after the other; what they rate goes to `stats` at once. A
    failed call is counted there and ends nothing.
    """

    async def rate(person: SimulatedPerson, number: int, dice: random.Random) -> None:
        request = {
            "model": model,
            "user": person.id,
            "messages": [{"role": "user", "content": dice.choice(prompts)}],
            "stream": True,
            "max_tokens": tokens,
            "temperature": 1.0,
            "top_p": 1.0,
        }
        answer = await ask(http, request)
        probability = person.acceptance(answer.text, measures)
        accepted = dice.random() < probability
        event = {
            "id": f"{person.id}-{number}",
            "target": answer.turn,
            "name": "accepted",
            "value": accepted,
            "source": "human",
        }
        await send_feedback(http, event)
        stats.rated.append(
            RatedAnswer(person=person.id, number=number, at=wall_clock(), probability=probability, accepted=accepted)
        )

    async def live(person: SimulatedPerson) -> None:
        dice = random.Random(f"{seed}/{person.id}/answers")
        for number in range(1, answers + 1):
            try:
                await rate(person, number, dice)
            except Failed as failure:
                stats.failures[failure.kind] += 1
                await asyncio.sleep(0.5)

    timeout = aiohttp.ClientTimeout(total=_PATIENCE_S)
    async with (
        aiohttp.ClientSession(base_url, timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http,
        asyncio.TaskGroup() as group,
    ):
        for person in people:
            group.create_task(live(person))
