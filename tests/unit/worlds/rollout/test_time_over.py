"""Rollouts whose time is over, and what is away: each counts as it should, and nothing is tried without end. Log and desk are real."""

import asyncio
import random
from collections import Counter, defaultdict
from types import SimpleNamespace

import pytest
from tests.deadlines import PATIENT_S
from tests.unit.worlds.rollout.test_rollout_worker import CONFIG, Coin, World, tasks, until_done
from tests.virtual_time import in_virtual_time

from ostinato.core.errors import Unavailable
from ostinato.core.records import Batch, Finish, Holdback, Reward, Turn
from ostinato.worlds.grading.grade import Grade
from ostinato.worlds.harness.rollout import Ended, OutOfTime, Rollout

ONE = CONFIG.model_copy(update={"groups": 1, "concurrency": 4})


class Scripted:
    """A harness whose rollouts go as `plan` says, one after another: the finishes of their turns, and how they end."""

    name, hash, spec = "single", "h", lambda self, task: None

    def __init__(self, *plan):
        self.plan = list(plan)

    async def run(self, task, model, sandbox):
        finishes, ended = self.plan.pop(0)
        turns = []
        for finish in finishes:
            model.finish = finish
            turn = (await model.ask(task.messages, max_tokens=2)).turn
            if finish.trainable:  # of another one a harness hears nothing
                turns.append(turn)
        if isinstance(ended, Exception):
            raise ended
        return Rollout(
            task=task.id,
            harness="h",
            ended=ended,
            messages=(),
            turns=tuple(turns),
            detail={"why": "after 60 s"} if ended is Ended.TIMEOUT else {},
        )


class Full(Coin):
    """Grades whatever it is given as solved."""

    def __init__(self):
        super().__init__(random.Random(0))

    async def grade(self, task, rollout):
        await super().grade(task, rollout)
        return Grade(value=1.0)


def rows(world, kind):
    return [row for row in world.log.rows if isinstance(row, kind)]


async def test_what_overran_is_worth_nothing_and_is_learned_from_in_its_group(tmp_path):
    world = World(tmp_path, 0, tasks(1), ONE)
    world.grader = Full()
    cut = ([Finish.DEADLINE], Ended.TIMEOUT)
    whole = ([Finish.STOP], Ended.SUBMITTED)
    world.harness = Scripted(cut, whole, whole, whole)
    await until_done(world, random.Random(0), kills=0)
    (late,) = [turn for turn in rows(world, Turn) if turn.finish is Finish.DEADLINE]
    rewards = {row.turn: row.value for row in rows(world, Reward)}
    assert rewards.pop(late.id) == 0.0
    assert set(rewards.values()) == {1.0}
    (batch,) = rows(world, Batch)
    credits = dict(zip(batch.turns, batch.credits, strict=True))
    assert len(credits) == 4
    assert credits[late.id] == (-0.75,) * len(late.sampled_ids)
    assert rows(world, Holdback) == []
    assert len(world.grader.graded) == 3, "nobody asks what it left behind"
    (record,) = [record for record in world.finished if record.ended is Ended.TIMEOUT]
    assert (record.value, record.solved, record.why) == (0.0, False, "its time was over after 60 s")
    (line,) = [more for kind, more in world.told if kind == "group"]
    assert (line["timeouts"], line["reward"]) == (1, 0.75)


async def test_what_broke_its_sandbox_is_worth_nothing_whatever_it_left_behind(tmp_path):
    world = World(tmp_path, 0, tasks(1), ONE)
    world.grader = Full()
    broken, whole = ([Finish.STOP], Ended.BROKEN), ([Finish.STOP], Ended.SUBMITTED)
    world.harness = Scripted(broken, whole, whole, whole)
    await until_done(world, random.Random(0), kills=0)
    assert sorted(row.value for row in rows(world, Reward)) == [0.0, 1.0, 1.0, 1.0]
    assert len(world.grader.graded) == 3, "nobody asks what it left behind"
    (line,) = [more for kind, more in world.told if kind == "group"]
    assert (line["broken"], line["failed"]) == (1, 0)


