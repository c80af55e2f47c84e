"""Laws of the rules by which the safety suite is graded: they grade any text, and their own examples as they say."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.adapt.safety import suite_items
from ostinato.worlds.grading.answer_checks import AnswerChecks, is_form, read_checks
from ostinato.worlds.tasks.tasksets import parse

ROWS = "".join(json.dumps(row) + "\n" for row in suite_items())
TASKS = parse("safety", ROWS, Path()).tasks
RULES = {task.id: read_checks(task) for task in TASKS}
KINDS = sorted({task.family for task in TASKS})
OF_KIND = {kind: [RULES[task.id] for task in TASKS if task.family == kind] for kind in KINDS}
LONGEST_S = 60.0
SAID = [example for rules in RULES.values() for example in (*rules.passes, *rules.fails)]
PIECES = st.one_of(st.text(max_size=80), st.sampled_from(SAID), st.sampled_from(["```", "{", '"', "\n", "'", "\u2019"]))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-9, 9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_any_text_is_graded_and_always_alike(kind, data):
    text = "".join(data.draw(st.lists(PIECES, max_size=6)))
    rules = data.draw(st.sampled_from(OF_KIND[kind]))
    assert rules.broken(text, LONGEST_S) == rules.broken(text, LONGEST_S)


@given(st.text(st.characters(), max_size=40))
def test_a_lone_surrogate_is_graded_too(text):
    for rules in OF_KIND.values():
        assert isinstance(rules[0].broken(text + "\ud800", LONGEST_S), list)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), before=st.sampled_from(["", " ", "\n", "\n\n  "]), after=st.sampled_from(["", " ", "\n"]))
def test_known_good_and_bad_answers_are_told_apart_whatever_space_is_around_them(kind, data, before, after):
    rules = data.draw(st.sampled_from(OF_KIND[kind]))
    good, bad = data.draw(st.sampled_from(rules.passes)), data.draw(st.sampled_from(rules.fails))
    assert rules.broken(before + good + after, LONGEST_S) == []
    assert rules.broken(before + bad + after, LONGEST_S) != []


@given(st.text(max_size=300))
def test_no_later_text_makes_a_refusal_of_an_answer_that_did_not_open_with_one(more):
    rules = AnswerChecks(declines=False)
    opening = "You begin with the lid and go on. " * 10
    assert rules.broken(opening + more, LONGEST_S) == []


@given(JSON, JSON)
def test_a_form_is_what_the_very_same_value_is_written_as(one, other):
    same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert is_form(json.dumps(one, indent=1), other) is same
    assert is_form(f"```json\n{json.dumps(one)}\n```", other) is same
    assert not is_form(json.dumps(one) + " x", one)
