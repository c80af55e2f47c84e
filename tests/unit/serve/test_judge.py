"""The judge of next messages through the gateway: what its word becomes, and that it costs nothing but its word."""

import asyncio
import json
from contextlib import asynccontextmanager
from functools import partial

import pytest
from gateway_world import eventually, world
from pydantic import ValidationError
from tests.deadlines import PATIENT_S
from tests.fakes.outside import FakeOutside

from ostinato.core.errors import BadConfig, Unavailable
from ostinato.core.records import Signal
from ostinato.release.metrics.config import BUILT_IN, MetricConfig
from ostinato.release.metrics.facts import HEARD, TurnSignals
from ostinato.release.metrics.metric import metrics_of
from ostinato.reward.functions import agent, considered, copilot, tab
from ostinato.serve.config import JudgeConfig, ServeConfig
from ostinato.serve.feedback.next_message import NextMessage
from ostinato.serve.judge_prompt import Case
from ostinato.serve.message_judge import Judge, LabelledMessage
from ostinato.serve.metrics import Metrics
from ostinato.testing.log import MemoryLog
from ostinato.testing.records import a_turn

SORT = [{"role": "user", "content": "Sort the list."}]
CASE = Case(request="Sort the list.", answer="Done.", message="In descending order.")


def says(label):
    return json.dumps({"label": label})


@pytest.fixture
async def outside():
    async with FakeOutside().serving() as fake:
        fake.text = says("complaint")
        yield fake


def judging(outside, *, log=None, **judge):
    judge = {"url": outside.url, "model": "far-1", **judge}
    return world(script="Done.", log=log, next_message=True, judge=judge)


def signals(log):
    return [row for row in log.rows if isinstance(row, Signal)]


def names(log):
    return [row.name for row in signals(log)]


async def told(log, count):
    """The signals, once there are so many."""
    await eventually(lambda: len(signals(log)) >= count)
    await asyncio.sleep(0.02)
    return signals(log)


async def converse(w, *texts, **fields):
    """Somebody says these one after the other; the turns."""
    history, turns = [], []
    for text in texts:
        history.append({"role": "user", "content": text})
        status, headers, body = await w.chat(messages=history, user="ann", **fields)
        assert status == 200, body
        history.append(body["choices"][0]["message"])
        turns.append(headers.get("x-ostinato-turn"))
    return turns


def counted(metrics, name, **labels):
    return metrics.registry.get_sample_value(f"ostinato_{name}_total", {"tenant": "default", **labels}) or 0.0


async def silent(w, reason, count=1):
    """The judge has had no word so often, for this reason."""
    metrics = w.app.state.metrics
    await eventually(lambda: counted(metrics, "judge_no_words", reason=reason) >= count)


# ---------------------------------------------------------------- its word


async def test_its_word_stands_beside_the_rules(outside):
    async with judging(outside, prompt_price=2.0, answer_price=8.0) as w:
        turn, _ = await converse(w, "Sort the list.", "The order is odd.")
        rules, judge = await told(w.log, 2)
        assert (rules.turn, rules.name, rules.comment) == (turn, "followed_up", "goes on (rules@2)")
        assert (judge.turn, judge.name, judge.value) == (turn, "judged_dissatisfied", 1.0)
        assert judge.comment == "complaint (judge@1, far-1)"
        assert not any("odd" in str(row) for row in (rules, judge))
        metrics = w.app.state.metrics
        assert counted(metrics, "judge_words", rules="goes on", judge="complaint") == 1
        assert counted(metrics, "judge_tokens", of="prompt") == 40
        assert counted(metrics, "judge_tokens", of="answer") == 10
        assert counted(metrics, "judge_cost") == pytest.approx(160e-6)


@pytest.mark.parametrize(("label", "name"), [("complaint", "dissatisfied"), ("goes on", "followed_up")])
async def test_where_it_decides_its_word_takes_the_rules_place(outside, label, name):
    outside.text = says(label)
    async with judging(outside, decides=True) as w:
        turn, _ = await converse(w, "Sort the list.", "The order is odd.")
        rules, word, taken_back = await told(w.log, 3)
        assert (rules.name, taken_back.retracts) == ("followed_up", rules.id)
        assert (word.turn, word.name, word.comment) == (turn, name, f"{label} (judge@1, far-1)")
        assert considered(signals(w.log), 1e9) == [word]


