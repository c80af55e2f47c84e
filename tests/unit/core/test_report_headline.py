"""What stands first in a reason, for lists."""

from ostinato.core.report import headline


def test_lists_show_what_decided():
    assert headline("a person shipped it") == "a person shipped it"
    assert headline("worse: -3.1 pp; low power; add items") == "worse: -3.1 pp; …"
    assert headline("x" * 200, most=10) == "xxxxxxxxx…"
    assert headline("") == ""
