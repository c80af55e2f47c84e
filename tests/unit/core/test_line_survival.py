"""Numbers of lines, as clients send them."""

from dataclasses import replace

import pytest
from tests.growth import TIMES, grows_with_its_input

from ostinato.core.errors import BadRequest
from ostinato.core.line_survival import MOST_LINES, count, fates, holds, kept_share, line_spans, parse_ranges
from ostinato.core.records import LineSurvival, ParsedCall
from ostinato.testing.records import a_turn


@pytest.mark.parametrize(
    ("text", "ranges"),
    [("", ()), ("1", ((1, 1),)), ("1-5, 9", ((1, 5), (9, 9))), ("1-4,5,6-7", ((1, 7),)), ("12", ((12, 12),))],
)
def test_ranges_are_joined(text, ranges):
    assert parse_ranges(text, 12) == ranges


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("1-1000000000", "is no list"),
        ("1-999999", "names line 999999, and the text has 12"),
        ("13", "names line 13"),
        ("3-5, 4-6", "4-6 is not above"),
        ("5, 1", "1 is not above"),
        ("0-3", "0-3 is not above"),
        ("4-2", "4-2 is not above"),
        ("-1", "is no list"),
        ("1;2", "is no list"),
        ("one", "is no list"),
        ("1-2-3", "is no list"),
        ("\u0661", "is no list"),  # a digit, of another script
    ],
)
def test_anything_else_is_refused(text, why):
    with pytest.raises(ValueError, match=why):
        parse_ranges(text, 12)


def test_runs_of_lines_by_their_fate():
    survival = LineSurvival(call=0, argument="a", lines=12, followed=((2, 4), (7, 12)), kept=((3, 4), (8, 9)))
    runs = [(2, 2, False), (3, 4, True), (7, 7, False), (8, 9, True), (10, 12, False)]
    assert list(fates(survival)) == runs
    assert (count(survival.followed), kept_share([survival])) == (9, 4 / 9)
    assert kept_share([]) is None
    assert holds(survival.followed, survival.kept)
    assert not holds(survival.followed, ((4, 7),))
    assert not holds(survival.followed, ((1, 2),))
    assert not holds((), ((1, 1),))


def test_lines_of_an_answer_without_a_call():
    turn = a_turn()
    object.__setattr__(turn, "text", "one\ntwo\r\nthree")
    assert line_spans(turn, None, "", 3) == [(0, 4), (4, 9), (9, 14)]
    for wrong in ((None, "", 2), (None, "content", 3), (0, "content", 3), (None, "", MOST_LINES)):
        with pytest.raises(BadRequest) as caught:
            line_spans(turn, *wrong)
        assert caught.value.field == "lines"


def test_a_call_full_of_quotes_is_read_in_time_that_grows_with_it():
    def call_of(size):
        text = "<tool_call>" + '\\"' * size + "</tool_call>"
        return replace(a_turn("t:0"), text=text, calls=(ParsedCall(name="write", start=0, end=len(text)),))

    def read(turn):
        with pytest.raises(BadRequest):
            line_spans(turn, 0, "content", 1)

    assert grows_with_its_input(read, call_of(2_000), call_of(2_000 * TIMES))
