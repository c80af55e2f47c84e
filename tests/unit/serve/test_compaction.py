"""Which summary a window begins with: recognised by its long lines, for the same user alone, after a restart too."""

from dataclasses import replace

import pytest
from tests.unit.serve.gateway_world import world
from tests.unit.serve.test_sessions import ME, NOBODY, RENDERER, answer, ask, looked, named, said, talk, turn

from ostinato.core.conversation import Conversation, Message, Role, ToolCall
from ostinato.core.records import Branch, Purpose, Window, WindowMaker
from ostinato.serve.calls.compaction import SummaryIndex, SummaryTurn
from ostinato.serve.calls.conversations import Sessions
from ostinato.testing.engine import FakeEngine
from ostinato.testing.log import MemoryLog

SUMMARY = "\n".join(
    [
        "<analysis>We looked at the parser for a while, and at what its callers expect.</analysis>",
        "<summary>",
        *(f"{i}. The function read_{i} in parser_{i}.py returns None where it should raise." for i in range(6)),
        "</summary>",
    ]
)
TOLD = SUMMARY.partition("<summary>")[2].partition("</summary>")[0]  # as agents cut it
NEXT = f"The conversation ran out of room. Summary:\n{TOLD}\nGo on."
SYSTEM = Message(role=Role.SYSTEM, text="You are an agent.")


def begun(text=NEXT, *more):
    """A conversation that begins with this message, after a system's text."""
    return Conversation(messages=(SYSTEM, *said(text, *more).messages))


def summarised(sessions, scope=ME, episode="ep-1"):
    """A conversation that was summarised; returns the turn of the summary."""
    _, first = talk(sessions, said("Mend it."), "Done so far.", "a:0", scope=scope, episode=episode)
    follow = said("Mend it.", "Done so far.", "Summarise.")
    _, summary = talk(sessions, follow, SUMMARY, "s:0", scope=scope, episode=first.episode)
    return summary


def window(number, turn, by=WindowMaker.AGENT):
    return Window(number=number, begins_with=turn, by=by)


def test_a_conversation_that_begins_with_a_summary_goes_on_with_its_episode():
    sessions = Sessions(RENDERER, budget=100_000)
    summary = summarised(sessions)
    prompt, first = talk(sessions, begun(), "Going on.", "b:0")
    assert (prompt.parent, prompt.branch) == (None, Branch.COMPACTED)
    assert (prompt.episode, prompt.window) == (summary.episode, window(1, "s:0"))
    follow = ask(sessions, begun(NEXT, "Going on.", "More."))
    assert (follow.parent, follow.branch, follow.window) == (first.id, Branch.NONE, window(1, "s:0"))


@pytest.mark.parametrize("system", [(), (SYSTEM,)])
def test_a_summary_behind_the_task_is_recognised_with_and_without_a_system_message(system):
    sessions = Sessions(RENDERER, budget=100_000)
    summarised(sessions)
    task, kept = (Message(role=Role.USER, text=text) for text in ("Mend it.", NEXT))
    assert ask(sessions, Conversation(messages=(*system, task, kept))).window == window(1, "s:0")
    later = (task, Message(role=Role.USER, text="And the lexer."), kept)
    assert ask(sessions, Conversation(messages=(*system, *later))).window is None


@pytest.mark.parametrize("system", [(), (SYSTEM,)])
@pytest.mark.parametrize("restored", [False, True])
def test_a_summary_that_its_agent_puts_into_the_assistants_mouth_is_recognised_if_it_was_asked_for(system, restored):
    """opencode goes on with the user's task, the summary as the assistant's answer, and what is to be done next."""
    request = said("Summarise.")
    first = turn(RENDERER.chat(request), SUMMARY, id="s:0", episode="ep-1")
    told = Conversation(messages=(*system, *said("What did we do so far?", TOLD, "Go on.").messages))
    for summary in (first, replace(first, purpose=Purpose.COMPACTION)):
        sessions = Sessions(RENDERER, budget=100_000)
        if restored:
            sessions.restore(summary)
        else:
            sessions.remember(looked(sessions, ME, request), summary, answer(SUMMARY))
        found = ask(sessions, told)
        wanted = (Branch.COMPACTED, window(1, "s:0")) if summary is not first else (found.branch, None)
        assert (found.branch, found.window) == wanted
        later = Conversation(messages=(*system, *said("One.", "Two.", "Three.", TOLD, "Go on.").messages))
        assert ask(sessions, later).window is None


def test_windows_are_counted_along_the_chain():
    sessions = Sessions(RENDERER, budget=100_000)
    summarised(sessions)
    _, first = talk(sessions, begun(), "Going on.", "b:0")
    again = SUMMARY.replace("parser", "lexer")
    sessions = Sessions(RENDERER, budget=100_000)
    sessions.restore(first)
    prompt, second = talk(sessions, begun(NEXT, "Going on.", "Summarise."), again, "s:1")
    assert (prompt.parent, prompt.window) == ("b:0", window(1, "s:0"))
    assert ask(sessions, begun(again)).window == window(2, "s:1")
    sessions = Sessions(RENDERER, budget=100_000)
    sessions.restore(second)
    assert ask(sessions, begun(again)).window == window(2, "s:1")


@pytest.mark.parametrize("scope", [NOBODY, named(user="v"), named(tenant="other"), named(arm="canary")])
def test_nobody_elses_summary_is_recognised(scope):
    sessions = Sessions(RENDERER, budget=100_000)
    summarised(sessions)
    assert ask(sessions, begun(), scope).window is None
    summarised(sessions, NOBODY)
    assert ask(sessions, begun(), NOBODY).window is None


