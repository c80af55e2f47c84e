"""The order of the log decides: whoever reads it, alone and later, comes to the rewards that the desk wrote.

Signals are received and committed at different times, in any order; two desks poll when they like, stall between reading and
writing, and are started anew. The reader below knows only the rows.
"""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.grids import first

from ostinato.core.notices import Alarm, AlarmState
from ostinato.core.records import Arm, Delivered, NoReward, Pending, Quarantine, Reward, Signal, Turn
from ostinato.reward.accounting import account
from ostinato.reward.config import CoverageConfig, RewardConfig
from ostinato.reward.functions import copilot
from ostinato.reward.pipeline import RewardDesk
from ostinato.reward.runners import Inline
from ostinato.testing.log import MemoryFolds, MemoryLog
from ostinato.testing.records import a_delivery, a_signal, a_turn

CONFIG = RewardConfig(
    delivery_s=20.0,
    orphan_s=1e6,
    max_signals=3,
    remember=10_000,
    coverage=CoverageConfig(min_turns=10, false_alarm_turns=5.0),
)
TURNS = 60


def fn(turn: Turn, signals, now: float) -> Reward | Pending | NoReward:
    """The copilot's, over 30 s; it fails where somebody says so."""
    if any(signal.name == "poison" for signal in signals):
        raise RuntimeError("poisoned")
    return copilot(turn, signals, now, window=30.0, silence=0.0 if turn.user == "ann" else None)


class Racing(MemoryLog):
    """A log in which others commit between a desk's reading and its writing."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[Signal | Delivered] = []
        self.race = 0

    async def append(self, *rows):
        if self.race and isinstance(rows[0], Reward | Quarantine) and self.waiting:
            self.race -= 1
            await super().append(self.waiting.pop(0))
        return await super().append(*rows)


class World:
    """What happens to one log: each method is an act, with a number and a word that it makes of what it likes."""

    def __init__(self) -> None:
        self.log = Racing()
        self.now = 0.0
        self.folds = [MemoryFolds(), MemoryFolds()]
        self.desks = [self.desk(each) for each in self.folds]
        self.turns = 0
        self.sent: list[Signal] = []

    def desk(self, folds: MemoryFolds) -> RewardDesk:
        return RewardDesk(self.log, Inline(fn, max_abs=CONFIG.max_abs), lambda: self.now, CONFIG, folds=folds)

    async def turn(self, number: int, word: str) -> None:
        if self.turns < TURNS:
            arm = Arm.CONTROL if self.turns % 5 == 4 else Arm.LIVE
            user = "bob" if word == "silence" else "ann"
            made = replace(a_turn(f"t{self.turns}:0", user=user, arm=arm), ended_at=self.now)
            self.turns += 1
            await self.log.append(made, *([a_delivery(made, at=self.now)] if number % 2 else []))

    def about(self, number: int) -> Turn:
        """One of the turns so far, or the next."""
        return a_turn(f"t{number % (self.turns + 1)}:0")

    async def say(self, number: int, word: str) -> None:
        self._send(a_signal(self.about(number), word, id=f"s{len(self.sent)}", at=self.now))

    async def foreign(self, number: int, word: str) -> None:
        about = replace(self.about(number), tenant="rival")
        self._send(a_signal(about, word, id=f"s{len(self.sent)}", at=self.now))

    async def retract(self, number: int, word: str) -> None:
        if self.sent:
            named = self.sent[number % len(self.sent)]
            new = replace(named, id=f"s{len(self.sent)}", name=word, received_at=self.now, retracts=named.id)
            self._send(new)

    def _send(self, signal: Signal) -> None:
        self.sent.append(signal)
        self.log.waiting.append(signal)

    async def deliver(self, number: int, word: str) -> None:
        about = a_delivery(self.about(number), at=self.now)
        self.log.waiting.append(replace(about, id=f"{word}{len(self.log.rows)}"))

    async def commit(self, number: int, word: str) -> None:
        if self.log.waiting:
            await MemoryLog.append(self.log, self.log.waiting.pop(number % len(self.log.waiting)))

    async def wait(self, number: int, word: str) -> None:
        self.now += 1.7 * (number % 16)

    async def poll(self, number: int, word: str) -> None:
        await self.desks[number % 2].poll()

    async def restart(self, number: int, word: str) -> None:
        if word == "silence":
            await self.desks[number % 2].save()
        self.desks[number % 2] = self.desk(self.folds[number % 2])

    async def race(self, number: int, word: str) -> None:
        self.log.race += 1


ACTS = [
    *["turn", "say", "poll"] * 2,
    *["commit"] * 3,
    *["retract", "foreign", "deliver", "wait", "restart", "race"],
]
WORDS = ["accepted", "rejected", "undone", "ignored", "poison", "silence"]

Script = list[tuple[str, int, str]]
scripts = st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 15), st.sampled_from(WORDS)), max_size=80)


async def happen(script: Script) -> World:
    """Play a script, then let everything commit and every window close."""
    world = World()
    end: Script = [*[("commit", 0, "")] * 200, *[("wait", 15, "")] * 40, ("poll", 0, ""), ("poll", 1, "")]
    for act, number, word in [*script, *end]:
        await getattr(world, act)(number, word)
    return world


def read_alone(rows) -> dict[str, Reward | str]:
    """The rule, by the book: what each turn's decision has to be, from the rows before it alone."""
    numbered = list(enumerate(rows, 1))
    turns = {row.id: row for row in rows if isinstance(row, Turn)}
    found: dict[str, Reward | str] = {}
    for place, row in numbered:
        if not isinstance(row, Reward | Quarantine) or row.turn in found:
            continue
        assert 0 < row.upto < place
        before, turn = [each for seq, each in numbered if seq <= row.upto], turns[row.turn]
        assert turn in before
        said = [s for s in before if isinstance(s, Signal) and (s.tenant, s.turn) == (turn.tenant, turn.id)][:3]
        delivered = any(turn.id in d.turns for d in before[before.index(turn) :] if isinstance(d, Delivered))
        alarms = [a for a in before if isinstance(a, Alarm) and a.name == f"coverage:{turn.tenant}"]
        silenced = bool(alarms) and alarms[-1].state is AlarmState.RAISED
        try:
            answer = fn(turn, said, 1e12)
        except RuntimeError:
            found[turn.id] = "reward_failed: RuntimeError: poisoned"
            continue
        if not said and not delivered:
            found[turn.id] = "undelivered"
        elif not said and silenced:
            found[turn.id] = "coverage"
        else:
            assert not isinstance(answer, Pending)
            found[turn.id] = f"no_reward:{answer.reason}" if isinstance(answer, NoReward) else answer
    return found


