"""What a worker has loaded is left out of later collections, and freed all the same."""

import gc
import weakref

from ostinato.launch.workers.settling import settle


class Weights:
    pass


def test_what_is_loaded_is_looked_through_no_more_and_freed_once_nothing_needs_it():
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
        gc.unfreeze()
