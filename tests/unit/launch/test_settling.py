"""What a worker has loaded is left out of later collections, and freed all the same; its threads take short turns."""

import gc
import sys
import weakref

from ostinato.launch.workers.settling import THRESHOLDS, TURN_S, settle, take_short_turns


class Weights:
    pass


def test_what_is_loaded_is_looked_through_no_more_and_freed_once_nothing_needs_it():
    usual = gc.get_threshold()
    weights = Weights()
    seen = weakref.ref(weights)
    try:
        settle()
        assert gc.get_freeze_count() > 10_000, "the interpreter and its modules"
        assert not any(each is weights for each in gc.get_objects())
        later = Weights()
        assert any(each is later for each in gc.get_objects())
        del weights
        assert seen() is None
    finally:
        assert gc.get_threshold() == THRESHOLDS
        gc.unfreeze()
        gc.set_threshold(*usual)


def test_threads_take_short_turns_and_never_longer_ones_than_before():
    usual = sys.getswitchinterval()
    try:
        for before, after in ((0.005, TURN_S), (TURN_S / 2, TURN_S / 2)):
            sys.setswitchinterval(before)
            take_short_turns()
            assert abs(sys.getswitchinterval() - after) < 2e-6  # whole microseconds
    finally:
        sys.setswitchinterval(usual)
