"""A person's word ends an alarm about behaviour, once, and no other."""

import pytest

from ostinato.core.errors import BadRequest, Conflict, NotFound
from ostinato.core.notices import Alarm, AlarmState
from ostinato.record.config import RecordConfig
from ostinato.record.log import SqlLog
from ostinato.release.monitors.config import MonitorsConfig
from ostinato.release.monitors.watcher import MonitorWatcher, accept, acceptable, standing


def an_alarm(name, number, state=AlarmState.RAISED):
    return Alarm(id=f"{name}:{number}", name=name, state=state, reason="12% where 3% is expected", at=float(number))


@pytest.fixture
def log(tmp_path):
    with SqlLog.open(tmp_path / "log") as log:
        yield log


async def test_the_word_is_in_the_log_and_the_alarm_does_not_stand(log):
    await log.append(an_alarm("monitor:edit", 1))
    await log.append(an_alarm("coverage:acme", 2))
    row = await accept(log, "monitor:edit", "the prompt asks for it", "ann", 9.0, "monitor:edit:1")
    assert row.reason == "accepted by ann (the prompt asks for it): what was 12% where 3% is expected"
    assert (row.state, row.detail) == (AlarmState.CLEARED, {"accepted": True, "actor": "ann"})
    assert list(await standing(log)) == ["coverage:acme"]
    with pytest.raises(NotFound, match="coverage:acme"):
        await accept(log, "monitor:edit", "again", "ann", 10.0)


async def test_an_alarm_stands_though_retention_dropped_the_rows_of_its_time(tmp_path):
    """Alarms stay in the log for ever, so what was raised before its horizon still stands, for people and for the monitors."""
    config = RecordConfig(segment_rows=1, retain_days=1)
    with SqlLog.open(tmp_path / "log", lambda: 0.0, config) as log:
        await log.append(an_alarm("monitor:edit", 1))
        await log.append(*(an_alarm("coverage:acme", number, AlarmState.CLEARED) for number in (2, 3)))
        await log.drop_old(30 * 86_400.0, log.newest())
        assert await log.horizon() > 1
        assert list(await standing(log)) == ["monitor:edit"]
        watcher = MonitorWatcher(log, MonitorsConfig())
        await watcher.refresh()
        assert watcher.paused


async def test_what_was_raised_anew_meanwhile_is_not_accepted(log):
    for row in (an_alarm("best_of_k", 1), an_alarm("best_of_k", 2, AlarmState.CLEARED), an_alarm("best_of_k", 3)):
        await log.append(row)
    with pytest.raises(Conflict, match="anew"):
        await accept(log, "best_of_k", "fine", "ann", 9.0, "best_of_k:1")
    assert (await accept(log, "best_of_k", "fine", "ann", 9.0, "best_of_k:3")).id == "best_of_k:3:accepted"


@pytest.mark.parametrize("name", ["coverage:acme", "release:rollbacks", "monitor:reference", "auto:propensities"])
async def test_a_fault_cannot_be_accepted(log, name):
    await log.append(an_alarm(name, 1))
    with pytest.raises(BadRequest, match="when its cause does"):
        await accept(log, name, "never mind", "ann", 9.0)
    assert name in await standing(log)


@pytest.mark.parametrize("name", ["monitor:edit", "monitor:edit:canary", "proxy_gap", "influence:person", "best_of_k"])
def test_findings_can_be_accepted(name):
    assert acceptable(name)
