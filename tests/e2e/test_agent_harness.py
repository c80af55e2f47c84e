"""An agent that is not ours, in a real sandbox, through a real gateway: whose turns they are, what it can reach, and how it ends."""

import asyncio
import json
from dataclasses import replace

import pytest
import pytest_asyncio
from tests.deadlines import WHOLE_PROGRAM_S
from tests.fakes.gateways import KEY, world_gateway
from tests.fakes.scripted_agent import agent_settings
from tests.fakes.stalling_engine import Stalls
from tests.grids import covering

from ostinato.core.conversation import Message, Role
from ostinato.core.errors import Unavailable
from ostinato.core.records import Finish, Purpose, Signal, Window, WindowMaker
from ostinato.core.sandbox import SandboxSpec
from ostinato.testing.engine import decode
from ostinato.worlds.grading.grade import Grade
from ostinato.worlds.harness.harnesses import open_harness
from ostinato.worlds.harness.rollout import Ended
from ostinato.worlds.rollout.attempt import RolloutAttempts, Workshop
from ostinato.worlds.sandbox import Boxes
from ostinato.worlds.tasks.task import Grading, Task

RESULT = 0xFC  # what a tool's message begins with
TASK = Task(
    id="calc",
    family="repair",
    messages=(Message(role=Role.SYSTEM, text="Be quick."), Message(role=Role.USER, text="Mend {model} calc.py.")),
    spec=SandboxSpec(files={"calc.py": b"def add(a, b):\n    return a - b\n"}),
    grading=Grading(grader="pytest"),
    harness="agent",
    turns=8,
    tokens=300,
    timeout_s=WHOLE_PROGRAM_S,
)


def calls(command):
    return f"On it.<tool_call>\n{json.dumps({'name': 'bash', 'arguments': {'command': command}})}\n</tool_call>"


def stepwise(*steps):
    return lambda request: steps[min(request.prompt_ids.count(RESULT), len(steps) - 1)]


DIALECTS, ANSWERS = ("chat", "messages", "responses"), ("whole", "streamed")


def spoken(dialect, answers):
    """What tells the agent in which dialect to ask, and for which of the answers."""
    return {"DIALECT": dialect, "STREAM": "1" if answers == "streamed" else ""}


MENDED = stepwise(calls("sed -i 's/a - b/a + b/' calc.py; cat calc.py"), "Done.")


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def boxes():
    made = Boxes()
    yield made
    await made.close()


async def run(boxes, gateway, settings, task=TASK, episode="e.0", group="g.0"):
    harness = open_harness("agent", settings)
    box = await boxes.start(harness.spec(task))
    try:
        return await harness.run(task, gateway.model(episode, group=group, harness=harness.hash), box), harness
    finally:
        await box.stop()


@pytest.mark.parametrize(("dialect", "answers"), covering(DIALECTS, ANSWERS))
async def test_its_turns_are_the_episodes_whatever_it_says_itself(boxes, dialect, answers):
    settings = agent_settings(environment=spoken(dialect, answers), dialect=dialect)
    async with world_gateway(MENDED) as (gateway, log):
        rollout, harness = await run(boxes, gateway, settings)
    turns = log.turns()
    assert rollout.turns == tuple(turn.id for turn in turns)
    assert len(turns) == 2
    for turn in turns:
        assert (turn.episode, turn.group, turn.harness, turn.arm) == ("e.0", "g.0", harness.hash, "world")
        assert (turn.user, turn.purpose) == ("world", Purpose.TASK)
        assert (turn.sampling.temperature, turn.sampling.top_p, turn.sampling.max_tokens) == (1.0, 1.0, 300)
    known = turns[0].prompt_ids + turns[0].sampled_ids
    assert turns[1].prompt_ids[: len(known)] == known
    assert "Be quick.\n\nMend {model} calc.py." in decode(turns[0].prompt_ids), "a prompt is no template"
    assert (rollout.ended, rollout.harness) == (Ended.SUBMITTED, f"agent@{harness.hash}")
    said, told, last = rollout.messages[2:]
    (call,) = said.calls
    assert (said.text, call.name, last.text) == ("On it.", "bash", "Done.")
    assert call.values()["command"].startswith("sed")
    assert (told.role, told.answers, told.text) == (Role.TOOL, call.id, "def add(a, b):\n    return a + b\n")
    assert [change.data for change in rollout.changes] == [b"def add(a, b):\n    return a + b\n"]
    assert (rollout.effort["turns"], rollout.effort["calls"]) == (2, 1)
    assert rollout.effort["tokens"] == sum(len(turn.sampled_ids) for turn in turns)


