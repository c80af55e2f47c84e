"""A backup is made with the guide's own commands while a run serves, learns and ships; another run starts from it elsewhere."""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from tests.deadlines import LEARNING_S
from tests.fakes import fork_server

from ostinato.app.storage import open_log, open_run
from ostinato.config import load
from ostinato.core.records import Batch, Signal, Turn
from ostinato.record.codec.kinds import KINDS
from ostinato.status import summary

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "running.md"


def commands(heading: str) -> list[str]:
    """The blocks of commands in a section of the guide."""
    section = GUIDE.read_text().partition(f"\n{heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"```sh\n(.*?)```", section, re.DOTALL)


async def shell(tmp_path: Path, script: str, run: Path, settings: list[str]) -> str:
    """Run a block of the guide's commands on this run, with its settings."""
    ostinato = tmp_path / "bin" / "ostinato"
    ostinato.parent.mkdir(exist_ok=True)
    given = " ".join(f"--set '{setting.replace(chr(39), chr(34))}'" for setting in settings)
    ostinato.write_text(f'#!/bin/sh\nexec {sys.executable} {fork_server.__file__} -m ostinato.cli "$@" {given}\n')
    ostinato.chmod(0o755)
    script = script.replace("runs/default", str(run)).replace("/backup", str(tmp_path / "backup"))
    env = os.environ | {"PATH": f"{ostinato.parent}:{os.environ['PATH']}", "COLUMNS": "300", "NO_COLOR": "1"}
    env[fork_server.SHARED] = fork_server.FORK_SERVER.start()
    done = await asyncio.to_thread(
        subprocess.run, ["sh", "-ec", script], capture_output=True, text=True, env=env, timeout=LEARNING_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


async def test_a_run_starts_from_a_backup_that_was_made_under_load(tmp_path, running, simulated_users, quick_settings):
    (tmp_path / "master").write_bytes(b"m" * 40)
    more = ("record.encrypt='user'", f"record.master_key='{tmp_path / 'master'}'", "record.segment_rows=150")
    backing_up, restoring = commands("## Back it up")
    run = await running(tmp_path, *more)
    root = run.launched.home.root
    (root / "erasure").mkdir()
    (root / "erasure" / "3fa09c.json").write_text("a certificate")
    drawn = '{"kind":"opened","token":"w1"}\n{"kind":"drawn","n":0,"task":"t","epoch":0,"size":1}\n'
    (root / "rollouts.jsonl").write_text(drawn)
    told = {name: f'{{"told":"{name}"}}\n' for name in ("audit.1.jsonl", "finished.jsonl", "finished.1.jsonl")}
    for name, line in told.items():
        (root / name).write_text(line)
    with (root / "audit.jsonl").open("a") as file:
        file.write('{"action":"ship"}\n')
    key = (root / "admin.key").read_text()
    try:
        async with simulated_users(run) as acked, asyncio.timeout(LEARNING_S):
            while len(list(root.glob("log/0*.db"))) < 4 or not list(root.glob("checkpoints/*/checkpoint.json")):
                await asyncio.sleep(0.1)
            while True:
                turns, signals = dict(acked.turns), set(acked.signals)
                said = await shell(tmp_path, backing_up, root, [*quick_settings(tmp_path), *more])
                if len(acked.turns) > len(turns):
                    break
                shutil.rmtree(tmp_path / "backup")  # it was so quick that nobody was served meanwhile
            for worker in run.crew:
                os.kill(worker.pid, signal.SIGKILL)
    finally:
        await run.stop()
    shutil.rmtree(root)

    elsewhere = [*quick_settings(tmp_path), *more, f"run.directory='{tmp_path / 'elsewhere'}'"]
    said += await shell(tmp_path, restoring, tmp_path / "elsewhere", elsewhere)
    assert "the master key is not in it" in said
    assert (tmp_path / "elsewhere" / "admin.key").read_text() == key, "clients' signed summaries stay valid"
    assert (tmp_path / "elsewhere" / "erasure" / "3fa09c.json").read_text() == "a certificate"
    assert (tmp_path / "elsewhere" / "rollouts.jsonl").read_text() == drawn, "no task is drawn again"
    assert {name: (tmp_path / "elsewhere" / name).read_text() for name in told} == told
    assert '{"action":"ship"}\n' in (tmp_path / "elsewhere" / "audit.jsonl").read_text()
    config = load(None, elsewhere)
    with open_log(config) as log:
        found = {turn.id: turn.text for turn in await log.find(Turn, [(turn,) for turn in turns])}
        assert found == turns
        assert len(await log.find(Signal, [("default", each) for each in signals])) == len(signals) > 20
        before = [item async for item in log.read(0, {kind.record for kind in KINDS})]
        assert [seq for seq, _ in before] == list(range(1, len(before) + 1))

    steps = max(row.step for _, row in before if isinstance(row, Batch))
    again = await running(tmp_path, *more, f"run.directory='{tmp_path / 'elsewhere'}'")
    try:
        async with simulated_users(again) as acked, asyncio.timeout(LEARNING_S):
            while len(acked.turns) < 30 or await newest_step(config) <= steps:
                await asyncio.sleep(0.2)
    finally:
        await again.stop()
    with open_run(config) as opened:
        rows = [item async for item in opened.log.read(0, {kind.record for kind in KINDS})]
        assert rows[: len(before)] == before
        kept, _ = await summary.summarise(opened.log, opened.folds, opened.log.newest())
        anew = summary.Summary()
        await summary.catch_up(anew, opened.log)
        assert kept.state() == anew.state()
        every = [row.step for _, row in rows if isinstance(row, Batch)]
        assert every == sorted(set(every)) == list(range(every[0], every[-1] + 1))


async def newest_step(config) -> int:
    with open_log(config) as log:
        return max((row.step for _, row in log.tail(1, {Batch}) if isinstance(row, Batch)), default=0)
