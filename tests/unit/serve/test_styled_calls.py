"""Which conversations are dealt a style, that they keep it, what the log and the client are told, and what a person sees and sets."""

import json
from collections import Counter

import pytest
from tests.unit.serve.gateway_world import ADMIN, V0, V1, eventually, world

from ostinato.adapt.config import AdaptConfig, StylesConfig
from ostinato.adapt.styles import StyleAdaptation, approval, styles_of
from ostinato.core.arm_assignment import Dealing
from ostinato.core.conversation import Conversation, Message, Role
from ostinato.core.records import Pick, Signal
from ostinato.record.config import Encrypt
from ostinato.record.person_cache import SqlPersonCache
from ostinato.serve.calls.caller import with_style
from ostinato.testing.engine import FakeEngine
from ostinato.testing.log import MemoryLog

PROMPTS = {"concise": "Answer in one sentence.", "steps": "Answer in numbered steps."}
TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}
CONFIG = AdaptConfig(users="declared", holdout=0.0, styles=StylesConfig(prompts=PROMPTS, floor=0.0))
CONCISE, STEPS = styles_of(CONFIG)


def dealer(log, tmp_path, config=CONFIG, places=(0.5,), name="styles"):
    cache, left = SqlPersonCache(tmp_path / f"{name}.sqlite", None, Encrypt.NONE, most=100), list(places)
    return StyleAdaptation(log, cache, config, chance=lambda: left.pop(0) if len(left) > 1 else left[0])


async def approved(*policies, styles=(CONCISE, STEPS)):
    log = MemoryLog()
    await log.append(
        *(approval(style, policy, passed=True, why="it passed", at=1.0) for style in styles for policy in policies)
    )
    return log


async def known(w, user="ann"):
    """What `GET /v1/adaptation` tells, once the log was read to its end."""
    return (await w.http.get("/v1/adaptation", headers={"x-ostinato-user": user})).json()["style"]


async def put(w, body, user="ann"):
    reply = await w.http.put("/v1/adaptation", headers={"x-ostinato-user": user}, json=body)
    return reply.status_code, reply.json()


def shown(w, turn):
    """The prompt that the engine got."""
    return w.renderer.decode(turn.prompt_ids)


def said(*texts):
    roles = ("user", "assistant")
    return [{"role": roles[place % 2], "content": text} for place, text in enumerate(texts)]


async def test_a_conversation_is_dealt_a_style_and_keeps_it_whatever_is_drawn_next(tmp_path):
    log = await approved(V0)
    async with world(log=log, styles=dealer(log, tmp_path, places=(0.5, 0.99, 0.01))) as w:
        assert (await known(w))["active"]
        _, headers, _ = await w.chat(user="ann")
        first = log.turns()[-1]
        assert headers["x-ostinato-style"] == "concise"
        assert first.style.arm == CONCISE.arm
        assert [*first.style.odds] == ["none", CONCISE.arm, STEPS.arm]
        assert sum(first.style.odds.values()) == pytest.approx(1.0)
        assert all(abs(chance - 1 / 3) < 0.01 for chance in first.style.odds.values())
        assert "Answer in one sentence." in shown(w, first)
        await w.chat(user="ann", messages=said("hi", "hello", "more"))
        second = log.turns()[-1]
        assert (second.style, second.parent, second.episode) == (first.style, first.id, first.episode)
        assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids, "its prefix stays in the cache"
        await w.chat(user="ann", messages=said("hi", "hello", "another way"))  # edited, from the same answer on
        assert log.turns()[-1].style == first.style
        _, headers, _ = await w.chat(user="ann", messages=said("a new one"))
        assert headers["x-ostinato-style"] == "steps"
        assert "numbered steps" in shown(w, log.turns()[-1])
        _, headers, _ = await w.chat(user="ann", messages=said("the third"))
        assert (headers["x-ostinato-style"], log.turns()[-1].style.arm) == ("none", "none")
        assert "Answer in" not in shown(w, log.turns()[-1])
        await w.chat(user="ann", messages=said("the third", "hello", "more"))
        assert log.turns()[-1].style == log.turns()[-2].style
    async with world(log=log, styles=dealer(log, tmp_path, places=(0.99,), name="another")) as w:  # a restart
        assert (await known(w))["active"]
        await w.chat(user="ann", messages=said("hi", "hello", "more", "hello", "and more"))
        assert log.turns()[-1].style == first.style
        assert log.turns()[-1].prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
        await w.chat(user="ann", messages=said("nobody", "knows this", "here"))
        assert log.turns()[-1].style is None, "it began elsewhere"