async def test_a_model_that_never_speaks_in_time_leaves_its_group_and_says_so(tmp_path):
    world = World(tmp_path, 0, tasks(1), ONE)
    late = ([], OutOfTime("no answer had begun"))
    world.harness = Scripted(*[late] * (CONFIG.group * CONFIG.tries))
    await until_done(world, random.Random(0), kills=0)
    assert world.harness.plan == [], "each of the group is tried as often as worlds.tries says, and not once more"
    assert {record.value for record in world.finished} == {None}
    assert {record.why for record in world.finished} == {"the model gave no answer in time: no answer had begun"}
    assert rows(world, Reward) == []


@pytest.mark.parametrize("what", ["gateway", "grader", "sandbox"])
@in_virtual_time
async def test_what_stays_away_ends_the_worker_with_the_reason(tmp_path, what):
    world = World(tmp_path, 0, tasks(1), CONFIG.model_copy(update={"patience_s": 0.05}))

    class Away:
        name, hash, spec = "single", "h", lambda self, task: None
        tried = 0

        async def fails(self, *_):
            self.tried += 1
            raise Unavailable(f"the {what} is away")

        run = grade = say = fails

    away = Away()
    if what == "gateway":
        world.gateway.say = away.say
    elif what == "grader":
        world.grader = away
    else:
        world.harness = away
        world.gateway.model = lambda episode, **_: SimpleNamespace(policies=set())  # nothing was begun
    with pytest.raises(BaseExceptionGroup if what != "gateway" else Unavailable) as caught:
        async with asyncio.timeout(PATIENT_S):
            await world.worker().run()
    error = caught.value
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, Unavailable)
    assert "worlds.patience_s" in str(error)
    assert f"the {what} is away" in str(error)
    assert away.tried > 1
    world.close()


async def test_who_comes_back_in_time_is_waited_for_anew_each_time(tmp_path):
    """Patience is for one absence: rollouts that are lost now and then for a day end nobody."""
    world = World(tmp_path, 0, tasks(6), CONFIG.model_copy(update={"patience_s": 0.5}), away=0.2)
    await until_done(world, random.Random(1), kills=0)
    assert len({record.task for record in world.finished}) == 6


@pytest.mark.parametrize("last", [Finish.ABORT, Finish.ERROR])
async def test_the_grade_goes_to_the_last_turn_that_was_captured_whole(tmp_path, last):
    """As where an agent hangs up in the middle of its last call, or the engine failed in it."""
    world = World(tmp_path, 0, tasks(1), ONE)
    world.grader = Full()
    broken = ([Finish.STOP, Finish.STOP, last], Ended.SUBMITTED)
    late = ([Finish.STOP, last], Ended.TIMEOUT)
    only = ([Finish.STOP], Ended.SUBMITTED)
    torn = ([Finish.STOP, last], Unavailable("the gateway went away in the last call"))
    world.harness = Scripted(broken, late, only, torn, broken)
    await until_done(world, random.Random(0), kills=0)
    by_episode = defaultdict(list)
    for turn in rows(world, Turn):
        by_episode[turn.episode].append(turn)
    rewards = {row.turn: row.value for row in rows(world, Reward)}
    held = {row.turn: row.reason for row in rows(world, Holdback)}
    (batch,) = rows(world, Batch)
    credits = dict(zip(batch.turns, batch.credits, strict=True))
    worth = Counter({record.episode: record.value for record in world.finished})
    assert sorted(worth.values()) == [0.0, 1.0, 1.0, 1.0]
    for episode, turns in by_episode.items():
        whole = [turn for turn in turns if turn.finish.trainable]
        cut = [turn for turn in turns if not turn.finish.trainable]
        assert {held.get(turn.id) for turn in cut} <= {f"finish:{last}"}
        if episode not in worth:
            assert {held[turn.id] for turn in whole} == {"world:rollout_torn"}
            continue
        assert [rewards[turn.id] for turn in whole] == [0.0] * (len(whole) - 1) + [worth[episode]]
        assert {credits[turn.id][0] for turn in whole} == {worth[episode] - 0.75}
        assert not {turn.id for turn in cut} & credits.keys()
