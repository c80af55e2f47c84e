"""People in waves and rollouts over three servers, with real workers: what people's servers lend, and what it costs people.

The servers are fakes behind real sockets, each with two seats: who finds none waits, as in a full batch.
"""

import asyncio
import contextlib
import json
import re
import time
from collections import Counter
from dataclasses import dataclass, field

import aiohttp
import pytest
from tests.fakes.vllm_tokens import TokenVllm
from world_runs import graded_twice, write_tasks

from ostinato.app.storage import home, open_log, open_run
from ostinato.config import load
from ostinato.core.records import Arm, Turn
from ostinato.core.weights import WeightArray
from ostinato.launch.commands.crew import launch
from ostinato.launch.commands.demo import ready
from ostinato.launch.commands.worlds.train import world_overrides
from ostinato.launch.workers.prepare import prepare
from ostinato.record.roles import hold
from ostinato.status.progress_lines import last_lines
from ostinato.testing.serving import serving
from ostinato.weights.publish.publisher import VersionPublisher

TOKEN_S, SEATS, PROMISE_S = 0.02, 2, 2.0
WAVES = ((1.5, 24.0), (7.0, 16.0), (1.5, 24.0))  # answers a second, for so many seconds
ANSWER, ROLLOUT = 8, 40
LENDING = (
    "compute.lend.most=1",
    "compute.lend.carries=8.0",
    "compute.lend.window_s=12.0",
    "compute.lend.hold_s=6.0",
    "compute.lend.end_s=0.2",
    f"compute.lend.guard_s={PROMISE_S}",
)


@dataclass
class People:
    """What people were told, and how long they waited for a first token."""

    url: str
    model: str
    waits: list[float] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    async def ask(self, session: aiohttp.ClientSession, number: int) -> None:
        body = {
            "model": self.model,
            "user": f"u{number}",
            "max_tokens": ANSWER,
            "stream": True,
            "messages": [{"role": "user", "content": f"person {number}"}],
        }
        began, first, text = time.monotonic(), None, ""
        async with session.post(f"{self.url}/v1/chat/completions", json=body) as answer:
            async for line in answer.content:
                first = first or time.monotonic() - began
                text += line.decode()
            turn = answer.headers.get("x-ostinato-turn", "")
        if answer.status != 200 or "[DONE]" not in text or first is None:
            self.failed.append(f"{answer.status} {text[-200:]}")
            return
        self.waits.append(first)
        self.turns.append(turn)

    async def come(self, waves) -> None:
        """Evenly, at each wave's rate."""
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
            number = 0
            for rate, seconds in waves:
                for _ in range(int(rate * seconds)):
                    number += 1
                    group.create_task(self.ask(session, number))
                    await asyncio.sleep(1 / rate)


async def publish_worlds(config) -> tuple[str, str]:
    """Version 0 for people and another one for rollouts, as a trainer would. Returns their roots."""
    with open_run(config) as run:
        await prepare(run, lambda _: None)
        live = await run.follower.resolve("live")
        weights = await run.follower.fetch(live)
        changed = {
            name: WeightArray(each.dtype, each.shape, (each.data ^ 1).astype(each.data.dtype))
            for name, each in weights.items()
        }
        done = await VersionPublisher(run.store, run.config.publish).publish(
            1, changed, run=run.home.name, base=live, ref=Arm.WORLD.value
        )
    return live.hash, done.policy.hash


async def numbers(url: str, key: str) -> dict[str, float]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{url}/metrics", headers={"X-Ostinato-Key": key}) as page,
    ):
        text = await page.text()
    return {name: float(value) for name, value in re.findall(r"^(ostinato_engine_\w+) (\S+)$", text, re.MULTILINE)}


