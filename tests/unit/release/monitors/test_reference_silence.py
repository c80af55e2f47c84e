"""When the reference arm falls silent: who can silence it, who is heard instead, and that nothing ships unseen."""

import json
import random
from dataclasses import replace

import pytest

from ostinato.core.arm_assignment import ANONYMOUS
from ostinato.core.notices import AlarmState
from ostinato.core.records import Arm
from ostinato.release.monitors.behaviour import REFERENCE
from ostinato.release.monitors.config import MonitorsConfig
from ostinato.release.monitors.monitors import Monitors
from ostinato.release.monitors.rates import BUILT_IN
from ostinato.release.monitors.watcher import rates_of
from ostinato.testing.records import a_turn

CONFIG = MonitorsConfig(
    false_alarm_sessions=1_000.0, false_comfort_sessions=100.0, session_turns=4, reference_sessions=30.0, pauses=True,
    stale_sessions=40, stale_s=1_800.0, off=tuple(BUILT_IN.keys() - {"question", "edit"}),
)  # fmt: skip
EDIT = "```python\na = 1\n```"
ASK = "Which of the two should I keep?"


class Crowd:
    """People whose sessions follow each other by a minute, and what the monitors tell of them."""

    def __init__(self, config=CONFIG):
        self.watch, self.rng, self.number, self.at = (
            Monitors(config, rates_of(config.off, {})),
            random.Random(1),
            0,
            0.0,
        )

    def session(self, arm, *, asks=0.1, user=None, tenant="acme", pause=60.0):
        """One session of four turns, of which this share asks; the alarms of it."""
        told, self.number, self.at = [], self.number + 1, self.at + pause
        for turn in range(4):
            name = user or f"{tenant} {self.number % 200} {arm}"
            made = a_turn(f"{self.number}:{turn}", user=name, arm=arm, ended_at=self.at + turn / 100)
            text = ASK if self.rng.random() < asks else EDIT
            row = replace(made, tenant=tenant, episode=f"e{self.number}", text=text)
            told += self.watch.apply(4 * self.number + turn, row)
        return told

    def sessions(self, arms, count, **how):
        return [alarm for n in range(count) for alarm in self.session(arms[n % len(arms)], **how)]

    def flooded(self, rounds, *, user=None):
        """Sixty sessions of a stranger's, well behaved, before each honest one; one honest session in five is on control."""
        told = []
        for number in range(rounds):
            told += self.sessions((Arm.LIVE,), 60, tenant="evil", user=user, pause=0.5)
            arm = Arm.CONTROL if number % 5 == 0 else Arm.LIVE
            told += self.session(arm, asks=0.1 if arm is Arm.CONTROL else 0.7, pause=30.0)
        return told

    def again(self, config=CONFIG):
        """The monitors begin again from their saving."""
        state = json.loads(json.dumps(self.watch.snapshot()))
        self.watch = Monitors(config, rates_of(config.off, {}))
        assert self.watch.restore(state)


def silences(alarms):
    return [alarm.state for alarm in alarms if alarm.name == REFERENCE]


def learned(reference=Arm.CONTROL):
    crowd = Crowd()
    assert crowd.sessions((reference, Arm.LIVE), 200) == []
    return crowd


def test_a_flood_without_names_neither_silences_the_reference_arm_nor_hides_a_shift():
    crowd = learned()
    told = crowd.flooded(60, user=ANONYMOUS)
    assert silences(told) == []
    assert crowd.watch.paused
    assert "monitor:question" in crowd.watch.standing


def test_a_flood_without_names_raises_nothing_where_a_reference_arm_is_heard():
    crowd = learned()
    assert crowd.sessions((Arm.LIVE, Arm.LIVE, Arm.CONTROL), 30) == []
    assert crowd.sessions((Arm.LIVE,), 300, asks=1.0, user=ANONYMOUS, tenant="evil") == []
    assert crowd.watch.snapshot()["behaviour"]["turns"] == 230 * 4


def test_a_flood_of_names_does_not_silence_a_reference_arm_that_is_heard_all_the_while():
    crowd = learned()
    assert silences(crowd.flooded(30)) == []


def test_nothing_ships_while_control_is_silent_and_a_session_or_two_of_it_are_no_return():
    crowd = learned()
    told = crowd.sessions((Arm.LIVE,), 100)
    assert silences(told) == [AlarmState.RAISED]
    assert told[-1].detail == {"arm": "control", "pauses": True}
    assert crowd.watch.paused
    assert REFERENCE in crowd.watch.standing
    crowd.again()
    assert crowd.watch.paused
    for _ in range(8):
        assert crowd.session(Arm.CONTROL) == []
        assert crowd.sessions((Arm.LIVE,), 60) == [], "no row more while it only flickers"
    assert crowd.watch.paused
    assert silences(crowd.sessions((Arm.CONTROL, Arm.LIVE), 40)) == [AlarmState.CLEARED]
    assert not crowd.watch.paused
    assert crowd.watch.standing == []


def test_previous_is_silent_between_trials_so_that_pauses_nothing():
    crowd = learned(Arm.PREVIOUS)
    told = crowd.sessions((Arm.LIVE,), 100)
    assert told[-1].detail == {"arm": "previous", "pauses": False}
    assert silences(told) == [AlarmState.RAISED]
    assert not crowd.watch.paused


def test_when_previous_is_silent_control_is_heard_in_its_place():
    crowd = learned(Arm.PREVIOUS)
    told = crowd.sessions((Arm.LIVE, Arm.LIVE, Arm.CONTROL), 200)
    assert silences(told) == []
    assert crowd.watch.snapshot()["behaviour"]["expecting"]["arm"] == "control"
    crowd.sessions((Arm.LIVE, Arm.CONTROL), 200, asks=0.1)
    for _ in range(100):
        crowd.session(Arm.LIVE, asks=0.7)
        crowd.session(Arm.CONTROL)
    assert crowd.watch.paused


def test_when_control_fell_silent_while_previous_was_heard_nothing_ships_once_both_are_silent():
    crowd = learned()
    crowd.sessions((Arm.PREVIOUS, Arm.LIVE), 80)
    told = crowd.sessions((Arm.LIVE,), 100)
    assert silences(told) == [AlarmState.RAISED]
    assert crowd.watch.paused
    crowd.watch = Monitors(CONFIG, rates_of(CONFIG.off, {}))
    crowd.watch.begin({REFERENCE: told[-1]})
    assert crowd.watch.paused


def test_an_arm_that_was_taken_out_of_the_settings_is_not_waited_for():
    crowd = learned()
    crowd.sessions((Arm.LIVE,), 100)
    assert crowd.watch.paused
    crowd.again(CONFIG.model_copy(update={"reference": ("previous",)}))
    assert not crowd.watch.paused
    assert silences(crowd.sessions((Arm.LIVE,), 3)) == [AlarmState.CLEARED]


@pytest.mark.parametrize("enabled", [True, False])
def test_where_the_state_is_lost_the_silence_stands_on_unless_nothing_is_watched(enabled):
    crowd = learned()
    raised = crowd.sessions((Arm.LIVE,), 100)[-1]
    config = CONFIG if enabled else CONFIG.model_copy(update={"enabled": False})
    crowd.watch = Monitors(config, rates_of(config.off, {}) if enabled else ())
    crowd.watch.begin({raised.name: raised})
    told = crowd.sessions((Arm.LIVE,), 5)
    assert silences(told) == ([] if enabled else [AlarmState.CLEARED])
    assert crowd.watch.paused == enabled
