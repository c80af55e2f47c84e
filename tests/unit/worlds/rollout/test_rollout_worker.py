"""Rollouts that are killed at any instant: graded once, rewarded once, no group parted. The log, the desk and the journal are real."""

import asyncio
import json
import os
import random
from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from tests.deadlines import PATIENT_S, WHOLE_PROGRAM_S
from tests.oracles.turn_accounting import recount

from ostinato.core.conversation import Message, Role
from ostinato.core.errors import BadConfig, BadRequest, Corrupt, NoSignal, StorageFull, Unavailable
from ostinato.core.records import Arm, Batch, Finish, Holdback, PolicyVersion, Purpose, Reward, Signal, Turn
from ostinato.core.verdicts import BELIEF, CLOSED, is_continuation
from ostinato.reward.config import BeliefConfig, RewardConfig
from ostinato.reward.functions import copilot
from ostinato.reward.ledger_entries import Taught
from ostinato.reward.pipeline import RewardDesk
from ostinato.reward.runners import Inline
from ostinato.serve.feedback.intake import parse_feedback
from ostinato.testing.log import MemoryLog
from ostinato.testing.records import a_turn
from ostinato.worlds.grading.grade import Grade
from ostinato.worlds.harness.memory import Memory, MemoryConfig
from ostinato.worlds.harness.rollout import Ended, ModelAnswer, Rollout
from ostinato.worlds.rollout.attempt import Workshop
from ostinato.worlds.rollout.config import WorldsConfig
from ostinato.worlds.rollout.groups import MOST_BYTES, EventFile, SpentGroups
from ostinato.worlds.rollout.rollout_worker import Rollouts
from ostinato.worlds.tasks.task import Grading, KnownAnswer, Split, Task
from ostinato.worlds.tasks.tasksets import taskset_of

V0 = PolicyVersion(number=0, hash="00")
CONFIG = WorldsConfig(file="t", group=4, groups=2, lead=2, window=3, retry_pause_s=0.001, poll_s=0.001, concurrency=6)


def tasks(count: int, **changes):
    ask = (Message(role=Role.USER, text="say"),)
    return taskset_of(
        "letters",
        [Task(id=f"t{n}", family="f", messages=ask, grading=Grading(grader="coin"), **changes) for n in range(count)],
    )


class FakeGateway:
    """A log behind a gateway that answers after a while, and may be away."""

    def __init__(self, log: MemoryLog, chance: random.Random) -> None:
        self.log, self.chance, self.asked, self.away = log, chance, 0, 0.0
        self.prompts = defaultdict(list)
        self.read, self.room = [], 99
        self.believes = lambda messages: len(messages) / 10

    def model(self, episode, *, group, harness, temperature=None, top_p=1.0):
        return FakeModel(self, episode, group)

    async def belief(self, messages, known):
        """As `believes` says."""
        self.read.append((messages, known))
        if self.chance.random() < self.away:
            raise Unavailable("away")
        if len(messages) > self.room:
            raise BadRequest("too long")
        return self.believes(messages)

    async def say(self, events):
        await asyncio.sleep(0)
        if self.chance.random() < self.away:
            raise Unavailable("away before")
        await self.log.append(*parse_feedback(events, tenant="default", now=20.0))
        await asyncio.sleep(0)
        if self.chance.random() < self.away:
            raise Unavailable("away after")


class FakeModel:
    def __init__(self, gateway, episode, group) -> None:
        self.gateway, self.episode, self.group = gateway, episode, group
        self.policies, self.finish, self.draw = {V0}, Finish.STOP, 0.5

    async def ask(self, messages, tools=(), *, max_tokens, stop=(), left_s=None, purpose=Purpose.TASK):
        gateway = self.gateway
        gateway.asked += 1
        gateway.prompts[self.episode].append(messages[-1].text)
        made = a_turn(f"chatcmpl-{gateway.asked}:0", arm=Arm.WORLD, user="world", finish=self.finish)
        await asyncio.sleep(0)
        await gateway.log.append(replace(made, episode=self.episode, group=self.group, purpose=purpose))
        await asyncio.sleep(0)
        if gateway.chance.random() < gateway.away:
            raise Unavailable("away")
        said = Message(role=Role.ASSISTANT, text=made.id if gateway.chance.random() < 0.8 else "")
        return ModelAnswer(turn=made.id, message=said, finish="stop", prompt_tokens=1, tokens=2)


