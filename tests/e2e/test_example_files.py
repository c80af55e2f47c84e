"""Every file of examples/ run as it stands: against a gateway over the tiny model, whose words mean nothing, and where an example is
about what a capable model does, against scripted answers, too.
"""

import asyncio
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from pydantic import SecretStr
from tests.deadlines import WHOLE_PROGRAM_S
from tests.fakes.fork_server import FORK_SERVER

from ostinato.app.storage import home
from ostinato.app.worlds import check_tasks, open_workshop
from ostinato.config import load
from ostinato.core.clock import wall_clock
from ostinato.core.records import NoReward, Pending, Signal, Turn
from ostinato.engine.config import EngineConfig
from ostinato.reward.protocol import load as load_reward
from ostinato.serve.config import ServeConfig
from ostinato.serve.gateway import create_app
from ostinato.testing.engine import FakeEngine, decode
from ostinato.testing.log import MemoryLog
from ostinato.testing.records import a_signal, a_turn
from ostinato.testing.renderer import ByteRenderer
from ostinato.testing.serving import serving
from ostinato.testing.tiny_engine import tiny_engine
from ostinato.worlds.rollout.attempt import Measurement
from ostinato.worlds.tasks.tasksets import load as load_tasks

EXAMPLES = Path(__file__).parents[2] / "examples"
ADMIN = "admin-0123456789abcdef"
MODEL = "smollm2"  # the name under which `ostinato up` serves its default model
AS_IT_STANDS = "import runpy, sys; sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"
RESULT = 0xFC  # what a tool's message begins with, in the scripted gateway's prompts

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Gateway:
    """A gateway's address, and what is in its log since `take` was called last."""

    url: str
    log: MemoryLog
    seen: int = 0

    async def run(self, *command: str | Path) -> str:
        """What a program prints that is told this gateway's address."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *map(str, command), stdout=pipe, stderr=pipe, env=os.environ | self._environment
        )
        async with asyncio.timeout(WHOLE_PROGRAM_S):
            out, err = await process.communicate()
        assert process.returncode == 0, err.decode()
        return out.decode()

    async def fork(self, source: Path) -> str:
        """The same of an example in a process that begins with the libraries imported that it would import."""
        command = [sys.executable, "-c", AS_IT_STANDS, str(source)]
        done = await asyncio.to_thread(FORK_SERVER.run, command, env=self._environment, timeout=WHOLE_PROGRAM_S)
        assert done.returncode == 0, done.stderr
        return done.stdout

    @property
    def _environment(self) -> dict[str, str]:
        return {"OSTINATO_URL": self.url, "OSTINATO_MODEL": MODEL}

    def take(self) -> tuple[list[Turn], list[Signal]]:
        rows, self.seen = self.log.rows[self.seen :], len(self.log.rows)
        return [row for row in rows if isinstance(row, Turn)], [row for row in rows if isinstance(row, Signal)]


@asynccontextmanager
async def gateway_of(engine, renderer):
    log = MemoryLog()
    app = create_app(
        engine=engine,
        renderer=renderer,
        log=log,
        config=ServeConfig(),
        clock=wall_clock,
        model_name=MODEL,
        admin_keys=[SecretStr(ADMIN)],
    )
    async with serving(app) as url:
        yield Gateway(url, log)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    async with (
        tiny_engine(path, EngineConfig(kv_tokens=8192, block=16), context=2048) as tiny,
        gateway_of(tiny.engine, tiny.renderer) as served,
    ):
        yield served


@asynccontextmanager
async def scripted(script):
    async with gateway_of(FakeEngine(script), ByteRenderer()) as served:
        yield served


async def test_the_openai_client_chats_and_says_what_the_person_did(gateway):
    await gateway.run(sys.executable, EXAMPLES / "openai_client.py")
    turns, signals = gateway.take()
    first, second = turns
    assert {turn.user for turn in turns} == {"anna"}
    assert first.episode == second.episode, "the second call continues the first one's conversation"
    assert sorted((signal.turn, signal.name) for signal in signals) == sorted(
        [(first.id, "accepted"), (first.id, "followed_up"), (second.id, "accepted"), (second.id, "undone")]
    )
    assert [signal.correction for signal in signals if signal.name == "undone"] == ["Lamps: 30% off"]


def assert_one_task(turns, signals, *names):
    """All calls are one episode, and the verdict is about the last of them."""
    assert len({turn.episode for turn in turns}) == 1
    assert [signal.turn for signal in signals] == [turns[-1].id]
    assert signals[0].name in names


async def test_the_tool_agent_reports_its_tests_whatever_the_model_says(gateway):
    await gateway.fork(EXAMPLES / "tool_agent.py")
    assert_one_task(*gateway.take(), "tests_passed", "tests_failed")


def steps(*answers):
    """A model that gives these answers in turn, one more for each tool's result."""
    return lambda request: answers[min(request.prompt_ids.count(RESULT), len(answers) - 1)]


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize(("order", "verdict"), [("a2", "tests_passed"), ("none", "tests_failed")])
async def test_the_tool_agents_tests_look_at_what_the_calls_did(order, verdict):
    async with scripted(steps(call("list_orders"), call("refund", order=order), "Done.")) as served:
        await served.fork(EXAMPLES / "tool_agent.py")
        turns, signals = served.take()
    assert len(turns) == 3
    assert_one_task(turns, signals, verdict)


LANGCHAIN = all(importlib.util.find_spec(name) for name in ("langchain", "langchain_openai"))


@pytest.mark.skipif(not LANGCHAIN, reason="needs LangChain: pip install langchain langchain-openai")
async def test_the_langchain_agent_calls_its_tool():
    async with scripted(steps(call("opening_hours", day="Sunday"), "We are closed.")) as served:
        said = await served.run(sys.executable, EXAMPLES / "langchain_agent.py")
        turns, signals = served.take()
    assert said == "We are closed.\n"
    assert len(turns) == 2
    assert_one_task(turns, signals, "accepted")


