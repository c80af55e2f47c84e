"""Who decides that servers are lent: the guard, over what the gateway and the engine say; and which runs may lend at all."""

import pytest

from ostinato.app.server_loans import Lending, check_lending
from ostinato.compute.borrowing import Meter
from ostinato.compute.config import LendConfig
from ostinato.config import load
from ostinato.core.errors import BadConfig
from ostinato.engine.vllm.loans import LendingState
from ostinato.serve.priority import LatencyWindow


class Seconds:
    """A clock that tests own."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Counted:
    """Stands in for the engine's loans: what is lent is lent at once, and so is what is given back."""

    def __init__(self, serving):
        self.own, self.lent, self.back, self.open, self.seconds, self.cut_off = serving, 0, 0, 8, 0.0, 0
        self.asked = []

    def standing(self):
        return LendingState(serving=self.own - self.lent, lent=self.lent, returning=self.back, open=self.open)

    def lend(self, count):
        self.lent += count
        return count

    def give_back(self, count, end_s):
        self.asked.append((count, end_s))
        self.lent -= count
        return count


class Scene:
    """People who ask at a rate, and somebody who looks each half second."""

    def __init__(self, **config):
        self.clock, self.loans, self.told = Seconds(), Counted(4), []
        self.waits = LatencyWindow(self.clock)
        rules = LendConfig(**{"most": 3, "carries": 5.0, "window_s": 120.0, "hold_s": 60.0, "end_s": 3.0} | config)
        self.lending = Lending(self.loans, self.waits, rules, lambda: 7, self.told.append, self.clock, self.clock)

    def people(self, rate, seconds, wait_s=0.1, users=3):
        due, asked = 0.0, 0
        for _ in range(int(seconds * 2)):
            self.clock.now += 0.5
            due += rate / 2
            while due >= 1:
                due, asked = due - 1, asked + 1
                with self.waits.asked(1, f"u{asked % users}") as first:
                    self.clock.now += wait_s
                    first()
                    self.clock.now -= wait_s
            self.lending.look()
        return self.loans.lent


def test_nothing_is_lent_before_the_traffic_is_known_then_at_the_trough_and_all_is_back_at_the_wave():
    scene = Scene()
    assert scene.people(2.0, 55) == 0, "hold_s after the start"
    assert scene.people(2.0, 10) == 3
    assert scene.people(2.0, 100) == 3
    assert 0 < scene.people(9.0, 15) < 3, "as many as the rate needs"
    assert scene.people(19.0, 15) == 0
    assert scene.people(2.0, 50) == 0, "hold_s after a return"
    assert scene.people(2.0, 60) == 0, "the wave is in the window still"
    assert scene.people(2.0, 60) == 3
    assert {end_s for _, end_s in scene.loans.asked} == {3.0}
    assert [told.lent for told in scene.told if told.why][:2] == [2, 3]
    assert next(told.why for told in scene.told if told.why).startswith("2 lent: 2.0")


def test_what_is_lent_is_told_at_the_start_and_when_it_changed_whatever_changed_it():
    scene = Scene()
    scene.people(1.0, 1)
    assert [(told.lent, told.returning, told.why) for told in scene.told] == [(0, 0, "")]
    for back in (2, 0):
        scene.loans.back = back
        scene.people(1.0, 1)
        assert scene.told[-1].returning == back
    assert len(scene.told) == 3


def test_a_tenth_of_people_who_wait_take_everything_back_whatever_the_rate():
    scene = Scene(guard_s=2.0)
    assert scene.people(2.0, 70) == 3
    assert scene.people(2.0, 10, wait_s=1.9) == 3
    assert scene.people(2.0, 3, wait_s=2.1) == 0


def test_who_waits_without_a_token_counts_before_it_comes():
    scene = Scene(guard_s=2.0)
    assert scene.people(0.0, 70) == 3
    with scene.waits.asked(1, "a"), scene.waits.asked(1, "a"), scene.waits.asked(1, "b"):
        assert scene.people(0.0, 2) == 3
        assert scene.people(0.0, 1) == 0


def test_no_single_call_and_no_single_user_keeps_lending_off():
    scene = Scene(guard_s=2.0)
    assert scene.people(0.0, 70) == 3
    with scene.waits.asked(1, "a"), scene.waits.asked(1, "b"):
        assert scene.people(0.0, 5) == 3, "two calls may be two long prompts"
    assert scene.people(1.0, 20, wait_s=5.0, users=1) == 3, "ten calls, all of one user"
    assert scene.people(1.0, 20, wait_s=5.0, users=2) == 0


def test_one_user_with_many_late_calls_counts_only_with_others_who_are_late():
    scene = Scene(guard_s=2.0)
    assert scene.people(0.0, 70) == 3
    with scene.waits.asked(1, "b") as first:
        first()
    for _ in range(9):
        with scene.waits.asked(1, "a") as first:
            scene.clock.now += 3.0
            first()
            scene.clock.now -= 3.0
    assert scene.waits.delay_s() == 0.0
    with scene.waits.asked(1, None):
        scene.clock.now += 5.0
        assert scene.waits.delay_s() == 0.0, "its slot has other servers"


def test_rollouts_that_ask_for_nothing_are_lent_nothing():
    scene = Scene()
    scene.loans.open = 0
    assert scene.people(1.0, 200) == 0
    scene.loans.open = 1
    assert scene.people(1.0, 5) == 3
    scene.loans.open = 0
    assert scene.people(1.0, 50) == 3
    assert scene.people(1.0, 20) == 0


def test_when_nobody_serves_people_everything_is_wanted_back():
    scene = Scene()
    assert scene.people(0.0, 70) == 3
    scene.loans.own = 3  # the one that stayed is away
    assert scene.people(0.0, 1) == 0


def test_rates_are_of_the_last_seconds_and_the_highest_is_forgotten():
    meter = Meter(window_s=20.0, over_s=5.0)
    assert meter.note(0.0, 0) == (0.0, 0.0)
    assert meter.note(5.0, 50) == (10.0, 10.0)
    assert meter.note(10.0, 60) == (2.0, 10.0)
    assert meter.note(24.0, 60)[1] == 10.0
    assert meter.note(26.0, 60) == (0.0, 2.0)


VLLM = ["engine.kind=vllm", "engine.urls=['http://a:1','http://b:1','http://c:1']", "engine.replicas={live=2}"]
LEND = [*VLLM, "learn.source=worlds", "compute.lend.most=1", "compute.lend.carries=3.0"]


def test_a_run_that_can_lend():
    check_lending(load(None, LEND))
    check_lending(load(None, [*LEND, "record.url='postgresql:///c'", "compute.lend.only_gateway=true"]))
    check_lending(load())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["engine.kind=embedded"], 'engine.kind is "embedded": set engine.kind = "vllm" and engine.urls, or'),
        (["compute.lend.most=2"], "has 2 servers, .* raise engine.replicas.live to 3, or lend at most 1"),
        (["engine.replicas={}"], "has 1 server, .* raise engine.replicas.live to 2$"),
        (["learn.source=people"], 'no rollouts to lend to; set it to "worlds" or "both"'),
        (["record.url='postgresql:///c'"], "set compute.lend.only_gateway = true"),
        (["compute.lend.carries=0"], "set carries to .*, or most = 0"),
        (["compute.lend.lend_below=0.8"], "lend_below must be below return_above"),
    ],
)
def test_a_run_that_cannot_lend_is_told_why(more, message):
    with pytest.raises(BadConfig, match=message):
        check_lending(load(None, [*LEND, *more]))