class Written:
    """Grades by what was written."""

    async def grade(self, task, rollout):
        return Grade(value=float(b"a + b" in rollout.changes[0].data))


async def test_a_rollout_that_was_to_be_recorded_is_worked_on_like_any_other(boxes):
    harness = open_harness("agent", agent_settings(environment={"DIALECT": "chat", "STREAM": ""}, dialect="chat"))
    async with world_gateway(MENDED) as (gateway, _):
        shop = Workshop(harnesses={"agent": harness}, backend=boxes, grader=Written(), gateway=gateway)
        tried = await RolloutAttempts(shop, pause_s=0.1).once(TASK, "w.0.0.0", "w.0", record=True)
    assert (tried.value, len(tried.turns), tried.given) == (1.0, 2, ())


SEARCH = r"""
import os, sys
sought = {name: bytes.fromhex(text) for name, text in json.loads(os.environ["SOUGHT"]).items()}
found = set()
def search(data, path):
    found.update(f"{name} {path}" for name, secret in sought.items() if secret in data)
def look(path):
    try:
        with open(path, "rb") as file:
            search(file.read(1 << 20), path)
    except OSError:
        pass
for root in ("/tmp", "/work", "/etc", "/dev/shm", "/opt", "/run", "/var", "/root", "/home"):
    for at, _, names in os.walk(root):
        for name in names:
            look(f"{at}/{name}")
for pid in filter(str.isdigit, os.listdir("/proc")):
    for name in ("environ", "cmdline", "maps", "mountinfo", "status"):
        look(f"/proc/{pid}/{name}")
        look(f"/proc/{pid}/net/tcp")
    for name in ("cwd", "root", "exe"):
        try:
            target = os.readlink(f"/proc/{pid}/{name}")
        except OSError:
            continue
        search(target.encode(), f"/proc/{pid}/{name}")
ask([{"role": "user", "content": "hi"}])
for name in ("models",):
    status, text = send("GET", "/v1/models")
    search(text.encode(), name)
open("found", "w").write("\n".join(found))
"""


@pytest.mark.parametrize("planted", [False, True], ids=["searched", "control"])
async def test_no_secret_lies_in_the_sandbox(boxes, planted):
    async with world_gateway("ok") as (gateway, _):
        sought = {"key": KEY, "address": gateway._url.removeprefix("http://")}
        environment = {"SOUGHT": json.dumps({name: text.encode().hex() for name, text in sought.items()})}
        environment |= {f"PLANTED_{name}": text for name, text in sought.items()} if planted else {}
        rollout, _ = await run(boxes, gateway, agent_settings(SEARCH, environment=environment))
    (found,) = [change.data.decode().splitlines() for change in rollout.changes if change.path == "found"]
    assert {line.partition(" ")[0] for line in found} == (sought.keys() if planted else set()), found


REACH = r"""
import socket
said = []
for host, port in json.loads(os.environ["PLACES"]):
    try:
        socket.create_connection((host, port), timeout=30).close()
        said.append(f"{host}:{port}")
    except OSError:
        pass
ask([{"role": "user", "content": "hi"}])
open("found", "w").write("\n".join(said))
"""


async def test_nothing_but_its_model_can_be_reached(boxes):
    async with world_gateway("ok") as (gateway, _):
        port = int(gateway._url.rpartition(":")[2])
        places = [("127.0.0.1", port), ("1.1.1.1", 80), ("10.0.0.1", 22), ("127.0.0.1", 3128), ("127.0.0.1", 8321)]
        rollout, _ = await run(boxes, gateway, agent_settings(REACH, environment={"PLACES": json.dumps(places)}))
    (found,) = [change.data.decode().split() for change in rollout.changes if change.path == "found"]
    assert found == ["127.0.0.1:8321"]