class Talks:
    """A harness whose rollouts are conversations of one to three turns."""

    name, hash = "single", "h"

    def __init__(self, chance: random.Random, length: int = 0, told=lambda: "on") -> None:
        self.chance, self.length, self.told = chance, length, told

    def spec(self, task):
        return None

    async def run(self, task, model, sandbox):
        messages, turns = list(task.messages), []
        for _ in range(self.length or self.chance.randint(1, 3)):
            answered = await model.ask(messages, max_tokens=2)
            turns.append(answered.turn)
            messages += [answered.message, Message(role=Role.USER, text=self.told())]
        done = tuple(messages[:-1])
        return Rollout(task=task.id, harness="single", ended=Ended.SUBMITTED, messages=done, turns=tuple(turns))


class Steps:
    """A harness of one to three turns."""

    name, hash = "single", "h"

    def __init__(self, chance: random.Random, failing: float = 0.0) -> None:
        self.chance, self.failing = chance, failing

    def spec(self, task):
        return None

    async def run(self, task, model, sandbox):
        turns = []
        for _ in range(self.chance.randint(1, 3)):
            turns.append((await model.ask(task.messages, max_tokens=2)).turn)
        ended = Ended.FAILED if self.chance.random() < self.failing else Ended.SUBMITTED
        return Rollout(task=task.id, harness="single", ended=ended, messages=(), turns=tuple(turns))


class Remembers(Steps):
    """A harness of one to three windows, each of which ends with a summary, and an answer."""

    async def run(self, task, model, sandbox):
        config = MemoryConfig(window=4096, summary_tokens=4, think_tokens=0, tells=(), keep_last=False)
        messages, turns, effort = list(task.messages), [], Counter()
        memory = Memory(config, task, model, messages, turns, effort, room=4000)
        for _ in range(self.chance.randint(1, 3)):
            messages.append(Message(role=Role.USER, text="event"))
            await memory.summarise(lambda: {"seconds": 9.0})
        turns.append((await model.ask(messages, max_tokens=2)).turn)
        said = tuple(memory.transcript)
        return Rollout(task=task.id, harness="single", ended=Ended.SUBMITTED, messages=said, turns=tuple(turns))


class Coin:
    """Grades, and remembers what it graded."""

    def __init__(self, chance: random.Random) -> None:
        self.chance, self.graded = chance, Counter()

    async def grade(self, task, rollout):
        await asyncio.sleep(0)
        self.graded[rollout.turns] += 1
        return Grade(value=float(self.chance.random() < 0.5))


class Contrast(Coin):
    """Every other rollout of a task is worth something, so that no group is without contrast but those of the tasks in `flat`."""

    def __init__(self, flat=()) -> None:
        super().__init__(random.Random(0))
        self.flat = flat

    async def grade(self, task, rollout):
        await super().grade(task, rollout)
        self.graded[task.id] += 1
        return Grade(value=float(self.graded[task.id] % 2 and task.id not in self.flat))


class World:
    """What outlives the worker: the log and the journal's file."""

    def __init__(
        self, directory, seed: int, taskset, config=CONFIG, *, away=0.0, failing=0.0, most_bytes=MOST_BYTES, **reward
    ) -> None:
        chance = random.Random(seed)
        self.log, self.path, self.config, self.taskset = MemoryLog(), directory / "rollouts.jsonl", config, taskset
        self.gateway = FakeGateway(self.log, chance)
        self.gateway.away = away
        self.grader, self.harness = Coin(chance), Steps(chance, failing)
        self.told, self.finished = [], []
        self.desk = RewardDesk(
            self.log,
            Inline(copilot, max_abs=1.0),
            lambda: 30.0,
            RewardConfig(world_staleness=10**6, **reward),
            taught=Taught(people=False, groups=config.groups),
        )
        self.journal, self.most_bytes, self.over, self.more = None, most_bytes, False, {}

    def close(self) -> None:
        if self.journal is not None:
            self.journal.close()

    def worker(self) -> Rollouts:
        self.close()
        self.journal, events = EventFile.open(self.path, self.most_bytes)
        shop = Workshop(harnesses={"single": self.harness}, backend=None, grader=self.grader, gateway=self.gateway)
        spending = SpentGroups(self.log, after=max((event.get("after", 0) for event in events), default=0))
        return Rollouts(
            self.taskset,
            shop,
            self.journal,
            events,
            spending,
            self.config,
            lambda kind, **more: self.told.append((kind, more)),
            self.finished.append,
            clock=lambda: 50.0,
            **self.more,
        )

    async def train(self) -> None:
        """Take whatever batch there is, until it is over and everything written by then is read."""
        last = False
        while not last:
            last = self.over
            try:
                await self.desk.poll()
                await self.desk.batch(self.desk.last_step + 1, 1, V0)
            except NoSignal:
                pass
            await asyncio.sleep(0)


