"""Rollouts on another machine while the line is cut, the worker is killed and the door starts anew: no reward twice, no group torn."""

import asyncio
import contextlib
import random
import socket
from collections import Counter, defaultdict

import pytest
from tests.deadlines import PATIENT_S, WHOLE_PROGRAM_S
from tests.fakes.certificates import Authority
from tests.fakes.gateways import world_gateway
from tests.oracles.turn_accounting import recount
from tests.unit.worlds.rollout.test_rollout_worker import Coin, Steps, tasks

from ostinato.app.worlds import open_far_rollouts
from ostinato.config import load
from ostinato.core.errors import NoSignal
from ostinato.core.records import Batch, Holdback, PolicyVersion, Reward, Signal, Turn
from ostinato.core.verdicts import GRADED
from ostinato.reward.config import RewardConfig
from ostinato.reward.functions import copilot
from ostinato.reward.ledger_entries import Taught
from ostinato.reward.pipeline import RewardDesk
from ostinato.reward.runners import Inline
from ostinato.worlds.harness.gateway import WorldGateway
from ostinato.worlds.rollout.config import DoorConfig, WorldsConfig
from ostinato.worlds.rollout.groups import EventFile, SpentGroups
from ostinato.worlds.rollout.mutual_tls import door_context, worker_context
from ostinato.worlds.rollout.rollout_server import Door, FarOutcomes, OwnTurns
from ostinato.worlds.rollout.rollout_worker import Rollouts, Workshop

CONFIG = WorldsConfig(file="t", group=3, groups=2, lead=2, window=3, retry_pause_s=0.01, poll_s=0.01, concurrency=6)


class BadLine:
    """Carries bytes to a port and back, and cuts connections after a while."""

    def __init__(self, port: int, chance: random.Random, cuts: float) -> None:
        self.port, self.chance, self.cuts, self.cut, self.carried = port, chance, cuts, 0, 0
        self.tasks = set()

    async def carry(self, reader, writer):
        self.tasks.add(asyncio.current_task())
        ends = [writer]

        async def one(source, sink):
            while data := await source.read(4096):
                self.carried += 1
                if self.chance.random() < self.cuts or self.carried == 40:  # once for certain
                    self.cut += 1
                    raise ConnectionError("cut")
                sink.write(data)
            raise ConnectionError("ended")

        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.port)
            ends.append(far_writer)
            async with asyncio.TaskGroup() as both:
                both.create_task(one(reader, far_writer))
                both.create_task(one(far_reader, writer))
        except* OSError:
            pass
        finally:
            for end in ends:
                end.transport.abort()
            self.tasks.discard(asyncio.current_task())

    async def end(self):
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await asyncio.sleep(0.05)  # transports close in the loop's next rounds


async def train(log):
    desk = RewardDesk(
        log, Inline(copilot, max_abs=1.0), lambda: 1030.0, RewardConfig(world_staleness=10**6),
        taught=Taught(people=False, groups=CONFIG.groups),
    )  # fmt: skip
    while True:
        with contextlib.suppress(NoSignal):
            await desk.poll()
            await desk.batch(desk.last_step + 1, 1, PolicyVersion(number=0, hash="fake0"))
        await asyncio.sleep(0.005)


async def work(path, taskset, url, context, chance, grader):
    """One life of a worker, as `open_far_rollouts` puts it together."""
    journal, events = EventFile.open(path)
    try:
        async with WorldGateway(url, "", timeout_s=PATIENT_S, context=context) as gateway:
            after = max((event["after"] for event in events if "after" in event), default=0)
            spending = SpentGroups(FarOutcomes(gateway), after=after)
            shop = Workshop(harnesses={"single": Steps(chance)}, backend=None, grader=grader, gateway=gateway)
            await Rollouts(taskset, shop, journal, events, spending, CONFIG, lambda kind, **more: None).run()
    finally:
        journal.close()


