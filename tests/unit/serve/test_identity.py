"""Who asks: names, signatures, groups, and whose conversation is continued."""

import pytest
from gateway_world import ASK, V0, V1, world
from tests.fakes import conversations

from ostinato.testing.engine import STOP_ID, FakeEngine
from ostinato.testing.renderer import ByteRenderer
from ostinato_client import sign_user

SECRET = "user-secret-0123456789"


def talk(*texts):
    return [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(texts)]


async def test_strangers_with_one_conversation_stay_strangers():
    async with world() as w:
        await w.chat(headers={"x-ostinato-episode": "bob"})
        await w.chat()
        await w.chat(messages=talk("hi", "hello", "and?"), headers={"x-ostinato-episode": "ann"})
        await w.chat(messages=talk("hi", "hello", "and?"), user="")
        await w.chat(messages=talk("hi", "hello", "and?"), headers={"x-ostinato-episode": "bob"})
        bob, unnamed, ann, other, bob_again = w.log.turns()
        assert (ann.parent, ann.episode) == (None, "ann")
        assert other.parent is None
        assert other.episode not in (unnamed.episode, "bob")
        assert (bob_again.parent, bob_again.episode) == (bob.id, "bob")
        assert {turn.user for turn in w.log.turns()} == {"anonymous"}


async def test_a_stranger_can_go_on_with_the_episode_that_the_answer_named():
    async with world() as w:
        _, _, body = await w.chat()
        await w.chat(messages=talk("hi", "hello", "and?"), headers={"x-ostinato-episode": body["ostinato"]["episode"]})
        first, second = w.log.turns()
        assert second.parent == first.id


async def test_header_and_body_name_the_same_user():
    engine = FakeEngine(lambda r: "hello", slots={"live": V1, "control": V0})
    async with world(engine=engine, control_share=0.5) as w:
        for i in range(20):
            user = f"Zoë-{i}-李"
            await w.chat(user=user)
            await w.chat(headers={"x-ostinato-user": user.encode()})
            one, two = w.log.turns()[-2:]
            assert (one.user, one.arm) == (two.user, two.arm) == (user, two.arm)
        await w.chat(headers={"x-ostinato-user": "Zo\xeb".encode("latin-1")})
        assert w.log.turns()[-1].user == "Zoë"


@pytest.mark.parametrize("stream", [False, True])
async def test_after_a_stop_string_the_model_reads_what_the_client_saw(stream):
    async with world("one END two") as w:
        await w.chat(stop="END", user="u", stream=stream)
        (first,) = w.log.turns()
        assert (first.text, bytes(first.sampled_ids)) == ("one ", b"one END")
        follow = talk("hi", "one ", "more")
        await w.chat(messages=follow, user="u")
        second = w.log.turns()[-1]
        assert second.prompt_ids == tuple(ByteRenderer().chat(conversations.talk(*follow)))
        assert (second.parent, second.episode) == (None, first.episode)


async def test_a_signature_makes_a_user_verified():
    async with world(user_keys=(SECRET,)) as w:
        proof = {"x-ostinato-user-signature": sign_user(SECRET, "Zoë", now=w.now)}
        await w.chat(user="Zoë", headers=proof)
        await w.chat(headers={"x-ostinato-user": "Zoë".encode(), **proof})
        await w.chat(user="Zoë")
        assert [turn.verified for turn in w.log.turns()] == [True, True, False]
        for user in ("zoë", "anonymous", ""):
            status, _, body = await w.chat(user=user, headers=proof)
            assert (status, body["error"]["type"]) == (401, "authentication_error")
        w.now += 3601
        assert (await w.chat(user="Zoë", headers=proof))[0] == 401
        assert len(w.log.turns()) == 3


async def test_a_group_is_recorded():
    async with world() as w:
        await w.chat(headers={"x-ostinato-group": "task-7"})
        await w.chat()
        assert [turn.group for turn in w.log.turns()] == ["task-7", None]


async def test_a_prefilled_turn_is_found_after_a_restart():
    messages = talk("write f", "def f():")
    async with world() as w:
        extra = {"continue_final_message": True, "add_generation_prompt": False}
        await w.chat(messages=messages, user="u", **extra)
        log = w.log
    async with world(log=log) as w:
        await w.chat(messages=talk("write f", "def f():hello", "more"), user="u")
        first, second = log.turns()
        assert second.parent == first.id
        assert second.prompt_ids[: len(first.prompt_ids) + 6] == (*first.prompt_ids, *b"hello", STOP_ID)


async def test_bad_names_are_refused_by_name():
    async with world() as w:
        for header in ("X-Ostinato-User", "X-Ostinato-Episode", "X-Ostinato-Group", "Idempotency-Key"):
            for bad in ("", "x" * 513, "\u200b"):
                status, _, body = await w.chat(headers={header: bad.encode()})
                assert (status, body["error"]["param"]) == (400, header)
        assert not w.log.rows
        assert (await w.chat(**ASK))[0] == 200