def test_within_an_episode_that_is_named_only_its_own_summary_is_recognised():
    sessions = Sessions(RENDERER, budget=100_000)
    one, two = named(episode="one"), named(episode="two")
    summarised(sessions, one, episode="one")
    assert ask(sessions, begun(), two).window is None
    assert ask(sessions, begun(), one).window == window(1, "s:0")
    mine = named(user="anonymous", episode="mine")
    summarised(sessions, mine, episode="mine")
    assert ask(sessions, begun(), mine).window == window(1, "s:0")


@pytest.mark.parametrize("arm", ["live", "world", "outside"])
def test_after_a_restart_it_is_recognised_too(arm):
    scope = named(arm=arm)
    sessions = Sessions(RENDERER, budget=100_000)
    summary = summarised(sessions, scope)
    sessions = Sessions(RENDERER, budget=100_000)
    sessions.restore(summary)
    by = {"world": WindowMaker.HARNESS, "outside": WindowMaker.OUTSIDE}.get(arm, WindowMaker.AGENT)
    assert ask(sessions, begun(), scope).window == window(1, "s:0", by)


@pytest.mark.parametrize(
    "text",
    [
        "The conversation ran out of room. " + TOLD[:180],
        "\n".join(TOLD.splitlines()[:3]) + "\nand other things that we said.",
        TOLD.replace("None", "null"),
    ],
    ids=["too little", "less than half", "other words"],
)
def test_what_repeats_too_little_begins_with_no_summary(text):
    sessions = Sessions(RENDERER, budget=100_000)
    summarised(sessions)
    assert ask(sessions, begun(text)).window is None


def test_what_the_assistant_said_and_later_messages_do_not_count():
    sessions = Sessions(RENDERER, budget=100_000)
    summarised(sessions)
    assert ask(sessions, said("One.", SUMMARY, "Two.", "Yes.", NEXT)).window is None
    late = Conversation(messages=(SYSTEM, *said("One.", "No.", NEXT).messages))
    assert ask(sessions, late).window is None


def test_of_several_answers_the_one_of_which_most_is_there():
    index = SummaryIndex(10_000)
    place, message = b"p", Message(role=Role.USER, text=NEXT)

    def known(turn, text):
        index.add(place, SummaryTurn(turn=turn, episode="e", number=0, by=WindowMaker.AGENT), text)

    known("whole:0", TOLD)
    known("copy:0", TOLD + "\nThat is what the summary said, and here is more of it, at some length." * 2)
    assert index.find(place, None, [message]).turn == "whole:0"
    known("newer:0", TOLD)
    assert index.find(place, None, [message]).turn == "newer:0"


def test_memory_is_bounded_by_user_and_in_all():
    index = SummaryIndex(20_000)
    message = [Message(role=Role.USER, text=TOLD)]

    def known(place, turn, text):
        index.add(place, SummaryTurn(turn=turn, episode="e", number=0, by=WindowMaker.AGENT), text)

    known(b"ann", "ann:0", TOLD)
    for i in range(64):
        known(b"ann", f"ann:{i + 1}", TOLD.replace("parser", f"module{i}"))
    assert index.find(b"ann", None, message) is None, "the last 64"
    known(b"bob", "bob:0", TOLD)
    for i in range(100):
        known(
            f"u{i}".encode(),
            f"u{i}:0",
            "\n".join(f"{i} {j} and enough words to make the line a long one" for j in range(3_000)),
        )
    assert index.find(b"bob", None, message) is None
    assert 0 < index._held <= 20_000
    assert index._held == sum(each.cost for answers in index._answers.values() for each in answers)


def test_an_answer_with_a_call_is_no_summary():
    sessions = Sessions(RENDERER, budget=100_000)
    question = sessions.look(ME, said("x"), [b"a", b"b"])
    prompt = sessions.render(question)
    called = replace(answer(SUMMARY), calls=(ToolCall(id="c", name="write", arguments="{}"),))
    sessions.remember(question, turn(prompt.ids, SUMMARY), called)
    assert ask(sessions, begun()).window is None


async def test_the_turn_has_its_window_and_a_repeat_gives_the_same():
    log, said_ = MemoryLog(), iter([SUMMARY, "Going on.", "And on."])
    messages = [{"role": "system", "content": "You are an agent."}, {"role": "user", "content": NEXT}]
    async with world(engine=FakeEngine(lambda request: next(said_)), log=log) as w:
        await w.chat(user="ann", max_tokens=2_000)
    async with world(engine=FakeEngine(lambda request: next(said_)), log=log) as w:
        key = {"idempotency-key": "k"}
        _, _, first = await w.chat(messages=messages, user="ann", headers=key)
        _, _, again = await w.chat(messages=messages, user="ann", headers=key)
        assert first == again
        summary, turn = log.turns()
        assert (turn.window, turn.branch) == (window(1, summary.id), Branch.COMPACTED)
        assert turn.episode == summary.episode
        assert first["ostinato"]["window"] == {"number": 1, "begins_with": summary.id}
        more = [*messages, {"role": "assistant", "content": "Going on."}, {"role": "user", "content": "And?"}]
        _, _, later = await w.chat(messages=more, user="ann")
        assert log.turns()[-1].parent == turn.id
        assert log.turns()[-1].window == turn.window == window(1, summary.id)
        assert later["ostinato"]["window"]["number"] == 1
