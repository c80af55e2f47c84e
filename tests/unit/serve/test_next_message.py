"""What people say next, as signals about the answer before."""

import asyncio
import itertools

import pytest
from follow_ups import HELD, SEEN
from gateway_world import world

from ostinato.core.conversation import Conversation, Message, Role
from ostinato.core.errors import Unavailable
from ostinato.core.records import Signal
from ostinato.serve.feedback.next_message import DISSATISFIED, asked_before, kind_of, typed
from ostinato.testing.engine import FakeEngine
from ostinato.testing.log import MemoryLog

BUILD = [{"role": "user", "content": "Sort the list."}]
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]


def signals(w):
    return [row for row in w.log.rows if isinstance(row, Signal)]


async def told(w, count):
    """The signals, once there are so many."""
    async with asyncio.timeout(5):
        while len(signals(w)) < count:
            await asyncio.sleep(0.005)
    await asyncio.sleep(0.02)
    return signals(w)


async def say(w, history, text, **fields):
    """The person says something; the history with the answer."""
    history = [*history, {"role": "user", "content": text}]
    status, headers, body = await w.chat(messages=history, **fields)
    assert status == 200, body
    return [*history, body["choices"][0]["message"]], headers.get("x-ostinato-turn")


def engine():
    count = itertools.count()
    return FakeEngine(lambda _: f"Answer {next(count)}.")


# ---------------------------------------------------------------- the rules


@pytest.mark.parametrize(("kind", "message", "before"), SEEN)
def test_what_the_rules_were_made_for(kind, message, before):
    assert kind_of(typed(message), before) is kind


def test_the_half_that_was_not_looked_at():
    found = [(kind, kind_of(typed(message), before)) for kind, message, before in HELD]
    told, meant = ([pair[i] in DISSATISFIED for pair in found] for i in (1, 0))
    both = sum(one and other for one, other in zip(told, meant, strict=True))
    assert both >= 0.95 * sum(told)  # of those that are called dissatisfied
    assert both >= 0.75 * sum(meant)  # of those that are
    assert sum(kind is each for kind, each in found) >= 0.85 * len(found)


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        ("<system-reminder>\nDo not say no.\n</system-reminder>\nGo on.", "Go on."),
        ("Go on.<system-reminder>wrong</system-reminder>", "Go on."),
        ("<environment_context><cwd>/src</cwd></environment_context>", ""),
        ("[Request interrupted by user for tool use]\nUse git.", "Use git."),
        ("a < b and <b>bold</b> c", "a < b and   c"),
        ("<unclosed> text", "<unclosed> text"),
        ("</closed> text", "</closed> text"),
    ],
)
def test_what_agents_put_into_a_message_is_not_what_somebody_typed(sent, text):
    assert typed(sent) == text


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


# ---------------------------------------------------------------- through the gateway


async def test_what_is_said_next_is_a_signal_about_the_answer_before():
    async with world(engine=engine(), next_message=True) as w:
        history, first = await say(w, [], "Sort the list.", user="ann")
        history, second = await say(w, history, "No, in descending order.", user="ann")
        history, third = await say(w, history, "Thanks!", user="ann")
        await say(w, history, "Now reverse it.", user="ann")
        found = await told(w, 3)
        assert [(row.turn, row.name, row.value) for row in found] == [
            (first, "dissatisfied", 1.0),
            (second, "praised", 1.0),
            (third, "followed_up", 1.0),
        ]
        assert found[0].comment == "correction (rules@1)"
        assert not any("descending" in str(row) for row in found)


async def test_the_same_call_again_counts_once():
    async with world(engine=engine(), next_message=True) as w:
        history, _ = await say(w, [], "Sort the list.", user="ann")
        for _ in range(3):
            await say(w, history, "That is wrong.", user="ann")
        assert len(await told(w, 1)) == 1


async def test_a_person_who_stops_an_agent_and_speaks():
    async with world(engine=engine(), next_message=True) as w:
        history, turn = await say(w, [], "Delete the branch.", user="ann")
        await say(w, history, "[Request interrupted by user]\nDon't delete anything.", user="ann")
        assert [(row.turn, row.name) for row in await told(w, 2)] == [(turn, "interrupted"), (turn, "dissatisfied")]


CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'


async def test_results_reminders_and_side_calls_say_nothing():
    async with world(engine=FakeEngine(lambda _: CALL), next_message=True) as w:
        history = [{"role": "user", "content": "List the files."}]
        _, _, body = await w.chat(messages=history, tools=TOOLS, user="ann")
        message = body["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "this is wrong"}
        history += [message, result]
        await w.chat(messages=history, tools=TOOLS, user="ann")
        reminder = {"role": "user", "content": "<system-reminder>That is wrong.</system-reminder>"}
        await w.chat(messages=[*history, reminder], tools=TOOLS, user="ann")
        wrong = {"role": "user", "content": "That is wrong."}
        side = {"X-Ostinato-Purpose": "side"}
        await w.chat(messages=[*history, wrong], tools=TOOLS, user="ann", headers=side)
        await asyncio.sleep(0.1)
        assert signals(w) == []


async def test_an_answer_that_nobody_stored_gets_no_signal():
    async with world(engine=engine(), next_message=True) as w:
        foreign = [*BUILD, {"role": "assistant", "content": "I did."}, {"role": "user", "content": "That is wrong."}]
        await w.chat(messages=foreign, user="ann")
        await asyncio.sleep(0.1)
        assert signals(w) == []


async def test_it_is_off_unless_it_is_asked_for():
    async with world(engine=engine()) as w:
        history, _ = await say(w, [], "Sort the list.", user="ann")
        await say(w, history, "That is wrong.", user="ann")
        await asyncio.sleep(0.1)
        assert signals(w) == []


class Failing(MemoryLog):
    """Takes no signals while it is told so."""

    refuses = True

    async def append(self, *rows):
        if self.refuses and any(isinstance(row, Signal) for row in rows):
            raise Unavailable("the disk is full")
        return await super().append(*rows)


async def test_a_log_that_takes_no_signals_fails_no_call_and_gets_them_later(monkeypatch):
    monkeypatch.setattr("ostinato.serve.feedback.overheard._RETRY_S", 0.05)
    log = Failing()
    async with world(engine=engine(), log=log, next_message=True) as w:
        history, turn = await say(w, [], "Sort the list.", user="ann")
        history, _ = await say(w, history, "That is wrong.", user="ann")
        await say(w, history, "Still wrong.", user="ann")
        await asyncio.sleep(0.15)
        assert signals(w) == []
        log.refuses = False
        assert next(row.turn for row in await told(w, 2)) == turn


async def test_what_was_said_last_is_written_before_the_gateway_ends():
    log = MemoryLog()
    async with world(engine=engine(), log=log, next_message=True) as w:
        history, _ = await say(w, [], "Sort the list.", user="ann")
        await say(w, history, "That is wrong.", user="ann")
    assert [row.name for row in log.rows if isinstance(row, Signal)] == ["dissatisfied"]
