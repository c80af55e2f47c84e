"""How people's dials differ, told to an operator without anybody's own value."""

from pathlib import Path

import numpy as np
import pytest
from tests.unit.adapt.people import BASIS, about, cache_at, log_of, steered_turn

from ostinato.adapt.config import AdaptConfig
from ostinato.adapt.dials import SHOWN_PEOPLE, DialAdaptation
from ostinato.core.records import Row

CONFIG = AdaptConfig(mode="dials", users="declared", holdout=0.0)


async def adaptation_of(people: int, path: Path, config: AdaptConfig = CONFIG) -> DialAdaptation:
    rows: list[Row] = []
    for number in range(4 * people):
        turn = steered_turn(f"t{number}:0", ("acme", f"user {number % people}"), 10.0 + number)
        rows += [turn, about(turn, f"s{number}", value=float(number % 3 == 0))]
    found = DialAdaptation(await log_of(rows), cache_at(path), config)
    await found.follow()
    return found


async def test_the_spread_is_the_quantiles_of_the_dials_that_answers_get(tmp_path: Path) -> None:
    found = await adaptation_of(30, tmp_path)
    spread = await found.spread()
    assert spread is not None
    assert (spread.people, set(spread.dials)) == (30, set(BASIS.names))
    got = []
    for number in range(30):
        steering = found.steering(("acme", f"user {number}"), weights=BASIS.weights, verified=False)
        assert steering is not None
        got.append(steering.dials)
    wanted = np.quantile(np.array(got), [0.1, 0.25, 0.5, 0.75, 0.9], axis=0).T
    for name, quantiles in zip(BASIS.names, wanted, strict=True):
        assert spread.dials[name] == pytest.approx(quantiles.tolist())
        assert spread.dials[name][0] < spread.dials[name][-1]


async def test_of_few_people_nothing_is_told_and_of_the_holdout_neither(tmp_path: Path) -> None:
    assert await (await adaptation_of(SHOWN_PEOPLE - 1, tmp_path / "few")).spread() is None
    held = CONFIG.model_copy(update={"holdout": 0.99})
    assert await (await adaptation_of(30, tmp_path / "held", held)).spread() is None
    assert await DialAdaptation(await log_of([]), cache_at(tmp_path / "none"), CONFIG).spread() is None
