"""What an operator is told of dials: one line of `ostinato status`, its JSON, the page's section and the metrics."""

import asyncio
from dataclasses import asdict, replace
from typing import ClassVar

import numpy as np
import pytest
from tests.fakes.page_world import RUN

from ostinato.adapt.config import AdaptConfig
from ostinato.core.arm_assignment import holdout_place
from ostinato.core.records import Reward, SteeringBasis
from ostinato.core.steering import Basis, Steered
from ostinato.launch.views.numbers import LearningNumbers, _dials_of
from ostinato.launch.views.progress import Progress
from ostinato.launch.workers import serve as serve_worker
from ostinato.release.ledger import State
from ostinato.status.dials import REFUSED, UNFITTED, cautions, dials_line, dials_now, effect_sentence, refused_bases
from ostinato.status.progress_lines import last_lines
from ostinato.status.summary import Summary
from ostinato.testing.records import a_turn
from ostinato.web.page.templates import StaticFiles, Templates
from ostinato.web.page.views import dials_shown

ON = AdaptConfig(mode="dials", holdout=0.5)
TURN = replace(a_turn(), verified=True)
WEIGHTS = TURN.versions[0].hash
BASIS = SteeringBasis.of(Basis(("brief",), np.arange(3), np.ones((1, 3), np.float32), WEIGHTS), at=0.0)
LEAN = Steered(basis=BASIS.hash, dials=(0.5,), cap=0.1, budget=3.0, tokens=10, kl=0.3, features=(0.1,))
SPREAD = {"kind": "dials", "at": 1.0, "people": 30, "resets": 2, "dials": {"brief": [-1.0, -0.5, 0.1, 0.5, 1.0]}}


def folded(people: int, basis: bool = True) -> Summary:
    """Three turns of each; with dials two of them are accepted, in the holdout one."""
    seen, rows = Summary(), [BASIS] if basis else []
    for number in range(3 * people):
        user = f"u{number // 3}"
        held = holdout_place((TURN.tenant, user)) < 0.5
        turn = replace(
            TURN, id=f"t{number}:0", user=user, started_at=10.0 + number, steered=None if held or not basis else LEAN
        )
        good = number % 3 < (1 if held else 2) if number % 5 else number % 2 == 0
        rows += [turn, Reward(turn=turn.id, value=1.0 if good else -1.0, function="f@1", signals=("s",), at=20.0)]
    for cursor, row in enumerate(rows, start=1):
        seen.apply(cursor, row)
    return seen


def html(found) -> str:
    return Templates(StaticFiles()).render("_dials.html", {"dials": dials_shown(found)})


def test_nothing_is_told_while_dials_are_off():
    assert dials_now(AdaptConfig(), folded(10), WEIGHTS, [SPREAD]) is None


def test_the_effect_has_its_interval_everywhere():
    found = dials_now(ON, folded(240), WEIGHTS, [{"kind": "swapped"}, SPREAD, {"kind": "lent"}])
    effect = found.effect
    assert 0.0 < effect.lower < effect.difference < effect.upper
    interval = f"{100 * effect.difference:+.1f} pp, 95% [{100 * effect.lower:+.1f}, {100 * effect.upper:+.1f}]"
    line = dials_line(found)
    assert "\n" not in line
    for words in (
        interval,
        f"of {effect.people} people lean",
        "0.030 nats a token",
        "10% of an answer's budget",
        "2 resets",
    ):
        assert words in line, words
    page = html(found)
    for words in (interval, "Held out", "How people&#39;s dials differ", "arm-control", "arm-live", "-1.00", "brief"):
        assert words in page.replace("'", "&#39;"), words
    assert not any(f"u{number}" in page for number in range(240)), "no names"
    assert {curve.arm for curve in found.curves} == {"dials", "holdout"}
    assert asdict(found)["effect"]["holdout"] == effect.holdout


