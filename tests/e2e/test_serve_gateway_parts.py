"""The gateway with its real neighbours: the torch engine, the model's own renderer and the SQLite log."""

import itertools

import httpx2

from ostinato.core.records import Finish, Turn
from ostinato.record.log import SqlLog
from ostinato.serve.config import ServeConfig
from ostinato.serve.gateway import create_app
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
