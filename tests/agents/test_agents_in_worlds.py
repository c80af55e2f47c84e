"""Unmodified coding agents in a simulated world: each works in a sandbox, with nothing of the run within reach, until its task is done.

The policy is scripted, as in test_agents.py. Needs the agents: `make agents`.
"""

from pathlib import Path

import pytest
from tests.agents.running import AGENTS
from tests.agents.solving import HOME, answer, installed
from tests.fakes.gateways import KEY, world_gateway

from ostinato.core.conversation import Message, Role
from ostinato.core.records import Purpose
from ostinato.core.sandbox import SandboxSpec
from ostinato.testing.engine import decode
from ostinato.worlds.harness.agent import HOME as INSIDE
from ostinato.worlds.harness.harnesses import open_harness
from ostinato.worlds.harness.rollout import Ended
from ostinato.worlds.sandbox import Boxes
from ostinato.worlds.tasks.task import Grading, Task
from ostinato_client.connect.agent_settings import AGENTS as KNOWN
from ostinato_client.connect.agent_settings import Aim, Surroundings

RESULT = 0xFC  # first byte of a tool's message
TASK = Task(
    id="calc",
    family="repair",
    messages=(Message(role=Role.USER, text="Fix calc.py so that the tests pass."),),
    spec=SandboxSpec(files={"calc.py": b"def add(a, b):\n    return a - b\n"}),
    grading=Grading(grader="pytest"),
    harness="agent",
    turns=20,
    tokens=2000,
    timeout_s=240.0,
)
BASE = {"IS_SANDBOX": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "OSTINATO_API_KEY": "ostinato"}


def settings_of(agent):
    """`[worlds.harness.agent]`, with the settings that `ostinato connect` writes for this agent."""
    known = KNOWN[agent.name]
    place = known.places["user"](Surroundings(env={"HOME": INSIDE}, directory=Path("/work")))
    text = known.settings(None, Aim(url="{base_url}", key=None, model="{model}"))
    if agent.script is None:
        source, inside, path = HOME / agent.name, "/opt/agent", "/opt/agent/bin"
    else:
        source, inside, path = HOME / "node_modules", "/opt/agent/node_modules", "/opt/agent/node_modules/.bin"
    command = [{"Fix calc.py so that the tests pass.": "{prompt}"}.get(word, word) for word in agent.command]
    if agent.script is None:  # its start-up script holds the path where it was installed
        command[0] = f"{path}/{command[0]}"
        command = ["/opt/agent/bin/python", *command]
    if agent.name == "codex":
        command.insert(2, "--skip-git-repo-check")
    if agent.name == "aider":
        command.insert(2, "--no-git")
    return {
        "command": command,
        "environment": {**BASE, "PATH": f"{path}:/usr/local/bin:/usr/bin:/bin"},
        "files": {str(place.relative_to(INSIDE)): text},
        "runtime": {inside: str(source)},
        "dialect": known.dialect,
        "version": agent.package,
        "memory_mb": 2048,
        "processes": 256,
    }


@pytest.fixture(params=AGENTS, ids=lambda agent: agent.name)
def agent(request):
    if not installed(request.param):
        pytest.skip("needs the agents: make agents")
    if request.param.name == "codex" and not list((HOME / "node_modules" / "@openai").glob("codex-linux*")):
        pytest.skip("needs Codex's own binary for this machine, which npm left out")
    return request.param


@pytest.mark.examination
async def test_it_solves_a_task_inside_a_sandbox(agent):
    steps = agent.steps(Path("/work"))

    def script(request):
        ids = request.prompt_ids
        told = "</tools>" in decode(ids)
        return answer(steps, uses_tools=agent.uses_tools, told=told, results=ids.count(RESULT))

    harness, boxes = open_harness("agent", settings_of(agent)), Boxes()
    try:
        async with world_gateway(script, context=4_000_000) as (gateway, log):
            box = await boxes.start(harness.spec(TASK))
            rollout = await harness.run(TASK, gateway.model("e.0", group="g.0", harness=harness.hash), box)
            seen = await box.exec(["sh", "-c", "cat /proc/*/environ; grep -r . /tmp /work 2>/dev/null"], timeout=60.0)
    finally:
        await boxes.close()
    changed = {change.path: change.data for change in rollout.changes}
    assert changed.get("calc.py") == b"def add(a, b):\n    return a + b\n", (rollout.ended, rollout.detail)
    assert rollout.ended is Ended.SUBMITTED
    turns = {turn.id: turn for turn in log.turns()}
    assert set(rollout.turns) == turns.keys()
    assert {(turn.episode, turn.group, turn.harness) for turn in turns.values()} == {("e.0", "g.0", harness.hash)}
    assert {turn.sampling.temperature for turn in turns.values()} == {1.0}
    assert turns[rollout.turns[-1]].purpose is Purpose.TASK
    assert KEY.encode() not in seen.stdout