def groups_of(log: MemoryLog) -> dict[str, list[Turn]]:
    found = defaultdict(list)
    for row in log.rows:
        if isinstance(row, Turn):
            found[row.group].append(row)
    return found


async def until_done(world: World, chance: random.Random, kills: int) -> None:
    training = asyncio.create_task(world.train())
    try:
        async with asyncio.timeout(WHOLE_PROGRAM_S):
            for left in range(kills, -1, -1):
                working = asyncio.create_task(world.worker().run())
                if left:
                    for _ in range(chance.randint(1, 120)):
                        await asyncio.sleep(0)
                    working.cancel()  # whatever it awaits now never happens
                    await asyncio.gather(working, return_exceptions=True)
                    if chance.random() < 0.5:  # a line that the kill cut short
                        with world.path.open("ab") as file:
                            file.write(b'{"kind":"ended","n":0,"mem')
                else:
                    await working
            world.over = True
            await training
    finally:
        training.cancel()
        world.close()


@pytest.mark.parametrize("seed", range(12))
async def test_kills_at_any_instant_part_no_group_and_reward_nothing_twice(seed: int, tmp_path):
    chance = random.Random(seed)
    config = CONFIG if seed % 3 else CONFIG.model_copy(update={"group": 6, "group_first": 3})
    most_bytes = 800 if seed % 2 else MOST_BYTES
    world = World(tmp_path, seed, tasks(8), config, away=0.05, failing=0.05, most_bytes=most_bytes)
    await until_done(world, chance, kills=10)
    assert ("lines" in json.loads(world.path.read_text().splitlines()[0])) == (seed % 2 == 1), "it was written anew"
    log = world.log
    batches = [row for row in log.rows if isinstance(row, Batch)]
    rewards = Counter(row.turn for row in log.rows if isinstance(row, Reward))
    trained = Counter(turn for batch in batches for turn in batch.turns)
    assert max(rewards.values()) == 1
    assert max(trained.values()) == 1
    found = await recount(log)
    assert found.balanced
    of = {turn.id: turn.group for turn in log.rows if isinstance(turn, Turn)}
    in_batches = [{of[turn] for turn in batch.turns} for batch in batches]
    assert sum(map(len, in_batches)) == len(set().union(*in_batches)), "no group is in two batches"
    held = {row.turn: row.reason for row in log.rows if isinstance(row, Holdback)}
    waiting = {group for turn, group in of.items() if turn not in held and turn not in trained}
    assert len(waiting) < CONFIG.groups, "what nobody knew any more was held back when its group was closed"
    for members in groups_of(log).values():
        graded = {turn.episode for turn in members if turn.id in rewards}
        assert len(graded) <= config.group, "a rollout that was torn is replaced, not counted beside its replacement"
        outcomes = {held.get(turn.id, "trained").partition(":")[0] for turn in members if turn.id in rewards}
        assert len(outcomes) <= 1
    episodes = {turn.id: turn.episode for turn in log.rows if isinstance(turn, Turn)}
    assert not [turns for turns in world.grader.graded if len({episodes[turn] for turn in turns}) != 1]


@pytest.mark.parametrize("seed", range(6))
async def test_killed_in_the_middle_of_a_summary_a_rollout_is_begun_anew_without_half_a_memory(seed: int, tmp_path):
    chance = random.Random(seed)
    world = World(tmp_path, seed, tasks(8), away=0.03, purposes=tuple(Purpose))
    world.harness = Remembers(chance)
    await until_done(world, chance, kills=10)
    log = world.log
    turns = {row.id: row for row in log.rows if isinstance(row, Turn)}
    batches = [row for row in log.rows if isinstance(row, Batch)]
    assert max(Counter(row.turn for row in log.rows if isinstance(row, Reward)).values()) == 1
    assert max(Counter(turn for batch in batches for turn in batch.turns).values()) == 1
    assert (await recount(log)).balanced
    summaries = {id for id, turn in turns.items() if turn.purpose is Purpose.COMPACTION}
    assert summaries & {turn for batch in batches for turn in batch.turns}, "they are learned from"
    for batch in batches:
        credits = defaultdict(set)
        for turn, credit in zip(batch.turns, batch.credits, strict=True):
            credits[turns[turn].episode].add(credit)
        assert all(len(of_chain) == 1 for of_chain in credits.values()), "a chain's turns have one advantage"
    for episode, prompts in world.gateway.prompts.items():
        known = {id for id in summaries if turns[id].episode == episode}
        begun = [text.split("\n")[1] for text in prompts if text.startswith("=== memory: summary")]
        assert set(begun) <= known, "no summary of another try, nor a part of one"
    finished = {record.episode: record for record in world.finished}
    for record in finished.values():
        assert set(record.turns) == {id for id, turn in turns.items() if turn.episode == record.episode}