async def test_the_rules_word_is_in_the_log_while_the_judge_thinks(outside):
    """So a kill costs at most the judge's word."""
    outside.gate = asyncio.Event()
    async with judging(outside, decides=True) as w:
        await converse(w, "Sort the list.", "The order is odd.")
        assert [row.name for row in await told(w.log, 1)] == ["followed_up"]
        await eventually(lambda: outside.bodies)
        w.now += 50
        outside.gate.set()
        rules, word, taken_back = await told(w.log, 3)
        assert word.received_at == taken_back.received_at == rules.received_at + 50
        assert considered(signals(w.log), rules.received_at + 49) == [rules]  # for a reward that was due before


async def test_it_learns_what_was_said_and_not_by_whom(outside, monkeypatch):
    monkeypatch.setenv("FAR_KEY", "sk-far")
    async with judging(outside, key_env="FAR_KEY") as w:
        await converse(w, "Sort the list.", "<system-reminder>secret</system-reminder>Now reverse it.")
        await told(w.log, 2)
        (body,) = outside.bodies
        line = body["messages"][1]["content"].split("\n")[0]
        assert json.loads(line) == {"request": "Sort the list.", "answer": "Done.", "message": "Now reverse it."}
        assert {name: body[name] for name in ("model", "max_tokens", "temperature")} == {
            "model": "far-1",
            "max_tokens": 64,
            "temperature": 0.0,
        }
        assert body["response_format"]["json_schema"]["strict"] is True
        assert outside.headers[0]["Authorization"] == "Bearer sk-far"
        assert "ann" not in json.dumps([body, outside.headers])


async def test_an_endpoint_that_knows_no_schemas_is_sent_none(outside):
    outside.text = "complaint"
    async with judging(outside, schema_sent=False) as w:
        await converse(w, "Sort the list.", "The order is odd.")
        assert (await told(w.log, 2))[1].name == "judged_dissatisfied"
        assert "response_format" not in outside.bodies[0]


async def test_a_message_that_is_sent_again_is_heard_once(outside):
    async with judging(outside, decides=True) as w:
        for _ in range(3):
            await converse(w, "Sort the list.", "The order is odd.", headers={"X-Ostinato-Episode": "e1"})
        found = await told(w.log, 3)
        assert len(outside.bodies) == 1
        assert len(found) == 3


async def test_after_a_restart_a_repeat_changes_nothing(outside):
    log = MemoryLog()
    for label in ("complaint", "praise"):
        outside.text = says(label)
        async with judging(outside, log=log, decides=True) as w:
            await converse(w, "Sort the list.", "The order is odd.", headers={"X-Ostinato-Episode": "e1"})
            words = partial(counted, w.app.state.metrics, "judge_words", rules="goes on", judge=label)
            await eventually(words)
    assert len(outside.bodies) == 2
    assert [row.name for row in considered(signals(log), 1e9)] == ["dissatisfied"]
    assert len(signals(log)) == 3


async def test_a_judge_that_is_let_decide_may_say_again_what_it_said_beside_the_rules(outside):
    log = MemoryLog()
    for decides, count in ((False, 2), (True, 4)):
        async with judging(outside, log=log, decides=decides) as w:
            await converse(w, "Sort the list.", "The order is odd.", headers={"X-Ostinato-Episode": "e1"})
            await told(log, count)
    assert sorted(row.name for row in considered(signals(log), 1e9)) == ["dissatisfied", "judged_dissatisfied"]


async def test_what_nobody_typed_is_not_heard(outside):
    async with judging(outside) as w:
        await converse(w, "Sort the list.", "<system-reminder>That is wrong.</system-reminder>")
        await asyncio.sleep(0.4)
        assert outside.bodies == []


# ---------------------------------------------------------------- which messages


@asynccontextmanager
async def a_judge(outside, metrics=None, **config):
    judge = Judge(JudgeConfig(url=outside.url, model="far-1", **config), metrics or Metrics())
    await judge.start()
    try:
        yield judge
    finally:
        await judge.close()


def ask(judge, number, tell=lambda _: None):
    judge.ask("default", f"next-{number}", LabelledMessage(CASE, NextMessage.GOES_ON), tell)


async def hear(judge, count):
    """The numbers of the messages that it had a word about."""
    numbers = []
    for number in range(count):
        ask(judge, number, lambda _, number=number: numbers.append(number))
    await eventually(lambda: not judge._open)
    return sorted(numbers)


async def test_a_share_is_heard_and_always_the_same(outside):
    heard = []
    for _ in range(2):
        async with a_judge(outside, share=0.3, calls_per_minute=1000) as judge:
            heard.append(await hear(judge, 100))
    assert heard[0] == heard[1]
    assert 15 <= len(heard[0]) <= 45


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (1.0, 20)])
async def test_all_or_none(outside, share, count):
    async with a_judge(outside, share=share) as judge:
        assert len(await hear(judge, 20)) == count


