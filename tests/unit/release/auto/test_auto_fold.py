"""The router over a log: started again it knows what it knew, and reads no more than it must."""

from dataclasses import replace

import pytest
from tests.unit.release.auto.test_router import EVEN, a_dealt_turn, a_reward

from ostinato.core.errors import Unavailable
from ostinato.core.notices import Alarm
from ostinato.core.records import Pick
from ostinato.record.folds import FileFolds
from ostinato.release.alarms import note
from ostinato.release.auto.config import RouterConfig
from ostinato.release.auto.router import FoldedRouter
from ostinato.release.monitors.watcher import standing
from ostinato.testing.log import MemoryLog
from ostinato.testing.records import a_turn


class Counted(MemoryLog):
    """Counts the rows that are read."""

    seen = 0

    async def read(self, after, kinds):
        async for found in super().read(after, kinds):
            self.seen += 1
            yield found


@pytest.fixture
def log():
    return Counted()


@pytest.fixture
def folded(log, tmp_path):
    def make(**options):
        return FoldedRouter(log, FileFolds(tmp_path), lambda: 5.0, list(EVEN), RouterConfig(**options))

    return make


async def served(log, count, *, start=0, like=None):
    for i in range(start, start + count):
        arm = "live" if i % 2 else "large"
        turn = a_dealt_turn(f"t{i}:0", arm, user=f"u{i}")
        await log.append(a_turn(f"other{i}:0"), turn, a_reward(turn, 1.0 if arm == (like or "live") else -1.0))


async def test_shares_follow_the_log(log, folded):
    router = folded()
    await router.catch_up()
    assert router.router.odds(EVEN)["live"] == pytest.approx(0.5)
    await served(log, 60)
    await router.catch_up()
    assert router.router.odds(EVEN)["live"] > 0.95


async def test_a_start_goes_on_where_it_was_saved(log, folded):
    first = folded()
    await served(log, 40)
    await first.catch_up()
    await first.save()
    await served(log, 10, start=40)
    await first.catch_up()
    log.seen = 0
    again = folded()
    await again.catch_up()
    assert log.seen <= 31  # ten times three rows, and the one that the saving ended with
    assert again.router.state() == first.router.state()


async def test_a_process_that_was_killed_reads_again_what_was_not_saved(log, folded):
    first = folded(fold_rows=25)
    await served(log, 40)
    await first.catch_up()
    again = folded(fold_rows=25)
    await again.catch_up()
    assert again.router.state() == first.router.state()


async def test_a_state_that_all_streams_wait_for_is_not_saved_every_few_minutes(log, folded, tmp_path):
    await served(log, 2_000)  # 4,000 rows that it reads
    await folded().catch_up()
    assert await FileFolds(tmp_path).load("auto") is None


async def test_a_saving_of_another_log_or_that_is_damaged_is_not_used(log, folded, tmp_path):
    await served(log, 20)
    first = folded()
    await first.catch_up()
    await first.save()
    cursor, state = await FileFolds(tmp_path).load("auto")
    for wrong in (
        {**state, "last": ["Turn", "another:0"]},
        {**state, "router": {"arms": {"live": {"posteriors": {"reward": {"sums": [1], "users": []}}}}}},
    ):
        await FileFolds(tmp_path).save("auto", cursor, wrong)
        again = folded()
        await again.catch_up()
        assert again.router.views() == first.router.views()


@pytest.mark.parametrize(
    "changed",
    [{"low": -0.25, "high": 0.75}, {"rho": 0.1}, {"users": "verified"}, {"longest_s": 600.0}],
    ids=lambda changed: ", ".join(changed),
)
async def test_what_was_summed_up_under_another_range_is_summed_up_anew(log, folded, tmp_path, changed):
    """A mean of 0.9 between -1 and 1 became one of 0.7 between -0.25 and 0.75, for good."""
    weights = {"reward": 1.0, "seconds": -0.01}
    first = folded(weights=weights)
    await served(log, 40)
    for i in range(6):
        turn = a_dealt_turn(f"more{i}:0", "live", user="often")
        await log.append(turn, a_reward(turn, i / 10))
    await first.catch_up()
    await first.save()
    again = folded(weights=weights, **changed)
    await again.catch_up()
    rules = RouterConfig(weights=weights, **changed)
    anew = FoldedRouter(log, FileFolds(tmp_path / "none"), lambda: 5.0, list(EVEN), rules)
    await anew.catch_up()
    assert again.router.state() == anew.router.state()
    assert again.router.views() == anew.router.views()
    log.seen = 0
    await again.save()
    await folded(weights=weights, **changed).catch_up()
    assert log.seen <= 1, "once"


async def test_wrong_propensities_raise_one_alarm(log, folded):
    for i in range(300):
        turn = a_dealt_turn(f"t{i}:0", "live", user=f"u{i}", odds={"live": 0.5, "large": 0.5})
        await log.append(turn)
    for _ in range(2):
        router = folded()
        await router.catch_up()
        await router.catch_up()
    (alarm,) = [row for row in log.rows if isinstance(row, Alarm)]
    assert (alarm.name, alarm.at) == ("auto:propensities", 5.0)
    assert "`ostinato auto` names" in alarm.reason, "which arms, of which there may be more later"
    await note(log, alarm.name, raised=False, why="Auto was off", at=6.0)
    await folded().catch_up()
    assert [*await standing(log)] == [alarm.name], "the log is as it was"


async def test_an_alarm_that_could_not_be_written_is_written_later(log, folded, monkeypatch):
    for i in range(300):
        await log.append(a_dealt_turn(f"t{i}:0", "live", user=f"u{i}", odds={"live": 0.5, "large": 0.5}))
    router = folded()

    async def away(*_):
        raise Unavailable("Postgres is away")

    with monkeypatch.context() as broken:
        broken.setattr(log, "append", away)
        with pytest.raises(Unavailable):
            await router.catch_up()
    await router.catch_up()
    assert [row.name for row in log.rows if isinstance(row, Alarm)] == ["auto:propensities"]


async def test_who_only_looks_writes_nothing(log, folded, tmp_path):
    for i in range(300):
        await log.append(replace(a_turn(f"t{i}:0"), auto=Pick(arm="live", odds=EVEN)))
    router = folded(fold_rows=10)
    await router.catch_up(telling=False)
    assert router.router.propensities.wrong(0.01)
    assert await FileFolds(tmp_path).load("auto") is None
    assert len(log.rows) == 300