def decisions(rows) -> dict[str, Reward | Quarantine]:
    """Per turn, the first row that decided it."""
    found: dict[str, Reward | Quarantine] = {}
    for row in rows:
        if isinstance(row, Reward | Quarantine):
            found.setdefault(row.turn, row)
    return found


def feedback(rows) -> Counter[str]:
    """What became of each signal, by the book."""
    places = {id(row): place for place, row in enumerate(rows, 1)}
    owners = {row.id: row for row in rows if isinstance(row, Turn)}
    decided, held, found = decisions(rows), Counter[str](), Counter[str]()
    for row in rows:
        if not isinstance(row, Signal) or row.turn not in owners:
            continue
        decision, place = decided[row.turn], places[id(row)]
        if row.tenant != owners[row.turn].tenant:
            found["foreign"] += place > places[id(owners[row.turn])]
        elif place > places[id(decision)]:
            found["late"] += 1
        elif held[row.turn] == CONFIG.max_signals:
            found["excess"] += 1
        else:
            held[row.turn] += 1
            found["late"] += place > decision.upto
    return found


async def check(script: Script) -> set[str]:
    """Play a script and check everything. Returns what kinds of decisions came of it."""
    rows = (await happen(script)).log.rows
    decided = {
        turn: row.reason if isinstance(row, Quarantine) else replace(row, upto=0)
        for turn, row in decisions(rows).items()
    }
    assert decided == read_alone(rows)
    assert set(decided) == {row.id for row in rows if isinstance(row, Turn)}, "in the end every turn is decided"
    log = MemoryLog()
    log.rows = rows
    found = await account(log, config=CONFIG)
    assert Counter(late=found.late, foreign=found.foreign, excess=found.excess) == feedback(rows)
    assert found.balanced
    return {
        *(each if isinstance(each, str) else f"{each.value:g}" for each in decided.values()),
        *(name for name, count in feedback(rows).items() if count),
    }


@settings(max_examples=250)
@given(scripts)
async def test_whoever_reads_the_log_alone_comes_to_the_same_rewards(script: Script):
    await check(script)


OUTAGE: Script = [  # thirty turns that something is said about, then none
    *[step for i in range(30) for step in (("turn", 1, ""), ("say", i, "accepted"), ("commit", 0, ""))],
    *[step for _ in range(3) for step in (*[("wait", 15, "")] * 3, ("poll", 0, ""), *[("turn", 1, "")] * 8)],
]


@pytest.mark.parametrize("seeds", first([12, 40]))
async def test_and_that_is_true_of_every_kind_of_decision(seeds):
    seen: set[str] = set()
    for seed in range(seeds):
        dice = random.Random(seed)
        acts = [(dice.choice(ACTS), dice.randrange(TURNS), dice.choice(WORDS)) for _ in range(400)]
        seen |= await check([*(OUTAGE if seed % 4 == 0 else []), *acts])
    assert seen == {
        "0.75", "-0.25", "0", "undelivered", "coverage", "no_reward:silence", "reward_failed: RuntimeError: poisoned",
        "late", "foreign", "excess",
    }  # fmt: skip


async def test_a_signal_that_was_received_in_time_but_committed_after_the_decision_is_late_for_everyone():
    world = World()
    turn = a_turn("t0:0")
    praise = a_signal(turn, at=39.0)
    await world.log.append(turn, a_delivery(turn))
    world.now = 41.0
    world.log.waiting, world.log.race = (
        [praise],
        1,
    )  # the disk stalls: it commits between the desk's reading and writing
    desk = world.desk(MemoryFolds())
    await desk.poll()
    assert [type(row) for row in world.log.rows] == [Turn, Delivered, Signal, Reward]
    reward = world.log.rows[-1]
    assert (reward.value, reward.upto) == (0.0, 2)
    assert read_alone(world.log.rows)["t0:0"] == replace(reward, upto=0)
    for found in (await account(world.log, config=CONFIG), await account(world.log, config=CONFIG)):
        assert found.late == 1
