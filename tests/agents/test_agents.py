"""Unmodified coding agents, with the settings that `ostinato connect` writes, solve a task through the gateway.

The policy is scripted, so that the wire is what is tested: every call is answered and captured, and every prompt is the tokens of
the turn before it and what is new. Needs the agents: `make agents`.
"""

import asyncio
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from tests.agents.running import AGENTS

from ostinato.core.clock import wall_clock
from ostinato.core.records import Finish, Signal, Turn
from ostinato.serve.config import ServeConfig
from ostinato.serve.gateway import create_app
from ostinato.testing.engine import FakeEngine, decode
from ostinato.testing.log import MemoryLog
from ostinato.testing.renderer import ByteRenderer
from ostinato.testing.serving import serving

HOME = Path(os.environ.get("OSTINATO_AGENTS", Path(__file__).parents[2] / ".agents"))
RESULT = 0xFC  # what a tool's message begins with
CONTEXT = 4_000_000
TELEMETRY = ("claude-code", "codex")


def installed(agent):
    return (HOME / "node_modules" / ".bin" / agent.command[0]).exists() or (HOME / agent.name / "bin").exists()


@pytest.fixture(params=AGENTS, ids=lambda agent: agent.name)
def agent(request):
    if not installed(request.param):
        pytest.skip("needs the agents: make agents")
    return request.param


@pytest.fixture
def repo(tmp_path):
    repo = tmp_path / "repo"
    repo.mkdir()
    (repo / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    (repo / "test_calc.py").write_text("from calc import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n")
    for words in (
        ["init", "-q"],
        ["add", "-A"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "start"],
    ):
        subprocess.run(["git", *words], cwd=repo, check=True)
    return repo


def passes(repo):
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."]
    return subprocess.run(words, cwd=repo, capture_output=True, check=False).returncode == 0


def policy(steps, *, uses_tools):
    """Answers the agent's own calls step by step; a title or a summary, which offers no tools, gets a few words."""

    def script(request):
        if uses_tools and "</tools>" not in decode(request.prompt_ids):
            return "A short title."
        done = request.prompt_ids.count(RESULT)
        return steps[done] if done < len(steps) else "The tests pass now."

    return script


def surroundings(agent, home):
    paths = [HOME / "node_modules" / ".bin", HOME / agent.name / "bin", Path(sys.executable).parent]
    return {
        "HOME": str(home),
        "PATH": ":".join([*map(str, paths), os.environ["PATH"]]),
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        "IS_SANDBOX": "1",
        "OSTINATO_API_KEY": "sk-any-0123456789",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }


async def run(*words, cwd, env, longest_s=120):
    process = await asyncio.create_subprocess_exec(
        *words, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(longest_s):
            told, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        told, _ = await process.communicate()
        pytest.fail(f"{words[0]} did not end: {told.decode(errors='replace')[-2000:]}")
    assert process.returncode == 0, told.decode(errors="replace")[-2000:]
    return told.decode(errors="replace")


async def solved(agent, repo, home):
    """Connect the agent and have it solve the task; the log, and the agent's calls that were refused."""
    log, refused = MemoryLog(), []
    app = create_app(
        engine=FakeEngine(policy(agent.steps(repo), uses_tools=agent.uses_tools), context=CONTEXT),
        renderer=ByteRenderer(context=CONTEXT),
        log=log,
        config=ServeConfig(),
        clock=wall_clock,
        model_name="m",
    )

    async def watched(scope, receive, send):
        async def tell(message):
            is_call = scope["type"] == "http" and scope["method"] == "POST" and "analytics" not in scope["path"]
            if message["type"] == "http.response.start" and message["status"] >= 400 and is_call:
                refused.append((scope["path"], message["status"]))
            await send(message)

        await app(scope, receive, tell)

    env = surroundings(agent, home)
    async with serving(watched) as url:
        words = ["connect", agent.name, "--url", url, "--model", "m", "--yes"]
        telemetry = ["--telemetry"] if agent.name in TELEMETRY else []
        await run(sys.executable, "-m", "ostinato.cli", *words, *telemetry, cwd=repo, env=env)
        await run(*agent.command, cwd=repo, env=env)
        await asyncio.sleep(0.5)  # an exporter's last batch may come when the agent has gone
    return log, refused


async def test_an_unmodified_agent_solves_a_task_and_every_prompt_continues_the_turn_before(agent, repo, tmp_path):
    assert not passes(repo)
    home = tmp_path / "home"
    home.mkdir()
    log, refused = await solved(agent, repo, home)
    assert passes(repo)
    assert refused == []
    turns = [row for row in log.rows if isinstance(row, Turn)]
    assert all(turn.finish in (Finish.STOP, Finish.TOOL_CALLS) for turn in turns)
    if not agent.uses_tools:
        assert len(turns) >= 1
        return
    own = [turn for turn in turns if "</tools>" in decode(turn.prompt_ids)]
    steps = agent.steps(repo)
    assert [turn.text for turn in own[: len(steps)]] == steps
    assert len({turn.episode for turn in own}) == 1
    for before, after in pairwise(own):
        known = before.prompt_ids + before.sampled_ids
        assert after.parent == before.id
        assert after.prompt_ids[: len(known)] == known
    if agent.name in TELEMETRY:
        told = {(row.turn, row.name) for row in log.rows if isinstance(row, Signal)}
        assert {(turn.id, "tool_ok") for turn in own[: len(steps)]} <= told
