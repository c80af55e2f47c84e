from dataclasses import replace

import pytest

from ostinato.core.conversation import Conversation, Message, Role
from ostinato.core.records import Arm, Finish, PolicyVersion, Sampling, Span, Turn
from ostinato.serve.calls.conversations import ConversationScope, Sessions, chain_of
from ostinato.testing.engine import STOP_ID
from ostinato.testing.renderer import ByteRenderer

ME = ConversationScope(tenant="default", user="u", arm="live")
NOBODY = ConversationScope(tenant="default", user="anonymous", arm="live")
RENDERER = ByteRenderer()


def looked(sessions, scope, conversation):
    return sessions.look(scope, conversation, chain_of(scope, conversation))


def turn(prompt_ids, text="hello", *, id="t:0", episode="e", finish=Finish.STOP, end=(STOP_ID,), scope=ME):
    ids = (*text.encode(), *end)
    policy = PolicyVersion(number=0, hash="h")
    return Turn(
        id=id, episode=episode, parent=None, user=scope.user, tenant=scope.tenant, arm=Arm(scope.arm), propensity=1.0,
        prompt_ids=tuple(prompt_ids), sampled_ids=ids, logprobs=(-1.0,) * len(ids),
        spans=(Span(policy=policy, tokens=len(ids)),), sampling=Sampling(max_tokens=9), finish=finish, text=text,
        started_at=0.0, ended_at=0.0,
    )  # fmt: skip


def said(*texts):
    """A conversation: user and assistant in turns."""
    roles = (Role.USER, Role.ASSISTANT)
    return Conversation(messages=tuple(Message(role=roles[i % 2], text=text) for i, text in enumerate(texts)))


def answer(text):
    return Message(role=Role.ASSISTANT, text=text)


def ask(sessions, conversation, scope=ME):
    return sessions.render(looked(sessions, scope, conversation))


def talk(sessions, conversation, text, id, *, scope=ME, continued=False, **kwargs):
    """Ask, answer with `text`, and remember."""
    question = looked(sessions, scope, replace(conversation, continued=continued))
    prompt = sessions.render(question)
    episode = kwargs.pop("episode", None) or prompt.episode or f"e-{id}"
    made = replace(turn(prompt.ids, text, id=id, scope=scope, episode=episode, **kwargs), window=prompt.window)
    sessions.remember(question, made, answer(text))
    return prompt, made


def named(**parts):
    return ConversationScope(**({"tenant": "default", "user": "u", "arm": "live"} | parts))


def test_a_long_conversation_keeps_every_sampled_id():
    sessions = Sessions(RENDERER, budget=10_000)
    _, first = talk(sessions, said("hi"), "hello", "a:0")
    prompt, second = talk(sessions, said("hi", "hello", "more"), "yellow", "b:0")
    assert (prompt.parent, prompt.episode) == ("a:0", "e-a:0")
    known = first.prompt_ids + first.sampled_ids
    assert prompt.ids[: len(known)] == known
    assert prompt.ids[len(known) :] == tuple(RENDERER.follow_up(said("hi", "hello", "more"), 2))
    third = ask(sessions, said("hi", "hello", "more", "yellow", "x"))
    assert third.parent == "b:0"
    assert third.ids[: len(second.prompt_ids)] == second.prompt_ids


def test_an_edited_history_goes_back_to_the_last_common_turn():
    sessions = Sessions(RENDERER, budget=10_000)
    talk(sessions, said("hi"), "hello", "a:0")
    talk(sessions, said("hi", "hello", "more"), "yellow", "b:0")
    assert ask(sessions, said("hi", "hello", "more", "EDITED", "x")).parent == "a:0"
    assert ask(sessions, said("hi", "EDITED", "more")).parent is None
    assert ask(sessions, said("ho", "hello", "more")).ids == tuple(RENDERER.chat(said("ho", "hello", "more")))


@pytest.mark.parametrize("field", ["tenant", "user", "arm"])
def test_conversations_are_not_shared_across(field):
    sessions = Sessions(RENDERER, budget=10_000)
    talk(sessions, said("hi"), "hello", "a:0")
    assert ask(sessions, said("hi", "hello", "more"), named(**{field: "canary"})).parent is None


