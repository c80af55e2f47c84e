"""Sycophancy probes: what they measure on models that are swayed or not, how often they are wrong, and who is asked when."""

import math
from contextlib import asynccontextmanager

import numpy as np
import pytest

from ostinato.core.errors import BadRequest, Conflict, Unavailable
from ostinato.core.records import PolicyVersion
from ostinato.core.report import Incumbent, Incumbents, ItemScore, Verdict
from ostinato.evaluate.config import GateConfig, RunnerConfig
from ostinato.evaluate.evaluation import Evaluation
from ostinato.evaluate.opinions import FALSE_POSITIVE_RATE, TOLERANCE, OpinionProbes, opinion_pairs, opinion_shift
from ostinato.evaluate.suites import Item, Suite

V0, V7, V8, V9 = (PolicyVersion(number=n, hash=f"{n:02}" * 16) for n in (0, 7, 8, 9))
PAIRS = opinion_pairs()
SAID = {each.said_a: "A" for each in PAIRS} | {each.said_b: "B" for each in PAIRS}
KNOWS = {prompt: index % 3 - 1.0 for index, pair in enumerate(PAIRS) for prompt in (pair.said_a, pair.said_b)}


class Weights:
    """Models in slots: by slot the version, how far (in nats) a stated opinion moves it, and how far it prefers A anyway."""

    def __init__(self, **slots):
        self.slots, self.asked, self.trouble = slots, [], []

    @asynccontextmanager
    async def open(self, slot):
        yield Slot(self, slot)


class Slot:
    def __init__(self, weights, name):
        self.weights, self.name = weights, name

    async def served(self):
        return self.weights.slots[self.name][0]

    async def logprob(self, prompt, answer):
        self.weights.asked.append(self.name)
        if self.weights.trouble:
            raise self.weights.trouble.pop()
        _, swayed, leaning = self.weights.slots[self.name]
        return swayed * (SAID[prompt] == answer) + (answer == "A") * (leaning + KNOWS[prompt])


def probes(weights, **changes):
    return OpinionProbes(weights, RunnerConfig(**{"retry_pause_s": 0.001, "slot_timeout_s": 0.05} | changes))


def test_the_prompts_of_a_pair_differ_in_the_opinion_alone():
    assert len(PAIRS) == 80
    assert len(SAID) == 160
    for pair in PAIRS:
        different = [(a, b) for a, b in zip(pair.said_a, pair.said_b, strict=True) if a != b]
        assert different == [("A", "B")]


@pytest.mark.parametrize("leaning", [-3.0, 0.0, 3.0])
async def test_agreement_is_a_half_where_opinions_change_nothing_whatever_the_model_prefers(leaning):
    weights = Weights(still=(V7, 0.0, leaning), swayed=(V9, 4.0, leaning))
    still = await probes(weights).agreement("still", V7)
    assert still == pytest.approx([0.5] * 80)
    swayed = await probes(weights).agreement("swayed", V9)
    assert min(swayed) > 0.55
    contrary = await probes(Weights(still=(V7, -4.0, leaning))).agreement("still", V7)
    assert max(contrary) < 0.45


async def test_no_probability_at_all_is_no_opinion():
    class Silent(Slot):
        async def logprob(self, prompt, answer):
            return -math.inf

    weights = Weights(live=(V7, 0.0, 0.0))
    weights.open = lambda slot: entered(Silent(weights, slot))
    assert await probes(weights).agreement("live", V7) == (0.5,) * 80


@asynccontextmanager
async def entered(slot):
    yield slot


# ------------------------------------------------------------------------------------------------ the comparison


def versus(candidate, incumbent):
    return opinion_shift(candidate, incumbent, against=Incumbent.LIVE, policy=V7)


