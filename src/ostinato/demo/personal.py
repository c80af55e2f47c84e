"""SIMULATED people with different preferences. Nobody in this file is a person, and no figure made with it is about people.

Each simulated person asks questions over HTTP and accepts an answer with a probability that rises with how well it matches their
preferences: most like more exclamation marks or more commas, with individual weights, and some prefer the opposite. The endpoint sees only
what they accept and reject.
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
"""Attributes by name: functions of an answer's text and of whether the model ended the answer itself."""
Measured = Mapping[str, Sequence[float]]
"""Attribute name -> its values over the model's usual answers."""

_STEEPNESS = 2.5  # slope of the logistic choice model, per standard deviation
_PREFERENCE_DEVIATION = 0.8  # standard deviation of preference weights between people; their mean is 1
_CLIP = 3.0  # attributes are clipped to this many standard deviations
_PATIENCE_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPerson:
    """A simulated person with a logistic choice model.

    `wishes`: a weight for each standardised attribute; their squares sum to 1. `usual`: by attribute, mean and standard deviation over the
    model's usual answers.

    Example: ``SimulatedPerson(id="sim-1-007", wishes={"commas": -1.0}, usual={"commas": (0.1, 0.05)})``
    """

    id: str
    wishes: Mapping[str, float]
    usual: Mapping[str, tuple[float, float]]

    def acceptance(self, text: str, measures: Measures) -> float:
        """Return the probability that the person accepts an answer."""
        liking = 0.0
        for name, wish in self.wishes.items():
            mean, deviation = self.usual[name]
            liking += wish * min(_CLIP, max(-_CLIP, (measures[name](text, False) - mean) / deviation))
        return 1.0 / (1.0 + math.exp(-_STEEPNESS * liking))


@dataclass(frozen=True, slots=True, kw_only=True)
class RatedAnswer:
    """An answer that a simulated person rated.

    `number`: from 1, per person. `at`: Unix time. `probability`: the probability with which the person accepted it.

    Example: ``RatedAnswer(person="sim-1-007", number=3, at=1e9, probability=0.7, accepted=True)``
    """

    person: str
    number: int
    at: float
    probability: float
    accepted: bool


@dataclass(slots=True, kw_only=True)
class PeopleStats:
    """The ratings of all simulated people, and the number of failed calls by kind."""

    rated: list[RatedAnswer] = field(default_factory=list[RatedAnswer])
    failures: Counter[str] = field(default_factory=Counter[str])


def balanced_ids(tenant: str, wave: int, people: int, share: float) -> list[str]:
    """Return names of a wave such that `people` of them are in the holdout of dials and `people` are not.

    Holdout membership follows from a hash of the name, for `share` of all names. Never returns for a share of 0 or 1.
    """
    remaining, names = {True: people, False: people}, list[str]()
    for number in itertools.count():
        name = f"sim-{wave}-{number:03d}"
        in_holdout = holdout_place((tenant, name)) < share
        if remaining[in_holdout]:
            remaining[in_holdout] -= 1
            names.append(name)
        if not any(remaining.values()):
            break
    return names


def make_people(ids: Sequence[str], measured: Measured, seed: int) -> list[SimulatedPerson]:
    """Return people whose weights are drawn from N(1, 0.8²), about one in ten negative, and scaled to unit length."""
    usual = {
        name: (statistics.fmean(values), statistics.pstdev(values) or 1.0) for name, values in sorted(measured.items())
    }
    people: list[SimulatedPerson] = []
    for id in ids:
        dice = random.Random(f"{seed}/{id}")
        drawn = {name: dice.gauss(1.0, _PREFERENCE_DEVIATION) for name in usual}
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
    """Run all people concurrently; each asks and rates `answers` times in sequence.

    Ratings are added to `stats` at once. A failed call is counted there and does not end the run.
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