PATHS = r"""
tried = [("GET", "/health"), ("GET", "/metrics"), ("GET", "/"), ("POST", "/v1/feedback"), ("POST", "/v1/logs"), ("POST", "/v1/completions"),
         ("POST", "/v1/messages"), ("POST", "/v1/responses"), ("POST", "/s/x/v1/chat/completions"), ("POST", "//v1/chat/completions"),
         ("POST", "/v1/chat/completions/../feedback"), ("PUT", "/v1/chat/completions"), ("GET", "/v1/worlds/spent"),
         ("POST", "/v1%2Ffeedback")]
event = {"id": "x", "target": "chatcmpl-1:0", "name": "graded", "value": 1.0, "source": "code"}
said = [send(method, path, event if method == "POST" else None)[0] for method, path in tried]
for body in (b"", b"[]", b"{", b"[" * 100000, b'{"messages": ' + b"[" * 900 + b"]" * 900 + b"}", b'{"temperature": NaN, "messages": []}',
             b'{"model": "x", "messages": "none", "max_tokens": "many"}'):
    said.append(send("POST", "/v1/chat/completions", body)[0])
said.append(send("GET", "/v1/models")[0])
ask([{"role": "user", "content": "hi"}], n=4, seed=7, logit_bias={"1": 5}, max_tokens=10**9)
open("found", "w").write(json.dumps(said))
"""


async def test_no_other_path_is_let_through_and_no_nonsense_ends_it(boxes):
    async with world_gateway("ok") as (gateway, log):
        rollout, _ = await run(boxes, gateway, agent_settings(PATHS))
    (found,) = [json.loads(change.data) for change in rollout.changes if change.path == "found"]
    assert found == [404] * 14 + [400] * 7 + [200]
    assert not [row for row in log.rows if isinstance(row, Signal)]
    (turn,) = log.turns()
    assert (turn.sampling.max_tokens, turn.sampling.logit_bias, rollout.turns) == (300, (), (turn.id,))


SIDE = r"""
session = SAYS | {"session-id": "s1"}
ask([{"role": "user", "content": "hi"}], session)
ask([{"role": "user", "content": "title?"}], session, tools=False)
ask([{"role": "user", "content": "on"}], session)
ask([{"role": "user", "content": "sub"}], session | {"x-claude-code-agent-id": "a"})
"""


async def test_what_it_asks_beside_its_work_is_told_apart_and_never_the_last(boxes):
    async with world_gateway("ok") as (gateway, log):
        rollout, _ = await run(boxes, gateway, agent_settings(SIDE))
    first, title, own, sub = log.turns()
    assert [turn.purpose for turn in (first, title, own, sub)] == [
        Purpose.TASK,
        Purpose.SIDE,
        Purpose.TASK,
        Purpose.SUBAGENT,
    ]
    assert rollout.turns == (first.id, title.id, sub.id, own.id), "in their order, but the grade goes to the last turn"
    assert len(rollout.messages) == 4


SUMMARISES = r"""
session = SAYS | {"session-id": "s1"}
first = ask([{"role": "user", "content": "hi"}], session)
ask([{"role": "user", "content": "The summary: " + SUMMARY}], session)
"""


async def test_a_window_that_begins_with_its_own_summary_is_counted(boxes):
    lines = "\n".join(
        f"{i}. The function read_{i} in parser_{i}.py returns None where it should raise." for i in range(4)
    )
    agent = f"SUMMARY = {lines!r}\n" + SUMMARISES
    async with world_gateway(lines) as (gateway, log):
        rollout, _ = await run(boxes, gateway, agent_settings(agent), replace(TASK, tokens=2_000))
    summary, turn = log.turns()
    assert turn.window == Window(number=1, begins_with=summary.id, by=WindowMaker.HARNESS)
    assert (rollout.turns, rollout.effort["windows"]) == ((summary.id, turn.id), 2)


