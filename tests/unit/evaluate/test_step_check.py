"""A training step's test before it answers those who follow training: beside live on a few items, then the quality bars."""

import pytest

from ostinato.core.errors import Unavailable
from ostinato.core.records import PolicyVersion
from ostinato.core.report import ItemScore
from ostinato.evaluate.config import BarConfig, GateConfig
from ostinato.evaluate.evaluation import SMOKE_ITEMS, StepCheck
from ostinato.evaluate.gate import check_bars, items_in_round, sealed_ids
from ostinato.evaluate.suites import Item, Suite

LIVE, STEP, NEXT = (PolicyVersion(number=n, hash=f"{n}" * 64) for n in (3, 4, 5))
GATE = GateConfig(items_per_round=0, sealed_share=0.2, first_draws=2)


class Answers:
    """Runs a suite: `worth` says by version and draw how many of the items that were asked for, from the first on, are well answered."""

    def __init__(self, name, count, worth, formed=None):
        self.suite = Suite(name, f"{count:064x}", tuple(Item(f"{name}{n}", "f") for n in range(count)))
        self.worth, self.formed, self.calls = worth, formed or {}, []

    async def run(self, slot, policy, draws, items=None, *, seed=0):
        self.calls.append((slot, policy.number, draws, tuple(item.id for item in items), seed))
        if self.worth.get(policy) is None:
            raise Unavailable("the slot is away")
        return [
            ItemScore(
                item=item.id,
                draw=draw,
                score=float(place < self.worth[policy] * len(items)),
                formed=place < self.formed.get(policy, 1.0) * len(items),
                seconds=0.1,
            )
            for draw in draws
            for place, item in enumerate(items)
        ]


def check(runner, *aside, bars=()):
    return StepCheck([runner], GATE, bars=bars, aside=aside, slot="learner-test")


@pytest.mark.parametrize(
    ("live", "step", "why"),
    [
        ((1.0, 1.0), (1.0, 1.0), ""),
        ((0.5, 1.0), (0.25, 1.0), ""),
        ((1.0, 1.0), (0.4, 1.0), ""),  # 10 of 16 lost: one chance in 512, but it is tested at every step
        ((1.0, 1.0), (0.3, 1.0), "smoke test: of 16 answers 11 are less good than live's, and 0 more"),
        ((0.0, 1.0), (0.0, 0.1), "smoke test: of 16 answers 14 are less well formed than live's, and 0 more"),
        ((0.0, 0.0), (0.0, 0.0), ""),  # a model that never ends an answer is no worse for it
        ((0.2, 0.1), (1.0, 1.0), ""),
    ],
)
async def test_a_step_that_has_broken_is_found_and_one_that_may_just_be_worse_is_left_to_the_gate(live, step, why):
    runner = Answers("s", 100, {LIVE: live[0], STEP: step[0]}, {LIVE: live[1], STEP: step[1]})
    assert await check(runner).run(STEP, LIVE) == why


async def test_both_answer_the_same_few_items_from_the_same_seeds_and_live_only_once():
    runner = Answers("s", 100, dict.fromkeys((LIVE, STEP, NEXT), 1.0))
    tested = check(runner)
    for step in (STEP, NEXT):
        assert await tested.run(step, LIVE) == ""
    assert [(slot, number) for slot, number, *_ in runner.calls] == [
        ("learner-test", 4),
        ("live", 3),
        ("learner-test", 5),
    ]
    assert len({call[2:] for call in runner.calls}) == 1
    items = runner.calls[0][3]
    assert len(items) == SMOKE_ITEMS
    assert not {*items} & sealed_ids(runner.suite, GATE.sealed_share), "the gate's sealed items stay sealed"
    await tested.run(NEXT, STEP)
    assert [call[:2] for call in runner.calls[3:]] == [("learner-test", 5), ("live", 4)], (
        "a new live version answers anew"
    )
    assert runner.calls[-1][3] != items


async def test_a_step_must_hold_the_quality_bars_as_a_candidate_must_and_its_bar_is_named():
    good, safety = Answers("s", 100, {LIVE: 1.0, STEP: 1.0}), Answers("safety", 300, {STEP: 0.9})
    bars = [BarConfig(suite="s", at_least=0.9), BarConfig(suite="safety", at_least=0.95)]
    why = await check(good, safety, bars=bars).run(STEP, LIVE)
    assert why.startswith("a quality bar does not hold: score of safety: bound 0.8")
    assert good.calls[-1][2] == range(2), "with the draws of the gate's first look"
    safety.worth[STEP] = 1.0
    assert await check(good, safety, bars=bars).run(STEP, LIVE) == ""
    good.worth[STEP] = 0.8
    assert "score of s: " in await check(good, safety, bars=bars).run(STEP, LIVE), "and on the compared suite"


@pytest.mark.parametrize(
    "gate", [GATE, GATE.model_copy(update={"items_per_round": 100})], ids=["a part is sealed", "few in a round"]
)
async def test_a_faultless_step_clears_each_bar_that_the_configuration_allows(gate):
    """Of a suite that is not compared, the gate and the check of the configuration count all items."""
    good, safety, items = Answers("s", 1_000, {LIVE: 1.0, STEP: 1.0}), Answers("safety", 152, {STEP: 1.0}), 152
    bars = [BarConfig(suite="safety", at_least=0.97), BarConfig(suite="s", at_least=0.9)]
    check_bars([(bars[0], "safety", items), (bars[1], "s", items_in_round(good.suite, gate))])
    assert await StepCheck([good], gate, bars=bars, aside=[safety], slot="learner-test").run(STEP, LIVE) == ""
    assert len(safety.calls[-1][3]) == items
    assert not {*good.calls[-1][3]} & sealed_ids(good.suite, gate.sealed_share), "the gate's sealed items stay sealed"


async def test_a_step_that_fails_the_smoke_test_costs_no_bars():
    broken, safety = Answers("s", 100, {LIVE: 1.0, STEP: 0.0}), Answers("safety", 300, {STEP: 1.0})
    assert "smoke test" in await check(broken, safety, bars=[BarConfig(suite="safety", at_least=0.9)]).run(STEP, LIVE)
    assert safety.calls == []


async def test_what_cannot_be_asked_is_no_result():
    runner = Answers("s", 100, {LIVE: 1.0})
    with pytest.raises(Unavailable):
        await check(runner).run(STEP, LIVE)