async def waves(directory, quick_settings, *more: str) -> dict:
    """A run through the waves; what came of it, and that nothing was lost, doubled or made by the wrong weights."""
    tasks = write_tasks(directory / "letters.jsonl", tokens=ROLLOUT)
    fakes = [TokenVllm("some answer of a server " * 4, context=512) for _ in range(3)]
    for fake in fakes:
        fake.slow_s, fake.seats = TOKEN_S, asyncio.Semaphore(SEATS)
    async with contextlib.AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serving(fake.app)) for fake in fakes]
        settings = [
            "engine.kind=vllm",
            f"engine.urls={json.dumps(urls)}",
            "engine.replicas={live=2}",
            "worlds.concurrency=8",
            "worlds.group=4",
            "worlds.lead=1000",
            "worlds.window=8",
            "worlds.epochs=0",
            "reward.world_staleness=2000",
            "follow.interval_s=0.1",
            "evaluate.suite=''",
            "model.numerics=fast",
            "serve.control_share=0.0",
        ]
        config = load(None, [*quick_settings(directory, *world_overrides(tasks)), *settings, *more])
        place = home(config)
        live, world = await publish_worlds(config)
        stack.enter_context(hold(place.root, "up"))
        launching = launch(config, lambda who, what: None, front="serve", names=("serve", "rollout"))
        launched = await stack.enter_async_context(launching)
        url = await launched.during(ready(place, ("live", "world")))
        people, key = People(url, config.model.served_as), place.admin_key()
        await launched.during(people.come(WAVES))
        after = await numbers(url, key)
        lines = [line for line in last_lines(place.progress("serve"), 1 << 22) if line["kind"] == "lent"]
    with open_log(config) as log:
        turns = [row async for _, row in log.read(0, {Turn}) if isinstance(row, Turn)]
    assert people.failed == []
    stored = Counter(turn.id for turn in turns)
    assert max(stored.values()) == 1
    assert all(stored[turn] == 1 for turn in people.turns), "what people got is in the log"
    made = {arm: {span.policy.hash for turn in turns if turn.arm is arm for span in turn.spans} for arm in Arm}
    assert (made[Arm.LIVE], made[Arm.WORLD]) == ({live}, {world})
    worlds = [turn for turn in turns if turn.arm is Arm.WORLD]
    calls = Counter("-".join(turn.id.partition(":")[0].split("-")[:3]) for turn in worlds if turn.finish.trainable)
    assert max(calls.values()) == 1, "no call was answered twice"
    assert graded_twice(place) == []
    ended = sum(turn.finish.trainable for turn in worlds)
    waits = sorted(people.waits)
    return {
        "people": len(waits),
        "wait_p50": waits[len(waits) // 2],
        "wait_p90": waits[int(0.9 * len(waits))],
        "wait_max": waits[-1],
        "rollouts": ended,
        "ended_early": len(worlds) - ended,  # cut off, or open when the run was stopped
        "lent_tokens": after["ostinato_engine_lent_tokens"],
        "lent_seconds": after["ostinato_engine_lent_seconds"],
        "lent_cut": after["ostinato_engine_lent_cut"],
        "retries": after["ostinato_engine_retries"],
        "why": [line["why"] for line in lines if line["why"]],
    }


@pytest.mark.examination
async def test_servers_are_lent_at_the_trough_and_back_at_the_wave(tmp_path, quick_settings):
    for name in ("alone", "lent"):
        (tmp_path / name).mkdir()
    async with asyncio.timeout(500):
        alone = await waves(tmp_path / "alone", quick_settings)
        lent = await waves(tmp_path / "lent", quick_settings, *LENDING)
    (tmp_path / "figures.json").write_text(json.dumps({"alone": alone, "lent": lent}, indent=1))
    assert (alone["lent_tokens"], alone["why"]) == (0, [])
    verbs = [why.split(":")[0] for why in lent["why"]]
    assert verbs == ["1 lent", "1 wanted back", "1 lent"], lent["why"]
    assert lent["lent_tokens"] > 0
    assert lent["rollouts"] > alone["rollouts"]
    assert lent["lent_cut"] > 0, "rollouts of 0.8 s and more do not end in 0.2 s"
    assert max(alone["wait_max"], lent["wait_max"]) < PROMISE_S
    assert lent["people"] == alone["people"]
