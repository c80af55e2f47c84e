"""Which lines go on: laws that hold for any texts, and places in which an equal line is another line."""

import tracemalloc

from hypothesis import assume, given
from hypothesis import strategies as st

from ostinato_client.watch.aligning import carry, counts
from ostinato_client.watch.survival import Followed, Version, likest

COMMON = ["    return None", "    else:", "    }", "", "    pass", "x = 1", "\t)", "end"]
LINES = st.one_of(
    st.sampled_from(COMMON), st.text("ab (),=", max_size=12), st.integers(0, 30).map("value_{0} = f({0})".format)
)
TEXTS = st.lists(LINES, max_size=30)


def block(n, *common):
    return [f"def work_{n}(alpha_{n}):", f"    beta_{n} = alpha_{n} + {n}", *common, f"    return beta_{n}"]


@given(TEXTS)
def test_a_text_goes_on_in_itself_line_by_line(lines):
    assert carry(lines, lines) == [(i,) if counts(line) else () for i, line in enumerate(lines)]


@given(TEXTS, TEXTS)
def test_only_lines_of_the_same_tokens_go_on_and_each_once(old, new):
    carried = carry(old, new)
    assert len(carried) == len(new)
    for j, olds in enumerate(carried):
        assert all(counts(old[i]) for i in olds)
        assert not olds or counts(new[j])
    groups = {}
    for j, olds in enumerate(carried):
        for i in olds:
            groups.setdefault(i, []).append(j)
    for js in groups.values():
        assert js == list(range(js[0], js[-1] + 1)) or all(
            not counts(new[j]) for j in range(js[0], js[-1]) if j not in js
        )


@given(TEXTS, st.integers(1, 8))
def test_white_space_changes_no_line(lines, indent):
    laid_out = [" " * indent + line.replace(" ", "  ") + " \t" for line in lines]
    kept = {i for olds in carry(lines, laid_out) for i in olds}
    assert kept == {i for i, line in enumerate(lines) if counts(line)}


@given(TEXTS, TEXTS, TEXTS)
def test_what_is_new_is_its_callers_and_nothing_is_ever_invented(start, one, two):
    text, lines = Followed(Version.of(start)).written(one, first=0)
    assert text.kept == frozenset(range(lines))
    later = text.changed(two)
    assert later.kept <= text.kept
    assert later.changed(one).kept == text.kept, "the same text again is what it was"
    again, more = later.written(one, first=100)
    assert again.kept <= later.kept | set(range(100, 100 + more))


@given(TEXTS, TEXTS)
def test_an_undone_call_leaves_nothing(start, one):
    text, lines = Followed(Version.of(start)).written(one, first=0)
    gone = text.changed(start)
    assert all(
        not numbers
        for line, numbers in zip(gone.now.lines, gone.now.numbers, strict=True)
        if line in start and line not in one
    )
    assume(lines and not {line.strip() for line in one} & {line.strip() for line in start})
    assert gone.kept == frozenset()


@given(st.lists(st.sampled_from(COMMON), min_size=1, max_size=4))
def test_an_equal_line_elsewhere_is_another_line(common):
    before = [*block(1), *block(2), *block(3)]
    text, _ = Followed(Version.of(before)).written([*block(1), *block(4, *common), *block(2), *block(3)], first=0)
    elsewhere = [*block(1), *block(2), *block(5, *common), *block(3)]
    assert text.changed(elsewhere).kept == frozenset()


def test_a_replaced_function_is_not_kept_for_its_last_line():
    text, _ = Followed(Version.of([*block(1), *block(3)])).written(
        [*block(1), "def f(a):", "    b = a", "    return None", *block(3)], first=0
    )
    other = [*block(1), "def total(rows, start):", "    for row in rows:", "        start += row", "    log(start)"]
    assert text.changed([*other, "    return None", *block(3)]).kept <= {2}, "its last line stands where it stood"
    assert text.changed([*other, "    return None", "", "print(total([]))", *block(3)]).kept == frozenset()


def test_a_formatters_line_breaks_keep_the_line_whole_or_not_at_all():
    text, lines = Followed().written(["total = compute(first_value, second_value)", "done()"], first=0)
    wrapped = ["total = compute(", "    first_value,", "    second_value,", ")", "done()"]
    assert lines == 2
    assert text.changed(wrapped).kept == {0, 1}
    assert text.changed(wrapped).changed([*wrapped[:2], "    third_value,", *wrapped[3:]]).kept == {1}
    assert text.changed(wrapped).changed([text.now.lines[0], "done()"]).kept == {0, 1}


def test_a_string_with_other_spaces_is_the_same_and_with_other_words_is_not():
    text, _ = Followed().written(['say("a  b")', "x"], first=0)
    assert text.changed(['say("a b")', "x"]).kept == {0, 1}
    assert text.changed(['say("ab")', "x"]).kept == {1}


def test_later_calls_take_over_and_the_undone_takeover_gives_back():
    one, _ = Followed(Version.of(block(1))).written([*block(1), "limit = 10", "wait = 20"], first=0)
    two, lines = one.written([*block(1), "limit = 11", "wait = 20"], first=10)
    assert (lines, two.kept) == (1, {1, 10})
    assert two.changed([*block(1), "limit = 10", "wait = 20"]).kept == {0, 1}


def test_moved_lines_go_on_and_short_ones_do_not():
    moved = block(4, "    total_of_all = sum(every_value)")
    text, _ = Followed(Version.of([*block(1), *block(2)])).written([*block(1), *moved, *block(2), "x = 5"], first=0)
    assert text.changed([*block(1), *block(2), *moved, "x = 5"]).kept == {0, 1, 2, 3, 4}
    assert text.changed(["x = 5", *block(1), *moved, *block(2)]).kept == {0, 1, 2, 3}


def test_a_renamed_file_is_found_by_its_lines_or_not_at_all():
    assert likest(block(1), [block(2), [*block(1), "more = 1"]], [False, False]) == 1
    assert likest(block(1), [block(2), []], [False, True]) is None
    assert likest(block(1), [block(1), block(1)], [False, False]) is None, "two copies: nobody knows which"
    assert likest(block(1), [block(1), block(1)], [False, True]) == 1, "it is called what it was called before"
    much = [*block(1), *block(2), *block(3), *block(4)]
    assert [likest(much, [block(1)], [known]) for known in (False, True)] == [None, 0]


def test_a_long_line_that_goes_on_changing_leaves_no_version_of_it_in_memory():
    """As in a file of one line that an agent edits again and again."""
    line = "word, " * 20_000
    carry([line], [f"{line}x"])
    tracemalloc.start()
    try:
        for number in range(4):
            carry([f"{line}{number}"], [f"{line}{number + 1}"])
        left, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert left < 4 * len(line)
