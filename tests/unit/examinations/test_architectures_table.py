"""The page about models says what the examination of architectures found, and the examination survives what it finds."""

import json
import os
import signal

from tests.examinations.architectures.kinds import SPECIAL, VARIANTS, every_kind, tiny_config
from tests.examinations.architectures.run import STATES, Outcome, apart, examine
from tests.examinations.architectures.table import PAGE, RESULT, page


def test_the_page_is_made_of_the_newest_results():
    assert PAGE.read_text() == page(json.loads(RESULT.read_text()))


def test_no_architecture_is_wrong_or_crashes():
    report = json.loads(RESULT.read_text())
    assert {
        each["kind"]: each["reason"] for each in report["architectures"] if each["state"] in ("crash", "wrong")
    } == {}
    assert report["totals"] == {
        state: sum(each["state"] == state for each in report["architectures"]) for state in STATES
    }


def test_a_wrong_one_and_a_crash_are_shown():
    found = [
        {"kind": "a", "state": "equal", "reason": "", "difference": 1e-7},
        {"kind": "b", "state": "wrong", "reason": "", "difference": 0.5},
        {"kind": "c", "state": "crash", "reason": "KeyError: 'x | y'", "difference": None},
    ]
    text = page({"architectures": found, "totals": {"equal": 1}, "transformers": "1", "torch": "2"})
    assert "| `b` | **wrong** |" in text
    assert r"| `c` | **crash** KeyError: 'x \| y' |" in text


def die(kind):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_crash_does_not_end_the_examination():
    assert apart("llama", die) == Outcome(kind="llama", state="crash", reason="the process ended with code -9")


def test_the_tables_name_architectures_that_there_are():
    kinds = set(every_kind())
    assert SPECIAL.keys() <= kinds
    assert {kind for kind, _ in VARIANTS.values()} <= kinds


def test_each_state_is_told_from_the_others():
    assert examine("llama").state == "equal"
    assert examine("stablelm").state == "refused"
    assert examine("fuyu").state == "untried"


def test_a_variant_adds_to_its_architecture():
    assert tiny_config("phimoe").sliding_window == 16
    assert tiny_config("phimoe, no window").sliding_window is None