def test_strangers_are_not_joined_unless_they_name_the_episode():
    sessions = Sessions(RENDERER, budget=10_000)
    talk(sessions, said("hi"), "hello", "ann:0", scope=NOBODY)
    follow = said("hi", "hello", "more")
    alone = ask(sessions, follow, NOBODY)
    assert (alone.parent, alone.episode, alone.ids) == (None, None, tuple(RENDERER.chat(follow)))
    own = ask(sessions, follow, named(user="anonymous", episode="e-ann:0"))
    assert (own.parent, own.episode) == ("ann:0", "e-ann:0")
    other = ask(sessions, follow, named(user="anonymous", episode="bob's"))
    assert (other.parent, other.episode) == (None, "bob's")


def test_the_callers_episode_wins_and_the_parent_lies_in_it():
    sessions = Sessions(RENDERER, budget=10_000)
    one, two = named(episode="one"), named(episode="two")
    talk(sessions, said("hi"), "hello", "a:0", scope=one, episode="one")
    talk(sessions, said("hi"), "hello", "b:0", scope=two, episode="two")  # the same conversation again
    follow = said("hi", "hello", "more")
    assert (ask(sessions, follow, one).parent, ask(sessions, follow, one).episode) == ("a:0", "one")
    assert (ask(sessions, follow, two).parent, ask(sessions, follow, two).episode) == ("b:0", "two")
    third = ask(sessions, follow, named(episode="three"))
    assert (third.parent, third.episode) == (None, "three")
    assert ask(sessions, follow).parent == "b:0", "without a word from the caller, the newest"


def test_a_last_assistants_message_is_continued_only_if_asked_for():
    sessions = Sessions(RENDERER, budget=10_000)
    opened = said("write f", "def f():")
    talk(sessions, opened, "pass", "anew:0")  # the template lets the assistant speak again
    assert ask(sessions, said("write f", "def f():pass", "more")).parent is None
    follow = Conversation(messages=(*opened.messages, answer("pass"), *said("more").messages))
    assert ask(sessions, follow).parent == "anew:0"
    talk(sessions, opened, "pass", "on:0", continued=True)
    assert ask(sessions, said("write f", "def f():pass", "more")).parent == "on:0"


def test_what_follows_a_stop_string_never_comes_back():
    sessions = Sessions(RENDERER, budget=10_000)
    question = looked(sessions, ME, said("hi"))
    sampled = turn(sessions.render(question).ids, "one END", id="a:0", end=())
    seen = replace(sampled, text="one ")
    sessions.remember(question, seen, answer("one "))
    follow = said("hi", "one ", "more")
    prompt = ask(sessions, follow)
    assert prompt.ids == tuple(RENDERER.chat(follow)), "the prompt must hold what the client saw, and nothing else"
    assert (prompt.parent, prompt.episode) == (None, "e")


def test_a_cut_turn_gets_the_end_token_it_lacks():
    sessions = Sessions(RENDERER, budget=10_000)
    _, first = talk(sessions, said("hi"), "hel", "a:0", finish=Finish.LENGTH, end=())
    prompt = ask(sessions, said("hi", "hel", "more"))
    known = first.prompt_ids + first.sampled_ids
    assert prompt.parent == "a:0"
    assert prompt.ids[: len(known) + 1] == (*known, STOP_ID)
    assert prompt.ids == tuple(RENDERER.chat(said("hi", "hel", "more")))


def test_an_aborted_turn_is_no_parent():
    sessions = Sessions(RENDERER, budget=10_000)
    talk(sessions, said("hi"), "hello", "a:0", finish=Finish.ABORT)
    assert ask(sessions, said("hi", "hello", "more")).parent is None


def test_turns_read_from_a_log_are_found_through_several_steps():
    hot = Sessions(RENDERER, budget=10_000)
    _, first = talk(hot, said("hi"), "hello", "a:0")
    _, second = talk(hot, said("hi", "hello", "more"), "yellow", "b:0")
    cold = Sessions(RENDERER, budget=10_000)
    cold.restore(first)
    cold.restore(second)
    messages = said("hi", "hello", "more", "yellow", "x")
    assert ask(cold, messages) == ask(hot, messages)
    assert ask(cold, messages).parent == "b:0"
    for other in (named(tenant="other"), named(user="other"), named(episode="other"), NOBODY):
        assert ask(cold, messages, other).parent is None
    assert ask(cold, messages, named(episode="e-a:0")).parent == "b:0"


