"""Long requests are read in another process to the last bit as in the gateway, and whatever happens to that process, calls go on."""

import asyncio
import os
import select
import signal
import threading
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from gateway_world import eventually, world
from tests.deadlines import WHOLE_PROGRAM_S
from tests.fakes.reader_renderers import Bytes
from tests.fakes.worst_bodies import bodies

from ostinato.core.conversation import Conversation, Message, Role, Tool, ToolCall
from ostinato.core.errors import BadRequest, TooLarge, Unavailable
from ostinato.core.records import Signal
from ostinato.serve import reader as module
from ostinato.serve.calls.caller import ROUTES
from ostinato.serve.dialects.anthropic import parse_count
from ostinato.serve.dialects.items import ItemCache
from ostinato.serve.fair_thread import AT_ONCE_CHARS, PARSED_PER_CHAR
from ostinato.serve.feedback.intake import parse_feedback
from ostinato.serve.reader import LONG_CHARS, RequestReader, crowded
from ostinato.serve.reader_child import ITEMS, SIZES, ReaderJob, answer, read_body
from ostinato.serve.wire.body import parse_json
from ostinato.testing.engine import FakeEngine

LIMITS = (64, 100_000)
PARSERS = {route.path: route.parse for route in ROUTES} | {"/v1/messages/count_tokens": parse_count}
LONG = "word " * (LONG_CHARS // 4)


class Direct(RequestReader):
    """Both ends in one process: all that is said still goes through bytes."""

    def __init__(self):
        super().__init__(None, depth=LIMITS[0], values=LIMITS[1])
        self.asked = []

    async def start(self):
        pass

    def _exchange(self, job, body):
        self.asked.append(job.name)
        job = msgspec.json.decode(msgspec.json.encode(job), type=type(job))
        said, found = answer(job, body, Bytes(None))
        return msgspec.json.decode(msgspec.json.encode(said), type=type(said)), found


@pytest.fixture
def start(tmp_path):
    """Makes readers whose renderer is one of `reader_renderers`, and ends their helpers."""
    made = []

    def begin(renderer="Worst", **limits):
        limits = {"start_s": WHOLE_PROGRAM_S} | limits
        renderer = f"tests.fakes.reader_renderers:{renderer}"
        made.append(RequestReader(tmp_path, depth=64, values=100_000, renderer=renderer, **limits))
        return made[-1]

    yield begin
    for reader in made:
        asyncio.run(reader.close())


def ready(reader):
    """The reader, once its helper can be asked."""
    while reader._look() or reader.pid is None:
        assert reader._starting is not None, reader.trouble
        assert select.select([reader._starting._replies], [], [], WHOLE_PROGRAM_S)[0], "it does not start"
    return reader


def held_up(path):
    """Makes helpers wait as they start; what is returned lets them go on."""
    os.mkfifo(path / "go")

    def release():
        return os.open(path / "go", os.O_RDWR)  # open, for whoever has not got there yet

    return release


def outcome(work):
    """What comes of it: what is found, or the error as the client sees it."""
    try:
        return work()
    except BadRequest as error:
        return type(error).__name__, str(error), error.field, error.status, error.code


def told(request):
    """Everything that the gateway takes from a request."""
    conversation = getattr(request, "conversation", None)
    if conversation is None:
        return request
    parts = (*conversation.messages, *conversation.tools)
    return conversation, [part.digest for part in parts], request.omitted, request.model_dump(exclude={*ITEMS})


def parsed(path, data, reader, items):
    """As the gateway reads a body, with the helper or without."""
    known, value = items, None
    if reader is not None and len(data) >= LONG_CHARS:
        value = None if crowded(data) else parse_json(data, depth=LIMITS[0], values=LIMITS[1], unread=ITEMS)
        known = reader.ahead(PARSERS[path], data, items, value, hashed=True)
    return told(read_body(PARSERS[path], data, known, LIMITS, value))


@pytest.mark.parametrize("path", PARSERS)
@pytest.mark.parametrize("kept", [0, 64_000_000])
def test_worst_bodies_come_to_the_same(path, kept):
    reader, number = Direct(), 0
    for where, name, body in bodies():
        if where == path and len(data := msgspec.json.encode(body)) < 150_000:
            number += 1
            items = ItemCache(kept)
            local = outcome(lambda data=data: parsed(path, data, None, ItemCache(0)))
            assert outcome(lambda data=data, items=items: parsed(path, data, reader, items)) == local, name
            again = outcome(lambda data=data, items=items: parsed(path, data, reader, items))
            assert again == local, name
    assert number > 3
    assert reader.asked.count("read") > 1  # bodies without long items are read here


def test_an_agents_history_is_read_elsewhere_once():
    reader, items = Direct(), ItemCache(64_000_000)
    form = {"type": "object", "properties": {"a": {"type": "string"}}}
    functions = [{"name": f"t{n}", "description": "d" * 900, "parameters": form} for n in range(22)]
    tools = [{"type": "function", "function": each} for each in functions]
    assert len(msgspec.json.encode(tools)) > LONG_CHARS
    history = [{"role": ("user", "assistant")[n % 2], "content": f"{n} {'word ' * 100}"} for n in range(120)]

    def call(messages):
        data = msgspec.json.encode({"model": "m", "messages": messages, "tools": tools})
        assert len(data) > 4 * LONG_CHARS
        found = parsed("/v1/chat/completions", data, reader, items)
        assert found == parsed("/v1/chat/completions", data, None, ItemCache(0))

    call(history)
    for n in range(5):
        history = [*history, {"role": "assistant", "content": f"done {n}"}, {"role": "user", "content": f"more {n}"}]
        call(history)
    assert reader.asked == ["read"]


def conversations():
    call = ToolCall(id="c1", name="look", arguments='{"a": [1.0, 1e30, null, "\\u200b\\u0000"]}')
    yield Conversation(messages=(Message(role=Role.USER, text=LONG + "é\u200b\x00<|im_end|>"),))
    yield Conversation(
        messages=(
            Message(role=Role.USER, text=LONG),
            Message(role=Role.ASSISTANT, text="So", reasoning="Hm", calls=(call,)),
            Message(role=Role.TOOL, text="seen", answers="c1", failed=True),
        ),
        tools=(Tool(name="look", parameters={"whole": 10**30, "float": 1.0, "nothing": None, "deep": [[{}]]}),),
    )
    yield Conversation(messages=(Message(role=Role.ASSISTANT, text=LONG),), continued=True)
    yield Conversation(messages=(Message(role=Role.USER, text=LONG + "\ud800"),))  # not text: read here


def test_prompts_have_the_same_tokens(monkeypatch):
    monkeypatch.setattr(module, "LONG_HISTORY_CHARS", LONG_CHARS)
    renderer, reader = Bytes(None), Direct()
    for conversation in conversations():
        whole = conversation.messages[0].text.isprintable() or "\ud800" not in conversation.messages[0].text
        if whole:
            assert reader.chat(conversation) == renderer.chat(conversation)
            assert reader.follow_up(conversation, 1) == renderer.follow_up(conversation, 1)
            text = conversation.messages[0].text
            assert reader.encode(text) == renderer.encode(text)
        else:
            assert reader.chat(conversation) is reader.encode(conversation.messages[0].text) is None
    assert reader.chat(Conversation(messages=(Message(role=Role.USER, text="short"),))) is None


def test_feedback_comes_to_the_same():
    reader = Direct()
    for where, name, body in bodies():
        if where != "/v1/feedback" or len(data := msgspec.json.encode(body)) < LONG_CHARS:
            continue
        found = reader.feedback(data, "acme", 7.0)
        local = outcome(lambda body=body: parse_feedback(body, tenant="acme", now=7.0))
        if isinstance(local, list):
            assert found.refused is None
            assert [plain(each) for each in found.signals] == [plain(each) for each in local], name
        else:
            assert outcome(lambda found=found: raise_(found.refused)) == local, name
    assert outcome(lambda: reader.feedback(b"[" + LONG.encode(), "acme", 7.0)) == outcome(
        lambda: parse_json(b"[" + LONG.encode(), depth=64, values=100_000)
    )


def plain(signal: Signal):
    """A signal without the id that it was given, for it had none."""
    return replace(signal, id="")


def raise_(error):
    raise error


def test_what_is_read_elsewhere_never_holds_up_the_event_loop():
    """`FairThread` does at once, on the event loop, what takes as long as a few thousand characters: nothing that waits for a helper."""
    assert LONG_CHARS // PARSED_PER_CHAR > AT_ONCE_CHARS


# ------------------------------------------------------------ the gateway


async def test_calls_through_the_gateway_are_the_same():
    def asks(w):
        long = [{"role": "user", "content": LONG}]
        anthropic = {"model": "m", "max_tokens": 4, "messages": long}
        many = [{"role": ("user", "assistant")[n % 2], "content": f"{n}"} for n in range(1_001)]
        events = [{"id": f"e{n}", "target": "chatcmpl-0:0", "name": "ok", "value": n % 2} for n in range(300)]
        return [
            w.post("/v1/chat/completions", {"model": "m", "messages": long}),
            w.post("/v1/completions", {"model": "m", "prompt": LONG}),
            w.post("/v1/messages", anthropic),
            w.post("/v1/responses", {"model": "m", "input": LONG}),
            w.post("/v1/messages/count_tokens", {"model": "m", "messages": long}),
            w.post("/v1/messages/count_tokens", {"model": "m", "messages": many}),
            w.post("/v1/messages/count_tokens", {"model": "m", "messages": many, "wrong": LONG}),
            w.post("/v1/chat/completions", {"model": "m", "messages": [*many, {"role": "user", "content": 1}]}),
            w.post("/v1/feedback", events),
            w.post("/v1/feedback", [*events, {"target": ""}]),
            w.post("/v1/feedback", data=b"[" + LONG.encode()),
        ]

    found = []
    for reader in (None, Direct()):
        engine = FakeEngine(lambda request: "hello", context=1 << 20)
        async with world(engine=engine, renderer=Bytes(None), reader=reader) as w:
            answers = [await each for each in asks(w)]
            found.append([(status, _steady(body)) for status, _, body in answers])
            statuses = [status for status, _, _ in answers]
    assert found[0] == found[1]
    assert statuses == [200, 200, 200, 200, 200, 200, 400, 400, 202, 400, 400]
    assert {*reader.asked} == {"read", "chat", "encode", "count", "feedback"}


@pytest.mark.parametrize("name", ["target", "\\u0074arget", "targe\\u0074", "t\\u0061rget", "tar\\u0067et"])
async def test_long_feedback_beyond_the_quota_is_refused_whole(name):
    """`name`: how each event's JSON spells the field by which events are counted before they are read."""

    def sent(count):
        event = {"target": "chatcmpl-0:0", "name": "ok", "value": True, "comment": 'says "target", ' * 20}
        return (
            b"["
            + b",".join([msgspec.json.encode(event).replace(b'"target":', b'"%b":' % name.encode())] * count)
            + b"]"
        )

    reader = Direct()
    async with world(reader=reader, quota={"events_per_s": 1.0}) as w:  # a thousand at first
        assert (await w.post("/v1/feedback", data=sent(600)))[0] == 202
        assert (await w.post("/v1/feedback", data=sent(401)))[0] == 429
        assert len(reader.asked) == 1, "what may be too much is not read"
        assert (await w.post("/v1/feedback", data=sent(400)[:-1]))[0] == 400
        assert (await w.post("/v1/feedback", data=sent(400)))[0] == 202, "what was refused was not charged"
        rows = [row async for _, row in w.log.read(0, {Signal})]
        assert len(rows) == 1_000


class Slow(Direct):
    """Reads on until it is let go."""

    def __init__(self):
        super().__init__()
        self.go = threading.Event()

    def _exchange(self, job, body):
        found = super()._exchange(job, body)
        assert self.go.wait(WHOLE_PROGRAM_S)
        return found


def _list(*events):
    return b"[" + b",".join(msgspec.json.encode(each) for each in events) + b"]"


async def test_what_is_read_for_a_client_that_left_is_charged():
    event = {"target": "chatcmpl-0:0", "name": "ok", "value": True, "comment": "word " * 20}
    reader = Slow()
    async with world(reader=reader, quota={"events_per_s": 1.0}) as w:  # a thousand at first
        gone = asyncio.ensure_future(w.post("/v1/feedback", data=_list(*[event] * 600)))
        await eventually(lambda: reader.asked)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        reader.go.set()
        assert (await w.post("/v1/feedback", data=_list(*[event] * 401)))[0] == 429
        assert len(reader.asked) == 1
        assert (await w.post("/v1/feedback", data=_list(*[event] * 400)))[0] == 202


async def test_only_events_are_charged_and_values_that_are_none():
    reader = Direct()
    event = {"target": "chatcmpl-0:0", "name": "target", "value": True, "comment": "word " * 20}
    async with world(reader=reader, quota={"events_per_s": 1.0}) as w:
        assert (await w.post("/v1/feedback", data=_list(*[event] * 400)))[0] == 202, "a name that is told twice"
        assert (await w.post("/v1/feedback", data=_list(LONG, *[7] * 399)))[0] == 400
        assert (await w.post("/v1/feedback", data=_list(LONG, *[7] * 299)))[0] == 429, "which are seen when it is read"
        assert len(reader.asked) == 3
        assert (await w.post("/v1/feedback", {**event, "comment": ""}))[0] == 202


def _steady(value):
    """An answer without its ids and times."""
    if isinstance(value, dict):
        loose = {"id", "created", "created_at", "ostinato", "item_id"}
        return {name: _steady(each) for name, each in value.items() if name not in loose}
    return [_steady(each) for each in value] if isinstance(value, list) else value


# ------------------------------------------------------------ the process


def long(text):
    return f"{text} {LONG}"


def test_nobody_waits_for_a_helper_that_starts(start, tmp_path):
    release, reader = held_up(tmp_path), start()
    assert reader.encode(LONG) is None, "the first long request starts it, and is read here"
    assert reader.encode(LONG) is reader.encode(LONG) is None
    assert (reader.pid, reader.failures) == (None, 0)
    file = release()
    assert ready(reader).encode(LONG) == list(LONG.encode())
    os.close(file)


def test_it_steps_back_once_it_is_ready(start, tmp_path):
    reader = ready(start())
    assert reader.encode(LONG) == list(LONG.encode())
    assert int((tmp_path / "nice").read_text()) == os.nice(0)
    assert os.getpriority(os.PRIO_PROCESS, reader.pid) == min(19, os.nice(0) + 10)


def test_a_start_without_end_fails(start, tmp_path):
    release, reader = held_up(tmp_path), start(start_s=0)
    assert reader.encode(LONG) is None, "the first long request starts it, and is read here"
    assert reader.encode(LONG) is None
    assert "does not start" in reader.trouble
    assert (reader.failures, reader._starting) == (1, None)
    assert reader.encode(LONG) is None  # and is left alone
    assert reader._starting is None
    os.close(release())


def test_a_helper_that_is_killed_fails_one_request(start):
    reader = ready(start())
    killed = reader.pid
    with pytest.raises(Unavailable) as failed:
        reader.encode(long("die"))
    assert failed.value.status == 503
    assert reader.failures == 1
    assert "ended while it read" in reader.trouble
    assert ready(reader).encode(long("b")) == list(long("b").encode())
    assert reader.pid != killed
    assert (reader.failures, reader.trouble) == (1, "")


def test_whoever_asks_next_gets_no_answer_to_what_was_given_up(start, monkeypatch):
    reader = ready(start())
    says, read = reader._current._replies, os.read

    def short(file, size):
        if file == says:
            raise MemoryError
        return read(file, size)

    with monkeypatch.context() as short_of_memory:
        short_of_memory.setattr(os, "read", short)
        with pytest.raises(MemoryError):
            reader.encode(long("of acme"))
    assert reader.encode(long("of globex")) is None
    assert ready(reader).encode(long("of globex")) == Bytes(None).encode(long("of globex"))


def test_an_answer_to_another_request_is_nobodys(start):
    reader, body = ready(start()), long("of acme").encode()
    head = msgspec.json.encode(ReaderJob(name="encode", turn=999))
    os.write(reader._current._requests, SIZES.pack(len(head), len(body)) + head + body)
    with pytest.raises(Unavailable):
        reader.encode(long("of globex"))
    assert "belongs to another request" in reader.trouble
    assert ready(reader).encode(long("of globex")) == Bytes(None).encode(long("of globex"))


def test_one_that_ended_while_nobody_asked_fails_none(start):
    reader = ready(start())
    os.kill(reader.pid, signal.SIGKILL)
    os.waitid(os.P_PID, reader.pid, os.WEXITED | os.WNOWAIT)
    assert reader.encode(long("b")) is None
    assert ready(reader).failures == 0


def test_a_request_without_end_holds_nobody(start, monkeypatch):
    monkeypatch.setattr(module, "_SLACK_S", WHOLE_PROGRAM_S)
    for text, limits, limit in (
        ("spin", {"cpu_s": 0.2}, "0.2 s of processor time"),
        ("hang", {"longest_s": 0.2}, "0.2 s"),
        ("hoard", {}, "768 MiB of memory"),
    ):
        reader = ready(start(**limits))
        for _ in range(2):  # the second time it is not tried
            with pytest.raises(TooLarge, match=f"more than {limit} to read"):
                reader.encode(long(text))
        assert reader.failures == 1
        assert limit in reader.trouble
        if text == "hoard":  # nothing else is refused
            assert ready(reader).encode(LONG) == list(LONG.encode())


def test_a_request_that_proved_too_large_is_tried_again_later(start, monkeypatch):
    monkeypatch.setattr(module, "_REFUSED_S", 0.0)
    reader = ready(start())
    for number in (1, 2):
        with pytest.raises(TooLarge):
            ready(reader).encode(long("hoard"))
        assert reader.failures == number


def test_one_that_has_grown_goes_on_until_another_is_ready(start, tmp_path):
    reader = ready(start())
    small, release = reader.pid, held_up(tmp_path)
    assert reader.encode(long("grow")) == list(long("grow").encode())
    assert reader.encode(long("b")) == list(long("b").encode())
    assert reader.pid == small
    file = release()
    assert select.select([reader._starting._replies], [], [], WHOLE_PROGRAM_S)[0]
    os.close(file)
    assert reader.encode(long("b")) == list(long("b").encode())
    assert reader.pid != small
    assert reader.failures == 0


def test_what_others_left_in_memory_is_no_fault_of_a_request(start, tmp_path):
    reader = ready(start())
    held_up(tmp_path)
    assert reader.encode(long("grow")) == list(long("grow").encode())
    with pytest.raises(Unavailable):
        reader.encode(long("hoard"))


def test_where_none_can_be_started_requests_are_read_here(start):
    reader = start("Nothing")
    while not reader.trouble:
        assert reader.encode(LONG) is None
        if reader._starting is not None:
            assert select.select([reader._starting._replies], [], [], WHOLE_PROGRAM_S)[0]
    assert "does not start" in reader.trouble
    assert (reader.pid, reader._starting) == (None, None)


def test_it_gets_no_keys(start, monkeypatch):
    for name in ("OPENAI_API_KEY", "OSTINATO_API_KEY", "HF_TOKEN", "RECORD_URL"):
        monkeypatch.setenv(name, "secret-of-the-gateway")
    monkeypatch.setenv("LC_CTYPE", "C.UTF-8")
    given = Path(f"/proc/{ready(start()).pid}/environ").read_bytes()
    assert b"secret-of-the-gateway" not in given
    assert {b"LC_CTYPE=C.UTF-8", f"PATH={os.environ['PATH']}".encode()} <= {*given.split(b"\0")}


def test_it_ends_with_its_gateway(start):
    reader = ready(start())
    process = reader._current._process
    process.stdin.close()  # as when the gateway is killed
    assert process.wait(WHOLE_PROGRAM_S) == 0


def test_it_ends_with_its_gateway_in_the_middle_of_a_request(start):
    process, body = ready(start())._current._process, long("hang").encode()
    head = msgspec.json.encode(ReaderJob(name="encode"))
    os.write(process.stdin.fileno(), SIZES.pack(len(head), len(body)) + head + body)
    process.stdin.close()
    assert process.wait(WHOLE_PROGRAM_S) == 0


def test_signals_that_end_the_gateway_do_not_end_it(start):
    reader, blocked = start(), signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert reader.encode(LONG) is None, "the first long request starts it, and is read here"
    born = reader._starting.pid
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(born, each)  # from its first instruction on
    assert ready(reader).pid == born
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(born, each)
    assert reader.encode(LONG) == list(LONG.encode())
    assert reader.pid == os.getsid(born) == born  # and no terminal's reach it
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == blocked
