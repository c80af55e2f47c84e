"""Masking over a run's own parts: planted values reach no file of the run's directory, and no prompt that it logs."""

import asyncio

import httpx2
from tests.deadlines import WHOLE_PROGRAM_S

from ostinato.app.gateway import open_serving
from ostinato.app.storage import open_run
from ostinato.config import load
from ostinato.core.records import Signal, Turn
from ostinato.launch.views.progress import Progress
from ostinato.launch.workers.prepare import prepare
from ostinato.launch.workers.serve import WeightLoader
from ostinato.testing.serving import serving

MAIL, TOKEN = "plant.ed@example.com", "ghp_a1B2c3D4e5F6g7H8i9J0kLmNoPqRsTuVwXyZ"
PLANTED = (MAIL.encode(), TOKEN.encode())


async def ask(http, path, **fields):
    reply = await http.post(path, json={"model": "ostinato", "stream": False, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


async def test_planted_values_reach_no_file_of_a_run(tmp_path, quick_settings):
    config = load(None, quick_settings(tmp_path, "privacy.scrub=mask", "record.encrypt=none"))
    with open_run(config) as run:
        path = await prepare(run, lambda _: None)
        parts = await open_serving(run, path)
        await parts.engine.start()
        loader = WeightLoader(parts, run.log, Progress(run.home.progress("serve")), lambda: None)
        following = asyncio.create_task(loader.run(("live",)))
        try:
            async with asyncio.timeout(WHOLE_PROGRAM_S):
                while "live" not in parts.engine.slots():
                    await asyncio.sleep(0.02)
            async with serving(parts.gateway) as url, httpx2.AsyncClient(base_url=url, timeout=WHOLE_PROGRAM_S) as http:
                name = (await http.get("/v1/models")).json()["data"][0]["id"]
                said, talk = f"I am {MAIL}, {TOKEN}", [{"role": "user", "content": f"I am {MAIL}, {TOKEN}"}]
                body = await ask(
                    http, "/v1/chat/completions", model=name, messages=talk, max_tokens=4, user="ann", stop=[MAIL]
                )
                await ask(http, "/v1/completions", model=name, prompt=said, max_tokens=4)
                await ask(http, "/v1/responses", model=name, input=said, instructions=said, max_output_tokens=4)
                await ask(http, "/v1/messages", model=name, system=said, messages=talk, max_tokens=4)
                event = {"target": body["id"], "name": "x", "value": 1, "comment": said, "correction": said}
                assert (await http.post("/v1/feedback", json=event)).status_code == 202
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await parts.engine.close()
        from ostinato.model.renderer import HFRenderer

        renderer = HFRenderer(path)
        rows = [row async for _, row in run.log.read(0, {Turn, Signal})]
        turns = [row for row in rows if isinstance(row, Turn)]
        assert len(turns) == 4
        for turn in turns:
            prompt = renderer.decode(turn.prompt_ids)
            assert "⟨EMAIL_" in prompt
            assert "⟨GITHUB_TOKEN_" in prompt
        written = "".join(map(repr, rows)) + "".join(renderer.decode(turn.prompt_ids) for turn in turns)
        assert not any(value.decode() in written for value in PLANTED)
    files = [file for file in run.home.root.rglob("*") if file.is_file()]
    assert any("log" in str(file) for file in files)
    assert [file for file in files for value in PLANTED if value in file.read_bytes()] == []