@pytest.mark.parametrize("kills", [0, 8])
async def test_a_group_ends_with_its_first_rollouts_if_they_are_all_worth_the_same(kills: int, tmp_path):
    world = World(tmp_path, 0, tasks(6), CONFIG.model_copy(update={"group": 9, "group_first": 3}))
    world.grader = Contrast(flat=("t0", "t3"))
    await until_done(world, random.Random(1), kills)
    rewarded = {row.turn for row in world.log.rows if isinstance(row, Reward)}
    sizes: dict[str, list[int]] = defaultdict(list)
    names = {finished.group: finished.task for finished in world.finished}
    for name, members in groups_of(world.log).items():
        sizes[names[name]].append(len({turn.episode for turn in members if turn.id in rewarded}))
    assert sizes == {f"t{n}": [3 if n in (0, 3) else 9] for n in range(6)}
    held = {
        row.reason.partition(":")[0] for row in world.log.rows if isinstance(row, Holdback) and row.turn in rewarded
    }
    assert held == {"flat"}


async def test_after_a_power_cut_no_two_rollouts_have_one_name(tmp_path, monkeypatch):
    world, durable, sync = World(tmp_path, 1, tasks(2)), [b""], os.fsync
    named, model = list[str](), world.gateway.model

    def synced(descriptor):
        sync(descriptor)
        durable[0] = world.path.read_bytes()

    def begun(episode, **more):
        named.append(episode)
        return model(episode, **more)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(world.gateway, "model", begun)
    working = asyncio.create_task(world.worker().run())
    async with asyncio.timeout(PATIENT_S):
        while not world.gateway.asked:
            await asyncio.sleep(0)
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    world.close()
    world.path.write_bytes(durable[0])  # the rest was in the system's cache, and the turns are in the log
    await until_done(world, random.Random(1), 0)
    assert len(named) == len({*named})


async def test_what_was_graded_is_not_graded_again_after_a_restart(tmp_path):
    world = World(tmp_path, 0, tasks(6))
    await until_done(world, random.Random(3), kills=6)
    assert max(world.grader.graded.values()) == 1
    groups = groups_of(world.log)
    assert len(groups) == 6
    rewarded = {row.turn for row in world.log.rows if isinstance(row, Reward)}
    for members in groups.values():
        assert len({turn.episode for turn in members if turn.id in rewarded}) == CONFIG.group


async def test_a_group_that_was_told_as_the_worker_was_killed_is_found_in_the_batch_that_holds_it(tmp_path):
    world = World(tmp_path, 0, tasks(2))
    world.grader = Contrast()
    await until_done(world, random.Random(0), kills=0)
    (first, *events) = map(json.loads, world.path.read_text().splitlines())
    left = [each for each in events if each["kind"] != "spent" and (each["kind"] != "told" or each["n"] == 0)]
    world.path.write_text("".join(json.dumps(each) + "\n" for each in (first, *left)))
    worker = world.worker()
    async with asyncio.timeout(PATIENT_S):
        await worker.run()
    assert not worker.groups.open
    world.close()


async def test_killed_between_two_groups_that_one_look_found_it_finds_the_second_again(tmp_path):
    world = World(tmp_path, 0, tasks(2))
    world.grader = Contrast()
    await until_done(world, random.Random(0), kills=0)
    lines = world.path.read_text().splitlines(keepends=True)
    spent = [place for place, line in enumerate(lines) if '"spent"' in line]
    assert len(spent) == 2, "one batch held both"
    world.path.write_text("".join(lines[: spent[1]]))
    world.config = CONFIG.model_copy(update={"groups": 1})  # it ends when none is left
    worker = world.worker()
    assert len(worker.groups.open) == 1
    async with asyncio.timeout(PATIENT_S):
        await worker.run()
    world.close()


async def test_killed_as_it_gave_up_a_group_without_graded_turns_it_gives_it_up_again(tmp_path):
    world = World(tmp_path, 0, tasks(1), failing=1.0)
    await until_done(world, random.Random(0), kills=0)
    lines = world.path.read_text().splitlines(keepends=True)
    assert '"told"' in lines[-2]
    assert '"spent"' in lines[-1]
    world.path.write_text("".join(lines[:-1]))
    worker = world.worker()
    async with asyncio.timeout(PATIENT_S):
        await worker.run()
    assert not worker.groups.open
    world.close()


