"""What a poll costs, and what a flood of signals may: time for what is due, memory for what is bounded."""

from dataclasses import replace

from ostinato.core.records import Pending, Quarantine, Reward, Signal
from ostinato.reward.accounting import account
from ostinato.reward.config import RewardConfig
from ostinato.testing.records import a_delivery, a_signal


def reward(turn) -> Reward:
    return Reward(turn=turn.id, value=1.0, function="f@1", signals=(), at=30.0)


# ---------------------------------------------------------------- when it is asked


async def test_a_turn_is_asked_about_once_per_deadline_and_when_something_is_said(log, now, open_desk, turn):
    asked: list[tuple[str, int]] = []

    def fn(turn, signals, now):
        asked.append((turn.id, len(signals)))
        return Pending(until=500.0) if now < 500.0 else reward(turn)

    desk = open_desk(log, fn=fn)
    turns = [turn(i) for i in range(5)]
    await log.append(*turns, a_delivery(*turns))
    for now.at in range(20, 499):
        await desk.poll()
    assert asked == [(each.id, 0) for each in turns], "one question each, in 479 polls"
    await log.append(a_signal(turns[2]))
    await desk.poll()
    await desk.poll()
    assert asked[5:] == [("t2:0", 1)]
    for now.at in (500.4, 500.5, 600.0):
        await desk.poll()
    assert sorted(asked[6:]) == [("t0:0", 0), ("t1:0", 0), ("t2:0", 1), ("t3:0", 0), ("t4:0", 0)]


async def test_a_function_that_needs_no_window_decides_at_once(log, now, open_desk, turn):
    def eager(turn, signals, now):
        return reward(turn) if signals else Pending(until=1000.0)

    desk = open_desk(log, fn=eager)
    await log.append(turn(0))
    now.at = 12.0
    await desk.poll()
    await log.append(a_signal(turn(0)))
    await desk.poll()
    assert len(log.of(Reward)) == 1


class Counting:
    """A log that counts the rows that are fetched by name."""

    def __init__(self, log) -> None:
        self._log = log
        self.found = 0

    def __getattr__(self, name: str):
        return getattr(self._log, name)

    async def find(self, kind, identities):
        rows = await self._log.find(kind, identities)
        self.found += len(rows)
        return rows


async def test_a_poll_costs_what_is_due_and_not_what_is_open(log, now, open_desk, turn):
    counting = Counting(log)
    desk = open_desk(counting)
    many = [turn(i, ended_at=1000.0 + i) for i in range(1000)]
    await log.append(*many, a_delivery(*many))
    now.at = 1000.0
    await desk.poll()
    assert counting.found == 1000, "each is asked about once, to learn when"
    counting.found = 0
    for _ in range(50):
        await desk.poll()
    assert counting.found == 0
    now.at = 1040.6  # 11 windows of 30 s have closed
    await desk.poll()
    assert (counting.found, len(log.of(Reward))) == (11, 11)


# ---------------------------------------------------------------- floods


async def test_signals_about_no_turn_are_bounded_in_number_bytes_and_time(log, now, open_desk, turn):
    config = RewardConfig(max_orphans=100, orphan_bytes=20_000, orphan_s=60.0)
    desk = open_desk(log, config=config)

    def forged(i: int, size: int, at: float) -> Signal:
        name = f"{i}".rjust(size, "x")
        return replace(a_signal(turn(0), at=at), id=f"s{name}", turn=f"none{name}", comment="x" * 60_000)

    await log.append(*[forged(i, 4, 1.0 + i / 1000) for i in range(400)])
    await desk.poll()
    orphans = desk._reading.ledger.orphans
    assert (orphans.count, orphans.dropped) == (100, 300)
    await log.append(*[forged(1000 + i, 200, 2.0) for i in range(100)])
    await desk.poll()
    assert orphans.bytes <= 20_000
    assert orphans.count < 50
    # real feedback that comes before its turn is still heard, if not for long
    await log.append(a_signal(turn(0), at=3.0), a_signal(turn(1), at=3.0))
    await log.append(turn(0, ended_at=30.0))
    await desk.poll()
    await log.append(turn(2, ended_at=63.5), turn(1, ended_at=64.0))
    now.at = 999.0
    await desk.poll()
    assert {row.turn: row.value for row in log.of(Reward)} == {"t0:0": 0.75}
    assert log.reasons(Quarantine) == dict.fromkeys(("t1:0", "t2:0"), "undelivered")
    found = await account(log, config=config)
    assert found.orphans == 0
    assert found.forgotten == 501


async def test_only_so_many_signals_of_one_turn_count_and_none_is_held_whole(log, now, open_desk, turn):
    asked: list[int] = []

    def fn(turn, signals, now):
        asked.append(len(signals))
        return Pending(until=50.0) if now < 50.0 else reward(turn)

    desk = open_desk(log, fn=fn, config=RewardConfig(max_signals=10))
    await log.append(turn(0), *[replace(a_signal(turn(0), id=f"s{i}"), comment="x" * 60_000) for i in range(500)])
    now.at = 60.0
    await desk.poll()
    assert asked == [10]
    assert (await account(log, config=RewardConfig(max_signals=10))).excess == 490
