"""Unmodified coding agents with the hooks of `ostinato watch`: each line that they write is attributed to the call that wrote it.

Needs the agents: `make agents`.
"""

import pytest
from tests.agents.running import AGENTS
from tests.agents.solving import answer, installed, passes, solve

from ostinato.core.clock import wall_clock
from ostinato.core.conversation import calling_turn
from ostinato.core.records import Turn
from ostinato.testing.engine import FakeEngine, decode
from ostinato.testing.renderer import ByteRenderer
from ostinato_client.watch.git import Repository
from ostinato_client.watch.state import State
from ostinato_client.watch.watcher import Watcher, spool_directory

RESULT = 0xFC  # first byte of a tool's message
CONTEXT = 4_000_000


@pytest.mark.parametrize("name", ["claude-code", "opencode"])
@pytest.mark.parametrize("scope", ["user", "project"])
async def test_the_line_that_an_agent_wrote_is_its_calls(name, scope, repo, home):
    agent = next(agent for agent in AGENTS if agent.name == name)
    if not installed(agent):
        pytest.skip("needs the agents: make agents")

    def script(request):
        ids = request.prompt_ids
        told = "</tools>" in decode(ids)
        return answer(agent.steps(repo), uses_tools=agent.uses_tools, told=told, results=ids.count(RESULT))

    hook = ["watch", "--install", name, "--scope", scope, "--yes"]
    engine, renderer = FakeEngine(script, context=CONTEXT), ByteRenderer(context=CONTEXT)
    log, refused = await solve(agent, repo, home, engine, renderer, also=[hook])
    assert passes(repo)
    assert refused == []
    found = Repository.at(repo)
    with State(spool_directory(found)) as state:
        Watcher(found, state, wall_clock).look()
        Watcher(found, state, lambda: wall_clock() + 301).look()
        (event,) = state.waiting(10)
    edit = next(row for row in log.rows if isinstance(row, Turn) and row.text == agent.steps(repo)[1])
    assert (calling_turn(event.target), event.name, event.value) == (edit.id, "lines_kept_5m", 1.0)
    assert event.comment == "1 of 1 lines"