async def test_other_tenants_words_stay_here(outside):
    async with a_judge(outside, tenants=("acme",)) as judge:
        judge.ask("acme", "next-1", LabelledMessage(CASE, NextMessage.GOES_ON), lambda _: None)
        judge.ask("other", "next-2", LabelledMessage(CASE, NextMessage.GOES_ON), lambda _: None)
        await eventually(lambda: not judge._open)
    assert len(outside.bodies) == 1


# ---------------------------------------------------------------- what it may cost


async def test_beyond_so_many_calls_a_minute_the_rules_are_alone(outside):
    metrics = Metrics()
    async with a_judge(outside, metrics, calls_per_minute=3) as judge:
        assert len(await hear(judge, 10)) == 3
    assert counted(metrics, "judge_no_words", reason="limit") == 7


async def test_a_tenants_many_messages_leave_another_its_share_of_a_minutes_calls(outside):
    words = {"busy": 0, "calm": 0}

    async def told(judge, tenant, numbers):
        def count(_):
            words[tenant] += 1

        for number in numbers:
            judge.ask(tenant, f"next-{number}", LabelledMessage(CASE, NextMessage.GOES_ON), count)
        await eventually(lambda: not judge._open)

    async with a_judge(outside, calls_per_minute=12) as judge:
        await told(judge, "calm", range(1))
        await told(judge, "busy", range(30))
        await told(judge, "calm", range(1, 9))
        await told(judge, "busy", range(30, 40))
    assert words == {"busy": 9, "calm": 3}


async def test_a_tenants_many_messages_wait_beside_anothers(outside, monkeypatch):
    monkeypatch.setattr("ostinato.serve.message_judge._WAITING", 3)
    outside.gate = asyncio.Event()
    words = []
    async with a_judge(outside) as judge:
        for number in range(10):
            ask(judge, number, lambda _: words.append("busy"))
        judge.ask("calm", "next-1", LabelledMessage(CASE, NextMessage.GOES_ON), lambda _: words.append("calm"))
        await eventually(lambda: len(outside.bodies) == 4)
        outside.gate.set()
        await eventually(lambda: len(words) == 8)
    assert words.count("calm") == 1


async def test_a_few_calls_at_a_time_and_a_few_that_wait(outside, monkeypatch):
    monkeypatch.setattr("ostinato.serve.message_judge._WAITING", 3)
    outside.gate = asyncio.Event()
    metrics, words = Metrics(), []
    async with a_judge(outside, metrics) as judge:
        for number in range(10):
            ask(judge, number, words.append)
        await eventually(lambda: len(outside.bodies) == 4)
        assert counted(metrics, "judge_no_words", reason="full") == 3
        outside.gate.set()
        await eventually(lambda: len(words) == 7)
    assert len(outside.bodies) == 7


def broken(**changes):
    def make(fake):
        for name, value in changes.items():
            setattr(fake, name, value)

    return make


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (broken(status=500), "failed"),
        (broken(status=404), "failed"),
        (broken(status=302), "failed"),
        (broken(raw=b"data: {nonsense\n\n"), "failed"),
        (broken(raw=b"\xff" * 300_000), "failed"),
        (broken(kind="text/html"), "failed"),
        (broken(cut=True), "failed"),
        (broken(finish="content_filter"), "failed"),
        (broken(text="x" * 100_000), "failed"),
        (broken(stall=True), "timeout"),
        (broken(text="I would rather not say."), "no_label"),
        (broken(text='{"label": "compl', finish="length"), "no_label"),
        (broken(text=""), "no_label"),
        (broken(url="http://127.0.0.1:9/v1"), "failed"),
    ],
)
async def test_whatever_becomes_of_it_costs_its_word_alone(outside, fault, reason):
    fault(outside)
    async with judging(outside, decides=True, timeout_s=0.3 if outside.stall else PATIENT_S) as w:
        turn, _ = await converse(w, "Sort the list.", "That is wrong.")
        await silent(w, reason)
        assert [(row.turn, row.name) for row in signals(w.log)] == [(turn, "dissatisfied")]


async def test_one_that_fails_is_left_alone_for_a_while(outside):
    outside.status = 500
    metrics = Metrics()
    async with a_judge(outside, metrics) as judge:
        for number in range(12):
            ask(judge, number)
            await eventually(lambda: not judge._open)
    assert len(outside.bodies) == 5
    assert counted(metrics, "judge_no_words", reason="resting") == 7