async def test_it_stands_behind_the_clients_system_prompt():
    def told(*messages):
        asked = Conversation(messages=tuple(Message(role=Role(role), text=text) for role, text in messages))
        return [(each.role.value, each.text) for each in with_style(asked, "Be brief.").messages]

    assert told(("user", "hi")) == [("system", "Be brief."), ("user", "hi")]
    assert told(("system", "You sell tea."), ("user", "hi"))[0] == ("system", "You sell tea.\n\nBe brief.")
    two = told(("system", "a"), ("system", "b"), ("user", "hi"), ("system", "c"))
    assert [text for _, text in two] == ["a", "b\n\nBe brief.", "hi", "c"]


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ({"x-ostinato-adapt": "off"}, {"user": "ann"}),
        ({"x-ostinato-purpose": "side"}, {"user": "ann"}),
        ({"x-api-key": ADMIN, "x-ostinato-slot": "live"}, {"user": "ann"}),
        ({}, {}),
        ({}, {"user": "ann", "response_format": {"type": "json_object"}}),
        ({}, {"user": "ann", "tools": [TOOL]}),
        ({"x-ostinato-train": "aggregate"}, {"user": "ann"}),
    ],
    ids=["off", "side", "slot", "nobody", "form", "tools", "no consent"],
)
async def test_other_calls_have_no_style_and_the_prompt_that_they_had(tmp_path, headers, fields):
    log = await approved(V0)
    prompts = []
    for styles in (None, dealer(log, tmp_path)):
        engine = FakeEngine(lambda request: "{}")
        async with world(engine=engine, log=log, styles=styles, admin_keys=[ADMIN]) as w:
            if styles is not None:
                assert (await known(w))["active"]
            status, told, _ = await w.chat(headers, **fields)
            assert status == 200
            assert "x-ostinato-style" not in told
            prompts.append(log.turns()[-1].prompt_ids)
            assert log.turns()[-1].style is None
    assert prompts[0] == prompts[1]


async def test_a_call_that_no_style_fits_ends_it_in_its_conversation(tmp_path):
    log = await approved(V0)
    async with world(log=log, styles=dealer(log, tmp_path)) as w:
        assert (await known(w))["active"]
        await w.chat(user="ann")
        assert "one sentence" in shown(w, log.turns()[-1])
        for fields, headers in (
            ({"response_format": {"type": "json_object"}}, {}),
            ({}, {"x-ostinato-adapt": "off"}),
            ({}, {"x-ostinato-train": "never"}),
        ):
            await w.chat(headers, user="ann", messages=said("hi", "hello", "more"), **fields)
            if "x-ostinato-train" not in headers:
                assert "one sentence" not in shown(w, log.turns()[-1])
            assert log.turns()[-1].style is None


async def test_the_holdout_the_control_arm_and_who_is_not_proven_are_dealt_none(tmp_path):
    log = await approved(V0, V1)
    slots = {"live": V0, "control": V1}
    held = CONFIG.model_copy(update={"holdout": 1.0})
    proven = CONFIG.model_copy(update={"users": "verified"})
    for name, config, control in (("held", held, 0.0), ("control", CONFIG, 1.0), ("proven", proven, 0.0)):
        engine, styles = FakeEngine(lambda request: "hello", slots=slots), dealer(log, tmp_path, config, name=name)
        async with world(engine=engine, log=log, styles=styles, control_share=control) as w:
            await styles.shown(("default", "ann"), policies=[V0])
            await w.chat(user="ann")
            assert log.turns()[-1].style is None, name
    assert styles.view(("default", "ann"), policies=[V0]).off is None