@pytest.mark.parametrize("seed", range(4))
async def test_a_lost_link_resumes_without_a_reward_twice(tmp_path, seed):
    chance, authority = random.Random(seed), Authority(tmp_path)
    ours, theirs = authority.sign("trainer"), authority.sign("acme")
    inside = door_context(ours.certificate, ours.key, authority.file)
    context = worker_context(theirs.certificate, theirs.key, authority.file)
    grader, taskset = Coin(chance), tasks(8)
    async with world_gateway("hi") as (gateway, log), asyncio.timeout(WHOLE_PROGRAM_S):
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        line = BadLine(port, chance, cuts=0.02)
        carrying = await asyncio.start_server(line.carry, "127.0.0.1", 0)
        url = f"https://127.0.0.1:{carrying.sockets[0].getsockname()[1]}"
        training = asyncio.create_task(train(log))
        for left in range(4, -1, -1):
            async with Door(gateway, OwnTurns(log), listener.dup(), inside, DoorConfig()):
                working = asyncio.create_task(work(tmp_path / "j", taskset, url, context, chance, grader))
                if left:
                    seen = len(log.rows) + chance.randint(5, 40)
                    while len(log.rows) < seen and not working.done():
                        await asyncio.sleep(0.005)
                    if chance.random() < 0.5:  # killed; else only the door goes, and its connections with it
                        working.cancel()
                        await asyncio.gather(working, return_exceptions=True)
                        continue
                else:
                    await working
            if not working.done() and left:
                async with Door(gateway, OwnTurns(log), listener.dup(), inside, DoorConfig()):
                    seen = len(log.rows) + 3
                    while len(log.rows) < seen and not working.done():
                        await asyncio.sleep(0.005)
                    working.cancel()
                    await asyncio.gather(working, return_exceptions=True)
        training.cancel()
        carrying.close()
        await line.end()
        listener.close()
    assert line.cut > 0
    batches = [row for row in log.rows if isinstance(row, Batch)]
    rewards = Counter(row.turn for row in log.rows if isinstance(row, Reward))
    trained = Counter(turn for batch in batches for turn in batch.turns)
    told = Counter(row.turn for row in log.rows if isinstance(row, Signal) and row.name == GRADED)
    assert max(told.values()) == 1, "a verdict that was told again is the same one"
    assert max(rewards.values()) == max(trained.values()) == 1
    assert (await recount(log)).balanced
    turns = {row.id: row for row in log.rows if isinstance(row, Turn)}
    assert all(turn.episode.startswith("acme/") and turn.group.startswith("acme/") for turn in turns.values())
    of = defaultdict(set)
    for batch in batches:
        for turn in batch.turns:
            of[turns[turn].group].add(batch.step)
    assert all(len(steps) == 1 for steps in of.values()), "no group is parted"
    held = {row.turn for row in log.rows if isinstance(row, Holdback)}
    waiting = {turn.group for turn in turns.values() if turn.id not in held and turn.id not in trained}
    assert len(waiting) < CONFIG.groups, "only what is too little for a step waits"
    assert len({turn.group for turn in turns.values()}) == 8
    assert max(grader.graded.values()) == 1, "what was graded is not graded again"


async def test_a_worker_whose_run_was_restored_from_an_older_backup_waits_for_nothing_that_is_lost(tmp_path):
    authority, taskset = Authority(tmp_path), tasks(2)
    ours, theirs = authority.sign("trainer"), authority.sign("acme")
    journal, _ = EventFile.open(tmp_path / "rollouts.jsonl")
    ended = {
        "kind": "ended",
        "n": 0,
        "member": 0,
        "episode": "w.0.0.0",
        "last": True,
        "turns": ["lost:0"],
        "grade": 1.0,
    }
    for event in (
        {"kind": "linked", "n": -1, "after": 500},
        {"kind": "drawn", "n": 0, "task": "t0", "epoch": 0, "size": 1},
        ended,
        {"kind": "told", "n": 0},
    ):
        journal.append(event)
    journal.close()
    async with world_gateway("hi") as (gateway, log), asyncio.timeout(WHOLE_PROGRAM_S):
        listener = socket.create_server(("127.0.0.1", 0))
        settings = {"url": f"https://127.0.0.1:{listener.getsockname()[1]}", "certificate": theirs.certificate}
        settings |= {"key": theirs.key, "authority": authority.file}
        config = load(
            None,
            [f"run.directory={tmp_path}", *(f"worlds.connect.{name}='{value}'" for name, value in settings.items())],
        )
        inside = door_context(ours.certificate, ours.key, authority.file)
        async with Door(gateway, OwnTurns(log), listener, inside, DoorConfig()):
            opening = open_far_rollouts(config, taskset, lambda kind, **more: None, lambda _: None, lambda why: None)
            async with opening as rollouts:
                assert rollouts.groups.open == {}
                assert rollouts.groups.read_upto == len(log.rows)