async def test_every_budget_ends_it_with_what_was_done(boxes):
    look = stepwise(calls("echo x >> seen"))
    async with world_gateway(look) as (gateway, _):
        turns, _ = await run(boxes, gateway, agent_settings(), replace(TASK, turns=3))
        own, _ = await run(boxes, gateway, agent_settings(turns=2), episode="e.1")
        tokens, _ = await run(boxes, gateway, agent_settings(answer_tokens=100), episode="e.2")
        sent, _ = await run(boxes, gateway, agent_settings(sent_bytes=1500), episode="e.3")
        flood = "for _ in range(10**6): send('GET', '/nothing')"
        flooded, _ = await run(boxes, gateway, agent_settings(flood), replace(TASK, turns=1), episode="e.4")
    assert (turns.ended, len(turns.turns)) == (Ended.TURNS, 3)
    assert (own.ended, len(own.turns)) == (Ended.TURNS, 2)
    assert (tokens.ended, sent.ended) == (Ended.LENGTH, Ended.LENGTH)
    assert (flooded.ended, flooded.turns) == (Ended.FAILED, ())
    assert [change.path for change in turns.changes] == ["seen"]


async def test_the_deadline_ends_it_with_what_was_done(boxes):
    waits = "ask([{'role': 'user', 'content': 'hi'}]); open('a', 'w').write('1'); import time; time.sleep(600)"
    async with world_gateway("ok") as (gateway, _):
        for number, seconds in enumerate((3.0, 12.0, 48.0)):  # until this machine gets something done in the time
            task = replace(TASK, timeout_s=seconds)
            rollout, _ = await run(boxes, gateway, agent_settings(waits), task, episode=f"e.{number}")
            if rollout.turns and rollout.changes:
                break
    assert (rollout.ended, len(rollout.turns), [c.path for c in rollout.changes]) == (Ended.TIMEOUT, 1, ["a"])


@pytest.mark.parametrize(("dialect", "answers"), covering(DIALECTS, ANSWERS[::-1]))
async def test_an_answer_that_is_under_way_at_the_deadline_is_its_last_turn(boxes, dialect, answers):
    settings = agent_settings(environment=spoken(dialect, answers), dialect=dialect)
    engine = Stalls(3)
    for seconds in (2.0, 8.0, 32.0):  # a busy machine starts no agent in the first
        async with world_gateway(engine=engine) as (gateway, log):
            rollout, _ = await run(boxes, gateway, settings, replace(TASK, timeout_s=seconds))
        if [turn.text for turn in log.turns()] == ["hel"]:
            break
    (turn,) = log.turns()
    assert (turn.finish, turn.text) == (Finish.DEADLINE, "hel")
    assert (rollout.ended, rollout.turns) == (Ended.TIMEOUT, (turn.id,))
    assert rollout.messages[-1].text == "hel"


HANGS_UP = """
import socket
ask([{"role": "user", "content": "hi"}])
body = json.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": "QQ"}]}).encode()
s = socket.create_connection(("127.0.0.1", 8321))
s.sendall(b"POST /v1/chat/completions HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(body) + body)
got = b""
while got.count(b'"content":"') < 4:
    got += s.recv(4096)
"""


async def test_an_agent_that_ends_in_the_middle_of_its_last_call_is_graded_at_the_turn_before(boxes):
    engine = Stalls(100)

    def script(request):
        engine.tokens = 3 if request.prompt_ids.count(ord("Q")) else 100
        return "hello"

    engine.script = script
    async with world_gateway(engine=engine) as (gateway, log):
        rollout, _ = await run(boxes, gateway, agent_settings(HANGS_UP))
        async with asyncio.timeout(WHOLE_PROGRAM_S):
            while len(log.turns()) < 2:
                await asyncio.sleep(0.01)
    first, second = log.turns()
    assert (first.finish, second.finish) == (Finish.STOP, Finish.ABORT)
    assert (rollout.ended, rollout.turns) == (Ended.SUBMITTED, (first.id,))


@pytest.mark.parametrize(
    ("instead", "ended", "turns", "why"),
    [
        ("raise SystemExit('no settings')", Ended.FAILED, 0, "no settings"),
        ("ask([{'role': 'user', 'content': 'hi'}]); raise SystemExit('lost')", Ended.SUBMITTED, 1, "lost"),
        ("ask([{'role': 'user', 'content': 'hi'}]); ask([{'role': 'user', 'content': 'x' * 9000}])", Ended.LENGTH, 1, "context"),
        ("ask([{'role': 'user', 'content': 'hi'}]); print('y' * (2 << 20))", Ended.SUBMITTED, 1, "output"),
    ],
)  # fmt: skip
async def test_how_it_ends_says_why(boxes, instead, ended, turns, why):
    async with world_gateway("ok") as (gateway, _):
        rollout, _ = await run(boxes, gateway, agent_settings(instead))
    assert (rollout.ended, len(rollout.turns)) == (ended, turns)
    assert why in rollout.detail["why"]