async def test_an_unapproved_style_is_never_dealt_and_a_changed_text_is_another_style(tmp_path):
    changed = CONFIG.model_copy(update={"styles": StylesConfig(prompts={**PROMPTS, "steps": "Number your steps."})})
    for name, config, log, expected in (
        ("none", CONFIG, await approved(V1), set()),
        ("one", CONFIG, await approved(V0, styles=[CONCISE]), {"none", CONCISE.arm}),
        ("changed", changed, await approved(V0), {"none", CONCISE.arm}),
        ("both", CONFIG, await approved(V0), {"none", CONCISE.arm, STEPS.arm}),
    ):
        styles = dealer(log, tmp_path, config, places=[number / 20 for number in range(20)], name=name)
        async with world(log=log, styles=styles) as w:
            off = (await known(w))["off"]
            assert (off or {}).get("reason") == (None if expected else "styles")
            for number in range(20):
                await w.chat(user="ann", messages=said(f"question {number}"))
        dealt = Counter(None if turn.style is None else turn.style.arm for turn in log.turns())
        assert {*dealt} == (expected or {None}), name
    await log.append(approval(CONCISE, V0, passed=False, why="it failed", at=2.0))
    async with world(log=log, styles=dealer(log, tmp_path, places=(0.5,), name="refused")) as w:
        assert [each["chance"] is None for each in (await known(w))["styles"]] == [False, True, False]


async def test_while_releases_are_compared_only_what_is_approved_for_both_is_dealt(tmp_path):
    log = await approved(V0)
    slots, dealing = {"live": V0, "canary": V1}, Dealing(salt="a", canary=0.5)
    for both in (False, True):
        if both:
            await log.append(approval(CONCISE, V1, passed=True, why="it passed", at=2.0))
        engine = FakeEngine(lambda request: "hello", slots=slots)
        async with world(engine=engine, log=log, styles=dealer(log, tmp_path, places=(0.9,), name=f"{both}")) as w:
            w.app.deal(dealing)
            await known(w)
            before = len(log.turns())
            for number in range(12):
                await w.chat(user=f"u{number}")
            turns = log.turns()[before:]
            assert {turn.arm for turn in turns} == {"live", "canary"}
            assert {turn.style and turn.style.arm for turn in turns} == {CONCISE.arm if both else None}


@pytest.mark.parametrize("missing", [V0, V1], ids=["verified", "live"])
async def test_live_and_the_verified_release_have_the_same_styles_or_none(tmp_path, missing):
    log = await approved(V1 if missing is V0 else V0)
    engine = FakeEngine(lambda request: "hello", slots={"live": V1, "verified": V0})
    async with world(engine=engine, log=log, styles=(styles := dealer(log, tmp_path, places=(0.5,)))) as w:
        w.app.deal(Dealing(salt="a", verified=0.5, verified_salt="b"))
        for approves in (False, True):
            if approves:
                await log.append(approval(CONCISE, missing, passed=True, why="it passed", at=2.0))
            await styles.shown(("default", "ann"), policies=[V0])
            before = len(log.turns())
            for number in range(12):
                await w.chat(user=f"u{number}", messages=said(f"question {approves}"))
            turns = log.turns()[before:]
            assert {turn.arm for turn in turns} == {"live", "verified"}
            assert {turn.style and turn.style.arm for turn in turns} == {CONCISE.arm if approves else None}


async def test_a_person_sets_a_style_lets_it_go_and_nobody_else_is_touched(tmp_path):
    log = await approved(V0)
    async with world(log=log, styles=dealer(log, tmp_path, places=(0.1,))) as w:
        assert [each["name"] for each in (await known(w))["styles"]] == ["none", "concise", "steps"]
        status, told = await put(w, {"style": "steps"})
        assert (status, told["style"]["set"], told["dials"]) == (200, "steps", [])
        assert [each["chance"] for each in told["style"]["styles"]] == [0.0, 0.0, 1.0]
        await w.chat(user="ann")
        assert log.turns()[-1].style == Pick(arm=STEPS.arm, odds={STEPS.arm: 1.0})
        await w.chat(user="bob")
        assert log.turns()[-1].style.arm == "none"
        status, told = await put(w, {"style": "none"})
        assert told["style"]["set"] == "none"
        status, told = await put(w, {"style": None})
        assert (status, told["style"]["set"]) == (200, None)
        rows = await log.append()
        assert (await put(w, {"style": None}))[0] == 200
        assert await log.append() == rows, "there was nothing to let go of"
        for wrong in ("shouting", 3, ["steps"]):
            status, told = await put(w, {"style": wrong})
            assert status == 400
            assert "none, concise, steps" in told["error"]["message"]
        await put(w, {"style": "concise"})
        reply = await w.http.delete("/v1/adaptation", headers={"x-ostinato-user": "ann"})
        assert reply.json()["style"]["set"] is None


