import pytest
from ostinato.serve.sessions import Scope, Sessions

from ostinato.core.records import Arm, Finish, PolicyVersion, Sampling, Span, Turn
from ostinato.testing.engine import STOP_ID
from ostinato.testing.renderer import ByteRenderer

ME = Scope(tenant="default", user="u", arm="live")
ASK = [{"role": "user", "content": "hi"}]
RENDERER = ByteRenderer()


def turn(prompt_ids, text="hello", *, id="t:0", finish=Finish.STOP, end=(STOP_ID,), scope=ME):
    ids = (*text.encode(), *end)
    policy = PolicyVersion(number=0, hash="h")
    return Turn(
        id=id, episode="e", parent=None, user=scope.user, tenant=scope.tenant, arm=Arm(scope.arm), propensity=1.0,
        prompt_ids=tuple(prompt_ids), sampled_ids=ids, logprobs=(-1.0,) * len(ids),
        spans=(Span(policy=policy, tokens=len(ids)),), sampling=Sampling(max_tokens=9), finish=finish, text=text,
        started_at=0.0, ended_at=0.0,
    )  # fmt: skip


def said(*texts):
    """A conversation: user and assistant in turns."""
    return [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(texts)]


def talk(sessions, messages, text, id, **kwargs):
    prompt = sessions.prompt(ME, messages)
    made = turn(prompt.ids, text, id=id, **kwargs)
    sessions.remember(ME, messages, made)
    return prompt, made


def test_a_long_conversation_keeps_every_sampled_id():
    sessions = Sessions(RENDERER, budget=10_000)
    _, first = talk(sessions, said("hi"), "hello", "a:0")
    prompt, second = talk(sessions, said("hi", "hello", "more"), "yellow", "b:0")
    assert prompt.parent == "a:0"
    assert prompt.episode == "e"
    known = first.prompt_ids + first.sampled_ids
    assert prompt.ids[: len(known)] == known
    assert prompt.ids[len(known) :] == tuple(RENDERER.follow_up(said("hi", "hello", "more"), 2))
    third = sessions.prompt(ME, said("hi", "hello", "more", "yellow", "x"))
    assert third.parent == "b:0"
    assert third.ids[: len(second.prompt_ids)] == second.prompt_ids


def test_an_edited_history_goes_back_to_the_last_common_turn():
    sessions = Sessions(RENDERER, budget=10_000)
    talk(sessions, said("hi"), "hello", "a:0")
    talk(sessions, said("hi", "hello", "more"), "yellow", "b:0")
    assert sessions.prompt(ME, said("hi", "hello", "more", "EDITED", "x")).parent == "a:0"
    assert sessions.prompt(ME, said("hi", "EDITED", "more")).parent is None
    assert sessions.prompt(ME, said("ho", "hello", "more")).ids == tuple(RENDERER.chat(said("ho", "hello", "more")))


@pytest.mark.parametrize("field", ["tenant", "user", "arm"])
def test_conversations_are_not_shared_across(field):
    sessions = Sessions(RENDERER, budget=10_000)
    talk(sessions, said("hi"), "hello", "a:0")
    parts = {"tenant": "default", "user": "u", "arm": "live"} | {field: "canary"}
    assert sessions.prompt(Scope(**parts), said("hi", "hello", "more")).parent is None


def test_a_cut_turn_gets_the_end_token_it_lacks():
    sessions = Sessions(RENDERER, budget=10_000)
    _, first = talk(sessions, said("hi"), "hel", "a:0", finish=Finish.LENGTH, end=())
    prompt = sessions.prompt(ME, said("hi", "hel", "more"))
    known = first.prompt_ids + first.sampled_ids
    assert prompt.parent == "a:0"
    assert prompt.ids[: len(known) + 1] == (*known, STOP_ID)
    assert prompt.ids == tuple(RENDERER.chat(said("hi", "hel", "more")))


def test_an_aborted_turn_is_no_parent():
    sessions = Sessions(RENDERER, budget=10_000)
    talk(sessions, said("hi"), "hello", "a:0", finish=Finish.ABORT)
    assert sessions.prompt(ME, said("hi", "hello", "more")).parent is None


def test_turns_read_from_a_log_are_found_through_several_steps():
    hot = Sessions(RENDERER, budget=10_000)
    _, first = talk(hot, said("hi"), "hello", "a:0")
    _, second = talk(hot, said("hi", "hello", "more"), "yellow", "b:0")
    cold = Sessions(RENDERER, budget=10_000)
    cold.restore(first)
    cold.restore(second)
    messages = said("hi", "hello", "more", "yellow", "x")
    assert cold.prompt(ME, messages) == hot.prompt(ME, messages)
    assert cold.prompt(ME, messages).parent == "b:0"
    assert cold.prompt(Scope(tenant="other", user="u", arm="live"), messages).parent is None


def test_memory_is_bounded_and_the_oldest_goes_first():
    sessions = Sessions(RENDERER, budget=200)
    for i in range(50):
        talk(sessions, said(f"hi {i}"), "hello", f"{i}:0")
    assert len(sessions) <= 5
    assert sessions.prompt(ME, said("hi 49", "hello", "more")).parent == "49:0"
    assert sessions.prompt(ME, said("hi 0", "hello", "more")).parent is None
    nothing = Sessions(RENDERER, budget=0)
    talk(nothing, said("hi"), "hello", "a:0")
    assert len(nothing) == 0
