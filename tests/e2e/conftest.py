"""A whole run on the tiny model: the real workers as processes, and simulated users who like answers that begin with a letter."""

import asyncio
import contextlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
from tests.devices import SETTINGS
from tests.fakes.fork_server import FORK_SERVER

from ostinato.app.storage import home
from ostinato.config import load
from ostinato.launch.commands.crew import Launched, launch
from ostinato.launch.commands.demo import ready
from ostinato.launch.placing import process
from ostinato.record.roles import hold
from ostinato.testing.tiny import tiny_model

LIKED = "^[a-z]"
START_S = 600.0  # a busy machine imports and compiles slowly
SAMPLING = {"max_tokens": 2, "temperature": 1.0}


def messages(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"say {number % 7}"}]


@dataclass
class Acked:
    """The turns and signals that the gateway acknowledged to clients."""

    turns: dict[str, str] = field(default_factory=dict)  # turn -> text as received
    signals: set[str] = field(default_factory=set)
    failures: int = 0


@dataclass
class Run:
    """A run and its workers. `url` stays the same across restarts."""

    config: object
    launched: Launched
    events: list[tuple[str, str]]
    url: str
    _open: contextlib.AsyncExitStack

    async def stop(self):
        await self._open.aclose()

    @property
    def crew(self):
        return [watched.worker for watched in self.launched.supervisor.watched]

    def worker(self, name: str):
        return next(worker for worker in self.crew if worker.name == name)


def write_suite(path: Path, liked: str = LIKED) -> Path:
    """Held-out prompts that are answered well with what begins as it is liked."""
    items = [
        {
            "id": f"i{n}",
            "family": "letters",
            "messages": messages(n),
            "sampling": SAMPLING,
            "grader": "pattern",
            "pattern": liked,
        }
        for n in range(40)
    ]
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def settings(directory: Path, *overrides: str) -> list[str]:
    """Settings of a quick run on the tiny model, as `--set` words."""
    model = tiny_model(directory / "model")
    return [
        f"run.directory='{directory / 'run'}'",
        f"model.source='{model}'",
        "model.dtype='float32'",
        "listen.port=0",
        "serve.control_share=0.25",
        "reward.options={window=0.3}",
        "reward.settle_s=0.1",
        "reward.max_staleness=12",
        "learn.batch=32",
        "learn.checkpoint_every=3",
        "learn.publish_every=2",
        "learn.max_lead=8",
        "learn.poll_s=0.1",
        "train.compute='fp32'",
        "train.publish='fp32'",
        "train.learning_rate=2e-3",
        "train.turn_tokens=2",
        f"evaluate.suite='{write_suite(directory / 'suite.jsonl')}'",
        "evaluate.gate.margin=0.2",
        "evaluate.gate.total_margin=0.3",
        "evaluate.gate.candidates_per_week=1",
        "evaluate.gate.sealed_share=0.0",
        "evaluate.gate.first_draws=2",
        "evaluate.runner.retry_pause_s=0.1",
        "release.poll_s=0.2",
        "release.outcomes.maturity_s=0.3",
        "follow.interval_s=0.2",
        "supervise.longest_wait_s=1.0",
        # what a busy machine delays is no fault of a worker's
        "supervise.silence_s=120",
        "supervise.stop_s=120",
        "serve.store_timeout_s=120",
        *SETTINGS,
        *overrides,
    ]


async def start(directory: Path, *overrides: str, names: Sequence[str] | None = None) -> Run:
    """Start a run and wait until it serves. `names`: start only these workers."""
    config = load(None, settings(directory, *overrides))
    events, stack = [], contextlib.AsyncExitStack()
    stack.enter_context(hold(home(config).root, "up"))
    launched = await stack.enter_async_context(
        launch(config, lambda who, what: events.append((who, what)), names=names)
    )
    try:
        async with asyncio.timeout(START_S):
            url = await launched.during(ready(launched.home, ("live", "control")))
    except BaseException:
        await stack.aclose()
        raise
    return Run(config, launched, events, url, stack)


async def user(name: str, url: str, acked: Acked, until: asyncio.Event, liked: str) -> None:
    """One simulated user: ask, like or dislike, and continue after any failure."""
    number, model = 0, ""
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=300)) as session:
        while not until.is_set():
            number += 1
            try:
                model = model or await _model(session)
                await _ask(session, name, number, model, acked, liked)
            except (aiohttp.ClientError, TimeoutError, ConnectionError, json.JSONDecodeError):
                acked.failures += 1
                await asyncio.sleep(0.2)


async def _model(session: aiohttp.ClientSession) -> str:
    async with session.get("/health") as response:
        return (await response.json())["model"]


async def _ask(session: aiohttp.ClientSession, name: str, number: int, model: str, acked: Acked, liked: str) -> None:
    body = {"model": model, "user": name, "messages": messages(number), **SAMPLING}
    async with session.post("/v1/chat/completions", json=body) as response:
        reply = await response.json()
        if response.status != 200:
            raise aiohttp.ClientError(str(response.status))
    text = reply["choices"][0]["message"]["content"] or ""
    turn = reply["ostinato"]["turns"][0]
    acked.turns[turn] = text
    name_of = "accepted" if re.search(liked, text) else "rejected"
    event = {"id": f"{name}-{number}", "target": turn, "name": name_of, "value": True, "source": "human"}
    for _ in range(1 + number % 2):  # every other event is sent twice
        async with session.post("/v1/feedback", json=event) as response:
            if response.status == 202:
                acked.signals.add(event["id"])


@contextlib.asynccontextmanager
async def crowd(run: Run, count: int = 12, liked: str = LIKED):
    """Simulated users at work inside the block."""
    acked, until = Acked(), asyncio.Event()
    tasks = [asyncio.create_task(user(f"sim-{n}", run.url, acked, until, liked)) for n in range(count)]
    try:
        yield acked
    finally:
        until.set()
        await asyncio.gather(*tasks)


@pytest.fixture(autouse=True)
def forked_workers(monkeypatch):
    """Workers that a test itself supervises are forked; those of `ostinato up` are real processes."""
    monkeypatch.setattr(process, "spawn", FORK_SERVER.spawn)


@pytest.fixture
def running():
    return start


@pytest.fixture
def suite_of():
    return write_suite


@pytest.fixture
def quick_settings():
    return settings


@pytest.fixture
def simulated_users():
    return crowd
