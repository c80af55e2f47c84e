"""The servers that `gateway.py` measures, one process each: `python -m benchmarks.serving.servers NAME PORT DIRECTORY`.

`echo`: bare Starlette, the minimum for a Python server of this kind. `gateway`: ours, with an engine that returns a letter at once, and
the real log on disk. `gateway-memory`: the same with a log in memory.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ostinato.core.clock import wall_clock
from ostinato.core.generation import Chunk, Generate
from ostinato.core.interpreter import settle
from ostinato.core.records import Finish, PolicyVersion
from ostinato.record.log import SqlLog
from ostinato.serve.config import QuotaConfig, ServeConfig
from ostinato.serve.gateway import create_app
from ostinato.serve.wire.protocol import BoundedHttp
from ostinato.testing.engine import STOP_ID, FakeEngine
from ostinato.testing.log import MemoryLog
from ostinato.testing.renderer import ByteRenderer

KEY = "sk-benchmark-0123456789"
_CONTEXT = 1 << 20
_POLICY = PolicyVersion(number=0, hash="fake0")


class OneLetter(FakeEngine):
    """Answers at once with one letter and the end token."""

    async def generate(self, request: Generate) -> AsyncIterator[Chunk]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ids, logprobs = (ord("h"), STOP_ID), (-0.1, -0.1)
        yield Chunk(index=0, ids=ids, logprobs=logprobs, policy=_POLICY, text="h", finish=Finish.STOP, seed=1)

    def slots(self) -> dict[str, PolicyVersion]:
        return {"live": _POLICY}

    def numerics(self) -> str:
        return "fake"


def echo() -> Starlette:
    answer = {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "h"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }
    piece = {"id": "chatcmpl-0", "object": "chat.completion.chunk", "created": 0, "model": "m"}

    async def events() -> AsyncIterator[str]:
        for choice in (
            {"index": 0, "delta": {"role": "assistant", "content": "h"}, "finish_reason": None},
            {"index": 0, "delta": {}, "finish_reason": "stop"},
        ):
            yield f"data: {json.dumps({**piece, 'choices': [choice]})}\n\n"
        yield "data: [DONE]\n\n"

    async def chat(request: Request) -> Response:
        body = await request.json()
        if body.get("stream"):
            return StreamingResponse(events(), media_type="text/event-stream")
        return JSONResponse(answer)

    return Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])


def gateway(log: Any) -> Starlette:
    settle()  # as the serving worker does
    config = ServeConfig(
        api_keys=("acme:" + KEY,),  # type: ignore[arg-type]
        quota=QuotaConfig(calls_per_s=1e6, burst=1e6, bytes_per_s=1e12),
    )
    return create_app(
        engine=OneLetter(context=_CONTEXT),
        renderer=ByteRenderer(context=_CONTEXT),
        log=log,
        config=config,
        clock=wall_clock,
        model_name="m",
    )


def main() -> None:
    name, port, directory = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    app = (
        echo()
        if name == "echo"
        else gateway(MemoryLog() if name.endswith("memory") else SqlLog.open(directory / "log.db"))
    )
    config = uvicorn.Config(
        app, port=port, http=BoundedHttp, loop="none", log_level="warning", access_log=False, proxy_headers=False
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(uvicorn.Server(config).serve())


if __name__ == "__main__":
    main()
