"""Only what Ostinato ships is judged: another's model, and releases that nobody ships from, pause nothing and count nowhere."""

import random
from dataclasses import replace

import pytest

from ostinato.core.notices import Alarm, AlarmState
from ostinato.core.records import Arm
from ostinato.release.monitors.config import MonitorsConfig
from ostinato.release.monitors.monitors import Monitors
from ostinato.release.monitors.rates import BUILT_IN
from ostinato.release.monitors.watcher import rates_of
from ostinato.testing.records import a_turn

CONFIG = MonitorsConfig(
    false_alarm_sessions=1_000.0, false_comfort_sessions=100.0, session_turns=4, reference_sessions=30.0, pauses=True,
    off=tuple(BUILT_IN.keys() - {"question", "edit"}),
)  # fmt: skip
EDIT = "```python\na = 1\n```"
ASK = "Which of the two should I keep?"


def sessions(watch, arms, count, *, asks):
    """So many sessions of four turns on these arms in turn; on `asks` six answers of ten ask, elsewhere one in ten."""
    rng, told = random.Random(1), []
    for number in range(count):
        arm = arms[number % len(arms)]
        for turn in range(4):
            text = ASK if rng.random() < (0.6 if arm is asks else 0.1) else EDIT
            made = a_turn(f"{number}:{turn}", user=f"u{number % 200}-{arm}", arm=arm, ended_at=60.0 * number + turn)
            told += watch.apply(4 * number + turn + 1, replace(made, text=text))
    return told


@pytest.mark.parametrize("arm", [Arm.OUTSIDE, Arm.VERIFIED])
@pytest.mark.parametrize("reference", [Arm.CONTROL, Arm.PREVIOUS])
def test_an_arm_that_never_ships_raises_nothing(arm, reference):
    watch = Monitors(CONFIG, rates_of(CONFIG.off, {}))
    assert sessions(watch, (reference, Arm.LIVE, arm), 1_200, asks=arm) == []
    assert not watch.paused


@pytest.mark.parametrize("arm", [Arm.LIVE, Arm.CANARY])
def test_an_arm_that_ships_is_judged(arm):
    watch = Monitors(CONFIG, rates_of(CONFIG.off, {}))
    sessions(watch, (Arm.CONTROL, arm), 800, asks=arm)
    assert watch.paused


def test_turns_with_another_model_use_up_nothing_of_what_a_person_counts_for():
    config = CONFIG.model_copy(update={"turns_a_day": 4})
    watch = Monitors(config, rates_of(config.off, {}))
    for number, arm in enumerate([Arm.OUTSIDE] * 20 + [Arm.LIVE] * 3):
        watch.apply(number + 1, a_turn(f"t{number}", user="ann", arm=arm, ended_at=float(number)))
    state = watch.snapshot()["behaviour"]
    ((_, _, arm, _, _, turns),) = state["sessions"]["open"]
    assert (arm, len(turns)) == ("live", 3)


def test_an_alarm_that_stood_about_an_arm_that_is_not_judged_ends():
    stood = Alarm(
        id="a", name="monitor:question:outside", state=AlarmState.RAISED, reason="", at=1.0, detail={"pauses": True}
    )
    watch = Monitors(CONFIG, rates_of(CONFIG.off, {}))
    watch.begin({stood.name: stood})
    (ended,) = watch.apply(1, a_turn("t", user="ann", arm=Arm.LIVE, ended_at=2.0))
    assert (ended.name, ended.state) == (stood.name, AlarmState.CLEARED)
    assert not watch.paused
