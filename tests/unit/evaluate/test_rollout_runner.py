"""Whole rollouts as what a candidate is measured by: paired by (item, draw), made by the version that is meant, patient, bounded."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from ostinato.core.errors import BadConfig, Conflict, Corrupt, Unauthorized, Unavailable
from ostinato.core.records import PolicyVersion
from ostinato.core.report import Incumbent, Incumbents, Verdict
from ostinato.evaluate.config import BarConfig, GateConfig, RunnerConfig
from ostinato.evaluate.evaluation import Evaluation
from ostinato.evaluate.rollouts import RolloutRunner, WholeTry
from ostinato.evaluate.suites import Item, ItemMessage, build

KEY = "admin-key"
V7, V9, V11 = (PolicyVersion(number=n, hash=h) for n, h in ((7, "aa"), (9, "bb"), (11, "cc")))
SUITE = build(
    "world letters",
    [
        Item(id=f"t{n}", family="f", messages=(ItemMessage(role="user", content="x"),), grader="function")
        for n in range(120)
    ],
)


class World:
    """Rollouts whose grade `score` decides; `trouble` is raised first, one each."""

    def __init__(self, score=lambda slot, seed: float(seed % 2), trouble=(), made_by=None):
        self.score, self.trouble, self.made_by = score, list(trouble), made_by or {"evaluation": V9, "live": V7}
        self.seen, self.opened, self.now, self.most = [], 0, 0, 0

    @asynccontextmanager
    async def open(self, slot):
        self.opened += 1

        async def try_once(item, seed):
            self.now += 1
            self.most = max(self.most, self.now)
            try:
                await asyncio.sleep(0)
                if self.trouble:
                    raise self.trouble.pop()
                self.seen.append((slot, item.id, seed))
                made = self.made_by[slot]
                policies = made if isinstance(made, tuple) else (made,)
                return WholeTry(score=self.score(slot, seed), formed=seed % 5 > 0, policies=policies)
            finally:
                self.now -= 1

        yield try_once
        self.opened -= 1


@pytest.fixture
async def health():
    slots = {"evaluation": V9, "live": V7}

    async def report(request):
        if request.headers.get("x-ostinato-key") != KEY:  # as a stranger is told
            return web.json_response({"status": "ready"})
        body = {name: {"number": p.number, "hash": p.hash} for name, p in slots.items()}
        return web.json_response({"model": "smol", "slots": body})

    app = web.Application()
    app.router.add_get("/health", report)
    async with TestServer(app) as server:
        yield str(server.make_url("/"))


def runner(world, url, **changes):
    config = {"retry_pause_s": 0.001, "concurrency": 4, "slot_timeout_s": 0.1} | changes
    return RolloutRunner(SUITE, world, url, KEY, RunnerConfig(**config))


def place(score):
    return score.item, score.draw


async def test_a_gateway_with_another_key_is_named(health):
    stranger = RolloutRunner(SUITE, World(lambda *_: 1.0), health, "another-key", RunnerConfig(retry_pause_s=0.001))
    with pytest.raises(Unauthorized, match=r"must equal serve\.admin_key"):
        await stranger.run("candidate", V7, range(1))


async def test_a_draw_means_the_same_randomness_whoever_is_asked_and_whatever_is_known(health):
    world = World()
    at_once = await runner(world, health).run("evaluation", V9, range(3), seed=5)
    for part in (range(1), range(1, 3)):
        found = await runner(world, health).run("live", V7, part, seed=5)
        assert sorted(found, key=place) == sorted((each for each in at_once if each.draw in part), key=place)
    assert len({seed for _, _, seed in world.seen}) == 3 * 120, "no two draws share their random numbers"
    assert {seed >> 31 for _, _, seed in world.seen} == {0}
    world.seen.clear()
    await runner(world, health).run("evaluation", V9, range(1), SUITE.items[:2], seed=6)
    assert [item for _, item, _ in world.seen] == ["t0", "t1"]
    assert world.opened == 0
    assert world.most <= 4


async def test_what_is_away_is_tried_again_and_what_cannot_be_is_told(health):
    world = World(trouble=[Unavailable("the sandbox did not start in time")] * 3)
    assert len(await runner(world, health).run("evaluation", V9, range(1))) == 120
    with pytest.raises(Unavailable, match=r"task 't\d+' in slot 'evaluation'.*failed 2 times.*no room"):
        await runner(World(trouble=[Unavailable("no room")] * 99), health, attempts=2).run("evaluation", V9, range(1))
    with pytest.raises(BadConfig, match="no reference"):
        await runner(World(trouble=[BadConfig("no reference")]), health).run("evaluation", V9, range(1))


@pytest.mark.parametrize(
    ("made_by", "error", "told"),
    [
        (V11, Conflict, "has moved on to v11"),
        ((V9, V11), Conflict, "has moved on to v11"),
        (V7, Unavailable, "to serve v9@bb; it serves v7@aa"),
        ((), Corrupt, "names no version"),
    ],
)
async def test_a_rollout_of_another_version_is_no_evidence(health, made_by, error, told):
    with pytest.raises(error, match=told):
        await runner(World(made_by={"evaluation": made_by}), health).run("evaluation", V9, range(1))


async def test_nothing_is_tried_before_the_slot_serves_the_version(health):
    world = World()
    with pytest.raises(Unavailable, match="slot 'evaluation' to serve v11@cc; it serves v9@bb"):
        await runner(world, health).run("evaluation", V11, range(1))
    assert world.seen == []


@pytest.mark.parametrize("score", [float("nan"), 1.5, -0.1])
async def test_a_score_outside_its_range_is_corrupt(health, score):
    with pytest.raises(Corrupt, match=r"must lie in \[0, 1\]"):
        await runner(World(score=lambda *_: score), health).run("evaluation", V9, range(1))


async def test_a_run_has_a_deadline_that_names_how_far_it_came(health):
    class Stuck(World):
        @asynccontextmanager
        async def open(self, slot):
            async def try_once(item, seed):
                await asyncio.Event().wait()

            yield try_once

    with pytest.raises(Unavailable, match="with 0 of 120 rollouts graded"):
        await runner(Stuck(), health, deadline_s=0.05).run("evaluation", V9, range(1))


@pytest.mark.parametrize(("solved", "verdict"), [(0.1, Verdict.BLOCK), (0.9, Verdict.SHIP)])
async def test_a_candidate_below_the_bar_is_blocked_by_a_reason_that_names_it(health, solved, verdict):
    """It is far better than live on both sides: only the bar speaks against it."""

    def score(slot, seed):
        return float(seed % 1000 < 1000 * (solved if slot == "evaluation" else 0.0))

    world = World(score)
    compared, aside = runner(world, health), runner(world, health)
    aside.suite = build("world aside", SUITE.items)
    gate = GateConfig(first_draws=2, max_draws=2, sealed_share=0.0, margin=0.3, total_margin=0.3)
    bars = (BarConfig(suite="world aside", at_least=0.5), BarConfig(suite="world letters", axis="format", at_least=0.5))
    evaluation = Evaluation([compared], gate, bars=bars, aside=[aside], candidate_slot="evaluation")
    report = await evaluation.run(V9, against=Incumbents(live=V7, best=V7, anchor=V7, round=0))
    assert report.verdict is verdict
    assert [bar.holds for bar in report.bars] == [verdict is Verdict.SHIP, True]
    assert report.bars[0].n == 120
    against_live = next(found for found in report.comparisons if found.against is Incumbent.LIVE)
    assert against_live.suite == "world letters"
    assert against_live.lower < solved < against_live.upper + 0.1
    assert against_live.lower > 0.0
    if verdict is Verdict.BLOCK:
        assert "below a quality bar (score of world aside: bound " in report.reason
    again = Evaluation([compared], gate, bars=bars, aside=[aside], candidate_slot="evaluation")
    again.restore(evaluation.evidence())
    world.seen.clear()
    assert (await again.run(V9, against=Incumbents(live=V7, best=V7, anchor=V7, round=0))).bars == report.bars
    assert world.seen == [], "a restarted worker repeats no rollout"
