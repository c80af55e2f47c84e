"""A log, a clock that only tests advance, and reward desks on them."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from ostinato.core.records import Row, Turn
from ostinato.core.seams import RewardFn
from ostinato.reward.config import RewardConfig
from ostinato.reward.functions import copilot
from ostinato.reward.pipeline import RewardDesk
from ostinato.reward.runners import Inline
from ostinato.testing.log import MemoryLog
from ostinato.testing.records import a_turn


class Now:
    """A clock that returns `at`, in seconds since 1970."""

    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        return self.at


def within_30_s(turn, signals, now):
    """The `copilot` reward with a window of 30 s."""
    return copilot(turn, signals, now, window=30.0)


class Log(MemoryLog):
    """A log in memory that can list its rows of one kind."""

    def of(self, kind: type[Row]) -> list:
        """The rows of a kind, oldest first."""
        return [row for row in self.rows if type(row) is kind]

    def reasons(self, kind: type[Row]) -> dict[str, str]:
        """The reasons of quarantines or holdbacks, keyed by turn."""
        return {row.turn: row.reason for row in self.of(kind)}


@pytest.fixture
def now() -> Now:
    return Now()


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def open_desk(now: Now) -> Callable[..., RewardDesk]:
    def open_(log: MemoryLog, fn: RewardFn = within_30_s, config: RewardConfig | None = None, **more) -> RewardDesk:
        config = config or RewardConfig(user_cap=1.0)
        return RewardDesk(log, Inline(fn, max_abs=config.max_abs), now, config, **more)

    return open_


@pytest.fixture
def turn() -> Callable[..., Turn]:
    def turn_(i: int, **changes) -> Turn:
        """Turn number i, in an episode of its own, by one of five users."""
        made = replace(a_turn(f"t{i}:0", user=f"u{i % 5}", prompt=range(i % 7 + 1), sampled=(7,)), episode=f"e{i}")
        return replace(made, **changes)

    return turn_
