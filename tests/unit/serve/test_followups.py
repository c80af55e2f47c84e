"""What people say next, through the gateway: as signals about the answer before, counted once, by whoever is told of it."""

import asyncio
import itertools

import pytest
from gateway_world import ASK, world
from tests.deadlines import PATIENT_S
from tests.fakes.otlp_exports import JSON, claude, encode, logs

from ostinato.core.errors import Unavailable
from ostinato.core.records import Finish, Signal
from ostinato.reward.functions import AgentWeights, agent_parts
from ostinato.testing.engine import FakeEngine
from ostinato.testing.log import MemoryLog

BUILD = [{"role": "user", "content": "Sort the list."}]
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]


def signals(w):
    return [row for row in w.log.rows if isinstance(row, Signal)]


async def told(w, count):
    """The signals, once there are so many."""
    async with asyncio.timeout(PATIENT_S):
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
        assert found[0].comment == "correction (rules@2)"
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
    monkeypatch.setattr("ostinato.serve.feedback.followups._RETRY_S", 0.05)
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


# ---------------------------------------------------------------- refused and stopped

BASH = [{"name": "bash", "input_schema": {"type": "object"}}]
STOPPED = "[Request interrupted by user for tool use]"


async def speak(w, messages):
    status, _, body = await w.post(
        "/v1/messages",
        {"model": "m", "max_tokens": 512, "metadata": {"user_id": "ann"}, "tools": BASH, "messages": messages},
    )
    assert status == 200, body
    return body


async def called(w):
    """A turn, its call, and what an agent sends once somebody has answered it in these words."""
    asked = [{"role": "user", "content": "Clean up."}]
    body = await speak(w, asked)
    (call,) = [block["id"] for block in body["content"] if block["type"] == "tool_use"]

    def replied(*said):
        result = {"type": "tool_result", "tool_use_id": call, "content": "Not run.", "is_error": True}
        blocks = [result, *({"type": "text", "text": text} for text in said)]
        return [*asked, {"role": "assistant", "content": body["content"]}, {"role": "user", "content": blocks}]

    return f"{body['id']}:0", call, replied


async def report(w, call):
    event = claude("tool_decision", decision="reject", source="user_reject", tool_use_id=call)
    reply = await w.http.post("/v1/logs", content=encode(logs(event), JSON), headers={"content-type": JSON})
    assert reply.status_code == 200


@pytest.mark.parametrize("first", ["wire", "telemetry"])
async def test_a_refused_call_that_the_wire_and_telemetry_tell_of_is_worth_one_refusal(first):
    async with world(engine=FakeEngine(lambda _: CALL), next_message=True) as w:
        turn, call, replied = await called(w)
        if first == "telemetry":
            await report(w, call)
        await speak(w, replied(STOPPED, "Use git clean instead."))
        await told(w, 2)
        await report(w, call)
        found = await told(w, 3)
        assert {row.turn for row in found} == {turn}
        assert sorted(row.name for row in found) == ["dissatisfied", "tool_rejected", "tool_rejected"]
        assert agent_parts(found, AgentWeights())["refused"] == -AgentWeights.refused


async def test_a_call_that_failed_by_itself_was_not_refused():
    async with world(engine=FakeEngine(lambda _: CALL), next_message=True) as w:
        turn, _, replied = await called(w)
        await speak(w, replied("Use sudo."))
        assert [(row.turn, row.name) for row in await told(w, 1)] == [(turn, "followed_up")]


async def test_an_answer_that_was_stopped_and_kept_by_nobody_is_not_the_one_before():
    async with world(engine=engine(), next_message=True) as w:
        history, turn = await say(w, [], "Sort the list.", user="ann")
        await say(w, history, "Reverse it.\n[Request interrupted by user]\nThat is wrong.", user="ann")
        history, _ = await say(w, history, "Reverse it.", user="ann")
        assert [(row.turn, row.name) for row in await told(w, 1)] == [(turn, "followed_up")]


# ---------------------------------------------------------------- stopped while it was written


WRITTEN = "I will delete the branch now. " * 40
ASKED = {"role": "user", "content": "Delete the branch."}


