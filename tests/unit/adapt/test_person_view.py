"""What a person is shown: values that are those of the answers, intervals that narrow, and words that say no more than is known."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from tests.deadlines import PATIENT_S
from tests.unit.adapt.people import RULES, cache_at

from ostinato.adapt.config import AdaptConfig
from ostinato.adapt.dials import _WORDS, DialAdaptation, person_view
from ostinato.adapt.fit import ATTRIBUTES
from ostinato.adapt.learner import PersonState, names_hash
from ostinato.adapt.state_fold import FeatureMoments
from ostinato.core.errors import Unavailable
from ostinato.core.records import Row
from ostinato.core.seams import Cursor
from ostinato.core.steering import NotSteered, PersonView
from ostinato.testing.log import MemoryLog

REGRESSION, PRIOR = RULES.regression, RULES.prior


def rated(count: int, seed: int = 0) -> PersonState:
    """Somebody who dislikes lists, and of whose other wishes nothing can be said."""
    rng, state = np.random.default_rng(seed), PersonState.new(names_hash(RULES.names), 3)
    for place in range(1, count + 1):
        leaning = float(rng.normal())
        state = state.rate(place << 12, (0.0, leaning, 0.0), 1, float(leaning < 0), PRIOR, REGRESSION)
    return state


def view(state: PersonState, cap: float = 0.1, off: NotSteered | None = None) -> PersonView:
    return person_view(state, RULES.prior, RULES, FeatureMoments(3), cap=cap, off=off)


def test_words_become_sure_as_the_interval_narrows() -> None:
    nothing, few, many = view(PersonState.new(names_hash(RULES.names), 3)), view(rated(14)), view(rated(120))
    assert [dial.words for dial in nothing.dials] == ["not known yet"] * 3
    assert (few.dials[1].words, many.dials[1].words) == ("fewer lists, perhaps", "fewer lists, sure")
    widths = [seen.dials[1].high - seen.dials[1].low for seen in (nothing, few, many)]
    assert widths == sorted(widths, reverse=True)
    assert many.dials[1].high < 0
    assert many.dials[0].words == "not known yet"
    assert (many.ratings, many.reset_at) == (120, None)


def test_values_times_scale_are_the_dials_that_answers_lean_by() -> None:
    state, moments = rated(120), FeatureMoments(3)
    posterior = state.posterior(PRIOR, REGRESSION)
    for cap in (0.1, 1e-4):
        told = view(state, cap)
        dials = posterior.dials(moments.fisher_KK, tokens=moments.tokens, nats=cap, strength=REGRESSION.strength)
        assert [dial.value * told.scale for dial in told.dials] == pytest.approx(dials, rel=1e-5)
    little = PersonState.new(names_hash(RULES.names), 3).hold({0: 0.1}, PRIOR, REGRESSION)
    assert view(little).scale == pytest.approx(1.0)
    assert view(little, 1e-5).scale < 0.5


def test_what_was_set_by_hand_is_told_so() -> None:
    state = rated(20).hold({0: 0.5, 1: 0.0, 2: -2.0}, PRIOR, REGRESSION)
    told = view(state, off=NotSteered.HOLDOUT).to_json()
    assert [(dial["set"], dial["words"]) for dial in told["dials"]] == [
        (0.5, "shorter answers, set by hand"),
        (0.0, "as the model has it, set by hand"),
        (-2.0, "less you, set by hand"),
    ]
    assert (told["active"], told["off"]["reason"]) == (False, "holdout")
    again = view(state.reset(99 << 12))
    assert (again.ratings, again.reset_at) == (0, 99 / 1e6)


def test_every_built_in_dial_has_words_and_every_reason_too() -> None:
    assert set(_WORDS) == set(ATTRIBUTES)
    assert all(reason.words for reason in NotSteered)


class Failing(MemoryLog):
    """A log whose reader fails for a reason that nobody expects, once it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = asyncio.Event()

    async def read(self, after: Cursor, kinds: set[type]) -> AsyncIterator[tuple[Cursor, Row]]:
        await self.fails.wait()
        raise RuntimeError("a fault of the program")
        yield  # pyright: ignore[reportUnreachable]


@pytest.mark.parametrize("ends", ["by a fault", "by closing"])
async def test_who_asks_while_states_are_followed_no_longer_is_told_and_does_not_wait(
    tmp_path: Path, ends: str
) -> None:
    log = Failing()
    found = DialAdaptation(log, cache_at(tmp_path), AdaptConfig(mode="dials"))
    await found.start()
    asked = asyncio.create_task(found.shown(("acme", "ann"), weights="0" * 64))
    await asyncio.sleep(0)
    if ends == "by a fault":
        log.fails.set()
    else:
        await found.close()
    async with asyncio.timeout(PATIENT_S):
        with pytest.raises(Unavailable, match="restart the gateway"):
            await asked
        waiting = list(found._waiting)
        with pytest.raises(Unavailable, match="restart the gateway"):
            await found.shown(("acme", "ann"), weights="0" * 64)
    assert found._waiting == waiting, "whom nobody answers is not kept"
    await found.close()
