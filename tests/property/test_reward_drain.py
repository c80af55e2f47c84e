"""Whatever happens, once it is over and time has passed nothing waits: every turn was learned from or held back for a reason."""

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.oracles.turn_accounting import recount

from ostinato.core.errors import NoSignal
from ostinato.core.records import Arm, Finish, NoReward, Pending, PolicyVersion, Reward, Sampling, Signal, Span, Turn
from ostinato.reward.accounting import account
from ostinato.reward.config import CoverageConfig, RewardConfig
from ostinato.reward.functions import copilot
from ostinato.reward.pipeline import RewardDesk
from ostinato.reward.protocol import Answer, Failure, RewardRequest, Unloadable, answered
from ostinato.testing.log import MemoryFolds, MemoryLog
from ostinato.testing.records import a_delivery, a_signal, a_turn

BATCH = 6
CONFIG = RewardConfig(
    longest_wait_s=300.0,
    batch_wait_s=200.0,
    episode_wait_s=100.0,
    delivery_s=20.0,
    orphan_s=100.0,
    remember=5,
    fold_rows=7,
    user_cap=1.0,
    coverage=CoverageConfig(min_turns=10, false_alarm_turns=5.0),
)
LONG = CONFIG.longest_wait_s + CONFIG.batch_wait_s + 1.0
V0 = PolicyVersion(number=0, hash="00")


def fickle(turn: Turn, signals: Sequence[Signal], now: float) -> Reward | Pending | NoReward:
    """What it does is the user's name."""
    match turn.user:
        case "for ever":
            return Pending(until=now + 50.0)
        case "raises":
            raise RuntimeError
        case "far":
            return Reward(turn=turn.id, value=1.0, function="far@1", signals=(), at=1e300)
        case "nothing":
            return NoReward(reason="nothing")
        case _:
            return copilot(turn, signals, now, window=30.0)


class Moody:
    """Asks `fickle`, as long as it can be loaded, and in some rounds gets no further than one question."""

    def __init__(self) -> None:
        self.loadable, self.patience = True, 1000

    async def ask(self, questions: Sequence[RewardRequest]) -> list[Answer | None]:
        if not self.loadable:
            raise Unloadable("gone")
        asked = [
            Failure(reason="reward_hung: x") if each.turn.user == "hangs" else answered(fickle, each, 100.0)
            for each in questions[: self.patience]
        ]
        return [*asked, *[None] * (len(questions) - len(asked))]

    async def close(self) -> None: ...


class World:
    """A log, a desk, and a trainer that may be stopped, or wait for the gate; each method is an act."""

    def __init__(self) -> None:
        self.log, self.folds, self.asker = MemoryLog(), MemoryFolds(), Moody()
        self.now, self.step, self.turns = 0.0, 0, 0
        self.killed(0, "")

    def killed(self, number: int, word: str) -> None:
        """Whatever the desk held in memory is lost."""
        self.desk = RewardDesk(self.log, self.asker, lambda: self.now, CONFIG, folds=self.folds)

    async def turn(self, number: int, word: str) -> None:
        policy = PolicyVersion(number=max(0, self.step - number), hash="aa")
        made = replace(
            a_turn(f"t{self.turns}:0", user=word, ended_at=self.now, sampled=(7,)),
            spans=(Span(policy=policy, tokens=1),),
            episode=f"e{self.turns // (number + 1)}",
            group="g" if number == 5 else None,
            arm=Arm.CONTROL if number == 3 else Arm.LIVE,
            finish=Finish.ABORT if number == 4 else Finish.STOP,
            sampling=Sampling(max_tokens=8, top_p=0.5 if number == 6 else 1.0),
        )
        self.turns += 1
        await self.log.append(made, *([a_delivery(made, at=self.now)] if number % 2 else []))

    async def say(self, number: int, word: str) -> None:
        about = a_turn(f"t{max(0, self.turns - number)}:0")
        verb = "accepted" if number % 3 else "rejected"
        told = a_signal(about, verb, at=self.now, id=f"s{len(self.log.rows)}")
        await self.log.append(replace(told, retracts=f"s{len(self.log.rows) - number}" if number == 7 else None))

    async def wait(self, number: int, word: str) -> None:
        self.now += 3.0 * number**2

    async def poll(self, number: int, word: str) -> None:
        await self.desk.poll()

    async def train(self, number: int, word: str) -> None:
        try:
            made = await self.desk.batch(self.step + 1, BATCH, V0)
        except NoSignal:
            return
        self.step += made is not None

    async def look(self, number: int, word: str) -> None:
        await self.desk.poll()
        await self.desk.ready(self.step, BATCH)

    async def restart(self, number: int, word: str) -> None:
        self.killed(number, word)

    async def break_function(self, number: int, word: str) -> None:
        self.asker.loadable = not self.asker.loadable

    async def lose_patience(self, number: int, word: str) -> None:
        self.asker.patience = 1 if self.asker.patience > 1 else 1000


ACTS = ["turn"] * 4 + ["say", "poll", "train"] * 2 + ["look", "wait", "restart", "break_function", "lose_patience"]
WORDS = ["ann", "ann", "ben", "for ever", "raises", "hangs", "far", "nothing"]
scripts = st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 7), st.sampled_from(WORDS)), max_size=100)


@settings(max_examples=200)
@given(scripts)
async def test_after_silence_and_time_nothing_waits(script):
    world = World()
    for act, number, word in script:
        await getattr(world, act)(number, word)
    for _ in range(3):  # a reward's time ends, then the turn's
        world.now += LONG
        for _ in range(world.turns + 1):
            await world.train(0, "")
    for found in (await recount(world.log), await account(world.log, world.folds, CONFIG)):
        assert found.waiting == 0
        assert found.balanced, found.contradictions
        assert found.ingested == found.trained + sum(found.held.values()) == world.turns
