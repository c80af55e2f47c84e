"""Which tests always end the same way."""

from ostinato.worlds.grading.flaky import compared
from ostinato.worlds.grading.test_report import TestHeard, Testimony


def run(**ends):
    heard = {
        id: TestHeard(id=id, ended=how != "died", failed=how == "failed", skipped=how == "skipped")
        for id, how in ends.items()
    }
    return Testimony(collected=tuple(ends), tests=heard)


def test_a_test_is_flaky_if_it_passed_and_did_not():
    found = compared(
        [
            run(a="passed", b="failed", c="passed", d="passed", e="skipped", f="passed"),
            run(a="passed", b="failed", c="failed", d="died", e="skipped"),
        ]
    )
    assert found.passing == ("a",)
    assert found.failing == ("b", "e")
    assert found.flaky == ("c", "d", "f")
