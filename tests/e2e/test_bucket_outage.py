"""A gateway that is killed while the bucket is away serves again what it served, from its cache."""

import asyncio
import os
import signal

import aiohttp
from tests.deadlines import LEARNING_S, WHOLE_PROGRAM_S
from tests.fakes.s3_server import s3_options, s3_server


async def answered(url: str) -> dict | None:
    """The answer to a question, or None if there was none."""
    body = {"model": "live", "messages": [{"role": "user", "content": "say 1"}], "max_tokens": 4}
    try:
        async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=WHOLE_PROGRAM_S)) as session:
            async with session.get("/health") as reply:
                body["model"] = (await reply.json())["model"]
            async with session.post("/v1/chat/completions", json=body) as reply:
                return await reply.json() if reply.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return None


async def test_a_gateway_starts_again_while_the_bucket_is_away(tmp_path, running):
    with s3_server() as url:
        options = ", ".join(f"{name}='{value}'" for name, value in s3_options(url).items())
        run = await running(
            tmp_path,
            "weights.url='s3://weights/run'",
            f"weights.options={{{options}}}",
            "weights.retries=1",
            f"follow.cache='{tmp_path / 'cache'}'",
            "relay.timeout_s=20",
            names=("serve",),
        )
        before = await answered(run.url)
    try:  # from here on the bucket is away
        worker = run.worker("serve")
        first = worker.pid
        os.kill(first, signal.SIGKILL)
        async with asyncio.timeout(LEARNING_S):
            while worker.pid in (0, first) or (after := await answered(run.url)) is None:
                await asyncio.sleep(0.2)
    finally:
        await run.stop()
    assert before is not None
    assert after["ostinato"]["spans"][0][:2] == before["ostinato"]["spans"][0][:2], "the same version"
