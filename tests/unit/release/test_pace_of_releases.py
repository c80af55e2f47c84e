"""What the controller says of the pace: by the traffic that it sees and the trials of its ledger. Newer candidates are skipped."""

import pytest
from tests.fakes.release_world import QUICK, V0, V3, V5, V8, FakeJudge, controller, on_trial

from ostinato.release.pace import DAY
from ostinato.release.trial.config import HOUR


async def test_traffic_is_counted_up_to_a_day_and_the_ledgers_trials_are_counted_again_after_a_restart(disk):
    control, crowd = await on_trial(disk, {V3: 0.75})
    assert (await control.pace(gate_alpha=0.1)).traffic is None, "there is no hour of it yet"
    await crowd.until("shipped")
    crowd.time.now += 2 * HOUR
    found = await control.pace(gate_alpha=0.1)
    turns = crowd.turns * DAY / (crowd.time.now - 1009.0)
    assert (found.traffic.people, found.traffic.turns) == (len(crowd.people), pytest.approx(turns, rel=1e-3))
    assert 0.5 < found.traffic.good < 0.75
    assert (found.tried, found.spent.trials, found.spent.verdicts) == (True, 1, 1)
    assert found.spent.false_ships == pytest.approx(QUICK["trial"].ship_alpha)
    assert found.cadence.margin == QUICK["trial"].margin
    again = controller(disk, FakeJudge(), crowd.time, guarded=True, **QUICK)
    assert await again.pace(gate_alpha=0.1) == found


async def test_of_candidates_that_come_during_a_trial_only_the_newest_is_judged(disk):
    control, crowd = await on_trial(disk, {V3: 0.75, V5: 0.5, V8: 0.5})
    for policy in (V5, V8):
        disk.publish(policy)
        await crowd.slot()
        await control.step()
    for _ in range(60):
        await crowd.slot()
        await control.step()
        if ("canary", 8) in disk.events():
            break
    judged = [number for action, number in disk.events() if action == "evaluated"]
    assert judged == [3, 8]
    assert V0 in control.ledger.state.releases
