"""Only what Ostinato ships is judged: another's model, and releases that nobody ships from, pause nothing and count nowhere."""

import json
import random
from dataclasses import replace

import pytest
from tests.grids import covering

from ostinato.core.notices import Alarm, AlarmState
from ostinato.core.records import Arm, Pick, PolicyVersion, ReleaseEvent
from ostinato.release.monitors.config import MonitorsConfig
from ostinato.release.monitors.monitors import Monitors
from ostinato.release.monitors.rates import BUILT_IN
from ostinato.release.monitors.watcher import acceptance, rates_of
from ostinato.testing.records import a_turn

CONFIG = MonitorsConfig(
    false_alarm_sessions=1_000.0, false_comfort_sessions=100.0, session_turns=4, reference_sessions=30.0, pauses=True,
    off=tuple(BUILT_IN.keys() - {"question", "edit"}),
)  # fmt: skip
EDIT = "```python\na = 1\n```"
ASK = "Which of the two should I keep?"


def sessions(watch, arms, count, *, asks, style=None):
    """So many sessions of four turns on these arms in turn; on `asks` six answers of ten ask, elsewhere one in ten. All of that arm's
    answers have the style.
    """
    rng, told = random.Random(1), []
    for number in range(count):
        arm = arms[number % len(arms)]
        for turn in range(4):
            text = ASK if rng.random() < (0.6 if arm is asks else 0.1) else EDIT
            made = a_turn(f"{number}:{turn}", user=f"u{number % 200}-{arm}", arm=arm, ended_at=60.0 * number + turn)
            made = replace(made, text=text, style=style if arm is asks else None)
            told += watch.apply(4 * number + turn + 1, made)
    return told


@pytest.mark.parametrize(("arm", "reference"), covering([Arm.OUTSIDE, Arm.VERIFIED], [Arm.CONTROL, Arm.PREVIOUS]))
def test_an_arm_that_never_ships_raises_nothing(arm, reference):
    watch = Monitors(CONFIG, rates_of(CONFIG.off, {}))
    assert sessions(watch, (reference, Arm.LIVE, arm), 1_200, asks=arm) == []
    assert not watch.paused


@pytest.mark.parametrize("arm", [Arm.LIVE, Arm.CANARY])
def test_an_arm_that_ships_is_judged(arm):
    watch = Monitors(CONFIG, rates_of(CONFIG.off, {}))
    sessions(watch, (Arm.CONTROL, arm), 800, asks=arm)
    assert watch.paused


@pytest.mark.parametrize(("style", "paused"), [("concise@a60d30c4", False), ("none", True)])
def test_the_form_that_a_style_asks_for_is_no_drift_of_the_weights(monkeypatch, style, paused):
    watch, compared = Monitors(CONFIG, rates_of(CONFIG.off, {})), set()
    monkeypatch.setattr(watch._sameness, "turn", lambda turn: (compared.add(turn.arm), ())[1])
    sessions(watch, (Arm.CONTROL, Arm.LIVE), 800, asks=Arm.LIVE, style=Pick(arm=style, odds={style: 1.0}))
    assert watch.paused == paused
    assert compared == ({Arm.CONTROL, Arm.LIVE} if paused else {Arm.CONTROL})


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


RELEASES = 20
DRIFTING = MonitorsConfig(session_turns=4, pauses=True, off=tuple(BUILT_IN.keys() - {"question"}))


