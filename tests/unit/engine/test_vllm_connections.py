"""A vLLM server closes connections that nobody used for five seconds, and may do so just as a request arrives on one."""

import asyncio
import contextlib
import json

from tests.deadlines import PATIENT_S

from ostinato.engine.vllm.server import ServerClient
from ostinato.weights.follow.drive import VllmFollower

EVENT = {
    "choices": [{"index": 0, "token_ids": [7], "logprobs": {"content": [{"logprob": -0.5}]}, "finish_reason": "stop"}]
}
ANSWERS = {
    "/inference/v1/generate": f"data: {json.dumps(EVENT)}\n\ndata: [DONE]\n\n",
    "/weight_info": json.dumps({"weight_version": "root"}),
    "/collective_rpc": json.dumps({"results": [{"state": "ready", "root": "root", "served": "root", "seconds": 0.0}]}),
    "/init_weight_transfer_engine": "{}",
}


@contextlib.asynccontextmanager
async def impatient_server():
    """Answers one request on each connection, offers to keep it, and closes it when the next request has arrived."""

    open_ones = set()

    async def connected(reader, writer):
        open_ones.add(asyncio.current_task())
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            lengths = [line.split(":")[1] for line in head.splitlines() if line.lower().startswith("content-length:")]
            await reader.readexactly(int(lengths[0]) if lengths else 0)
            body = ANSWERS[head.split()[1]].encode()
            kept = b"HTTP/1.1 200 OK\r\nconnection: keep-alive\r\ncontent-type: application/json\r\n"
            writer.write(kept + b"content-length: %d\r\n\r\n" % len(body) + body)
            await writer.drain()
            await reader.readuntil(b"\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await asyncio.gather(*open_ones)


async def test_requests_never_use_a_connection_that_the_server_may_be_closing():
    async with impatient_server() as url:
        client = ServerClient(url, None, silence_s=PATIENT_S)
        try:
            for _ in range(5):
                assert [choice.ids async for choice in client.tokens({"token_ids": [1]})] == [[7]]
        finally:
            await client.close()


async def test_nor_do_changes_of_weights():
    async with impatient_server() as url, VllmFollower(url, None, {"url": "s"}) as driver:
        for _ in range(5):
            assert await driver.served() == "root"
            assert (await driver._ask("ostinato_status"))[0]["state"] == "ready"