async def test_it_is_never_further_ahead_than_told(tmp_path):
    world = World(tmp_path, 0, tasks(9))
    world.grader = Contrast(flat=("t0", "t3", "t6"))
    worker = world.worker()
    working = asyncio.create_task(worker.run())

    def teach():
        return [group for group in worker.groups.open.values() if not group.flat and group.told]

    async with asyncio.timeout(PATIENT_S):
        while len(teach()) < CONFIG.lead * CONFIG.groups:
            await asyncio.sleep(0)
    for _ in range(4000):  # nobody trains
        await asyncio.sleep(0)
    async with asyncio.timeout(PATIENT_S):
        while not all(group.told for group in worker.groups.open.values()):
            await asyncio.sleep(0)
    assert len(teach()) == CONFIG.lead * CONFIG.groups
    assert worker.groups.drawn > len(teach()), "nobody waits for what no batch takes"
    await world.desk.poll()
    assert await world.desk.batch(1, 1, V0) is not None
    async with asyncio.timeout(PATIENT_S):
        while worker.groups.drawn < (CONFIG.lead + 1) * CONFIG.groups:
            await asyncio.sleep(0.001)
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    world.close()


async def test_a_rollout_that_always_fails_leaves_its_group_to_the_others(tmp_path):
    world = World(tmp_path, 0, tasks(1), failing=1.0)
    await until_done(world, random.Random(0), kills=0)
    assert not [row for row in world.log.rows if isinstance(row, Reward)]
    reasons = Counter(row.reason for row in world.log.rows if isinstance(row, Holdback))
    assert set(reasons) == {"world:rollout_failed"}
    assert len({turn.episode for turn in world.log.rows if isinstance(turn, Turn)}) == CONFIG.group * CONFIG.tries


async def test_a_rollout_that_is_always_lost_in_its_middle_is_given_up(tmp_path):
    """As where what the model runs takes its sandbox along, each time: the others of its group and the run go on."""

    class Takes:
        name, hash, spec = "single", "h", lambda self, task: None

        async def run(self, task, model, sandbox):
            await model.ask(task.messages, max_tokens=2)
            raise Unavailable("the sandbox is gone")

    world = World(tmp_path, 0, tasks(1))
    world.harness = Takes()
    await until_done(world, random.Random(0), kills=0)
    assert {record.value for record in world.finished} == {None}
    assert {record.why[:11] for record in world.finished} == {"lost midway"}
    assert not [row for row in world.log.rows if isinstance(row, Reward)]


async def test_a_groups_line_tells_how_long_its_rollouts_were_and_how_they_ended(tmp_path):
    class Ends:
        name, hash, spec = "single", "h", lambda self, task: None
        left = iter([Ended.LENGTH, Ended.TIMEOUT, Ended.LENGTH, Ended.SUBMITTED])

        async def run(self, task, model, sandbox):
            ended = next(self.left)
            turn = (await model.ask(task.messages, max_tokens=2)).turn
            return Rollout(
                task=task.id, harness="h", ended=ended, messages=(), turns=(turn,), effort={"tokens": float(len(ended))}
            )

    world = World(tmp_path, 0, tasks(1), CONFIG.model_copy(update={"concurrency": 1}))
    world.harness = Ends()
    await until_done(world, random.Random(0), kills=0)
    (line,) = [more for kind, more in world.told if kind == "group"]
    assert (line["tokens"], line["turns"]) == ([6, 7, 6, 9], [1, 1, 1, 1])
    assert (line["cut"], line["timeouts"], line["failed"]) == (2, 1, 0)


async def test_held_out_tasks_are_measured_and_teach_nothing(tmp_path):
    both = taskset_of("both", [*tasks(2).tasks, replace(tasks(1).tasks[0], id="out", split=Split.HELD_OUT)])
    world = World(tmp_path, 0, both, CONFIG.model_copy(update={"measure_every": 2}))
    await until_done(world, random.Random(0), kills=0)
    alone = [turn.id for turn in groups_of(world.log)[None]]
    held = {row.turn: row.reason for row in world.log.rows if isinstance(row, Holdback)}
    assert alone
    assert {held[turn] for turn in alone} == {"world:rollout_measured"}
    assert [more["split"] for kind, more in world.told if kind == "measured"] == ["held_out"]


async def test_what_ends_the_worker_ends_every_measurement_that_is_under_way(tmp_path):
    out = [replace(tasks(1).tasks[0], id=f"out{n}", split=Split.HELD_OUT) for n in range(2)]
    world = World(
        tmp_path, 0, taskset_of("both", [*tasks(1).tasks, *out]), CONFIG.model_copy(update={"measure_every": 1})
    )
    under_way = []

    class Cannot:
        async def grade(self, task, rollout):
            if task.id == "out0":
                while "out1" not in under_way:
                    await asyncio.sleep(0)
                raise BadConfig("no such test")
            under_way.append(task.id)
            try:
                await asyncio.Event().wait()
            finally:
                under_way.remove(task.id)

    world.grader = Cannot()
    async with asyncio.timeout(PATIENT_S):
        with pytest.raises((BadConfig, ExceptionGroup)):
            await world.worker().run()
    assert under_way == []
    world.close()


