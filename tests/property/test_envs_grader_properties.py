"""Properties of the cut that decides what counts as the body."""

from hypothesis import given
from hypothesis import strategies as st

from ostinato.worlds.grading.completion import truncate_body

LINES = st.sampled_from(
    ["    return 1", "\tx = 2", "", "   ", "print(1)", "```", "    ```", "def g():", "  # note", "        y"]
)
TEXTS = st.one_of(st.text(max_size=200), st.lists(LINES, max_size=12).map("\n".join))


@given(TEXTS)
def test_cutting_twice_is_cutting_once(text):
    assert truncate_body(truncate_body(text)) == truncate_body(text)


@given(TEXTS)
def test_a_body_is_indented_code_from_the_start_of_the_text(text):
    body = truncate_body(text)
    assert text.startswith(body.rstrip())
    assert all(line[0] in " \t" and not line.lstrip().startswith("```") for line in body.split("\n") if line.strip())


@given(TEXTS, TEXTS)
def test_what_follows_an_unindented_line_never_matters(text, tail):
    assert truncate_body(text + "\nprint()\n" + tail) == truncate_body(text + "\nprint()")
