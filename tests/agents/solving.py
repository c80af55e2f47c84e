"""An agent at work on a small repository, pointed at a gateway by `ostinato connect`."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ostinato.core.clock import wall_clock
from ostinato.core.records import Consent
from ostinato.serve.config import PrivacyConfig, ServeConfig
from ostinato.serve.gateway import create_app
from ostinato.testing.log import MemoryLog
from ostinato.testing.serving import serving

HOME = Path(os.environ.get("OSTINATO_AGENTS", Path(__file__).parents[2] / ".agents"))
TELEMETRY = ("claude-code", "codex")


def installed(agent):
    return (HOME / "node_modules" / ".bin" / agent.command[0]).exists() or (HOME / agent.name / "bin").exists()


def broken(repo):
    """A repository whose one test fails."""
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


def answer(steps, *, uses_tools, told, results):
    """The policy: it answers the agent's own calls step by step. A request for a title or a summary, which has no tools, gets a few words.

    `told`: the prompt says how to call tools; `results`: the number of tool results in it.
    """
    if uses_tools and not told:
        return "A short title."
    return steps[results] if results < len(steps) else "The tests pass now."


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


async def run(*words, cwd, env, longest_s):
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


async def solve(agents, repo, home, engine, renderer, *, longest_s=120, also=(), settings=None, **config):
    """Connect the agent and have it solve the task. Returns the log and the agent's refused calls.

    `agents`: the agent, or the same with several commands, one after the other. `also`: further `ostinato` commands to run before it, as
    lists of words. `settings`: changes the agent's settings once they are written.
    """
    agents = agents if isinstance(agents, list) else [agents]
    agent = agents[0]
    log, refused = MemoryLog(), []
    app = create_app(
        engine=engine,
        renderer=renderer,
        log=log,
        config=ServeConfig(**config),
        clock=wall_clock,
        model_name="m",
        privacy=PrivacyConfig(store_false=Consent.YES),  # Codex sends it with every call
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
        await run(sys.executable, "-m", "ostinato.cli", *words, *telemetry, cwd=repo, env=env, longest_s=120)
        for words in also:
            await run(sys.executable, "-m", "ostinato.cli", *words, cwd=repo, env=env, longest_s=120)
        if settings is not None:
            settings(home, agent)
        for each in agents:
            await run(*each.command, cwd=repo, env=env, longest_s=longest_s)
        await asyncio.sleep(0.5)  # an exporter's last batch may arrive after the agent has exited
    return log, refused
