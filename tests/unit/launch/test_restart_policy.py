"""When a worker is hung, what its end means, how often it is tried again."""

import signal
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.launch.placing.heartbeat import Sign, read_sign
from ostinato.launch.placing.supervision import Ending, Failures, ending, hung
from ostinato.placing_config import SuperviseConfig

LIMITS = SuperviseConfig(silence_s=30.0, stop_s=20.0, tries=3, window_s=600.0, longest_wait_s=30.0)
SIGN = Sign(doing="taking step 12", for_s=100.0, limit_s=3600.0)
FAULT = Ending(reason="Conflict: taken", fault=True)
KILL = Ending(reason="was killed by SIGKILL", fault=False)


def test_a_step_of_minutes_is_no_hang_and_silence_is():
    assert hung(SIGN, 1.0, LIMITS) is None
    assert hung(SIGN, 29.0, LIMITS) is None
    assert hung(SIGN, 31.0, LIMITS) == "gave no sign of life for 31 s while taking step 12"
    assert hung(None, 29.0, LIMITS) is None, "it is being loaded"
    assert hung(None, 31.0, LIMITS) == "gave no sign of life for 31 s"


def test_each_stage_has_its_own_limit():
    assert hung(replace(SIGN, for_s=3601.0), 1.0, LIMITS) == (
        "was taking step 12 for 3601 s, longer than the 3600 s allowed"
    )
    assert hung(replace(SIGN, for_s=1e9, limit_s=None), 1.0, LIMITS) is None, "serving has no limit"


def test_an_event_loop_that_stands_still_is_a_hang_unless_the_stage_may_hold_it():
    serving = Sign(doing="serving", limit_s=None, lag_s=31.0)
    assert hung(serving, 1.0, LIMITS) == "its event loop stood still for 31 s while serving"
    assert hung(replace(serving, lag_s=29.0), 1.0, LIMITS) is None
    assert hung(replace(serving, doing="loading the model", limit_s=3600.0), 1.0, LIMITS) is None


@pytest.mark.parametrize(
    ("code", "sign", "last", "expected"),
    [
        (
            2,
            replace(SIGN, failed="BadConfig: no", certain=True),
            "x",
            Ending(reason="BadConfig: no", fault=True, certain=True),
        ),
        (1, replace(SIGN, failed="KeyError: 'a'"), "x", Ending(reason="KeyError: 'a'", fault=True)),
        (1, SIGN, "ImportError: x", Ending(reason="ended with code 1: ImportError: x", fault=True)),
        (1, None, "", Ending(reason="ended with code 1", fault=True)),
        (0, SIGN, "", Ending(reason="ended, as if it had been asked to", fault=False)),
        (-signal.SIGKILL, SIGN, "", Ending(reason="was killed by SIGKILL; is memory short?", fault=False)),
        (-signal.SIGTERM, None, "", Ending(reason="was killed by SIGTERM", fault=False)),
        (-signal.SIGSEGV, SIGN, "", Ending(reason="crashed with SIGSEGV", fault=True)),
        (-(signal.SIGRTMIN + 1), SIGN, "", Ending(reason=f"was killed by signal {signal.SIGRTMIN + 1}", fault=False)),
    ],
)
def test_an_end_says_why_in_the_workers_own_words_if_it_had_any(code, sign, last, expected):
    assert ending(code, sign, last) == expected


def test_it_is_tried_again_ever_later_and_not_for_ever():
    failures, waits = Failures(LIMITS), []
    for now in (0.0, 1.0):
        failures.add(now, FAULT, 1.0)
        waits.append(failures.wait_s)
        assert not failures.enough
    failures.add(3.0, FAULT, 1.0)
    assert failures.enough
    assert waits == [0.5, 1.0]


def test_failures_far_apart_and_kills_from_outside_are_never_enough():
    failures = Failures(LIMITS)
    for now in range(0, 100_000, 400):
        failures.add(float(now), FAULT, 399.0)
        assert not failures.enough
        assert failures.wait_s == 0.5, "it ran well for a while"
    failures = Failures(LIMITS)
    for now in range(100):
        failures.add(float(now), KILL, 1.0)
        assert not failures.enough
    assert failures.wait_s == LIMITS.longest_wait_s


texts = st.none() | st.text(max_size=3_000)


@given(doing=st.text(max_size=3_000), trouble=texts, failed=texts, for_s=st.floats(0, 1e12), certain=st.booleans())
def test_a_sign_fits_into_the_pipe_whatever_it_says(doing, trouble, failed, for_s, certain):
    sign = Sign(doing=doing, trouble=trouble, failed=failed, for_s=for_s, certain=certain)
    line = sign.line()
    assert len(line) <= 4096
    assert line.count(b"\n") == 1
    read = read_sign(line[:-1])
    assert (read.for_s, read.certain) == (for_s, certain)
    if failed is not None and failed.isprintable() and len(failed) < 200:
        assert read.failed == " ".join(failed.split())


@given(st.binary(max_size=200))
def test_half_a_line_is_no_sign(data):
    found = read_sign(data)
    assert found is None or isinstance(found, Sign)