async def test_each_rollout_that_ended_for_good_leaves_a_record(tmp_path):
    both = taskset_of("both", [*tasks(2).tasks, replace(tasks(1).tasks[0], id="out", split=Split.HELD_OUT)])
    world = World(tmp_path, 0, both, CONFIG.model_copy(update={"measure_every": 2}), failing=0.3)
    await until_done(world, random.Random(0), kills=0)
    assert Counter(record.task for record in world.finished) == {"t0": 4, "t1": 4, "out": 1}
    assert {record.taskset for record in world.finished} == {both.hash}
    assert {(record.group is None, record.member is None) for record in world.finished if record.task == "out"} == {
        (True, True)
    }
    episodes = {turn.id: turn.episode for turn in world.log.rows if isinstance(turn, Turn)}
    rewards = Counter()
    for row in world.log.rows:
        if isinstance(row, Reward):
            rewards[episodes[row.turn]] += row.value
    for record in world.finished:
        assert {episodes[turn] for turn in record.turns} == {record.episode}
        assert (record.policy, record.policy_last, record.at) == (V0, V0, 50.0)
        if record.group is not None and record.value is not None:
            assert rewards[record.episode] == record.value, "what is shown is what was learned from"


async def test_a_grader_that_cannot_grade_ends_the_worker(tmp_path):
    class Helpless:
        async def grade(self, task, rollout):
            raise BadConfig("no grader 'coin'")

    world = World(tmp_path, 0, tasks(1))
    world.grader = Helpless()
    with pytest.raises(BaseExceptionGroup) as caught:
        await world.worker().run()
    assert caught.group_contains(BadConfig)
    world.close()


def reopened(path) -> list[dict]:
    journal, events = EventFile.open(path)
    journal.close()
    return events