async def test_ratings_move_the_odds_of_whoever_gave_them(tmp_path):
    log = await approved(V0)
    places = [0.5, 0.1] * 30
    async with world(log=log, styles=dealer(log, tmp_path, places=places)) as w:
        await known(w)
        for number in range(16):
            w.now += 1.0
            await w.chat(user="ann", messages=said(f"question {number}"))
            turn = log.turns()[-1]
            await w.feedback(turn.id, id=f"s{number}", value=turn.style.arm == CONCISE.arm)
        told = {each["name"]: each for each in (await known(w))["styles"]}
        assert told["concise"]["low"] > 0.0
        assert told["concise"]["chance"] > 0.8 > 0.2 > told["none"]["chance"]
        others = {each["name"]: each["chance"] for each in (await known(w, "bob"))["styles"]}
        assert all(abs(chance - 1 / 3) < 0.01 for chance in others.values())


@pytest.mark.parametrize("place", [0.01, 0.5], ids=["none", "concise"])
@pytest.mark.parametrize("change", ["release", "form", "off", "nothing"])
async def test_what_is_said_of_an_answer_counts_whatever_form_the_next_call_has(tmp_path, place, change):
    log, engine = await approved(V0), FakeEngine(lambda request: "An answer.", slots={"live": V0})
    fields = {"response_format": {"type": "json_object"}} if change == "form" else {}
    headers = {"x-ostinato-adapt": "off"} if change == "off" else {}
    async with world(engine=engine, log=log, styles=dealer(log, tmp_path, places=(place,)), next_message=True) as w:
        await known(w)
        await w.chat(user="ann", messages=said("Sort the list, please."))
        if change == "release":
            engine._slots = {"live": V1}
        await w.chat(
            headers, user="ann", messages=said("Sort the list, please.", "An answer.", "That is wrong."), **fields
        )
    first, second = log.turns()
    assert first.style.arm == ("none" if place == 0.01 else CONCISE.arm)
    assert second.episode == first.episode
    assert second.style == (first.style if change == "nothing" else None)
    assert [(row.turn, row.name) for row in log.rows if isinstance(row, Signal)] == [(first.id, "dissatisfied")]


@pytest.mark.parametrize("place", [0.01, 0.5], ids=["none", "concise"])
async def test_whoever_stops_a_styled_answer_is_heard(tmp_path, place):
    log, answer = await approved(V0), "This is a long answer that somebody stops before its end."
    styles, asked = dealer(log, tmp_path, places=(place,)), said("Sort the list, please.")
    async with world(answer, log=log, styles=styles, real=True, next_message=True) as w:
        await known(w)
        got, body = "", {"model": "m", "user": "ann", "stream": True, "messages": asked}
        async with w.http.stream("POST", "/v1/chat/completions", json=body) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    got += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
                if len(got) >= 8:
                    break
        await eventually(lambda: log.turns())
        await w.chat(user="ann", messages=said("Sort the list, please.", got, "No, sort it backwards."))
    (first, _), heard_of = log.turns(), [row for row in log.rows if isinstance(row, Signal)]
    assert first.style.arm == ("none" if place == 0.01 else CONCISE.arm)
    assert {(row.turn, row.name) for row in heard_of} == {(first.id, "interrupted"), (first.id, "dissatisfied")}


