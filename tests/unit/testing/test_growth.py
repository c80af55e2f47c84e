"""The check of growth lets linear work pass, and no quadratic work."""

from tests.growth import TIMES, grows_with_its_input


def test_quadratic_work_is_found_out():
    def each(count):
        return sum(one > 1 for one in range(count))

    def every_pair(count):
        return sum(one > other for one in range(count) for other in range(count))

    assert grows_with_its_input(each, 1_000_000 // TIMES, 1_000_000)
    assert not grows_with_its_input(every_pair, 3_000 // TIMES, 3_000)
