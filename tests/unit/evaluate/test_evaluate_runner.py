"""The runner and `Evaluation` on a fake world: paired by (item, draw), made by the version that is meant, patient, bounded."""

import asyncio
import json
from collections import Counter
from contextlib import asynccontextmanager
from functools import partial

import pytest
from tests.deadlines import PATIENT_S
from tests.virtual_time import in_virtual_time

from ostinato.core.errors import BadConfig, BadRequest, Conflict, Corrupt, Unauthorized, Unavailable
from ostinato.core.records import PolicyVersion
from ostinato.core.report import Incumbent, Incumbents, Verdict
from ostinato.evaluate.config import BarConfig, GateConfig, RunnerConfig
from ostinato.evaluate.evaluation import Evaluation
from ostinato.evaluate.gate import seed_of
from ostinato.evaluate.runner import Attempted, SuiteRunner, item_seed
from ostinato.evaluate.statistics import draw_spread
from ostinato.evaluate.suites import Item, Suite

V7, V9, V11 = (PolicyVersion(number=n, hash=h) for n, h in ((7, "aa"), (9, "bb"), (11, "cc")))


def suite(count, name="held-out"):
    return Suite(name, "5e1f", tuple(Item(f"i{n:03}", "f") for n in range(count)))


SUITE, LARGE = suite(6), suite(120)


def answer_to(seed, index):
    return (seed * 31 + index * 17) // 3 % 1000


class World:
    """Try i of a call with seed s scores a number made of s and i, by whatever version the slot holds.

    `trouble` is raised first, one error each; `before` are the versions that the slot reports first.
    """

    def __init__(
        self,
        score=lambda slot, seed, index: float(answer_to(seed, index) % 2),
        size=1,
        trouble=(),
        before=(),
        ungraded=(),
    ):
        self.score, self.size, self.trouble, self.before = score, size, list(trouble), list(before)
        self.slots = {"candidate": [V9], "live": [V7]}
        self.calls, self.opened, self.now, self.most = [], 0, 0, 0
        self.grades, self.ungraded = 0, list(ungraded)
        self.text = lambda slot, seed, index: None

    @asynccontextmanager
    async def open(self, slot):
        self.opened += 1
        try:
            yield Slot(self, slot)
        finally:
            self.opened -= 1


class Slot:
    def __init__(self, world, name):
        self.world, self.name = world, name

    async def served(self):
        if self.world.before:
            return self.world.before.pop(0)
        made = self.world.slots.get(self.name, [None])[0]
        return made[0] if isinstance(made, tuple) and made else made or None

    def answers_per_call(self, item):
        return self.world.size

    async def graded(self, seed, number):
        self.world.grades += 1
        if self.world.ungraded:
            raise self.world.ungraded.pop()
        return self.world.score(self.name, seed, number)

    async def tries(self, item, seed, count):
        world = self.world
        world.now += 1
        world.most = max(world.most, world.now)
        try:
            await asyncio.sleep(0)
            if world.trouble:
                raise world.trouble.pop()
            world.calls.append((self.name, item.id, seed, count))
            versions = world.slots[self.name]
            made = versions.pop(0) if len(versions) > 1 else versions[0]
            policies = made if isinstance(made, tuple) else (made,)
            return [
                Attempted(
                    formed=seed % 5 > 0,
                    policies=policies,
                    seconds=0.25,
                    grade=partial(self.graded, seed, n),
                    text=world.text(self.name, seed, n),
                )
                for n in range(count)
            ]
        finally:
            world.now -= 1


def runner(world, suite=SUITE, **changes):
    config = {"retry_pause_s": 0.001, "concurrency": 4, "slot_timeout_s": PATIENT_S} | changes
    return SuiteRunner(suite, world, RunnerConfig(**config))


