"""Who has no gateway on its own host measures through the one that `evaluate.gateway` names, with the key that both were given."""

import json

import pytest
from aiohttp import web
from rich.console import Console

from ostinato.app.storage import open_run
from ostinato.config import load
from ostinato.core.errors import BadRequest, Unavailable
from ostinato.launch.commands.release import evaluate_slot
from ostinato.launch.workers.prepare import prepare
from ostinato.testing.tiny import tiny_model

KEY = "shared-0123456789abcdef"


def settings(tmp_path, *more):
    suite = tmp_path / "suite.jsonl"
    item = {
        "id": "a",
        "family": "f",
        "messages": [{"role": "user", "content": "x"}],
        "grader": "pattern",
        "pattern": "y",
    }
    suite.write_text(json.dumps(item) + "\n")
    words = [f"run.directory={tmp_path / 'run'}", f"evaluate.suite={suite}", f"serve.admin_key={KEY}"]
    return load(None, [*words, f"model.source={tiny_model(tmp_path / 'model')}", "model.dtype='float32'", *more])


async def test_a_slot_is_scored_through_a_gateway_of_another_host(tmp_path):
    config = settings(tmp_path)
    with open_run(config) as run:
        await prepare(run, lambda _: None)
        base = await run.follower.resolve("live")
    with pytest.raises(Unavailable, match=r"evaluate\.gateway"):
        await evaluate_slot(config, "live", 1, Console())
    keys = []

    async def health(request):
        return web.json_response({"model": "m", "slots": {"live": {"number": base.number, "hash": base.hash}}})

    async def answer(request):
        keys.append(request.headers.get("X-Ostinato-Key"))
        return web.json_response({"error": {"message": "seen"}}, status=400)

    app = web.Application()
    app.router.add_get("/health", health)
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        host, port = runner.addresses[0][:2]
        with pytest.raises(BadRequest, match="seen"):
            await evaluate_slot(settings(tmp_path, f"evaluate.gateway=http://{host}:{port}"), "live", 1, Console())
    finally:
        await runner.cleanup()
    assert keys == [KEY]
