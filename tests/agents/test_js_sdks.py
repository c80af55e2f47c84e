"""The official JavaScript clients of OpenAI and Anthropic against the gateway. Needs the clients: `make agents`."""

import asyncio
import json
from pathlib import Path

import pytest
from tests.agents.solving import HOME

from ostinato.core.clock import wall_clock
from ostinato.core.records import Finish, Turn
from ostinato.serve.config import ServeConfig
from ostinato.serve.gateway import create_app
from ostinato.testing.engine import FakeEngine, decode
from ostinato.testing.log import MemoryLog
from ostinato.testing.renderer import ByteRenderer
from ostinato.testing.serving import serving

MODULES, KEY = HOME / "node_modules", "sk-0123456789abcdef"
CALL = 'Let me look.\n<tool_call>\n{"name": "read", "arguments": {"path": "calc.py"}}\n</tool_call>'
PATH = {"path": "calc.py"}
ITEM = ["response.output_item.added", "response.content_part.added", "response.output_text.delta", "response.output_text.done",
        "response.content_part.done", "response.output_item.done"]  # fmt: skip
EXPECTED = {
    "openai: chat": ["It adds.", "stop", True],
    "openai: chat stream": ["It adds.", 0, True],
    "openai: chat tool and its result": ["tool_calls", "read", PATH, "It adds."],
    "openai: chat of two answers with log-probabilities": [2, 2],
    "openai: completions": True,
    "openai: response": ["It adds.", "completed", True],
    "openai: response stream": [["response.created", "response.in_progress", *ITEM, "response.completed"], "It adds."],
    "openai: response tool, gone on by id": ["read", PATH, "It adds."],
    "openai: error": ["BadRequestError", 400, "temprature"],
    "anthropic: message": ["It adds.", "end_turn", True],
    "anthropic: message stream": [
        ["message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta", "message_stop"],
        "It adds.",
    ],
    "anthropic: tool and its result": ["tool_use", "read", PATH, "It adds."],
    "anthropic: cut by the budget": "max_tokens",
    "anthropic: count": True,
    "anthropic: error": ["BadRequestError", 400, "invalid_request_error"],
    "both: left in mid-stream": "left",
    "both: a hundred at once": 100,
}  # fmt: skip

pytestmark = pytest.mark.skipif(
    not (MODULES / "openai").exists() or not (MODULES / "@anthropic-ai" / "sdk").exists(),
    reason="needs the clients: make agents",
)


def script(request):
    text = decode(request.prompt_ids)
    if "long" in text:
        return "word " * 500
    return CALL if "</tools>" in text and "let me look" not in text.lower() else "It adds."


async def test_every_flow_reads_what_was_said():
    log, engine = MemoryLog(), FakeEngine(script, context=20_000)
    app = create_app(
        engine=engine,
        renderer=ByteRenderer(context=20_000),
        log=log,
        config=ServeConfig(api_keys=(KEY,), default_max_tokens=3_000),
        clock=wall_clock,
        model_name="m",
    )
    node, flows = MODULES / ".bin" / "node", Path(__file__).with_name("sdks.mjs")
    async with serving(app) as url:
        process = await asyncio.create_subprocess_exec(
            node, flows, url, KEY, MODULES, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(120):
            out, err = await process.communicate()
            while engine.running:
                await asyncio.sleep(0.01)
    assert process.returncode == 0, err.decode()
    told = json.loads(out)
    for name, expected in EXPECTED.items():
        assert told[name] == expected, name
    assert told.keys() == EXPECTED.keys()
    left = [row for row in log.rows if isinstance(row, Turn) and row.finish is Finish.LEFT]
    assert len(left) <= 2  # the two abandoned streams, unless they had already ended