SHAPES = {
    "normal": lambda rng: rng.normal(0, 0.1, 80),
    "few move much": lambda rng: 0.1 - rng.exponential(0.1, 80),
    "one in ten moves": lambda rng: 0.03 - 0.3 * (rng.random(80) < 0.1) + rng.normal(0, 0.01, 80),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_candidate_at_the_tolerated_shift_is_reported_about_as_seldom_as_stated(shape):
    """4,000 candidates exactly at the tolerance, of which 4 may be reported; without the correction for skewness up to 57 are."""
    rng = np.random.default_rng(0)
    told = sum(versus(TOLERANCE + SHAPES[shape](rng), np.zeros(80)).excess.lower > 0 for _ in range(4_000))
    assert told <= 3 * 4_000 * FALSE_POSITIVE_RATE


def test_a_shift_of_ten_points_is_reported_and_a_fall_is_not():
    rng = np.random.default_rng(1)
    before = rng.beta(8, 4, 80)
    up, down = (versus(np.clip(before + by + rng.normal(0, 0.08, 80), 0, 1), before) for by in (0.1, -0.1))
    assert up.excess.lower > 0
    assert up.candidate - up.incumbent == pytest.approx(0.1, abs=0.03)
    assert down.excess.upper < 0
    with pytest.raises(ValueError, match="same ones"):
        versus(before, before[1:])


# ------------------------------------------------------------------------------------------------ in the gate


class Scores:
    suite = Suite("held-out", "5e1f", tuple(Item(f"i{n:03}", "f") for n in range(60)))

    def __init__(self, bad=()):
        self.bad = bad

    async def run(self, slot, policy, draws, items=None, *, seed=0):
        return [ItemScore(item=i.id, draw=d, score=float(policy not in self.bad)) for i in items for d in draws]


def evaluation(weights, bad=(), **changes):
    gate = GateConfig(margin=0.2, total_margin=0.2, first_draws=2, max_draws=2, sealed_share=0.0)
    return Evaluation([Scores(bad)], gate, opinions=probes(weights, **changes))


def reported(report):
    return [str(shift.against) for shift in report.opinions if shift.excess.lower > 0]


async def test_a_slow_drift_is_seen_against_the_first_release_though_never_against_the_one_before():
    """Each release is swayed a tenth of a nat more: less than is tolerated beside the release before it."""
    first, told = (V0, 0.0, 0.0), []
    weights = Weights(control=first, live=first, candidate=first)
    judge = evaluation(weights)
    for number in range(1, 21):
        policy = PolicyVersion(number=number, hash=f"{number:02}" * 16)
        weights.slots["candidate"] = (policy, 0.1 * number, 0.0)
        live = weights.slots["live"][0]
        report = await judge.run(policy, against=Incumbents(live=live, best=None, anchor=V0, round=number))
        assert report.verdict is Verdict.SHIP
        told.append(reported(report))
        weights.slots["live"] = weights.slots["candidate"]
    assert told[0] == []
    assert "anchor" in told[2]
    assert all(each == ["anchor"] for each in told[3:]), "live was a step behind each time"


async def test_each_version_is_asked_once_and_a_candidate_that_is_blocked_not_at_all():
    weights = Weights(control=(V0, 0.0, 0.0), live=(V7, 0.0, 0.0), candidate=(V8, 0.0, 0.0))
    judge, against = evaluation(weights), Incumbents(live=V7, best=None, anchor=V0, round=0)
    await judge.run(V8, against=against)
    assert len(weights.asked) == 3 * 320
    weights.slots["candidate"] = (V9, 9.0, 0.0)
    report = await judge.run(V9, against=against)
    assert weights.asked[3 * 320 :] == ["candidate"] * 320
    assert reported(report) == ["live", "anchor"]
    weights.asked.clear()
    blocked = await evaluation(weights, bad=(V9,)).run(V9, against=against)
    assert (blocked.verdict, blocked.opinions, weights.asked) == (Verdict.BLOCK, (), [])


async def test_a_gateway_that_cannot_score_holds_nothing_up_and_says_so(caplog):
    weights = Weights(control=(V0, 0.0, 0.0), live=(V7, 0.0, 0.0), candidate=(V9, 9.0, 0.0))
    weights.trouble = [BadRequest("maximum context")]
    report = await evaluation(weights).run(V9, against=Incumbents(live=V7, best=None, anchor=V0, round=0))
    assert (report.verdict, report.opinions) == (Verdict.SHIP, ())
    assert "evaluate.opinions: the gateway cannot score answers" in caplog.text


async def test_what_is_away_is_asked_again_and_another_version_is_no_evidence():
    weights = Weights(live=(V7, 0.0, 0.0))
    weights.trouble = [Unavailable("restarting")] * 3
    assert len(await probes(weights).agreement("live", V7)) == 80
    with pytest.raises(Conflict, match="has moved on to v9"):
        await probes(Weights(live=(V9, 0.0, 0.0))).agreement("live", V7)
    with pytest.raises(Unavailable, match="to serve v9"):
        await probes(weights).agreement("live", V9)

    class Moving(Slot):
        async def logprob(self, prompt, answer):
            self.weights.slots["live"] = (V9, 0.0, 0.0)
            return -1.0

    weights.open = lambda slot: entered(Moving(weights, slot))
    with pytest.raises(Conflict, match="has moved on to v9"):
        await probes(weights).agreement("live", V7)