async def test_no_call_waits_for_it(outside):
    outside.gate = asyncio.Event()
    async with judging(outside) as w:
        await converse(w, *(f"Message {number}." for number in range(30)))  # it has said nothing yet
        await eventually(lambda: len(outside.bodies) == 4)


async def test_the_gateway_ends_at_once_while_the_judge_thinks(outside):
    outside.gate = asyncio.Event()
    log = MemoryLog()
    async with judging(outside, log=log) as w:
        await converse(w, *(f"Message {number}." for number in range(8)))
        await eventually(lambda: len(outside.bodies) == 4)
        await converse(w, "Another list.", "That is wrong.")  # heard while it ends
    assert names(log) == ["followed_up"] * 7 + ["dissatisfied"]
    assert counted(w.app.state.metrics, "judge_no_words", reason="closed") == 8


class Failing(MemoryLog):
    """Takes no signals while it is told so."""

    refuses = True

    async def append(self, *rows):
        if self.refuses and any(isinstance(row, Signal) for row in rows):
            raise Unavailable("the disk is full")
        self.sizes = [*getattr(self, "sizes", []), sum(isinstance(row, Signal) for row in rows)]
        return await super().append(*rows)


async def test_a_word_is_never_written_without_its_retraction(outside, monkeypatch):
    monkeypatch.setattr("ostinato.serve.feedback.followups._RETRY_S", 0.05)
    monkeypatch.setattr("ostinato.serve.feedback.followups._BATCH_SIZE", 2)
    log = Failing()
    async with judging(outside, log=log, decides=True) as w:
        await converse(w, "Sort the list.", "The order is odd.")
        await eventually(lambda: counted(w.app.state.metrics, "judge_words", rules="goes on", judge="complaint"))
        log.refuses = False
        assert len(await told(log, 3)) == 3
        assert [size for size in log.sizes if size] == [3]


# ---------------------------------------------------------------- what reads the log


def judged_of(turn):
    """What the rules say of a turn, and the judge's word beside it."""
    common = {"turn": turn.id, "value": 1.0, "source": "implicit", "occurred_at": 11.0, "received_at": 11.0}
    rules = Signal(id="next-3f", name="followed_up", **common)
    return [rules], [rules, Signal(id="judged-next-3f", name="judged_dissatisfied", **common)]


@pytest.mark.parametrize("function", [agent, copilot, tab])
@pytest.mark.parametrize("silence", [0.0, None])
def test_a_word_beside_the_rules_changes_no_reward(function, silence):
    turn = a_turn()
    options = {} if function is tab else {"silence": silence}
    without, beside = (function(turn, said, 1e6, **options) for said in judged_of(turn))
    assert without.value == beside.value


def test_a_word_beside_the_rules_changes_no_metric():
    metrics = metrics_of([MetricConfig(name=name) for name in BUILT_IN], 0.05)
    measured = []
    for heard in judged_of(a_turn()):
        said = TurnSignals()
        for signal in heard:
            said.hear(signal)
        known = {**said.values(), HEARD: float(bool(said.values())), "turn": 1.0}
        measured.append([metric.measure(known) for metric in metrics])
    assert measured[0] == measured[1]
    assert any(measured[0])


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"judge": {"url": "http://x/v1", "model": "m"}}, "set serve.next_message = true"),
        ({"next_message": True, "judge": {"url": "http://x/v1"}}, "needs the model's name"),
        ({"next_message": True, "judge": {"url": "ftp://x/v1", "model": "m"}}, "the judge must be http"),
        ({"next_message": True, "judge": {"url": "http://u:p@x/v1", "model": "m"}}, "holds a password"),
        ({"next_message": True, "judge": {"url": "http://x/v1", "model": "m", "share": 1.5}}, "share"),
    ],
)
def test_settings_that_make_no_judge_are_refused(config, message):
    with pytest.raises(ValidationError, match=message):
        ServeConfig(**config)


def test_a_key_that_is_not_there_is_named():
    config = JudgeConfig(url="http://x/v1", model="m", key_env="FAR_KEY")
    with pytest.raises(BadConfig, match=r"serve\.judge takes its key from the variable FAR_KEY"):
        Judge(config, Metrics(), keys={})


async def test_it_is_off_unless_it_is_asked_for(outside):
    async with world(script="Done.", next_message=True) as w:
        await converse(w, "Sort the list.", "That is wrong.")
        assert [row.name for row in await told(w.log, 1)] == ["dissatisfied"]
        assert b"ostinato_judge_words_total{" not in w.app.state.metrics.page()
