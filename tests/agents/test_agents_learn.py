"""One pass through the whole loop with an unmodified agent: 24 repositories, people who keep or undo, rewards, one training step.

mini-swe-agent works on 24 small repositories over SmolLM2 and the embedded engine. The model's answers are scripted: two thirds of the
fixes are right. After each session a simulated person runs the tests, commits the change if they pass and reverts it otherwise, and
sends feedback about the call that made the edit. Needs the agent: `make agents`.
"""

import asyncio
import subprocess
import sys

import httpx2
import pytest
import torch
from tests.agents.running import AGENTS, call
from tests.agents.scripted import V0, scripted_engine, stretched
from tests.agents.solving import installed, passes, run, surroundings

from ostinato.core.clock import wall_clock
from ostinato.core.conversation import call_id
from ostinato.core.records import Reward, Turn
from ostinato.model.numerics import contract
from ostinato.model.renderer import HFRenderer
from ostinato.reward.config import RewardConfig
from ostinato.reward.pipeline import RewardDesk
from ostinato.reward.protocol import load
from ostinato.reward.runners import Inline
from ostinato.serve.config import ServeConfig
from ostinato.serve.gateway import create_app
from ostinato.testing.log import MemoryLog
from ostinato.testing.serving import serving
from ostinato.train.config import TrainConfig
from ostinato.train.trainer import PolicyTrainer

MINI = next(agent for agent in AGENTS if agent.name == "mini-swe-agent")
REPOSITORIES = 24
WRONG = frozenset(range(0, REPOSITORIES, 3))
WINDOW_S = 3600.0
SIGNS = ("+", "-", "*")

pytestmark = pytest.mark.skipif(not installed(MINI), reason="needs the agents: make agents")


def name_of(k):
    return f"combine_{k}"


def task(k):
    return f"Fix {name_of(k)} in part_{k}.py so that the tests pass."


def broken(repo, k):
    """Make a repository with a function that uses the wrong operator, and a test that fails because of it."""
    right, wrong = SIGNS[k % 3], SIGNS[(k + 1) % 3]
    repo.mkdir(parents=True)
    (repo / f"part_{k}.py").write_text(f"def {name_of(k)}(a, b):\n    return a {wrong} b\n")
    test = f"from part_{k} import {name_of(k)}\n\n\ndef test_it():\n    assert {name_of(k)}(7, 3) == 7 {right} 3\n"
    (repo / "test_part.py").write_text(test)
    git(repo, "init", "-q")
    commit(repo)


def commit(repo):
    git(repo, "add", "-A")
    git(repo, "commit", "-qm", "A working state")


def take_back(repo):
    git(repo, "checkout", "-q", ".")


def git(repo, *words):
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=repo, check=True)


def script(text):
    """The policy: look, edit, submit. In every third repository the fix is wrong."""
    k = next(k for k in reversed(range(REPOSITORIES)) if task(k) in text)
    sign = SIGNS[(k + 2) % 3] if k in WRONG else SIGNS[k % 3]
    edit = f"sed -i 's/a . b/a {sign} b/' part_{k}.py"
    steps = [
        call("bash", command=cmd) for cmd in (f"cat part_{k}.py", edit, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
    ]
    return steps[text.count("<tool_response>\n")]


async def session(k, work, url):
    """Run the agent, then keep its change if the tests pass and revert it otherwise. Returns whether they passed."""
    repo, home = work / f"repo{k}", work / f"home{k}"
    home.mkdir()
    broken(repo, k)
    assert not passes(repo)
    env = surroundings(MINI, home)
    words = ["connect", MINI.name, "--url", url, "--model", "m", "--session", f"work-{k}", "--yes"]
    await run(sys.executable, "-m", "ostinato.cli", *words, cwd=repo, env=env, longest_s=120)
    command = [task(k) if word == MINI.command[-1] else word for word in MINI.command]
    await run(*command, cwd=repo, env=env, longest_s=300)
    kept = await asyncio.to_thread(passes, repo)
    await asyncio.to_thread(commit if kept else take_back, repo)
    return kept


async def say(url, log, k, kept):
    """Send the person's feedback about the call that edited. Returns its turn's id."""
    (turn,) = [row for row in log.rows if isinstance(row, Turn) and row.episode == f"work-{k}" and "sed -i" in row.text]
    names = ("accepted", "tests_passed") if kept else ("undone", "tests_failed")
    events = [
        {"id": f"{name}-{k}", "target": call_id(turn.id, 0), "name": name, "value": True, "source": "human"}
        for name in names
    ]
    async with httpx2.AsyncClient() as http:
        reply = await http.post(f"{url}/v1/feedback", json=events)
    assert [each["status"] for each in reply.json()] == ["accepted"] * 2
    return turn.id


async def test_what_people_keep_gets_credit_and_what_they_undo_loses_it(tmp_path, monkeypatch):
    path = stretched(tmp_path)
    torch.set_num_threads(1)
    arithmetic, renderer, log = contract(torch.bfloat16, "exact", 1, block=32), HFRenderer(path), MemoryLog()
    gate = asyncio.Semaphore(2)
    edits = {}
    async with scripted_engine(path, renderer, arithmetic, script, monkeypatch) as engine:
        config = ServeConfig(chunk_timeout_s=400)
        app = create_app(engine=engine, renderer=renderer, log=log, config=config, clock=wall_clock, model_name="m")
        async with serving(app) as url:

            async def one(k):
                async with gate:
                    kept = await session(k, tmp_path, url)
                    edits[await say(url, log, k, kept)] = kept

            await asyncio.gather(*map(one, range(REPOSITORIES)))
    assert list(edits.values()).count(False) == len(WRONG)

    function = load("ostinato.reward.functions:agent", {"window": WINDOW_S, "silence": 0.0})
    config = RewardConfig(user_cap=1.0, user_steps=0, episode_wait_s=0.0)
    later = wall_clock() + WINDOW_S + 1
    desk = RewardDesk(log, Inline(function, max_abs=config.max_abs), lambda: later, config)
    await desk.poll()
    turns = [row for row in log.rows if isinstance(row, Turn)]
    rewards = {row.turn: row.value for row in log.rows if isinstance(row, Reward)}
    assert {turn.id for turn in turns} == set(rewards)
    assert {turn: value for turn, value in rewards.items() if value} == {
        turn: 1.0 if kept else -1.0 for turn, kept in edits.items()
    }
    batch = await desk.batch(1, len(turns), V0)
    credit = {turn: credits[0] for turn, credits in zip(batch.row.turns, batch.row.credits, strict=True)}
    assert set(credit) == set(rewards)
    assert all((credit[turn] > 0) == kept for turn, kept in edits.items())
    before = {turn.parent: kept for turn in turns for edit, kept in edits.items() if turn.id == edit}
    assert len(before) == REPOSITORIES
    assert all((credit[turn] > 0) == kept for turn, kept in before.items())  # the turns before edits share in it

    trainer = PolicyTrainer(path, TrainConfig(compute="bf16", publish="bf16", warmup_steps=0), arithmetic)
    chosen = [turn for turn in turns if turn.id in edits]
    scored = [sum(found) for found in trainer.score(chosen)]
    learned = trainer.step(batch.samples)
    assert learned.step == 1
    moved = [sum(after) - was for after, was in zip(trainer.score(chosen), scored, strict=True)]
    kept, undone = (
        [move for turn, move in zip(chosen, moved, strict=True) if edits[turn.id] is way] for way in (True, False)
    )
    assert sum(kept) / len(kept) > sum(undone) / len(undone)
