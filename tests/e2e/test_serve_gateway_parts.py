"""The gateway with its real neighbours: the torch engine, the model's own renderer and the SQLite log."""

import asyncio
import contextlib
import itertools

import httpx2
import pysqlite3.dbapi2
import pytest
from tests.deadlines import WHOLE_PROGRAM_S

from ostinato.core.clock import wall_clock
from ostinato.core.records import Finish, Turn
from ostinato.record.log import SqlLog
from ostinato.serve.config import ServeConfig
from ostinato.serve.gateway import create_app
from ostinato.testing.engine import FakeEngine
from ostinato.testing.renderer import ByteRenderer
from ostinato.testing.serving import serving
from ostinato.testing.tiny_engine import tiny_engine


async def test_a_conversation_across_a_restart_is_one_chain_of_ids(tmp_path):
    async with tiny_engine(tmp_path) as tiny:
        renderer = tiny.renderer
        talk = [{"role": "user", "content": "hello"}]
        for _ in range(2):
            log = SqlLog.open(tmp_path / "log.db")
            app = create_app(
                engine=tiny.engine, renderer=renderer, log=log, config=ServeConfig(), clock=lambda: 1.0, model_name="m"
            )
            transport = httpx2.ASGITransport(app=app)
            async with (
                app.router.lifespan_context(app),
                httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http,
            ):
                for seed in range(2):
                    body = {
                        "model": "m",
                        "messages": talk,
                        "user": "u",
                        "max_tokens": 12,
                        "seed": seed,
                        "logprobs": True,
                    }
                    reply = await http.post("/v1/chat/completions", json=body)
                    assert reply.status_code == 200, reply.text
                    text = reply.json()["choices"][0]["message"]["content"]
                    talk = [*talk, {"role": "assistant", "content": text}, {"role": "user", "content": "lo lo"}]
            turns = [row async for _, row in log.read(0, {Turn})]
            log.close()
        assert len(turns) == 4
        for before, after in itertools.pairwise(turns):
            known = before.prompt_ids + before.sampled_ids
            assert after.prompt_ids[: len(known)] == known
            assert (after.parent, after.episode) == (before.id, before.episode)
        assert {turn.finish for turn in turns} <= {Finish.LENGTH, Finish.STOP}


@contextlib.contextmanager
def held(directory):
    """Another program holds the log's write lock."""
    (file,) = directory.rglob("*.db")
    connection = pysqlite3.dbapi2.connect(str(file), isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        connection.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_no_end_is_shown_before_the_disk_has_the_turn(tmp_path, stream):
    with SqlLog.open(tmp_path / "log") as log, SqlLog.open(tmp_path / "log") as beside:
        app = create_app(
            engine=FakeEngine(lambda request: "hello"),
            renderer=ByteRenderer(),
            log=log,
            config=ServeConfig(),
            clock=wall_clock,
            model_name="m",
        )
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
        async with serving(app) as url, httpx2.AsyncClient(base_url=url, timeout=WHOLE_PROGRAM_S) as http:
            with held(tmp_path / "log"):
                call = asyncio.create_task(http.post("/v1/chat/completions", json=body))
                await asyncio.sleep(0.5)
                assert not call.done()
            reply = await call
            assert reply.status_code == 200
            (turn,) = await beside.find(Turn, [(reply.headers["x-ostinato-turn"],)])
            assert turn.text == "hello"


async def test_a_log_that_is_held_for_ever_is_told_in_time(tmp_path):
    with SqlLog.open(tmp_path / "log") as log:
        app = create_app(
            engine=FakeEngine(lambda request: "hello"),
            renderer=ByteRenderer(),
            log=log,
            config=ServeConfig(store_timeout_s=0.3),
            clock=wall_clock,
            model_name="m",
        )
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        event = {"id": "s", "target": "t:0", "name": "accepted", "value": True, "source": "human"}
        async with serving(app) as url, httpx2.AsyncClient(base_url=url, timeout=WHOLE_PROGRAM_S) as http:
            with held(tmp_path / "log"):
                calls = [http.post("/v1/chat/completions", json=body) for _ in range(10)]
                replies = await asyncio.gather(*calls, http.post("/v1/feedback", json=event))
            assert {reply.status_code for reply in replies} == {503}
            async with asyncio.timeout(WHOLE_PROGRAM_S):
                while (
                    await http.post("/v1/feedback", json=event)
                ).status_code != 202:  # a busy machine may take 0.3 s for it
                    await asyncio.sleep(0.1)
