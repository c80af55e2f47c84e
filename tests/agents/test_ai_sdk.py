"""Vercel's AI SDK against the gateway: its loops with tools, by the Responses API as by chat completions. Needs it: `make agents`."""

import asyncio
import json
from itertools import pairwise
from pathlib import Path

import pytest
from tests.agents.solving import HOME

from ostinato.core.clock import wall_clock
from ostinato.core.records import Branch
from ostinato.serve.config import ServeConfig
from ostinato.serve.gateway import create_app
from ostinato.testing.engine import FakeEngine, decode
from ostinato.testing.log import MemoryLog
from ostinato.testing.renderer import ByteRenderer
from ostinato.testing.serving import serving

MODULES, KEY = HOME / "node_modules", "sk-0123456789abcdef"
CALL = 'Step {}.\n<tool_call>\n{{"name": "weather", "arguments": {{"city":   "{}"}}}}\n</tool_call>'
PROVIDERS = {"responses": "ann", "whole": "bob", "chat": "eve"}  # and the user of its flows
LOOP, TALK = [3, "It stays dry."], ["It stays dry."] * 3

pytestmark = pytest.mark.skipif(
    not (MODULES / "ai").exists() or not (MODULES / "@ai-sdk" / "openai").exists(),
    reason="needs the AI SDK: make agents",
)


def script(request):
    """Asks for two cities, one after the other."""
    results = decode(request.prompt_ids).count("clear skies")
    return CALL.format(results, ["Paris", "Rome"][results]) if results < 2 else "It stays dry."


async def test_a_loop_with_tools_goes_on_in_the_sampled_tokens():
    log, engine = MemoryLog(), FakeEngine(script, context=20_000)
    app = create_app(
        engine=engine,
        renderer=ByteRenderer(context=20_000),
        log=log,
        config=ServeConfig(api_keys=(KEY,)),
        clock=wall_clock,
        model_name="m",
    )
    node, flows = MODULES / ".bin" / "node", Path(__file__).with_name("ai_sdk.mjs")
    async with serving(app) as url:
        process = await asyncio.create_subprocess_exec(
            node, flows, url, KEY, MODULES, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(120):
            out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    told = json.loads(out)
    assert told == {
        f"{name}: {flow}": expected
        for name in PROVIDERS
        for flow, expected in (("loop", LOOP), ("stream and a conversation that goes on", TALK))
    }
    for user in ("ann", "eve"):  # of bob's, who sends `store` false, nothing is kept
        turns = [turn for turn in log.turns() if turn.user == user]
        assert [turn.parent is None for turn in turns] == [True, False, False, True, False, False, False, False]
        for before, after in pairwise(turns):
            if after.parent is not None:
                known = before.prompt_ids + before.sampled_ids
                assert (after.parent, after.branch) == (before.id, Branch.NONE)
                assert after.prompt_ids[: len(known)] == known
