"""With `learn.batch = "auto"` the desk uses most of what people say at any traffic and for sessions of any length; a fixed batch does not.

A trainer of no cost on a log in memory: it may be `max_staleness` steps ahead of the live version, offers a candidate every two steps, and
the gate takes a sixth of the reward's window. Numbers of turns are a sixth of the default's: a step takes 24 at least.
"""

import math
import random
import re
from collections import Counter

import pytest
from tests.grids import first

from ostinato.core.notices import Alarm, AlarmState
from ostinato.core.records import Batch, Holdback, PolicyVersion, Turn
from ostinato.reward.config import RewardConfig
from ostinato.reward.functions import copilot
from ostinato.reward.ledger_entries import Taught
from ostinato.reward.pipeline import RewardDesk
from ostinato.reward.runners import Inline
from ostinato.testing.records import a_delivery, a_signal, a_turn

WINDOW, TICKS, LEAST, TOKENS = 3600.0, 120, 24, 10
ALONE = RewardConfig(user_cap=1.0, tenant_cap=1.0, user_steps=0)
EVERY, FIXED = Taught(every=True), Taught()


def version(number):
    return PolicyVersion(number=number, hash=f"{number:064x}")


class Traffic:
    """Turns of people who ask once, and of sessions of three windows with six turns in each. `sessions`: such turns for each single one."""

    def __init__(self, per_window, sessions=0.0):
        self.rng, self.made = random.Random(0), 0
        self.singles = per_window / TICKS
        self.begin = sessions * self.singles / 18
        self.running = {}

    def _turn(self, episode, ended, live):
        self.made += 1
        half = TOKENS // 2
        return a_turn(
            f"t{self.made}:0",
            user=f"u{self.made % 200}",
            version=live,
            prompt=range(half),
            sampled=range(half),
            episode=episode,
            ended_at=ended,
        )

    def rows(self, now, live):
        """What is served and said in the last tick."""
        tick = WINDOW / TICKS
        turns = [
            self._turn(f"e{self.made}", now - self.rng.random() * tick, live)
            for _ in range(max(0, round(self.rng.gauss(self.singles, math.sqrt(self.singles)))))
        ]
        if self.rng.random() < self.begin:
            self.running[f"s{len(self.running)}"] = (now, 18)
        for name, (due, left) in self.running.items():
            if left and due <= now:
                turns.append(self._turn(name, now, live))
                self.running[name] = (due + WINDOW / 6, left - 1)
        for turn in turns:
            name = "accepted" if self.rng.random() < 0.4 else "rejected"
            said_at = turn.ended_at + self.rng.random() * WINDOW / 2
            yield from (turn, a_delivery(turn, at=turn.ended_at), a_signal(turn, name, at=said_at))


async def run(log, now, traffic, taught, *, windows=5, config=ALONE):
    """The turns of each step, the share of decided turns that was trained on, and the same of session turns."""

    def reward(turn, signals, at):
        return copilot(turn, signals, at, window=WINDOW)

    desk = RewardDesk(log, Inline(reward, max_abs=100.0), now, config, taught=taught)
    live, offered, steps, lead = 0, None, [], max(1, config.max_staleness)
    for tick in range(1, windows * TICKS + 1):
        now.at = tick * WINDOW / TICKS
        await log.append(*traffic.rows(now.at, live))
        await desk.poll()
        ahead = len(steps) - live
        if ahead < lead and (made := await desk.batch(len(steps) + 1, LEAST, version(live))):
            steps.append(len(made.row.turns))
            ahead += 1
        if offered is None and (ahead >= lead or (ahead and len(steps) % 2 == 0)):
            offered = (now.at + WINDOW / 6, len(steps))
        if offered is not None and now.at >= offered[0]:
            live, offered = offered[1], None
    episodes = {row.id: row.episode for row in log.of(Turn)}
    trained = Counter(episodes[turn][0] for row in log.of(Batch) for turn in row.turns)
    held = Counter(episodes[row.turn][0] for row in log.of(Holdback))
    return steps, {kind: trained[kind] / (trained[kind] + held[kind]) for kind in trained | held}


@pytest.mark.parametrize("per_window", first([100, 500, 1_500], few=2))
async def test_most_turns_are_trained_on_at_any_traffic(log, now, per_window):
    steps, share = await run(log, now, Traffic(per_window), EVERY)
    assert share["e"] > 0.85
    assert min(steps) >= LEAST
    assert len(steps) >= 9
    assert max(steps[2:]) < 3 * min(steps[2:]), "steps are of about the same size"
    assert log.of(Alarm) == []


async def test_a_fixed_batch_trains_on_a_fixed_number(log, now):
    steps, share = await run(log, now, Traffic(500), FIXED)
    assert share["e"] < 0.25
    assert set(steps) == {LEAST}
    (alarm,) = log.of(Alarm)
    assert (alarm.name, alarm.state) == ("unused", AlarmState.RAISED)
    assert re.search(r"\d+% of the last turns .* trained on \(\d+% stale\): .*set learn.batch = 'auto'", alarm.reason)


async def test_sessions_that_go_on_are_trained_on_as_much_as_single_turns(log, now):
    _, share = await run(log, now, Traffic(100, sessions=1.0), EVERY, windows=6)
    assert share["s"] > share["e"] / 1.5
    assert share["e"] > share["s"] / 1.5
    assert share["s"] > 0.8


async def test_a_step_that_is_full_waits_for_nobody(log, now):
    """Where more comes than a batch holds, what it leaves is lost in any case. A draw leaves room for one part."""
    config = ALONE.model_copy(update={"batch_tokens": 5 * LEAST * TOKENS})
    steps, share = await run(log, now, Traffic(1_500), EVERY, config=config)
    assert set(steps) == {5 * LEAST - 1}
    assert len(steps) >= 13
    assert share["e"] > 0.2


@pytest.mark.parametrize("staleness", [0, 1])
async def test_where_every_step_makes_all_turns_stale_steps_are_taken_all_the_same(log, now, staleness):
    config = ALONE.model_copy(update={"max_staleness": staleness})
    steps, _ = await run(log, now, Traffic(100), EVERY, config=config)
    assert len(steps) >= 3