def test_what_is_missing_is_said_with_the_remedy():
    for live in (None, "f" * 64):
        assert UNFITTED in dials_line(dials_now(ON, Summary(), live, ()))
        assert "ostinato adapt fit" in html(dials_now(ON, Summary(), live, ()))
    assert effect_sentence(dials_now(ON, folded(0), WEIGHTS, ())) == "nothing to compare yet"
    few = dials_now(ON, folded(10), WEIGHTS, ())
    assert "too few people for an interval" in dials_line(few)
    assert few.effect.lower is None
    shipped = dials_now(ON, folded(10), "f" * 64, ())
    assert cautions(shipped) == [UNFITTED]
    assert cautions(few) == []


def test_a_holdout_that_grew_is_told():
    found = dials_now(ON.model_copy(update={"holdout": 0.8}), folded(60), WEIGHTS, ())
    assert "had dials before adapt.holdout was raised" in dials_line(found)


@pytest.mark.parametrize("dials", [None, RUN.dials])
def test_the_section_is_on_the_page_for_runs_with_dials_alone(dials):
    from ostinato.web.page.views import now_shown, state_of

    run = replace(RUN, dials=dials)
    page = Templates(StaticFiles()).render("_now.html", {**now_shown(run), "run": run, "state": state_of(run)})
    assert ("dials-title" in page) == (dials is not None)


@pytest.mark.parametrize("styles", [(), RUN.styles])
def test_styles_with_their_answers_and_effects_are_on_the_page_where_people_were_dealt_any(styles):
    from ostinato.web.page.views import now_shown, state_of

    run = replace(RUN, styles=styles)
    page = Templates(StaticFiles()).render("_now.html", {**now_shown(run), "run": run, "state": state_of(run)})
    for told in ("styles-title", "concise@a60d30c4", "3,418", "+0.062", "+0.018 to +0.106"):
        assert (told in page) == bool(styles), told


def test_a_basis_that_the_gateway_does_not_use_is_no_basis():
    lines = [{"kind": "bases", "refused": []}, SPREAD, {"kind": "bases", "refused": [WEIGHTS, "f" * 64]}, SPREAD]
    found = dials_now(ON, folded(60), WEIGHTS, lines)
    assert (found.fitted, found.refused) == (False, True)
    assert REFUSED in dials_line(found)
    assert "moves protected tokens" in html(found)
    assert effect_sentence(dials_now(ON, folded(0), WEIGHTS, lines)) == REFUSED
    mended = dials_now(ON, folded(60), WEIGHTS, [*lines, {"kind": "bases", "refused": ["f" * 64]}])
    assert (mended.fitted, mended.refused) == (True, False)
    assert cautions(mended) == []


async def test_a_basis_that_is_not_used_is_told_again_while_the_gateway_writes_of_other_things(tmp_path, monkeypatch):
    """Readers see the newest 128 KiB. What is used again is not told for ever."""
    path, seen = tmp_path / "serve.jsonl", []
    progress = Progress(path)

    class Adaptation:
        refused: ClassVar = {WEIGHTS: None}

        async def spread(self):
            seen.append(refused_bases(last_lines(path)))
            for _ in range(40):
                progress.write("swapped", filler="x" * 1000)
            if len(seen) == 24:
                self.refused.clear()
            if len(seen) == 30:
                raise asyncio.CancelledError

    monkeypatch.setattr(serve_worker, "_DIALS_POLL_S", 0.0)
    with pytest.raises(asyncio.CancelledError):
        await serve_worker.record_dials(Adaptation(), progress)
    assert seen == [frozenset({WEIGHTS})] * 24 + [frozenset()] * 6


def test_the_metrics_and_the_gateways_own_lines_agree(tmp_path):
    progress = Progress(tmp_path / "serve.jsonl")
    numbers = LearningNumbers(
        summary=folded(60), adapt=ON, serve=tmp_path / "serve.jsonl", ledger=State(releases=(TURN.versions[0],))
    )
    for refused, fitted in (([], True), ([WEIGHTS], False), ([], True)):
        progress.bases(refused)
        assert _dials_of(numbers).fitted is fitted
