"""Simulated people at a gateway with `[adapt] mode = "dials"`: do answers come to suit each of them, beside those whose answers never lean?

Each simulated person wants more or less of eight attributes of an answer, in proportions of their own that nobody is told, and accepts an
answer with probability sigma(1.5 w . psi); psi are the attributes in standard deviations of answers to callers without a name, which never
lean. Reported is the mean of that probability, which is less noisy than the acceptances, by how many answers the person had rated.

    ostinato up --set adapt.mode=dials --set adapt.users=declared --set adapt.holdout=0.33 ...
    ostinato adapt fit
    python -m benchmarks.adaptation.people http://127.0.0.1:8321
"""

from __future__ import annotations

import argparse
import asyncio
from collections import defaultdict
from dataclasses import dataclass, field

import aiohttp
import numpy as np

from ostinato.adapt.fit import ATTRIBUTES, PROMPTS

BINS = ((0, 0), (1, 5), (6, 20), (21, 50), (51, 100))
TOKENS = 24
WARM_UP = 192  # answers without a name
STEEPNESS = 1.5


@dataclass
class SimulatedPerson:
    """A person's wishes [A], whether an answer ever leaned, and by bin the acceptance probabilities of the answers."""

    name: str
    seed: tuple[int, int]
    wish_A: np.ndarray
    leans: bool = False
    accepted: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))


async def ask(http: aiohttp.ClientSession, model: str, question: str, user: str | None) -> tuple[str, np.ndarray, bool]:
    """The turn, the answer's attributes, and whether it leaned."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": TOKENS,
        "temperature": 1.0,
    } | ({} if user is None else {"user": user})
    async with http.post("/v1/chat/completions", json=body) as reply:
        reply.raise_for_status()
        told = await reply.json()
        choice = told["choices"][0]
        text, ended = choice["message"]["content"] or "", choice["finish_reason"] == "stop"
        found = np.array([measure(text, ended) for measure in ATTRIBUTES.values()])
        return told["ostinato"]["turns"][0], found, "X-Ostinato-Adapted" in reply.headers


async def live(
    http: aiohttp.ClientSession, model: str, person: SimulatedPerson, ratings: int, scale: tuple[np.ndarray, np.ndarray]
) -> None:
    """One person's answers and ratings, one after another."""
    dice = np.random.default_rng(person.seed)
    mean_A, deviation_A = scale
    for number in range(ratings + 1):
        turn, found_A, leaned = await ask(http, model, str(dice.choice(PROMPTS)), person.name)
        person.leans |= leaned
        probability = float(
            1 / (1 + np.exp(-STEEPNESS * person.wish_A @ np.clip((found_A - mean_A) / deviation_A, -3, 3)))
        )
        place = next(i for i, (low, high) in enumerate(BINS) if low <= number <= high)
        person.accepted[place].append(probability)
        name = "accepted" if dice.random() < probability else "rejected"
        event = {"id": f"{person.name}-{number}", "target": turn, "name": name, "value": 1.0, "source": "human"}
        async with http.post("/v1/feedback", json=event) as reply:
            reply.raise_for_status()


def interval(means: list[float]) -> str:
    """Mean over people and its 95% interval, people as clusters."""
    if len(means) < 2:
        return "-"
    half = 1.96 * np.std(means, ddof=1) / np.sqrt(len(means))
    return f"{np.mean(means):.3f} [{np.mean(means) - half:.3f}, {np.mean(means) + half:.3f}] ({len(means)})"


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("url")
    parser.add_argument("--people", type=int, default=64)
    parser.add_argument("--ratings", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draws = np.random.default_rng(options.seed)
    async with aiohttp.ClientSession(options.url, timeout=aiohttp.ClientTimeout(total=300)) as http:
        async with http.get("/v1/models") as reply:
            model = (await reply.json())["data"][0]["id"]
        questions = [str(draws.choice(PROMPTS)) for _ in range(WARM_UP)]
        seen = [found for _, found, _ in await asyncio.gather(*(ask(http, model, each, None) for each in questions))]
        mean_A, deviation_A = np.mean(seen, 0), np.maximum(np.std(seen, 0), 1e-3)
        wishes = draws.normal(size=(options.people, len(ATTRIBUTES)))
        wishes /= np.linalg.norm(wishes, axis=1, keepdims=True)
        people = [SimulatedPerson(f"sim-{options.seed}-{i}", (options.seed, i), wish) for i, wish in enumerate(wishes)]
        await asyncio.gather(*(live(http, model, each, options.ratings, (mean_A, deviation_A)) for each in people))
    print("| rated before | answers lean | never lean (holdout) |\n|---|---|---|")
    for place, (low, high) in enumerate(BINS):
        sides = [
            [float(np.mean(each.accepted[place])) for each in people if each.leans is leans and each.accepted[place]]
            for leans in (True, False)
        ]
        if sides[0]:
            print(f"| {low} to {high} | {interval(sides[0])} | {interval(sides[1])} |")


if __name__ == "__main__":
    asyncio.run(main())