async def test_a_question_asked_again_in_its_episode_keeps_its_style(tmp_path):
    log, told = await approved(V0), {"x-ostinato-episode": "e1"}
    async with world(log=log, styles=dealer(log, tmp_path, places=(0.5, 0.99)), next_message=True) as w:
        await known(w)
        for headers in (told, told, {**told, "x-ostinato-adapt": "off"}, told):
            await w.chat(headers, user="ann", messages=said("Sort the list please now."))
            w.now += 60.0
        assert [turn.style and turn.style.arm for turn in log.turns()] == [CONCISE.arm, CONCISE.arm, None, CONCISE.arm]
        assert [turn.branch for turn in log.turns()] == ["", "again", "again", "again"]
        await w.chat({"x-ostinato-episode": "e2"}, user="ann", messages=said("Sort the list please now."))
        assert log.turns()[-1].style.arm == STEPS.arm, "another episode is dealt anew"
    assert {row.name for row in log.rows if isinstance(row, Signal)} == {"dissatisfied"}


@pytest.mark.parametrize("place", [0.01, 0.5], ids=["none", "concise"])
async def test_a_prompt_that_fits_without_its_style_is_answered_without_it(tmp_path, place):
    log = await approved(V0)
    engine = FakeEngine(lambda request: "ok", context=400)
    async with world(engine=engine, log=log, styles=dealer(log, tmp_path, places=(place,)), next_message=True) as w:
        await known(w)
        told = {"x-ostinato-episode": "e1"}
        assert (await w.chat(told, user="ann", messages=said("x" * 380), max_tokens=5))[0] == 200
        assert log.turns()[-1].branch == "", "it was asked once"
        assert "one sentence" not in shown(w, log.turns()[-1])
        assert (log.turns()[-1].style and log.turns()[-1].style.arm) == ("none" if place == 0.01 else None)
        await w.chat(user="ann", messages=said("x" * 300), max_tokens=5)
        first, longer = log.turns()[-1], said("x" * 300, "ok", "y" * 75)
        assert ("one sentence" in shown(w, first)) == (place == 0.5)
        assert (await w.chat(user="ann", messages=longer, max_tokens=5))[0] == 200
        assert log.turns()[-1].episode == first.episode
        assert "one sentence" not in shown(w, log.turns()[-1])
        assert (await w.chat(user="ann", messages=said("x" * 420), max_tokens=5))[0] == 400


async def test_a_summary_within_a_call_has_the_style_that_its_conversation_was_dealt(tmp_path):
    log = await approved(V0)
    styles = dealer(log, tmp_path, places=(0.5, 0.99))
    edit = {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 900}}
    body = {"model": "m", "max_tokens": 200, "metadata": {"user_id": "ann"}, "context_management": {"edits": [edit]}}
    async with world("Done.", log=log, styles=styles, compaction_least_tokens=256) as w:
        await known(w)
        messages = [{"role": "user", "content": "Mend the parser. " * 60}]
        assert (await w.post("/v1/messages", body | {"messages": messages}))[0] == 200
        assert [turn.purpose for turn in log.turns()] == ["compaction", "task"]
        assert [turn.style.arm for turn in log.turns()] == [CONCISE.arm, CONCISE.arm]


@pytest.mark.parametrize("serve", [{"control_share": 1.0}, {"branches": ["default"]}], ids=["control", "branch"])
async def test_a_person_is_told_a_chance_of_the_styles_that_their_own_arm_is_dealt(tmp_path, serve):
    log = await approved(V0)
    slots = {"live": V0, "control": V0, "branch/default": V1}
    engine, styles = FakeEngine(lambda request: "hello", slots=slots), dealer(log, tmp_path)
    async with world(engine=engine, log=log, styles=styles, **serve) as w:
        told = await known(w)
        await w.chat(user="ann")
        assert log.turns()[-1].style is None
        assert (told["active"], [each["chance"] for each in told["styles"]]) == (False, [1.0, None, None])
        if "control_share" not in serve:
            await log.append(approval(CONCISE, V1, passed=True, why="it passed", at=2.0))
            assert [each["chance"] is None for each in (await known(w))["styles"]] == [False, False, True]
            await w.chat(user="ann", messages=said("another"))
            assert log.turns()[-1].style.arm in ("none", CONCISE.arm)