def test_a_prefilled_turn_is_found_after_a_restart():
    hot = Sessions(RENDERER, budget=10_000)
    _, first = talk(hot, said("write f", "def f():"), "pass", "a:0", continued=True)
    _, other = talk(hot, said("write g", "def g():"), "pass", "b:0", continued=True)
    cold = Sessions(RENDERER, budget=10_000)
    cold.restore(first)
    cold.restore(other)
    follow = said("write f", "def f():pass", "more")
    found = ask(cold, follow)
    assert found.parent == "a:0"
    assert found == ask(hot, follow)
    assert ask(cold, said("write f", "def f(): return", "more")).parent is None


def test_memory_is_bounded_and_the_oldest_goes_first():
    sessions = Sessions(RENDERER, budget=200)
    for i in range(50):
        talk(sessions, said(f"hi {i}"), "hello", f"{i}:0")
    assert len(sessions) <= 5
    assert ask(sessions, said("hi 49", "hello", "more")).parent == "49:0"
    assert ask(sessions, said("hi 0", "hello", "more")).parent is None
    nothing = Sessions(RENDERER, budget=0)
    talk(nothing, said("hi"), "hello", "a:0")
    assert len(nothing) == 0
    cold = Sessions(RENDERER, budget=200)
    for i in range(50):
        cold.restore(turn(RENDERER.chat(said(f"hi {i}")), id=f"{i}:0"))
    assert len(cold) <= 5
    assert ask(cold, said("hi 49", "hello", "more")).parent == "49:0"


def long_talk(sessions, turns, said="more"):
    conversation, last = Conversation(messages=(Message(role=Role.USER, text="hi"),)), None
    for i in range(turns):
        question = looked(sessions, ME, conversation)
        prompt = sessions.render(question)
        assert prompt.parent == (None if last is None else last.id)
        last = replace(turn(prompt.ids, "hello", id=f"{said}{i}:0"), parent=prompt.parent)
        sessions.remember(question, last, answer("hello"))
        more = (answer("hello"), Message(role=Role.USER, text=f"{said} {i}"))
        conversation = replace(conversation, messages=(*conversation.messages, *more))
    return last


def test_a_long_conversations_tokens_are_held_once():
    sessions = Sessions(RENDERER, budget=100_000)
    last = long_talk(sessions, 300)
    tokens = len(last.prompt_ids + last.sampled_ids)
    assert len(sessions) == 300
    assert sessions._held == tokens + 300 * 32


def test_a_branch_has_its_own_tokens_and_harms_none():
    sessions = Sessions(RENDERER, budget=100_000)
    _, first = talk(sessions, said("hi"), "hello", "a:0")
    for name in ("b", "c"):
        question = looked(sessions, ME, said("hi", "hello", name))
        prompt = sessions.render(question)
        made = replace(turn(prompt.ids, "yellow", id=f"{name}:0", episode="e-a:0"), parent=prompt.parent)
        sessions.remember(question, made, answer("yellow"))
        assert prompt.ids[: len(first.prompt_ids)] == first.prompt_ids
    for name in ("b", "c"):
        follow = ask(sessions, said("hi", "hello", name, "yellow", "x"))
        assert follow.parent == f"{name}:0"
        assert RENDERER.decode(follow.ids) == f"hihello{name}yellowx"


def test_all_that_is_held_is_given_back():
    sessions = Sessions(RENDERER, budget=3_000)
    for name in ("one", "two", "three", "four"):
        long_talk(sessions, 30, name)
    while sessions._entries:
        sessions._evict()
    assert sessions._held == 0


def test_a_long_conversation_read_from_the_log_is_held_once_too():
    hot = Sessions(RENDERER, budget=100_000)
    turns, conversation = [], said("hi")
    for i in range(30):
        question = looked(hot, ME, conversation)
        prompt = hot.render(question)
        turns.append(replace(turn(prompt.ids, "hello", id=f"t{i}:0"), parent=prompt.parent))
        hot.remember(question, turns[-1], answer("hello"))
        more = (answer("hello"), Message(role=Role.USER, text=f"more {i}"))
        conversation = replace(conversation, messages=(*conversation.messages, *more))
    cold = Sessions(RENDERER, budget=100_000)
    for each in turns:
        cold.restore(each)
    assert cold._held == len(turns[-1].prompt_ids + turns[-1].sampled_ids) + 30 * 32
    assert ask(cold, conversation) == ask(hot, conversation)
