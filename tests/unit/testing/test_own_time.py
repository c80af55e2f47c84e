"""What a test counts as time: a loop that is held up counts, a processor that the machine withholds does not."""

import time

from tests import deadlines
from tests.deadlines import OwnTime


async def test_time_in_which_something_holds_the_loop_up_counts():
    async with OwnTime() as own:
        time.sleep(1.0)  # noqa: ASYNC251 - holds it up
    assert own.seconds >= 0.9


async def test_time_that_the_machine_withholds_does_not_count(monkeypatch):
    so_far = deadlines.withheld_s()
    async with OwnTime() as own:
        monkeypatch.setattr(deadlines, "withheld_s", lambda: so_far + 3600.0)
    assert own.seconds < 0


def test_a_system_that_tells_no_waits_has_withheld_nothing(monkeypatch):
    def missing(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(deadlines, "open", missing, raising=False)
    assert deadlines.withheld_s() == 0.0
