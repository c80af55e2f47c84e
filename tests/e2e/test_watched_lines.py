"""The watcher as a process: signals reach the turns whose calls wrote the lines, through kill -9 and a gateway that is away."""

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing

import openai
import pytest
from tests.deadlines import WHOLE_PROGRAM_S

from ostinato.core.clock import wall_clock
from ostinato.serve.config import ServeConfig
from ostinato.serve.gateway import create_app
from ostinato.testing.engine import FakeEngine
from ostinato.testing.log import MemoryLog
from ostinato.testing.renderer import ByteRenderer
from ostinato.testing.serving import serving
from ostinato_client.watch.git import Repository
from ostinato_client.watch.spool import Edit, append
from ostinato_client.watch.watcher import spool_directory

KEY = "sk-0123456789abcdef"
TOOL = {"type": "function", "function": {"name": "write", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "write", "arguments": {"path": "a.py"}}\n</tool_call>'


class Away:
    """A gateway that takes feedback and cannot say so, or does not even take it, until it is back."""

    def __init__(self, app):
        self.app, self.away, self.tries = app, True, 0

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http" or not self.away or scope["path"] != "/v1/feedback":
            await self.app(scope, receive, send)
            return
        self.tries += 1
        if self.tries % 2:

            async def nowhere(message):
                pass

            await self.app(scope, receive, nowhere)
        await send({"type": "http.response.start", "status": 503, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


@pytest.fixture
def repo(tmp_path):
    root = tmp_path / "repo"
    root.mkdir()
    (root / "a.py").write_text("start = 1\n")
    for words in (
        ["init", "-q"],
        ["add", "-A"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "start"],
    ):
        subprocess.run(["git", *words], cwd=root, check=True)
    return root


def watching(repo, url, *words):
    env = os.environ | {"OSTINATO_API_KEY": KEY}
    command = [sys.executable, "-m", "ostinato_client.watch", "--url", url, "--interval", "0.05", *words]
    return subprocess.Popen(command, cwd=repo, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def killed(process):
    process.send_signal(signal.SIGKILL)
    process.communicate()


async def called(url, number):
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY) as client:
        said = [{"role": "user", "content": f"write {number}"}]
        answer = await client.chat.completions.create(model="m", messages=said, tools=[TOOL])
    return answer.choices[0].message.tool_calls[0].id, f"{answer.id}:0"


async def until(condition, longest_s=WHOLE_PROGRAM_S):
    async with asyncio.timeout(longest_s):
        while not condition():
            await asyncio.sleep(0.05)


def waiting(directory):
    if not (directory / "state.db").exists():
        return 0
    with closing(sqlite3.connect(f"file:{directory / 'state.db'}?mode=ro", uri=True)) as db:
        try:
            return db.execute("SELECT count(*) FROM outbox").fetchone()[0]
        except sqlite3.OperationalError:
            return 0


async def test_signals_arrive_once_on_their_turns_whoever_is_killed_or_away(repo):
    log = MemoryLog()
    app = create_app(
        engine=FakeEngine(lambda request: CALL),
        renderer=ByteRenderer(),
        log=log,
        config=ServeConfig(api_keys=(KEY,)),
        clock=wall_clock,
        model_name="m",
    )
    gateway, directory = Away(app), spool_directory(Repository.at(repo))
    directory.mkdir(mode=0o700)
    file, text, turns = repo / "a.py", "start = 1\n", {}

    def write(call, lines, due_in_s=0.5):
        nonlocal text
        before, text = text, text + "".join(f"{line}\n" for line in lines)
        file.write_text(text)
        append(directory, Edit("claude-code", call, str(file), before, text, wall_clock() - 300 + due_in_s))

    async with serving(gateway) as url:
        killed(watching(repo, "http://127.0.0.1:9"))  # nobody is there, and hardly has it begun
        watcher = watching(repo, "http://127.0.0.1:9")
        for number in range(3):
            call, turn = await called(url, number)
            turns[turn] = call
            write(call, [f"first_{number} = {number}", f"second_{number} = {number}"])
        await until(lambda: waiting(directory) == 3)
        killed(watcher)
        for _ in range(6):  # at any instant
            watcher = watching(repo, url)
            call, turn = await called(url, len(turns))
            turns[turn] = call
            write(call, [f"first_{len(turns)} = 1", f"second_{len(turns)} = 2"])
            await asyncio.sleep(0.2 + 0.13 * len(turns) % 0.5)
            killed(watcher)
        last, turn = await called(url, len(turns))
        turns[turn] = last
        write(last, ["kept = 1", "undone = 2"], due_in_s=12.0)
        watcher = watching(repo, url)
        await asyncio.sleep(1.0)
        text = text.replace("undone = 2\n", "")
        file.write_text(text)
        await until(lambda: waiting(directory) == len(turns))
        assert gateway.tries > 0
        gateway.away = False
        await until(lambda: len(log.signals()) == len(turns) and not waiting(directory))
        killed(watcher)
        once = watching(repo, url, "--once")
        told, _ = once.communicate(timeout=WHOLE_PROGRAM_S)
        assert once.returncode == 0, told
    found = {row.turn: (row.name, row.value, row.source.value, row.comment) for row in log.signals()}
    assert found == {
        turn: ("lines_kept_5m", 0.5, "code", "1 of 2 lines")
        if call == last
        else ("lines_kept_5m", 1.0, "code", "2 of 2 lines")
        for turn, call in turns.items()
    }
    assert f"{len(turns)} calls" in told


def test_once_says_what_it_could_not_send(repo):
    once = watching(repo, "http://127.0.0.1:9", "--once")
    told, _ = once.communicate(timeout=WHOLE_PROGRAM_S)
    assert (once.returncode, "following 0 lines" in told) == (0, True)
    for words, says in ((["--repository", "/"], "not a git repository"), (["--url", "ftp://x"], "base_url")):
        wrong = subprocess.run(
            [sys.executable, "-m", "ostinato_client.watch", "--once", *words],
            cwd=repo,
            capture_output=True,
            text=True,
            check=False,
        )
        assert wrong.returncode == 2
        assert says in wrong.stderr