async def stopped(w, history, **fields):
    """Ask, stop the answer in the middle of its stream; the turn, and the text that came."""
    body = {**ASK, "messages": history, "stream": True, "user": "ann", **fields}
    reader, writer = await w.connect(body)
    text = b""
    while text.count(b'"delta":{"content"') < 3:
        more = await reader.read(512)
        assert more, text
        text += more
    writer.close()
    async with asyncio.timeout(PATIENT_S):
        while not any(turn.finish is Finish.LEFT for turn in w.log.turns()):
            await asyncio.sleep(0.005)
    (turn,) = [turn for turn in w.log.turns() if turn.finish is Finish.LEFT]
    assert 3 <= len(turn.sampled_ids) < len(WRITTEN)
    return turn.id, WRITTEN[:3]


def a_slow_world():
    engine = FakeEngine(lambda _: WRITTEN, delay_s=0.002)
    return world(engine=engine, next_message=True, default_max_tokens=2_000, real=True)


NOTE = "[Request interrupted by user]"
NO = "That is wrong."


@pytest.mark.parametrize(
    ("goes_on", "names"),
    [
        (lambda text: [ASKED, {"role": "user", "content": NOTE}, {"role": "user", "content": NO}], 2),
        (lambda text: [{"role": "user", "content": f"{ASKED['content']}\n{NOTE}\n{NO}"}], 2),
        (lambda text: [ASKED, {"role": "assistant", "content": text}, {"role": "user", "content": NO}], 2),
        (lambda text: [ASKED, {"role": "assistant", "content": text}, {"role": "user", "content": "And the tag?"}], 1),
        (lambda text: [ASKED, {"role": "assistant", "content": "Else."}, {"role": "user", "content": NO}], 0),
        (lambda text: [ASKED], 0),  # perhaps a program that tries again
        (lambda text: [{"role": "user", "content": "Rename the branch."}], 0),
    ],
)
async def test_whoever_goes_on_with_other_words_had_stopped_the_answer(goes_on, names):
    async with a_slow_world() as w:
        first = {"role": "user", "content": "List the branches."}
        _, headers, body = await w.chat(messages=[first], user="ann", max_tokens=4)
        history = [first, body["choices"][0]["message"]]
        turn, text = await stopped(w, [*history, ASKED])
        await w.chat(messages=[*history, *goes_on(text)], user="ann", max_tokens=4)
        found = [(row.turn, row.name) for row in await told(w, names + 1) if row.turn != headers["x-ostinato-turn"]]
        assert found == [(turn, "interrupted"), (turn, "dissatisfied")][:names]


