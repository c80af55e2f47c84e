"""Nothing that a run writes can be read by other users of the machine."""

import asyncio

from tests.deadlines import LEARNING_S

from ostinato.status.progress_lines import Lines


async def test_nothing_in_a_runs_directory_is_open_to_others(tmp_path, running, simulated_users):
    run = await running(tmp_path, "housekeeping.every_s=2", "learn.checkpoint_every=1")
    root = run.launched.home.root
    try:
        lines, seen = Lines(run.launched.home.progress("train")), set()
        async with simulated_users(run), asyncio.timeout(LEARNING_S):
            while not {"step", "published"} <= seen or not list(root.glob("checkpoints/*/*.safetensors")):
                await asyncio.sleep(0.2)
                seen |= {line["kind"] for line in lines.new()}
    finally:
        await run.stop()
    written = [root, *root.rglob("*")]
    names = {path.name for path in written}
    assert {"serve.jsonl", "train.log", "follow.json", "workers.json", "objects", "LATEST", "admin.key"} <= names
    assert [str(path.relative_to(root)) for path in written if path.stat().st_mode & 0o077] == []