@pytest.mark.parametrize("size", [1, 4])
async def test_a_draw_means_the_same_randomness_whoever_is_asked_and_whatever_is_known(size):
    world = World(size=size)
    at_once = await runner(world).run("candidate", V9, range(10), seed=5)
    parts = (range(3), range(3, 4), range(4, 10))
    in_parts = [score for part in parts for score in await runner(world).run("live", V7, part, seed=5)]
    place = lambda score: (score.item, score.draw)  # noqa: E731
    assert at_once == sorted(in_parts, key=place)
    seeds = [item_seed(SUITE, item, 0, 5 + draw // size) for item in SUITE.items for draw in range(10)]
    expected = [answer_to(seed, draw % size) % 2 for seed, draw in zip(seeds, [*range(10)] * 6, strict=True)]
    assert [score.score for score in at_once] == expected
    assert len(set(seeds)) == 6 * -(-10 // size), "no two calls share their random numbers"
    assert {seed >> 31 for seed in seeds} == {0}
    assert world.most <= 4
    assert world.opened == 0


async def test_only_the_items_and_draws_that_are_asked_for_are_tried():
    world = World(size=4)
    found = await runner(world).run("candidate", V9, range(6, 8), SUITE.items[1:2])
    assert world.calls == [("candidate", "i001", item_seed(SUITE, SUITE.items[1], 0, 1), 4)]
    assert [(score.item, score.draw) for score in found] == [("i001", 6), ("i001", 7)]
    assert await runner(world).run("candidate", V9, range(0)) == []
    assert await runner(world).run("candidate", V9, range(1), []) == []


async def test_a_seed_draws_afresh_and_scores_say_how_long_and_how_well_formed():
    first, same, other = [await runner(World(size=4)).run("live", V7, range(8), seed=seed) for seed in (1, 1, 2)]
    assert first == same != other
    assert {score.seconds for score in first} == {0.25}
    assert {score.formed for score in [*first, *other]} == {True, False}


async def test_waits_for_the_slot_before_anything_is_sampled():
    world = World(before=[None, V7, V7])
    assert len(await runner(world).run("candidate", V9, range(4))) == 24
    assert len(world.calls) == 24
    world = World()
    with pytest.raises(Unavailable, match="slot 'candidate' to serve v11@cc; it serves v9@bb"):
        await runner(world, slot_timeout_s=0.05).run("candidate", V11, range(1))
    with pytest.raises(Unavailable, match="slot 'canary' to serve v9@bb; it is not loaded"):
        await runner(world, slot_timeout_s=0.05).run("canary", V9, range(1))
    assert world.calls == []


async def test_a_try_that_mixed_versions_is_made_again():
    world = World(size=4)
    world.slots["candidate"] = [V9, (V7, V9), V9]
    scores = await runner(world).run("candidate", V9, range(4))
    assert len({(score.item, score.draw) for score in scores}) == len(scores) == 24
    assert len(world.calls) == 6 + 1


@pytest.mark.parametrize(
    ("made_by", "error", "told"),
    [
        (V11, Conflict, "has moved on to v11"),
        ((V9, V11), Conflict, "has moved on to v11"),
        (V7, Unavailable, "to serve v9@bb; it serves v7@aa"),
        ((), Corrupt, "names no version"),
    ],
)
async def test_a_try_by_another_version_is_no_evidence(made_by, error, told):
    world = World()
    world.slots["candidate"] = [V9, made_by]
    with pytest.raises(error, match=told):
        await runner(world, slot_timeout_s=0.05).run("candidate", V9, range(2))


async def test_what_is_away_is_tried_again_and_what_cannot_be_is_told():
    world = World(trouble=[Unavailable("the sandbox did not start in time"), TimeoutError()] * 2)
    assert len(await runner(world).run("candidate", V9, range(1))) == 6
    with pytest.raises(Unavailable, match=r"item 'i\d+' in slot 'candidate'.*failed 2 times.*no room"):
        await runner(World(trouble=[Unavailable("no room")] * 99), attempts=2).run("candidate", V9, range(1))
    for error in (BadConfig("no reference"), BadRequest("too long"), Unauthorized("no key")):
        with pytest.raises(type(error), match=str(error)):
            await runner(World(trouble=[error])).run("candidate", V9, range(1))


async def test_a_grade_that_fails_is_asked_for_again_and_no_other_answer_is():
    world = World(size=4, ungraded=[Unavailable("no sandbox"), Unavailable("no sandbox")])
    found = await runner(world).run("candidate", V9, range(6, 8), SUITE.items[:2])
    assert len(found) == 4
    assert len(world.calls) == 2
    assert world.grades == 4 + 2, "only the draws that are asked for are graded"
    world = World(ungraded=[Unavailable("no words")] * 99)
    with pytest.raises(Unavailable, match=r"grading item 'i\d+'.*failed 2 times.*no words; look at its grader"):
        await runner(world, attempts=2).run("candidate", V9, range(1))
    assert len(world.calls) <= 6
    world = World(ungraded=[Unavailable("no words")] * 99)
    world.slots["candidate"] = [V9, V7]
    with pytest.raises(Unavailable, match="to serve v9@bb; it serves v7@aa"):
        await runner(world, slot_timeout_s=0.05).run("candidate", V9, range(1), SUITE.items[:2])


@pytest.mark.parametrize("score", [float("nan"), 1.5, -0.1])
async def test_a_score_outside_its_range_is_corrupt(score):
    with pytest.raises(Corrupt, match=r"a grader gave item 'i\d+' the score .* must lie in \[0, 1\]"):
        await runner(World(score=lambda *_: score)).run("candidate", V9, range(1))


@in_virtual_time
async def test_a_run_has_a_deadline_that_says_how_far_it_came():
    class Stuck(Slot):
        async def tries(self, item, seed, count):
            await asyncio.sleep(0 if item.id == "i000" else 60)
            return await super().tries(item, seed, count)

    class Slow(World):
        @asynccontextmanager
        async def open(self, slot):
            yield Stuck(self, slot)

    with pytest.raises(Unavailable, match=r"deadline of 0\.3 s with 1 of 6 tries graded"):
        await runner(Slow(), deadline_s=0.3).run("candidate", V9, range(1))


# ------------------------------------------------------------------------------------------------ the sides of a judgement

V0, V3 = PolicyVersion(number=0, hash="00"), PolicyVersion(number=3, hash="33")


def standing(live=V7, best=V7, anchor=V7, round=0):
    return Incumbents(live=live, best=best, anchor=anchor, round=round)


LOOKS = GateConfig(margin=0.5, total_margin=0.5, first_draws=2, max_draws=8, sealed_share=0.0)


async def test_evaluation_samples_nothing_twice_and_survives_a_restart():
    world = World(size=2)
    first = Evaluation([runner(world)], LOOKS)
    report = await first.run(V9, against=standing())
    # the world scores both alike: all differences are 0, on only six items
    assert (report.difference, report.draws, report.suite_hash) == (0.0, 2, SUITE.hash)
    assert report.verdict == Verdict.EXTEND
    assert report.draw_spread == draw_spread(first.scores(SUITE, V7)), "of the anchor"
    asked = len(world.calls)
    assert asked == 12, "live, best and anchor are one version, which is drawn once"

    evidence = json.loads(json.dumps(first.evidence()))
    second = Evaluation([runner(world)], LOOKS)
    second.restore(evidence)
    assert second.scores(SUITE, V9) == first.scores(SUITE, V9)
    assert (await second.run(V9, against=standing())).draws == 4
    assert len(world.calls) - asked == 12  # draws 2 and 3 of six items for two versions
    seeds = {seed for _, _, seed, _ in world.calls}
    assert len(seeds) == 12, "candidate and live share their seeds, draw by draw"
    assert item_seed(SUITE, SUITE.items[0], 0, seed_of(SUITE, V9.hash, 0)) in seeds


async def test_draws_of_other_items_than_the_settings_pick_now_are_drawn_again():
    """With some items of two looks and some of one no judgement was possible, and none of another candidate either."""
    world = World(size=2)
    first = Evaluation([runner(world)], LOOKS.model_copy(update={"items_per_round": 3}))
    assert (await first.run(V9, against=standing())).verdict == Verdict.EXTEND
    world.calls.clear()
    second = Evaluation([runner(world)], LOOKS)
    second.restore(json.loads(json.dumps(first.evidence())))
    report = await second.run(V9, against=standing())
    assert (report.items, report.draws, len(world.calls)) == (6, 2, 12)
    assert (await second.run(V9, against=standing())).draws == 4


async def test_a_candidate_whose_answers_are_all_alike_is_reported_after_a_restart_too():
    world = World(size=2)
    world.text = lambda slot, seed, index: "one \n answer" if slot == "candidate" else f"{seed} {index}"
    dozen = Suite("dozen", "c" * 64, tuple(Item(f"i{n}", "f") for n in range(12)))
    first = Evaluation([runner(world, dozen)], LOOKS)
    assert (await first.run(V9, against=standing())).diversity.excess.upper < 0
    second = Evaluation([runner(world, dozen)], LOOKS)
    second.restore(json.loads(json.dumps(first.evidence())))
    found = (await second.run(V9, against=standing())).diversity
    assert (found.draws, found.candidate, found.anchor, found.excess.upper < 0) == (4, 0.0, 1.0, True)


async def test_draws_that_got_a_version_chosen_are_never_used_again():
    """Live's draws were kept: a version that shipped by lucky draws kept its luck against every later candidate."""
    world = World(size=4)
    evaluation = Evaluation([runner(world)], LOOKS)
    await evaluation.run(V9, against=standing(round=0))
    before = {seed for _, _, seed, _ in world.calls}
    world.calls.clear()
    world.slots |= {"live": [V9], "control": [V7], "candidate": [v11 := PolicyVersion(number=11, hash="dd")]}
    await evaluation.run(v11, against=standing(live=V9, best=V9, round=1))
    assert {slot for slot, *_ in world.calls} == {"candidate", "live", "control"}, "v9 is drawn again as live"
    after = {seed for _, _, seed, _ in world.calls}
    assert not before & after, "from other seeds"


async def test_ten_candidates_share_the_anchors_draws_while_it_is_neither_live_nor_best():
    """It was chosen by no draws. As live or best, it is drawn from the candidate's seeds, whose answers are often its own."""
    world, drawn = World(size=4), list[tuple[int, int]]()
    evaluation = Evaluation([runner(world)], LOOKS)
    for round in range(12):
        policy = PolicyVersion(number=20 + round, hash=f"{round:02x}" * 8)
        world.slots |= {"live": [V9], "control": [V7], "candidate": [policy]}
        world.calls.clear()
        report = await evaluation.run(policy, against=standing(live=V9, best=V9, anchor=V7, round=round))
        asked = Counter(slot for slot, *_ in world.calls)
        assert asked["candidate"] == asked["live"] == 6
        drawn.append((round, asked["control"]))
        assert {str(found.against) for found in report.comparisons} == {"live", "best", "anchor"}
        assert report.draw_spread == draw_spread(evaluation.scores(SUITE, V7))
    assert [round for round, count in drawn if count] == [0, 10], "and then they are made anew"
    world.calls.clear()
    await evaluation.run(policy, against=standing(live=V9, best=V7, anchor=V7, round=13))
    by_slot = {
        slot: {seed for where, _, seed, _ in world.calls if where == slot} for slot in ("candidate", "live", "control")
    }
    assert by_slot["candidate"] == by_slot["live"] == by_slot["control"]


async def test_only_what_the_anchors_kept_draws_lack_is_drawn():
    """More draws after an undecided look, and items that the rounds before did not have."""
    world = World(size=4)
    evaluation = Evaluation([runner(world)], LOOKS)
    world.slots |= {"live": [V9], "control": [V7]}
    first, second = (PolicyVersion(number=20 + n, hash=f"e{n}" * 8) for n in range(2))
    for candidate, round, draws, asked in ((first, 0, 2, 6), (first, 0, 4, 6), (second, 1, 2, 0), (second, 1, 4, 0)):
        world.slots["candidate"] = [candidate]
        world.calls.clear()
        report = await evaluation.run(candidate, against=standing(live=V9, best=V9, anchor=V7, round=round))
        assert (report.draws, sum(slot == "control" for slot, *_ in world.calls)) == (draws, asked)
    few = LOOKS.model_copy(update={"items_per_round": 3, "sealed_share": 0.0})
    rotating, seen = Evaluation([runner(world)], few), set[str]()
    for round in range(8):
        world.slots["candidate"] = [policy := PolicyVersion(number=40 + round, hash=f"{round:02x}" * 8)]
        world.calls.clear()
        await rotating.run(policy, against=standing(live=V9, best=V9, anchor=V7, round=round))
        shown = {score.item for score in rotating.scores(SUITE, V7)}
        assert sum(slot == "control" for slot, *_ in world.calls) == len(shown - seen)
        seen |= shown


async def test_with_shared_draws_little_more_than_the_candidate_is_drawn_while_candidates_ship():
    world, sharing = World(size=4), LOOKS.model_copy(update={"share_draws": True})
    evaluation, asked = Evaluation([runner(world)], sharing), list[dict[str, int]]()
    live, shown = V7, []
    ships = (True, True, True, False, False, True, True)
    for round, ship in enumerate(ships):
        policy = PolicyVersion(number=20 + round, hash=f"{round:02x}" * 8)
        world.slots |= {"live": [live], "control": [V7], "candidate": [policy]}
        world.calls.clear()
        report = await evaluation.run(policy, against=standing(live=live, best=V7, anchor=V7, round=round))
        assert {str(found.against) for found in report.comparisons} == {"live", "best", "anchor"}
        assert report.draws == 2
        asked.append(dict(Counter(slot for slot, *_ in world.calls)))
        if live is not V7 and "live" not in asked[-1]:
            assert evaluation.scores(SUITE, live) == shown, "as it was drawn when it shipped"
        if ship:
            live, shown = policy, evaluation.scores(SUITE, policy)
    alone, afresh = {"candidate": 6}, {"candidate": 6, "live": 6}
    # the first live version is the anchor, whose draws are shared
    assert asked == [afresh, alone, alone, alone, afresh, afresh, alone]


async def test_shared_draws_of_the_best_release_are_not_those_that_it_was_chosen_by():
    world, sharing = World(size=4), LOOKS.model_copy(update={"share_draws": True})
    evaluation = Evaluation([runner(world)], sharing)
    await evaluation.run(V9, against=standing(round=0))
    chosen_by = {seed for slot, _, seed, _ in world.calls if slot == "candidate"}
    world.slots |= {"live": [V3], "best": [V9], "control": [V7]}
    for round in (1, 2):
        world.slots["candidate"] = [policy := PolicyVersion(number=30 + round, hash=f"{round:02x}" * 8)]
        world.calls.clear()
        await evaluation.run(policy, against=standing(live=V3, best=V9, anchor=V7, round=round))
        drawn = {seed for slot, _, seed, _ in world.calls if slot == "best"}
        assert (len(drawn) > 0) is (round == 1), "once for both"
        assert not drawn & chosen_by


async def test_draws_of_a_release_that_took_two_looks_or_on_other_items_are_not_used_again():
    """Undecided at the first look, they underestimate it."""
    world, sharing = World(size=4), LOOKS.model_copy(update={"share_draws": True})
    evaluation = Evaluation([runner(world)], sharing)
    for _ in range(2):
        report = await evaluation.run(V9, against=standing(round=0))
    assert report.draws == 4
    v11 = PolicyVersion(number=11, hash="dd")
    world.slots |= {"live": [V9], "control": [V7], "candidate": [v11]}
    world.calls.clear()
    await evaluation.run(v11, against=standing(live=V9, best=V9, anchor=V7, round=1))
    assert sum(slot == "live" for slot, *_ in world.calls) == 6
    few = Evaluation([runner(world)], sharing.model_copy(update={"items_per_round": 3, "sealed_share": 0.0}))
    live, fresh = V7, []
    for round in range(8):
        world.slots |= {
            "live": [live],
            "candidate": [policy := PolicyVersion(number=40 + round, hash=f"{round:02x}" * 8)],
        }
        world.calls.clear()
        await few.run(policy, against=standing(live=live, best=V7, anchor=V7, round=round))
        shown = {score.item for score in few.scores(SUITE, live)}
        assert shown == {score.item for score in few.scores(SUITE, policy)}
        fresh.append(sum(slot == "live" for slot, *_ in world.calls))
        live = policy
    assert fresh == [3] * 8, "each candidate has other items"


async def test_every_incumbent_is_asked_in_a_slot_that_serves_it():
    world = World(size=4)
    world.slots |= {"control": [V0], "shown": [V3]}
    evaluation = Evaluation([runner(world)], LOOKS, best_slot="shown")
    report = await evaluation.run(V9, against=standing(best=V3, anchor=V0))
    assert {slot for slot, *_ in world.calls} == {"candidate", "live", "control", "shown"}
    assert {str(found.against): found.policy for found in report.comparisons} == {"live": V7, "anchor": V0, "best": V3}
    world.calls.clear()
    await evaluation.run(V9, against=standing(best=V0, anchor=V0, round=1))
    assert {slot for slot, *_ in world.calls} == {"candidate", "live", "control"}
    world.calls.clear()
    report = await evaluation.run(V9, against=standing(best=None, anchor=V0, round=20))
    assert {slot for slot, *_ in world.calls} == {"candidate", "live", "control"}
    assert "was not sampled" in report.reason


async def test_bars_are_held_against_the_candidate_alone_where_a_suite_is_only_for_them():
    world = World(size=4)
    safety = runner(world, suite(6, "safety"))
    bars = (BarConfig(suite="safety", at_least=0.9), BarConfig(axis="latency", at_most=60.0, share=0.3))
    report = await Evaluation([runner(world)], LOOKS, bars=bars, aside=[safety]).run(V9, against=standing())
    assert report.verdict == Verdict.BLOCK
    assert report.reason.startswith("below a quality bar (score of safety")
    assert [(bar.suite, bar.axis, bar.holds) for bar in report.bars] == [
        ("safety", "score", False),
        ("held-out", "latency", True),
    ]
    assert {found.suite for found in report.comparisons} == {"held-out"}
    assert sum(slot == "candidate" for slot, *_ in world.calls) == 12
    assert sum(slot == "live" for slot, *_ in world.calls) == 6


def test_evidence_of_other_suites_and_forms_is_ignored_and_misshapen_evidence_refused():
    class Nobody:
        suite = SUITE

    evaluation = Evaluation([Nobody()], LOOKS)
    evaluation.restore({"suite_hash": SUITE.hash, "scores": {"aa": [[1.0]]}})
    evaluation.restore(
        {"candidate": "aa", "round": 0, "drawn": {"held-out:other": {"aa": [["i0", 0, 1.0, True, 0.1]]}}}
    )
    assert evaluation.scores(SUITE, V7) == []
    for rows in ([["i0"]], [1], None):
        with pytest.raises(Corrupt, match="expected form"):
            evaluation.restore({"candidate": "aa", "round": 0, "drawn": {f"held-out:{SUITE.hash}": {"aa": rows}}})


@pytest.mark.parametrize(("solved", "verdict"), [(0.1, Verdict.BLOCK), (0.9, Verdict.SHIP)])
async def test_a_candidate_below_the_bar_is_blocked_by_a_reason_that_names_it(solved, verdict):
    """It is far better than live on both sides: only the bar speaks against it."""

    def score(slot, seed, index):
        return float(seed % 1000 < 1000 * (solved if slot == "candidate" else 0.0))

    world = World(score)
    compared, aside = runner(world, LARGE), runner(world, suite(120, "aside"))
    gate = GateConfig(first_draws=2, max_draws=2, sealed_share=0.0, margin=0.3, total_margin=0.3)
    bars = (BarConfig(suite="aside", at_least=0.5), BarConfig(suite="held-out", axis="format", at_least=0.5))
    evaluation = Evaluation([compared], gate, bars=bars, aside=[aside])
    report = await evaluation.run(V9, against=standing())
    assert report.verdict is verdict
    assert [bar.holds for bar in report.bars] == [verdict is Verdict.SHIP, True]
    assert report.bars[0].n == 120
    against_live = next(found for found in report.comparisons if found.against is Incumbent.LIVE)
    assert against_live.suite == "held-out"
    assert against_live.lower < solved < against_live.upper + 0.1
    assert against_live.lower > 0.0
    if verdict is Verdict.BLOCK:
        assert "below a quality bar (score of aside: bound " in report.reason
    again = Evaluation([compared], gate, bars=bars, aside=[aside])
    again.restore(evaluation.evidence())
    world.calls.clear()
    assert (await again.run(V9, against=standing())).bars == report.bars
    assert world.calls == [], "a restarted worker repeats no rollout"