async def test_what_was_stopped_while_an_agent_worked_is_not_blamed_on_the_call_before():
    async with world(engine=FakeEngine(lambda _: CALL), next_message=True, real=True) as w:
        _, _, body = await w.chat(messages=[ASKED], tools=TOOLS, user="ann")
        message = body["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "main"}
        history = [ASKED, message, result]
        w.engine.script, w.engine.delay_s = (lambda _: WRITTEN), 0.002
        turn, _ = await stopped(w, history, tools=TOOLS, max_tokens=1_000)
        said = {"role": "user", "content": f"{NOTE}\n{NO}"}
        await w.chat(messages=[*history, said], tools=TOOLS, user="ann", max_tokens=4)
        assert [(row.turn, row.name) for row in await told(w, 2)] == [(turn, "interrupted"), (turn, "dissatisfied")]


async def test_an_answer_that_was_stopped_is_not_blamed_for_what_came_after_the_next_one():
    engine = FakeEngine(lambda _: WRITTEN, delay_s=0.002)
    async with world(engine=engine, next_message=True, default_max_tokens=2_000, real=True) as w:
        stopped_turn, _ = await stopped(w, [ASKED], tools=TOOLS)
        w.engine.script, w.engine.delay_s = (lambda _: CALL), 0.0
        both = [ASKED, {"role": "user", "content": "And the tag."}]
        _, headers, body = await w.chat(messages=both, tools=TOOLS, user="ann")
        message = body["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "main"}
        await w.chat(messages=[*both, message, result, {"role": "user", "content": NO}], tools=TOOLS, user="ann")
        found = {(row.turn, row.name) for row in await told(w, 2)}
        assert (headers["x-ostinato-turn"], "dissatisfied") in found
        assert (stopped_turn, "dissatisfied") not in found


# ---------------------------------------------------------------- asked again


async def test_who_asks_again_after_reading_was_not_content():
    async with world(engine=engine(), next_message=True) as w:
        history, _ = await say(w, [], "Sort the list.", user="ann")
        _, turn = await say(w, history, "Explain the second step.", user="ann")
        w.now += 30
        _, second = await say(w, history, "Explain the second step.", user="ann")
        w.now += 30
        await say(w, history, "Explain the second step.", user="ann")
        found = [(row.turn, row.comment) for row in await told(w, 3) if row.name == "dissatisfied"]
        assert found == [(turn, "retry (rules@2)"), (second, "retry (rules@2)")]


async def test_one_tenants_answers_drive_out_none_of_anothers(monkeypatch):
    monkeypatch.setattr("ostinato.serve.feedback.followups._MAX_ANSWERED", 6)
    monkeypatch.setattr("ostinato.serve.feedback.followups._LEAST_ANSWERED", 1)
    acme, bolt = "sk-acme-0123456789", "sk-bolt-0123456789"
    async with world(engine=engine(), next_message=True, api_keys=(f"acme:{acme}", f"bolt:{bolt}")) as w:
        ours = {"user": "ann", "headers": w.key(acme)}
        history, _ = await say(w, [], "Sort the list.", **ours)
        _, turn = await say(w, history, "Explain the second step.", **ours)
        for number in range(3):
            await say(w, [], f"Question {number}?", user="bob", headers=w.key(bolt))
        w.now += 30
        await say(w, history, "Explain the second step.", **ours)
        assert [row.turn for row in await told(w, 2) if row.name == "dissatisfied"] == [turn]


async def test_of_many_tenants_no_more_answers_are_remembered_than_of_one(monkeypatch):
    monkeypatch.setattr("ostinato.serve.feedback.followups._MAX_ANSWERED", 110)
    monkeypatch.setattr("ostinato.serve.feedback.followups._LEAST_ANSWERED", 1)
    keys = {f"t{number}": f"sk-t{number}-0123456789" for number in range(50)}
    entries = tuple(f"{tenant}:{key}" for tenant, key in keys.items())
    async with world(engine=engine(), next_message=True, api_keys=entries) as w:
        for key in keys.values():
            for number in range(4):
                await say(w, [], f"Question {number}?", user="ann", headers=w.key(key))
        answered = w.app._calls._follow_ups._answered
        assert {len(answered[tenant]) for tenant in keys} == {2}
        assert sum(map(len, answered.values())) <= 110


async def test_a_program_that_asks_again_at_once_says_nothing():
    async with world(engine=engine(), next_message=True) as w:
        history, _ = await say(w, [], "Sort the list.", user="ann")
        for _ in range(3):
            await say(w, history, "Explain the second step.", user="ann")
            w.now += 0.6
        assert [row.name for row in await told(w, 1)] == ["followed_up"]


async def test_a_call_that_is_asked_for_again_says_nothing():
    """A client that cannot read a call asks again by itself."""
    async with world(engine=FakeEngine(lambda _: CALL), next_message=True) as w:
        headers = {"X-Ostinato-Episode": "e1"}
        for _ in range(2):
            await say(w, [], "List the files.", user="ann", tools=TOOLS, headers=headers)
            w.now += 30
        await asyncio.sleep(0.1)
        assert signals(w) == []


async def test_the_first_question_of_a_named_session_may_be_asked_again():
    async with world(engine=engine(), next_message=True) as w:
        headers = {"X-Ostinato-Episode": "e1"}
        _, turn = await say(w, [], "Sort the list.", user="ann", headers=headers)
        w.now += 30
        await say(w, [], "Sort the list.", user="ann", headers=headers)
        assert [(row.turn, row.name) for row in await told(w, 1)] == [(turn, "dissatisfied")]


async def test_strangers_who_ask_alike_say_nothing():
    async with world(engine=engine(), next_message=True) as w:
        for _ in range(2):
            await say(w, [], "Sort the list.")
            w.now += 30
        await asyncio.sleep(0.1)
        assert signals(w) == []


@pytest.mark.parametrize("purpose", ["side", "compaction", "subagent"])
async def test_only_the_task_itself_is_listened_to(purpose):
    async with world(engine=engine(), next_message=True) as w:
        history, _ = await say(w, [], "Sort the list.", user="ann")
        await say(w, history, "That is wrong.", user="ann", headers={"X-Ostinato-Purpose": purpose})
        await asyncio.sleep(0.1)
        assert signals(w) == []