def node() -> str:
    """The program, if it reads TypeScript and the example's packages are installed."""
    found = shutil.which("node")
    if found is None or not (EXAMPLES / "typescript" / "node_modules").is_dir():
        return ""
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    return found if tuple(map(int, re.findall(r"\d+", version)[:2])) >= (22, 18) else ""


@pytest.mark.skipif(not node(), reason="needs Node 22.18 and `npm install` in examples/typescript")
async def test_the_ai_sdk_streams_an_answer_and_says_what_the_person_did(gateway):
    await gateway.run(node(), EXAMPLES / "typescript" / "chat.ts")
    (turn,), signals = gateway.take()
    assert turn.user == "anna"
    assert [(signal.turn, signal.name) for signal in signals] == [(turn.id, "accepted"), (turn.id, "undone")]


async def outcomes(served, file, directory, *settings):
    """What `ostinato worlds run` would record of a task set, from the slot that the gateway has."""
    config = load(None, [f"run.directory='{directory}'", f"serve.admin_key={ADMIN}", *settings])
    tasks = load_tasks(file)
    check_tasks(config, tasks.tasks)
    async with open_workshop(config, home(config), served.url, tasks, slot="live") as shop:
        measurement = Measurement(tasks.tasks, shop, tries=1, concurrency=4, token="m", again=1, pause_s=0.1)
        return [tried.record(tasks, wall_clock) async for tried in measurement.results()]


async def test_the_taskset_is_worked_on_and_graded(gateway, tmp_path):
    records = await outcomes(gateway, EXAMPLES / "taskset" / "tasks.jsonl", tmp_path)
    turns, _ = gateway.take()
    assert len(records) == len(turns) == 10
    assert {record.split for record in records} == {"train", "held_out"}


async def test_the_own_world_plays_and_grades(gateway, tmp_path):
    source = EXAMPLES / "own_world.py"
    (setting,) = re.findall(r"--set '(.*?)'", source.read_text())
    lines = (await gateway.run(sys.executable, source)).splitlines()
    assert len(lines) == 40
    file = tmp_path / "guess.jsonl"
    file.write_text(lines[0])
    (record,) = await outcomes(gateway, file, tmp_path, setting)
    turns, _ = gateway.take()
    assert record.effort["turns"] == len(turns)
    assert 1 <= len(turns) <= 7
    file.write_text("\n".join(lines[:2]))

    def bisect(request):
        low, high, said = 1, 100, decode(request.prompt_ids)
        for hint in re.findall(r"(Higher|Lower)\.", said):
            guess = (low + high) // 2
            low, high = (guess + 1, high) if hint == "Higher" else (low, guess - 1)
        return str((low + high) // 2)

    async with scripted(bisect) as served:
        records = await outcomes(served, file, tmp_path, setting)
    secrets = [json.loads(line)["world"]["files"]["secret"] for line in lines[:2]]
    assert sorted(record.value for record in records) == sorted(1 - guesses(int(secret)) / 7 for secret in secrets)


def guesses(secret, low=1, high=100):
    """How many wrong guesses a bisecting player makes."""
    guess = (low + high) // 2
    if guess == secret:
        return 0
    return 1 + (guesses(secret, guess + 1, high) if guess < secret else guesses(secret, low, guess - 1))


@pytest.fixture
def reward(monkeypatch):
    """The chat's reward function, found and configured by the settings that its docstring gives."""
    monkeypatch.syspath_prepend(EXAMPLES)
    settings = dict(re.findall(r"`reward\.(function|options) = (.+?)`", (EXAMPLES / "reward_chat.py").read_text()))
    config = load(None, [f"reward.{name}={value}" for name, value in settings.items()]).reward
    return load_reward(config.function, config.options)


@pytest.mark.parametrize(
    ("said", "tokens", "value"),
    [
        ([("accepted", 1)], 600, 0.5),
        ([("accepted", 1), ("followed_up", 1)], 10, 0.6),
        ([("accepted", 1), ("undone", 1)], 10, -0.5),
        ([("regenerated", 1)], 10, -0.5),
        ([("thumbs", 1), ("accepted", 1)], 10, 1.0),
        ([("thumbs", 1), ("thumbs", -1)], 10, -1.0),
        ([("accepted", 1)], 900, 0.25),
        ([("accepted", 1)], 6000, 0.0),
    ],
)
async def test_the_chats_reward(reward, said, tokens, value):
    turn = a_turn(ended_at=10.0, sampled=(5,) * tokens)
    signals = [a_signal(turn, name, value=float(worth), at=11.0 + n) for n, (name, worth) in enumerate(said)]
    assert reward(turn, signals[::-1], 1810.0).value == pytest.approx(value)
    assert reward(turn, signals, 1809.0) == Pending(until=1810.0)


async def test_silence_and_signals_that_it_does_not_know_are_no_reward_of_the_chat(reward):
    turn = a_turn(ended_at=10.0)
    for signals in ([], [a_signal(turn, "judged_praised", id="s")]):
        assert reward(turn, signals, 1810.0) == NoReward(reason="silence")


async def test_the_metrics_are_in_force():
    file = EXAMPLES / "metric.toml"
    declared = tomllib.loads(file.read_text())["release"]["metrics"]
    metrics = {metric.name: metric for metric in load(file).release.metrics}
    for each in declared:
        assert metrics[each["name"]].role == "guardrail"
        assert metrics[each["name"]].tolerance == each["tolerance"]
    assert {"acceptance", "failed", "stopped"} <= set(metrics)
