"""What a message says about the answer before it, by rules, and what of it somebody typed."""

import time

import pytest
from follow_ups import HELD, SEEN
from further_follow_ups import IN_SIGHT
from hypothesis import given
from hypothesis import strategies as st
from scored_follow_ups import ONLY_SCORED

from ostinato.core.conversation import Conversation, Message, Role
from ostinato.serve.feedback import followups
from ostinato.serve.feedback.followups import INTERRUPTION, Typed, asked_before, typed
from ostinato.serve.feedback.next_message import DISSATISFIED, NextMessage, kind_of


def scored(rows):
    """By kind, how often it was (meant and found, found, meant); and the same of all that is dissatisfied."""
    pairs = [(kind, kind_of(typed(message).text, before, answer)) for kind, message, before, answer in rows]
    by_kind = {
        each: (
            pairs.count((each, each)),
            sum(found is each for _, found in pairs),
            sum(meant is each for meant, _ in pairs),
        )
        for each in NextMessage
    }
    cross = [(meant in DISSATISFIED, found in DISSATISFIED) for meant, found in pairs]
    return by_kind, (cross.count((True, True)), sum(found for _, found in cross), sum(meant for meant, _ in cross))


def test_what_the_rules_were_made_for():
    rows = [(*row, "Done.") for row in (*SEEN, *HELD)] + IN_SIGHT
    by_kind, (right, found, meant) = scored(rows)
    assert len(rows) > 450
    assert right >= 0.99 * found  # it is rather missed
    assert right >= 0.85 * meant
    for kind in (*DISSATISFIED, NextMessage.PRAISE, NextMessage.TOPIC):
        correct, told, _ = by_kind[kind]
        assert correct >= 0.9 * told


def test_what_was_written_after_the_rules():
    by_kind, cross = scored(ONLY_SCORED)
    assert cross == (41, 41, 58)
    assert by_kind == {
        NextMessage.RETRY: (8, 8, 8),
        NextMessage.CORRECTION: (17, 18, 22),
        NextMessage.COMPLAINT: (15, 15, 28),
        NextMessage.PRAISE: (8, 8, 8),
        NextMessage.TOPIC: (4, 4, 5),
        NextMessage.GOES_ON: (48, 66, 48),
    }


def test_no_is_an_answer_where_something_was_asked():
    assert kind_of("No, only the first one.", "Convert them.", "Done.") is NextMessage.CORRECTION
    assert kind_of("No, only the first one.", "Convert them.", "Shall I do **both?**") is NextMessage.GOES_ON


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ("<system-reminder>\nDo not say no.\n</system-reminder>\nGo on.", Typed(text="Go on.")),
        ("Go on.<system-reminder>wrong</system-reminder>", Typed(text="Go on.")),
        ("<environment_context><cwd>/src</cwd></environment_context>", Typed()),
        ("[Request interrupted by user]\nUse git.", Typed(text="Use git.", stopped=True)),
        ("[Request interrupted by user for tool use]\nUse git.", Typed(text="Use git.", stopped=True, refused=True)),
        ("Use it.\n[Request interrupted by user]\nUse git.", Typed(text="Use it.\nUse git.", later=True)),
        ("Look:\n```\nthat is wrong\n```\n> it is wrong\nHere.", Typed(text="Look:\n\nHere.")),
        ("a < b and <b>bold</b> c", Typed(text="a < b and\nc")),
        ("<unclosed> text", Typed(text="<unclosed> text")),
        ("</closed> text", Typed(text="</closed> text")),
        ("", Typed()),
    ],
)
def test_what_agents_put_into_a_message_is_not_what_somebody_typed(sent, expected):
    assert typed(sent) == expected


def test_the_request_before_is_the_last_that_somebody_typed():
    texts = [
        (Role.USER, "Fix it."),
        (Role.ASSISTANT, "Done."),
        (Role.USER, "<reminder>tests</reminder>"),
        (Role.ASSISTANT, "Yes."),
    ]
    messages = tuple(Message(role=role, text=text) for role, text in texts)
    assert asked_before(Conversation(messages=messages), 4) == "Fix it."
    assert asked_before(Conversation(messages=messages), 0) == ""


def test_what_is_searched_of_earlier_messages_is_bounded(monkeypatch):
    searched = list[int]()
    honest = followups.typed
    monkeypatch.setattr(followups, "typed", lambda text: searched.append(len(text)) or honest(text))
    long, short = Message(role=Role.USER, text="\n" * 50_000), Message(role=Role.USER, text="Fix it.")
    assert asked_before(Conversation(messages=(short, long)), 2) == ""
    assert asked_before(Conversation(messages=(long, *[long, short] * 20, *[long] * 20)), 61) == ""
    assert sum(searched) == 100_000


@pytest.mark.parametrize("text", ["!" * 799 + "x", ":" * 799 + "x", "a" + " " * 798 + "b"])
def test_a_message_of_marks_alone_is_read_at_once(text):
    began = time.process_time()
    for _ in range(50):
        kind_of(text, "", "")
    assert time.process_time() - began < 0.3  # a few times what it takes


PIECES = ["<a>", "</a>", "```", "> ", "\n", "no ", "it fails ", '"', "not ", "? ", ", ", INTERRUPTION]


@given(st.lists(st.sampled_from(PIECES)).map("".join))
def test_any_text_is_read(text):
    assert kind_of(typed(text).text, text, text) in NextMessage
