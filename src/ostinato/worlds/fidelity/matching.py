"""Makes the task mix the same on both sides: each prompt as often in production as in simulation. Pure.

How often each prompt comes is a difference of the traffic. Once it is removed, what is left is what the environment gives away.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ostinato.core.errors import BadRequest
from ostinato.worlds.fidelity.observation import Observation


@dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """Paired observations: those at the same index on both sides were asked the same. `left_out` counts each side's unpaired ones.

    Example: ``Matched(production=(a,), simulation=(b,), prompts=1, left_out=(14, 3))`` where ``a.asked == b.asked``
    """

    production: tuple[Observation, ...]
    simulation: tuple[Observation, ...]
    prompts: int
    left_out: tuple[int, int]


def match_prompts(production: Sequence[Observation], simulation: Sequence[Observation], *, seed: int = 0) -> Matched:
    """For each prompt that both sides have, draw equally many observations from each side, from as many groups as there are.

    The draw does not depend on features. Raises BadRequest if no prompt is shared.
    """
    rng = np.random.default_rng(seed)
    sides = [_by_prompt(side) for side in (production, simulation)]
    shared = sorted(set(sides[0]) & set(sides[1]))
    if not shared:
        raise BadRequest(_nothing_shared(sides[0], sides[1]))
    pairs: list[tuple[Observation, Observation]] = []
    for prompt in shared:
        first, second = (_spread(side[prompt], rng) for side in sides)
        many = min(len(first), len(second))
        order = rng.permutation(many)
        pairs += [(first[at], second[int(other)]) for at, other in enumerate(order)]
    return Matched(
        production=tuple(first for first, _ in pairs),
        simulation=tuple(second for _, second in pairs),
        prompts=len(shared),
        left_out=(len(production) - len(pairs), len(simulation) - len(pairs)),
    )


def _by_prompt(side: Sequence[Observation]) -> dict[str, list[Observation]]:
    found: defaultdict[str, list[Observation]] = defaultdict(list)
    for each in side:
        if each.asked:
            found[each.asked].append(each)
    return dict(found)


def _spread(observations: Sequence[Observation], rng: np.random.Generator) -> list[Observation]:
    """The observations in random order, every group once before any group twice, because groups are the sampling units."""
    taken: defaultdict[str, int] = defaultdict(int)
    ranked: list[tuple[int, float, int]] = []
    for at in rng.permutation(len(observations)).tolist():
        group = observations[at].group
        ranked.append((taken[group], float(rng.random()), at))
        taken[group] += 1
    return [observations[at] for _, _, at in sorted(ranked)]


def _nothing_shared(first: dict[str, list[Observation]], second: dict[str, list[Observation]]) -> str:
    for name, side in (("production", first), ("simulation", second)):
        if not side:
            return (
                f"no observation of {name} says what was asked: only episodes do, not machines; write them again with "
                "`ostinato worlds episodes`, or leave --same-prompts out"
            )
    return (
        f"nothing was asked on both sides: {len(first)} prompts of production, {len(second)} of simulation, none of them the same; "
        "take episodes of the same tasks, or leave --same-prompts out"
    )