def test_a_journal_on_a_full_disk_stays_whole_however_often_it_is_tried(tmp_path, monkeypatch):
    journal, _ = EventFile.open(tmp_path / "j")
    whole = (tmp_path / "j").read_bytes()

    class Full:
        """Writes a part of what it is given, then says that there is no room."""

        def __init__(self, file) -> None:
            self.file, self.full = file, True

        def write(self, data):
            return self.file.write(data[: len(data) // 2] if self.full else data)

        def __getattr__(self, name):
            return getattr(self.file, name)

    disk = Full(journal._file)
    monkeypatch.setattr(journal, "_file", disk)
    for number in range(3):
        with pytest.raises(StorageFull):
            journal.append({"kind": "told", "n": number})
        assert (tmp_path / "j").read_bytes() == whole
    disk.full = False
    journal.append({"kind": "told", "n": 9})
    journal.close()
    assert reopened(tmp_path / "j") == [{"kind": "told", "n": 9}]


def test_a_journal_cut_at_any_byte_holds_what_was_whole(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    journal, _ = EventFile.open(path)
    events = [{"kind": "drawn", "n": n, "task": "ä"} for n in range(4)]
    for event in events:
        journal.append(event, sync=True)
    journal.close()
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for size in range(first, len(whole)):
        path.write_bytes(whole[:size])
        again, found = EventFile.open(path)
        assert again.token == journal.token
        assert found == events[: whole[:size].count(b"\n") - 1]
        again.append({"kind": "more"})
        again.close()
        assert reopened(path) == [*found, {"kind": "more"}]
    path.write_bytes(whole[: first - 3])
    assert reopened(path) == [], "cut in its first line it is as new"
    path.write_bytes(b"nonsense\n" + whole)
    with pytest.raises(Corrupt, match="line 1"):
        EventFile.open(path)


# ---------------------------------------------------------------- belief in a known answer

KNOWN = KnownAnswer(question="Which?", answer="this")


def beliefs_in(log: MemoryLog) -> dict[str, float]:
    """What was said of each turn's change."""
    return {row.turn: row.value for row in log.rows if isinstance(row, Signal) and row.name == BELIEF}


def talking(directory, taskset, **more) -> World:
    """A world whose rollouts are conversations, about which it is asked what they believe."""
    world = World(directory, 3, taskset, **more)
    world.harness, world.grader, world.more = Talks(world.gateway.chance), Contrast(), {"beliefs": True}
    return world


@pytest.mark.parametrize("kills", [0, 10])
async def test_what_each_turn_changed_is_said_before_its_group_closes_and_divides_its_credit(tmp_path, kills):
    belief, most_bytes = BeliefConfig(strength=1.0), 800 if kills else MOST_BYTES
    world = talking(tmp_path, tasks(6, known=KNOWN), away=0.05, belief=belief, most_bytes=most_bytes)
    await until_done(world, random.Random(kills), kills)
    said, rows = beliefs_in(world.log), world.log.rows
    turns = {row.id: row for row in rows if isinstance(row, Turn)}
    batches = [row for row in rows if isinstance(row, Batch)]
    assert batches
    assert {turn for batch in batches for turn in batch.turns} <= set(said)
    assert {known for _, known in world.gateway.read} == {KNOWN}
    closed = {turns[row.turn].group: n for n, row in enumerate(rows) if getattr(row, "name", "") == CLOSED}
    places = {row.turn: n for n, row in enumerate(rows) if isinstance(row, Signal) and row.name == BELIEF}
    assert all(place < closed[turns[turn].group] for turn, place in places.items() if turns[turn].group in closed)
    divided = 0
    for batch in batches:
        credits = dict(zip(batch.turns, batch.credits, strict=True))
        for turn, credit in credits.items():
            theirs = [each for each in credits if turns[each].episode == turns[turn].episode]
            total, mean = sum(said[each] for each in theirs), sum(credits[each][0] for each in theirs) / len(theirs)
            part = said[turn] * len(theirs) / total if mean > 0 else 1.0  # it only rose: a failure's is even
            assert credit[0] == pytest.approx(mean * part)
            divided += part != pytest.approx(1.0)
    assert divided


async def test_nothing_is_asked_unless_it_is_switched_on_and_the_answer_is_known(tmp_path):
    for known, beliefs in ((KNOWN, False), (None, True)):
        place = tmp_path / f"{beliefs}"
        place.mkdir()
        world = talking(place, tasks(2, known=known))
        world.more = {"beliefs": beliefs}
        await until_done(world, random.Random(0), 0)
        assert (world.gateway.read, beliefs_in(world.log)) == ([], {})


async def test_a_conversation_that_is_too_long_to_ask_or_is_not_whole_says_nothing(tmp_path):
    class Summing(Talks):
        async def run(self, task, model, sandbox):
            return replace(await super().run(task, model, sandbox), effort={"summaries": 1.0})

    for harness, room in ((Talks, 0), (Steps, 99), (Summing, 99)):
        place = tmp_path / harness.__name__
        place.mkdir()
        world = talking(place, tasks(2, known=KNOWN))
        world.harness, world.gateway.room = harness(world.gateway.chance), room
        await until_done(world, random.Random(0), 0)
        assert beliefs_in(world.log) == {}
        assert [row for row in world.log.rows if isinstance(row, Reward)], "the rollouts are learned from as ever"


# ---------------------------------------------------------------- failures sampled anew from a suspected turn


def falling(messages) -> float:
    """What is believed before any of three answers and after each: it falls at the second, more after longer texts of the first."""
    answers = [message for message in messages if message.role is Role.ASSISTANT]
    fallen = 0.2 if answers and answers[0].text else 0.3
    return (0.5, 0.6, fallen, 0.4)[len(answers)]


def suspecting(directory, *, suspects=1, tries=4, told=lambda: "on", **more) -> World:
    """A world of rollouts of three turns, whose failures are sampled anew from the second."""
    config = CONFIG.model_copy(update={"suspects": suspects, "suspect_tries": tries})
    world = talking(directory, tasks(6, known=KNOWN), config=config, **more)
    world.harness, world.gateway.believes = Talks(world.gateway.chance, 3, told), falling
    return world


def by_episode_in(log: MemoryLog) -> dict[str, list[Turn]]:
    found = defaultdict(list)
    for row in log.rows:
        if isinstance(row, Turn):
            found[row.episode].append(row)
    return found


async def test_a_failure_is_sampled_anew_from_the_turn_at_which_belief_fell_most(tmp_path):
    world = suspecting(tmp_path, suspects=1, tries=4)
    world.gateway.log_messages = messages_of(world.gateway)
    await until_done(world, random.Random(0), 0)
    episodes, rows = by_episode_in(world.log), world.log.rows
    again = {name: turns for name, turns in episodes.items() if is_continuation(name)}
    groups = Counter(turns[0].group for turns in again.values())
    assert set(groups.values()) == {4}, "four of one failure in each group"
    assert len(groups) == 6
    credits = {t: c[0] for row in rows if isinstance(row, Batch) for t, c in zip(row.turns, row.credits, strict=True)}
    values = {row.turn: row.value for row in rows if isinstance(row, Reward)}
    for name, turns in again.items():
        first = name.partition("~")[0]
        assert name.startswith(f"{first}~1.")
        assert len(turns) == 2, "its first turn is not sampled again"
        assert values[episodes[first][-1].id] == 0.0, "a failure"
        seen = world.gateway.log_messages[turns[0].id]
        assert seen == world.gateway.log_messages[episodes[first][1].id], "behind the same messages"
        mean = sum(values[each[-1].id] for other, each in again.items() if other.startswith(f"{first}~")) / 4
        if turns[0].id in credits:
            assert [credits[turn.id] for turn in turns] == pytest.approx([values[turns[-1].id] - mean, 0.0])
    assert any(turns[0].id in credits for turns in again.values())
    assert (await recount(world.log)).balanced


def messages_of(gateway: FakeGateway) -> dict[str, tuple[Message, ...]]:
    """By turn, the messages that were asked behind, from now on."""
    asked, before = FakeModel.ask, {}

    class Listening(FakeModel):
        async def ask(self, messages, tools=(), **more):
            answer = await asked(self, messages, tools, **more)
            before[answer.turn] = tuple(messages)
            return answer

    gateway.model = lambda episode, *, group, harness, temperature=None, top_p=1.0: Listening(gateway, episode, group)
    return before


async def test_of_several_failures_those_are_sampled_anew_in_which_belief_fell_furthest(tmp_path):
    world = suspecting(tmp_path, suspects=1, tries=2)
    before = messages_of(world.gateway)
    await until_done(world, random.Random(0), 0)
    episodes = by_episode_in(world.log)
    values = {row.turn: row.value for row in world.log.rows if isinstance(row, Reward)}

    def fell(name: str) -> float:
        said = [message.text for message in before[episodes[name][1].id] if message.role is Role.ASSISTANT]
        return 0.4 if said[0] else 0.3

    for group in {turns[0].group for turns in episodes.values()}:
        theirs = [name for name, turns in episodes.items() if turns[0].group == group]
        (chosen,) = {name.partition("~")[0] for name in theirs if is_continuation(name)}
        failed = [n for n in theirs if not is_continuation(n) and values[episodes[n][-1].id] == 0.0]
        assert fell(chosen) == max(map(fell, failed))


async def test_what_cannot_be_repeated_to_the_letter_is_not_sampled_anew(tmp_path):
    """The second answer stands behind what a program said, which is something else each time."""
    world = suspecting(tmp_path, told=iter(map(str, range(10**6))).__next__)
    await until_done(world, random.Random(0), 0)
    assert not any(map(is_continuation, by_episode_in(world.log)))
    assert [row for row in world.log.rows if isinstance(row, Batch)], "its group is learned from as ever"


@pytest.mark.parametrize("more", [{"suspects": 0}, {"tries": 2, "believes": lambda _: 0.5}])
async def test_nothing_is_sampled_anew_unless_it_is_wanted_and_belief_fell(tmp_path, more):
    believes = more.pop("believes", falling)
    world = suspecting(tmp_path, **more)
    world.gateway.believes = believes
    await until_done(world, random.Random(0), 0)
    assert not any(map(is_continuation, by_episode_in(world.log)))


@pytest.mark.parametrize("seed", range(6))
async def test_killed_while_it_samples_anew_no_turn_is_rewarded_twice_and_no_group_parted(tmp_path, seed):
    chance, most_bytes = random.Random(seed), 800 if seed % 2 else MOST_BYTES
    world = suspecting(tmp_path, suspects=2, tries=3, away=0.03, most_bytes=most_bytes)
    await until_done(world, chance, kills=10)
    log = world.log
    turns = {row.id: row for row in log.rows if isinstance(row, Turn)}
    batches = [row for row in log.rows if isinstance(row, Batch)]
    assert any(is_continuation(turn.episode) for turn in turns.values())
    assert max(Counter(row.turn for row in log.rows if isinstance(row, Reward)).values()) == 1
    assert max(Counter(turn for batch in batches for turn in batch.turns).values()) == 1
    assert (await recount(log)).balanced
    in_batches = [{turns[turn].group for turn in batch.turns} for batch in batches]
    assert sum(map(len, in_batches)) == len(set().union(*in_batches)), "no group is in two batches"
    for episode, theirs in by_episode_in(log).items():
        if is_continuation(episode):
            outcomes = {turn.id in {each for batch in batches for each in batch.turns} for turn in theirs}
            assert len(outcomes) == 1, "it is learned from whole, or not at all"
