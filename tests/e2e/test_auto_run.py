"""Auto over a run's own parts: gateway, engine, log, rewards, weights and ledger are real, the model is tiny, the model outside a stub."""

import asyncio
import contextlib
import io
import math
import random
from dataclasses import replace

import httpx2
import pytest
import torch
from rich.console import Console
from tests.deadlines import LEARNING_S, WHOLE_PROGRAM_S
from tests.fakes.outside import FakeOutside

from ostinato.app import trainer
from ostinato.app.evaluation import open_ledger, open_releases
from ostinato.app.gateway import open_serving
from ostinato.app.storage import open_run
from ostinato.app.trainer import open_desk
from ostinato.config import load
from ostinato.core.clock import wall_clock
from ostinato.core.records import Finish, Reward, Turn
from ostinato.core.report import Report, Verdict
from ostinato.core.weights import Learned
from ostinato.launch.commands.auto import show_auto
from ostinato.launch.views.progress import Progress
from ostinato.launch.workers.prepare import prepare
from ostinato.launch.workers.serve import WeightLoader, follow_trial
from ostinato.model.load import load_model
from ostinato.model.tensors import weights_of
from ostinato.release.auto.estimating import prospect
from ostinato.testing.serving import serving
from ostinato.weights.publish.publisher import Candidates, VersionPublisher

FLOOR, WINDOW_S = 0.1, 3600.0
LIKES = {"far": 0.9, "live": 0.15}
"""How often the simulated users accept an answer of the outside, and of the tiny model."""


def auto_settings(outside):
    far = f"{{name='far', url='{outside.url}', model='far-1', answer_price=8.0}}"
    return (
        "release.canary=true",
        f"serve.auto.arms=[{{name='live', slot='live'}}, {{name='canary', slot='canary'}}, {far}]",
        "serve.control_share=0",
        f"release.auto={{floor={FLOOR}, low=-0.25, high=0.75, poll_s=0.05}}",
        f"reward.options={{window={WINDOW_S}}}",
    )


class Served:
    """A run that is served in this process, and simulated users of it. When its rewards are asked for, every window has passed."""

    def __init__(self, run, parts, http):
        self.run, self.parts, self.http = run, parts, http
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainer, "wall_clock", lambda: wall_clock() + WINDOW_S)
            self.desk = open_desk(run.config, run.log, run.folds)
        self.chance = random.Random(4)
        self.asked = 0

    async def ask(self, user):
        """One simulated user asks, and accepts what comes from outside more often than what does not."""
        self.asked += 1
        number = self.asked
        body = {"model": "auto", "user": user, "max_tokens": 3, "messages": [{"role": "user", "content": "lo"}]}
        reply = await self.http.post("/v1/chat/completions", json=body, headers={"x-ostinato-episode": f"e{number}"})
        assert reply.status_code == 200, reply.text
        said = reply.json()
        arm = "far" if said["choices"][0]["message"]["content"] == "from afar" else "live"
        event = {
            "id": f"s{number}",
            "target": said["ostinato"]["turns"][0],
            "name": "accepted" if self.chance.random() < LIKES[arm] else "rejected",
            "value": True,
            "source": "human",
        }
        assert (await self.http.post("/v1/feedback", json=event)).status_code == 202
        return said["ostinato"]["auto"]

    async def round(self, users=24, each=2):
        """Every user asks a few times; then their rewards come, and the router hears of them."""
        for _ in range(each):
            await asyncio.gather(*(self.ask(f"sim-{n}") for n in range(users)))
        answered = sum(turn.finish.trainable for turn in await self.turns())
        async with asyncio.timeout(WHOLE_PROGRAM_S):
            while (rewarded := await self.rewarded()) < answered:
                await asyncio.sleep(0.1)  # the deliveries are noted
                await self.desk.poll()
        assert rewarded == answered
        await self.parts.router.catch_up()

    async def rewarded(self):
        return len([reward async for reward in self.run.log.read(0, {Reward})])

    async def turns(self):
        return [turn async for _, turn in self.run.log.read(0, {Turn})]


@contextlib.asynccontextmanager
async def served(config):
    with open_run(config) as run:
        path = await prepare(run, lambda _: None)
        parts = await open_serving(run, path)
        await parts.engine.start()
        following = WeightLoader(parts, run.log, Progress(run.home.progress("serve")), lambda: None)
        beside = [
            asyncio.create_task(following.run(("live", "canary", "previous"))),
            asyncio.create_task(follow_trial(open_ledger(run), parts.gateway, 0.0)),
            asyncio.create_task(parts.router.run()),
        ]
        try:
            while not {"live", "canary"} <= parts.engine.slots().keys():
                await asyncio.sleep(0.02)
            async with serving(parts.gateway) as url, httpx2.AsyncClient(base_url=url, timeout=WHOLE_PROGRAM_S) as http:
                yield Served(run, parts, http)
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            await parts.engine.close()


async def a_candidate(run, path):
    """Publish other weights as version 1."""
    candidates = Candidates(VersionPublisher(run.store, run.config.publish), "test", 1, lambda _: None)
    candidates.last = await run.follower.resolve("base")
    weights = weights_of(load_model(path, torch.float32))
    name = next(iter(weights))
    array = weights[name]
    data = array.data.copy()
    data[3] ^= 1
    changed = dict(weights) | {name: type(array)(array.dtype, array.shape, data)}
    await candidates.publish(Learned(step=1, policy_number=1, weights=changed, metrics={}))
    return await run.follower.resolve("candidate")