class Releases:
    """A product whose live arm changes with each release, with users on the one before it and on the first one."""

    def __init__(self, config, *, seed=1):
        self.watch, self.rng = Monitors(config, rates_of(config.off, {})), random.Random(seed)
        self.arms = (Arm.LIVE, Arm.PREVIOUS, Arm.LIVE, Arm.CONTROL)
        self.number, self.told = 0, []

    def release(self, count, *, live, previous, control=0.2):
        """So many sessions of four turns under these shares of questions."""
        asks = {Arm.LIVE: live, Arm.PREVIOUS: previous, Arm.CONTROL: control}
        for _ in range(count):
            arm, self.number = self.arms[self.number % len(self.arms)], self.number + 1
            for turn in range(4):
                text = ASK if self.rng.random() < asks[arm] else EDIT
                user, at = f"u{self.number % 400}-{arm}", 60.0 * self.number + turn
                made = a_turn(f"{self.number}:{turn}", user=user, arm=arm, ended_at=at)
                self.told += self.watch.apply(4 * self.number + turn + 1, replace(made, text=text))


@pytest.mark.parametrize("reference", [("previous", "control"), ("previous",)])
def test_a_rate_that_drifts_by_a_twentieth_of_itself_a_release_is_found_against_control_only(reference):
    product = Releases(DRIFTING.model_copy(update={"reference": reference}))
    product.arms = (Arm.LIVE, Arm.PREVIOUS, Arm.PREVIOUS, Arm.CONTROL)
    rate = 0.2
    for _ in range(RELEASES):
        product.release(180, live=1.05 * rate, previous=rate)
        rate *= 1.05
    found = [alarm.detail["against"] for alarm in product.told if alarm.state is AlarmState.RAISED]
    assert found == (["control"] if "control" in reference else [])
    assert product.watch.paused == ("control" in reference)


def test_a_sudden_shift_is_found_though_control_has_no_traffic():
    product = Releases(DRIFTING)
    product.arms = (Arm.LIVE, Arm.PREVIOUS)
    product.release(600, live=0.2, previous=0.2)
    assert product.told == []
    product.release(300, live=0.8, previous=0.2)
    assert [alarm.detail["against"] for alarm in product.told] == ["previous"]


def test_a_shift_that_was_accepted_is_expected_of_both():
    product = Releases(DRIFTING)
    product.release(800, live=0.2, previous=0.2)
    product.release(200, live=0.7, previous=0.2)
    (raised,) = product.told
    assert raised.name == "monitor:question"
    product.watch.apply(5 * 10**6, acceptance(raised, "ann", raised.at))
    product.release(600, live=0.7, previous=0.2)
    assert product.told == [raised]
    arms, product.arms = product.arms, (Arm.LIVE, Arm.CONTROL)
    product.release(1_100, live=0.7, previous=0.7)
    live = PolicyVersion(number=3, hash="c3")
    shipped = ReleaseEvent(id="r", action="shipped", policy=live, previous=None, reason="", detail={}, at=1e6)
    product.watch.apply(5 * 10**6 + 1, shipped)
    product.arms = arms
    product.release(600, live=0.7, previous=0.7)
    assert product.told == [raised], "previous shows it itself now, and control never will"


def test_an_alarm_ends_against_control_though_the_release_before_is_gone():
    product = Releases(DRIFTING)
    product.release(800, live=0.2, previous=0.2)
    product.release(200, live=0.7, previous=0.2)
    assert len(product.told) == 1
    product.arms = (Arm.LIVE, Arm.CONTROL)
    product.release(1_600, live=0.2, previous=0.2)
    assert [alarm.state for alarm in product.told] == [AlarmState.RAISED, AlarmState.CLEARED]


def test_a_saved_state_goes_on_against_both():
    product = Releases(DRIFTING)
    product.release(500, live=0.2, previous=0.2)
    state = json.loads(json.dumps(product.watch.snapshot()))
    again = Monitors(DRIFTING, rates_of(DRIFTING.off, {}))
    assert again.restore(state)
    assert json.loads(json.dumps(again.snapshot())) == state
    assert set(state["behaviour"]["expecting"]["arms"]) == {"previous", "control"}


def test_versions_that_are_alike_raise_nothing_against_either():
    product = Releases(DRIFTING.model_copy(update={"false_alarm_sessions": 10_000.0}))
    product.release(3_000, live=0.2, previous=0.2)
    assert product.told == []