@pytest.mark.parametrize(("dialect", "answers"), covering(DIALECTS, ANSWERS))
async def test_a_conversation_that_outgrows_the_context_ends_it_in_every_dialect(boxes, dialect, answers):
    instead = "ask([{'role': 'user', 'content': 'hi'}]); ask([{'role': 'user', 'content': 'x' * 9000}])"
    settings = agent_settings(instead, environment=spoken(dialect, answers), dialect=dialect)
    async with world_gateway("ok") as (gateway, _):
        rollout, _ = await run(boxes, gateway, settings)
    assert (rollout.ended, len(rollout.turns)) == (Ended.LENGTH, 1)
    assert "too long" in rollout.detail["why"] or "context_length_exceeded" in rollout.detail["why"]


async def test_a_gateway_that_is_away_is_raised(boxes):
    async with world_gateway("ok") as (gateway, _):
        await gateway.named()
        gateway._url = "http://127.0.0.1:9"
        with pytest.raises(Unavailable):
            await run(boxes, gateway, agent_settings())


async def test_an_agent_that_hangs_up_or_does_not_read_is_no_failure_of_the_gateway(boxes):
    hang = r"""
import socket, time
body = json.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}]}).encode()
for _ in range(4):
    s = socket.create_connection(("127.0.0.1", 8321))
    s.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    s.recv(10)
    s.close()
    s = socket.create_connection(("127.0.0.1", 8321))
    s.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\n\r\nhalf")
    s.close()
kept = []
for _ in range(300):
    try:
        kept.append(socket.create_connection(("127.0.0.1", 8321), timeout=5))
    except OSError:
        break
for s in kept:
    s.close()
while True:  # refused until the relay has seen that the others are closed
    try:
        work("go on")
        break
    except OSError:
        time.sleep(0.05)
"""
    async with world_gateway("a long enough answer") as (gateway, _):
        rollout, _ = await run(boxes, gateway, agent_settings(hang))
    assert rollout.ended is Ended.SUBMITTED
    assert rollout.messages[-1].text == "a long enough answer"


async def test_a_connection_that_it_leaves_open_holds_nobody_up(boxes):
    leaves = r"""
import socket, time
ask([{"role": "user", "content": "hi"}])
if os.fork() == 0:
    os.setsid()
    silent = socket.create_connection(("127.0.0.1", 8321))
    open("open", "w").close()
    while True:
        time.sleep(1)
while not os.path.exists("open"):
    time.sleep(0.01)
"""
    async with world_gateway("ok") as (gateway, _), asyncio.timeout(WHOLE_PROGRAM_S):
        rollout, _ = await run(boxes, gateway, agent_settings(leaves))
    assert rollout.ended is Ended.SUBMITTED


async def test_what_it_leaves_running_asks_nobody_after_the_end(boxes):
    leaves = r"""
ask([{"role": "user", "content": "hi"}])
if os.fork() == 0:
    os.setsid()
    while True:
        try:
            ask([{"role": "user", "content": "more"}])
        except BaseException:
            open("refused", "a").write("x")
"""
    task = replace(TASK, turns=10**6)
    settings = agent_settings(leaves, turns=10**6)
    harness, engine = open_harness("agent", settings), Stalls(100, "ok")
    async with world_gateway(engine=engine) as (gateway, log):
        box = await boxes.start(harness.spec(task))
        await harness.run(task, gateway.model("e", group=None, harness=harness.hash), box)
        refused = ["sh", "-c", "rm -f refused; until test -s refused; do sleep 0.02; done"]
        assert (await box.exec(refused, timeout=WHOLE_PROGRAM_S)).code == 0
        async with asyncio.timeout(WHOLE_PROGRAM_S):
            while engine.running:  # a call that was broken off is a turn, too
                await asyncio.sleep(0.01)
        assert (await box.exec(refused, timeout=WHOLE_PROGRAM_S)).code == 0
        seen = len(log.turns())
        assert (await box.exec(refused, timeout=WHOLE_PROGRAM_S)).code == 0
        assert len(log.turns()) == seen
        await box.stop()