def passed(candidate, live):
    return Report(
        suite="s", suite_hash="9f", candidate=candidate, live=live, candidate_mean=0.5, live_mean=0.4, difference=0.1,
        lower=0.0, upper=0.2, items=9, draws=2, margin=0.05, power=0.9, verdict=Verdict.SHIP, reason="it passed the gate",
    )  # fmt: skip


@pytest.fixture
async def outside():
    async with FakeOutside().serving() as fake:
        yield fake


async def test_shares_follow_simulated_users_and_other_shares_are_estimated_before_they_are_used(
    tmp_path, quick_settings, outside
):
    config = load(None, quick_settings(tmp_path, *auto_settings(outside)))
    async with asyncio.timeout(LEARNING_S), served(config) as world:
        for _ in range(8):
            await world.round()
            now = world.parts.router.router.odds(["live", "far"])
            if now["far"] > 0.75:
                break
        for _ in range(2):
            await world.round()
        turns = await world.turns()
        assert len(turns) == world.asked
        assert all(set(turn.auto.odds) == {"live", "far"} for turn in turns), (
            "between trials canary only holds live's weights"
        )
        assert all(turn.propensity == turn.auto.odds[turn.auto.arm] for turn in turns)
        assert all(FLOOR - 1e-9 <= odds <= 1 - FLOOR + 1e-9 for turn in turns for odds in turn.auto.odds.values())
        assert turns[0].auto.odds == pytest.approx({"live": 0.5, "far": 0.5})
        assert now["far"] > 0.75, "what its users prefer gets most"
        assert {round(turn.auto.cost, 9) for turn in turns if turn.auto.arm == "far"} == {80e-6}

        await outside_dies(world, outside)

        said = io.StringIO()
        await show_auto(config, ("far=0.5", "live=0.5"), Console(file=said, width=160))
        changed = await prospect(world.run.log, {"far": 0.5, "live": 0.5}, config.release.auto)
    for value in (changed.ips, changed.snips, changed.dr):
        assert -0.25 < value.lower < value.mean < value.upper < 0.75
        assert math.isfinite(value.error)
        assert f"{value.mean:+.3f}" in said.getvalue()
        assert f"{value.lower:+.3f} to {value.upper:+.3f}" in said.getvalue()
    assert changed.snips.mean < changed.earned.mean, "half to the worse arm earns less than was earned"
    assert "No evidence against the logged propensities" in said.getvalue()


async def outside_dies(world, outside):
    """Whoever is dealt it meanwhile is answered by the tiny model, and the log says what happened."""
    before, outside.status = len(await world.turns()), 503
    while not (failed := [turn for turn in (await world.turns())[before:] if turn.finish is Finish.ERROR]):
        await world.ask("sim-0")
    outside.status = 200
    after = [turn for turn in (await world.turns())[before:] if turn.episode == failed[0].episode]
    assert [turn.auto.arm for turn in after] == ["far", "live"]
    assert after[1].auto.odds == {"live": 1.0}
    assert 'ostinato_auto_passed_on_total{arm="far",tenant="default"}' in (await world.http.get("/metrics")).text


async def test_a_release_enters_auto_with_its_trial_and_leaves_when_the_ledger_says_so(
    tmp_path, quick_settings, outside
):
    config = load(None, quick_settings(tmp_path, *auto_settings(outside)))
    async with asyncio.timeout(LEARNING_S), served(config) as world:
        run, path = world.run, tmp_path / "model"
        candidate, controller = await a_candidate(run, path), open_releases(run)
        await world.ask("sim-0")
        live = await run.follower.resolve("live")
        begun = await controller.decide(candidate, passed(candidate, live))
        assert begun.action == "canary"
        while not (tried := [turn for turn in await world.turns() if turn.auto.arm == "canary"]):
            await world.ask("sim-1")
        assert {span.policy for span in tried[0].spans} == {candidate}
        assert set(tried[0].auto.odds) == {"live", "canary", "far"}

        over = open_releases(replace(run, config=load(None, [*quick_settings(tmp_path), "release.canary=false"])))
        assert (await over.step()).action == "blocked"
        await world.ask("sim-1")
        while "canary" in (await world.turns())[-1].auto.odds:  # until the gateway has looked at the ledger
            await world.ask("sim-1")
        mark = len(await world.turns())
        for n in range(8):
            await world.ask(f"sim-{n}")
        assert {frozenset(turn.auto.odds) for turn in (await world.turns())[mark:]} == {frozenset({"live", "far"})}

        await controller.ship(candidate, "by hand", actor="ann")
        await answered_by(world, candidate)
        await controller.rollback(None, "it is worse", actor="ann")
        await answered_by(world, live)
        wrong = world.parts.router.router.propensities.wrong(config.release.auto.alpha)
    assert wrong == []


async def answered_by(world, policy):
    """Auto's live arm answers with these weights, sooner or later."""
    while True:
        await world.ask("sim-2")
        last = (await world.turns())[-1]
        if last.spans and last.auto.arm == "live" and last.spans[-1].policy == policy:
            return
