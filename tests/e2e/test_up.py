"""`ostinato up` itself, as a process: it refuses early, heals what dies or hangs, ends cleanly, and survives kill -9 of itself."""

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import aiohttp
import psutil
import pytest
from tests.deadlines import WHOLE_PROGRAM_S
from tests.fakes.fork_server import FORK_SERVER

from ostinato.app.storage import Home, open_log, open_store
from ostinato.config import load
from ostinato.core.notices import Alarm
from ostinato.launch.placing import warm_process
from ostinato.launch.placing.warm import NO_FORKS
from ostinato.status.gateway_address import read_address
from ostinato.status.worker_status import read_board

PATIENT_S = 900.0


class Up:
    """A process of `ostinato up`, and the directory of its run. `mortal`: its workers are not forked, so they die with it."""

    def __init__(
        self, directory: Path, settings: list[str], *more: str, output: Path | None = None, mortal: bool = False
    ) -> None:
        self.words = [word for setting in (*settings, *more) for word in ("--set", setting)]
        self.config = load(None, [*settings, *more])
        self.home = Home(self.config.run.directory)
        self.output = output or directory / "up.txt"
        self.url = ""
        command = [sys.executable, "-m", "ostinato.cli", "up", *self.words]
        shown = {"NO_COLOR": "1", "COLUMNS": "200"}
        with self.output.open("ab") as written:
            if mortal:
                shown |= os.environ
                self.process = subprocess.Popen(command, stdout=written, stderr=subprocess.STDOUT, env=shown)
            else:
                streams = {"stdin": subprocess.DEVNULL, "stdout": written, "stderr": subprocess.STDOUT}
                self.process = FORK_SERVER.popen(command, env=shown, forks=True, **streams)

    async def ended(self, timeout_s: float = PATIENT_S) -> int:
        return await asyncio.to_thread(self.process.wait, timeout_s)

    def said(self) -> str:
        return self.output.read_text() if self.output.is_file() else ""

    def standing(self, name: str):
        board = read_board(self.home.workers)
        if board is None or board.pid != self.process.pid:
            return None
        return next(worker for worker in board.workers if worker.name == name)

    async def until(self, condition, what: str, timeout_s: float = PATIENT_S):
        async with asyncio.timeout(timeout_s):
            while not (found := condition()):
                assert self.process.poll() is None, f"up ended before {what}: {self.said()}"
                await asyncio.sleep(0.1)
        return found

    async def serving(self) -> str:
        self.url = await self.until(lambda: read_address(self.home.address), "the gateway answered")
        return self.url

    async def doing(self, name: str, what: str, than: int = 0) -> int:
        """The pid of a worker that does this, once it is another one than `than`."""

        def found():
            worker = self.standing(name)
            return worker.pid if worker and worker.pid != than and worker.doing.startswith(what) else 0

        return await self.until(found, f"{name} was {what}")

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()


@pytest.fixture
def up(tmp_path, quick_settings):
    """Starts `up` on the tiny model; whatever is left is killed."""
    started = []

    def start(*more: str, mortal: bool = False) -> Up:
        started.append(Up(tmp_path, quick_settings(tmp_path, "model.numerics=fast"), *more, mortal=mortal))
        return started[-1]

    yield start
    for each in started:
        each.kill()


async def health(url: str) -> dict:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as response:
        return await response.json()


async def metrics(run: Up) -> set[str]:
    """The lines that an operator's Prometheus reads."""
    headers = {"authorization": f"Bearer {run.home.admin_key()}"}
    async with aiohttp.ClientSession(headers=headers) as session, session.get(f"{run.url}/metrics") as response:
        assert response.status == 200
        return set((await response.text()).splitlines())


async def live(url: str) -> str:
    """What is served as live, once something is."""
    async with asyncio.timeout(WHOLE_PROGRAM_S):
        while "live" not in (slots := (await health(url))["slots"]):
            await asyncio.sleep(0.2)
    return slots["live"]["hash"]


def contents(directory: Path) -> dict[str, str]:
    """Every file of a run that only `up` itself writes, by its hash."""
    files = [
        directory / name
        for name in ("config.json", "gateway.url", "admin.key", ".up.lock", ".serve.lock", ".train.lock")
    ]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def into_every_process(monkeypatch, directory: Path, program: str) -> None:
    """Each Python process that is started from now on runs this first."""
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(directory), os.environ.get("PYTHONPATH", "")]))


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


HARM = """
import ctypes, os, threading, time

class Hang(BaseException):
    def __init__(self):
        time.sleep(1e6)

def harm():
    while True:
        time.sleep(0.5)
        for kind, error in (("die", MemoryError), ("hang", Hang)):
            if os.path.exists(os.path.join(os.environ["HARM"], f"{kind}-{os.getpid()}")):
                for thread in threading.enumerate():
                    if type(thread).__name__ == "EngineThread":
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(error))

threading.Thread(target=harm, daemon=True).start()
"""

LONG_STEPS = """
import sys, threading, time

def lengthen():
    while not hasattr(sys.modules.get("ostinato.train.trainer"), "PolicyTrainer"):
        time.sleep(0.1)
    trainer = sys.modules["ostinato.train.trainer"].PolicyTrainer
    step = trainer.step
    trainer.step = lambda *given: (time.sleep(5), step(*given))[1]

threading.Thread(target=lengthen, daemon=True).start()
"""


async def test_it_heals_refuses_a_second_start_and_ends_cleanly_in_mid_step(tmp_path, up, simulated_users, monkeypatch):
    """The engine's harm is done from inside, in its own thread, between two instructions."""
    into_every_process(monkeypatch, tmp_path / "harm", HARM + LONG_STEPS)
    monkeypatch.setenv("HARM", str(tmp_path / "harm"))
    first = up("supervise.silence_s=20", "supervise.engine_s=6", "evaluate.suite=''")
    await first.until(lambda: "reserved http://" in first.said(), "it took its port")
    url = first.said().split("reserved ")[1].split(";")[0]
    assert read_address(first.home.address) is None, "the port is taken long before the model is loaded"
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=PATIENT_S):
        pass
    assert await first.serving() == url
    served = await live(url)
    await first.doing("train", "waiting for 32 turns")

    before = contents(first.home.root)
    second = up("listen.port=0", "learn.batch=7")
    assert await second.ended() == 2
    assert f"another up process (pid {first.process.pid}) already uses" in first.said()
    assert contents(first.home.root) == before, "the second start touched the first one's files"
    assert first.process.poll() is None

    await harm_engine(first, "hang", "EngineDied: the engine has finished no step or command for", tmp_path / "harm")
    assert await first.serving() == url
    assert await live(url) == served

    pid = await first.doing("train", "waiting for 32 turns")
    restarts = first.standing("train").restarts + 1
    os.kill(pid, signal.SIGSTOP)
    await first.doing("train", "waiting for 32 turns", than=pid)
    worker = first.standing("train")
    assert worker.restarts == restarts
    assert "gave no sign of life" in worker.reason
    seen = await metrics(first)
    assert {
        f'ostinato_worker_restarts_total{{worker="train"}} {restarts}.0',
        'ostinato_worker_running{worker="train"} 1.0',
    } <= seen

    async with simulated_users(first):
        await first.doing("train", "taking step")
        pids = [each.pid for each in read_board(first.home.workers).workers]
        first.process.send_signal(signal.SIGTERM)
        assert await first.ended() == 0
    assert "told to end while taking step" in (first.home.root / "logs" / "train.log").read_text()
    assert "did not end within" not in first.said(), "a worker had to be killed"
    assert [pid for pid in pids if alive(pid)] == []
    assert not first.home.address.exists()
    assert read_board(first.home.workers).ended == "stopped"


@pytest.mark.examination
async def test_an_engine_whose_thread_dies_gets_a_new_process(tmp_path, up, monkeypatch):
    into_every_process(monkeypatch, tmp_path / "harm", HARM)
    monkeypatch.setenv("HARM", str(tmp_path / "harm"))
    run = up("supervise.engine_s=3", "evaluate.suite=''", "listen.port=0")
    url = await run.serving()
    await harm_engine(run, "die", "EngineDied", tmp_path / "harm")
    os.kill(await run.doing("serve", "serving"), signal.SIGKILL)
    await run.until(lambda: run.standing("serve").restarts == 2, "a killed one gets one, too")
    await run.doing("serve", "serving")
    assert await live(url)


async def harm_engine(run: Up, kind: str, told: str, harm: Path) -> None:
    """Until it is a new process that serves, which was told why."""
    pid = await run.doing("serve", "serving")
    await live(run.url)
    (harm / f"{kind}-{pid}").touch()
    asking = asyncio.create_task(ask_on(run.url))
    try:
        await run.doing("serve", "serving", than=pid)
    finally:
        asking.cancel()
    assert told in run.standing("serve").reason


async def ask_on(url: str) -> None:
    """Ask, again and again, whatever comes back."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6}
    async with aiohttp.ClientSession() as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                body["model"] = (await health(url))["model"]
                async with asyncio.timeout(2), session.post(f"{url}/v1/chat/completions", json=body):
                    pass
            await asyncio.sleep(0.1)


WRITTEN_BY_A_RUN = {
    *("config.json", "admin.key", "follow.json", "workers.json", "serve.jsonl", "housekeeping.jsonl", "status.fold"),
    *(".up.lock", ".serve.lock", ".train.lock", ".release.lock", ".prepare.lock", ".housekeeping.lock"),
}


def files_of(run: Up) -> list[Path]:
    """What lies in a run's directory and beside its folds, but for the log."""
    paths = [*run.home.root.glob("*"), *(run.home.root / "folds").glob("*")]
    return sorted(path for path in paths if path.is_file() and not path.name.startswith("log.db"))


def names(paths: list[Path]) -> set[str]:
    return {path.name for path in paths}


@pytest.mark.parametrize("kept", [0.0, pytest.param(0.5, marks=pytest.mark.examination)])
async def test_it_survives_kill_9_of_itself_whatever_its_files_then_hold(tmp_path, up, kept):
    run = up(mortal=True)
    served = await live(await run.serving())
    await run.until(lambda: names(files_of(run)) >= WRITTEN_BY_A_RUN, "every file was there")
    key = run.home.admin_key()
    await run.until(
        lambda: all(each.pid for each in read_board(run.home.workers).workers), "the board named every worker"
    )
    pids = [each.pid for each in read_board(run.home.workers).workers]
    (forks,) = {each.pid for each in psutil.Process(run.process.pid).children()} - {*pids}
    assert warm_process.__name__ in psutil.Process(forks).cmdline(), "they were forked from it"
    pids.append(forks)
    run.kill()
    async with asyncio.timeout(WHOLE_PROGRAM_S):
        while any(alive(pid) for pid in pids):
            await asyncio.sleep(0.02)
    assert read_address(run.home.address) is None, "a gateway that is gone is not believed in"

    damaged = files_of(run)
    assert names(damaged) >= WRITTEN_BY_A_RUN
    for path in damaged:
        if path.exists():
            os.truncate(path, int(kept * path.stat().st_size))
    run.home.address.write_text("http://127.0.0.1:1\n1 0\n")
    run = up()
    assert await live(await run.serving()) == served
    assert run.home.admin_key() != key, "half a key is no key"
    assert load(run.home.config).run == run.config.run
    await run.doing("train", "waiting for 32 turns")
    await run.until(lambda: run.standing("release").doing.startswith("judging"), "the suite was read")


@pytest.mark.examination
async def test_a_terminal_that_takes_no_line_does_not_end_it(tmp_path, quick_settings):
    """Its output goes to a full disk. Workers are started, healed and stopped all the same."""
    run = Up(tmp_path, quick_settings(tmp_path, "model.numerics=fast"), output=Path("/dev/full"))
    try:
        assert await live(await run.serving())
        pid = await run.doing("serve", "serving")
        os.kill(pid, signal.SIGKILL)
        await run.doing("serve", "serving", than=pid)
        run.process.send_signal(signal.SIGTERM)
        await run.ended()
        assert read_board(run.home.workers).ended == "stopped"
    finally:
        run.kill()


async def test_a_trainer_that_can_never_run_is_told_in_its_own_words_and_serving_goes_on(up):
    run = up("reward.function=no_such_module_here:reward", "evaluate.suite=''")
    assert await live(await run.serving())
    await run.until(lambda: run.standing("train").condition == "failed", "training was given up")
    assert "cannot run: BadConfig: reward.function 'no_such_module_here:reward'" in run.said()
    assert "serve goes on without it" in run.said()
    assert "starts again" not in run.said()
    assert await live(run.url)
    run.process.send_signal(signal.SIGTERM)
    assert await run.ended() == 0


@pytest.mark.examination
async def test_a_trainer_that_cannot_run_any_more_leaves_the_gateway_alone(tmp_path, up, monkeypatch):
    function = tmp_path / "nightly.py"
    function.write_text("from ostinato.reward.functions import copilot as reward\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    run = up("reward.function='nightly:reward'", "evaluate.suite=''")
    served = await live(await run.serving())
    pid = await run.doing("train", "waiting for 32 turns")
    serving = await run.doing("serve", "serving")
    function.write_text("def reward(turn, signals, now)\n")
    os.kill(pid, signal.SIGKILL)
    await run.until(lambda: run.standing("train").condition == "failed", "training was given up")
    assert "serve goes on without it" in run.said()
    await asyncio.sleep(1.0)
    assert await live(run.url) == served
    assert (run.standing("serve").pid, run.standing("serve").condition) == (serving, "running")
    words = [sys.executable, "-m", "ostinato.cli", "status", *run.words]
    done = await asyncio.to_thread(subprocess.run, words, capture_output=True, text=True, check=True)
    told = " ".join(done.stdout.split())
    assert "reward.function 'nightly:reward'" in told
    assert "train is not restarted" in told
    assert "start `ostinato train` beside it" in told
    run.process.send_signal(signal.SIGTERM)
    assert await run.ended() == 0


async def test_a_model_that_cannot_be_loaded_ends_it_at_once(tmp_path, up, quick_settings):
    words = quick_settings(tmp_path, "model.numerics=fast")
    weights = tmp_path / "model" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-4:] = b"\x00\x00\xc0\x7f"  # NaN: the file is sound, what it holds is not
    weights.write_bytes(data)
    run = Up(tmp_path, words)
    try:
        assert await run.ended() == 2
        said = run.said()
    finally:
        run.kill()
    assert "cannot run: BadWeights" in said
    assert "NaN or infinity" in said
    assert "starts again" not in said
    board = read_board(run.home.workers)
    assert "NaN or infinity" in board.ended
    ended = {worker.name: worker.condition for worker in board.workers}
    assert ended.pop("serve") == "failed"
    assert set(ended.values()) <= {"stopped", "failed"}, "on a slow machine the trainer may have found it, too"


REFUSED = [
    ("model.source=/no/such/model", "model.source '/no/such/model': no such directory"),
    ("evaluate.suite=/no/such/suite.jsonl", "there is no task file /no/such/suite.jsonl; check evaluate.suite"),
    ("evaluate.suite={bad}", "there is no grader 'vibes'; there are function, pattern"),
    ("evaluate.suite={worse}", "task 'a': pattern '(' is not a regular expression"),
    ("run.directory={file}/run", "is a file; name another place"),
    ("listen.port={port}", "another program listens there; set listen.host and listen.port"),
    ("listen.host=0.0.0.0", "serve.api_keys is empty"),
]


ONE_AFTER_ANOTHER = """
import json, os, sys
import ostinato.launch.commands.up
from ostinato.cli import main
codes = []
for number, words in enumerate(json.loads(sys.argv[1])):
    if pid := os.fork():
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        continue
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{number}.{name}", os.O_CREAT | os.O_WRONLY), stream)
    sys.argv[1:] = words
    try:
        main()
    finally:
        print([name for name in ("torch", "transformers", "numba") if name in sys.modules], flush=True)
    os._exit(0)
print(json.dumps(codes))
"""
"""Runs each command in a process forked from one that has imported what `up` needs; prints their exit codes."""


def test_what_is_wrong_is_told_in_one_line_before_anything_is_started(tmp_path, quick_settings):
    item = {"id": "a", "family": "f", "messages": [{"role": "user", "content": "x"}]}
    (tmp_path / "bad.jsonl").write_text(json.dumps({**item, "grader": "vibes"}))
    (tmp_path / "worse.jsonl").write_text(json.dumps({**item, "grader": "pattern", "pattern": "("}))
    (tmp_path / "file").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        names = {
            "bad": tmp_path / "bad.jsonl",
            "worse": tmp_path / "worse.jsonl",
            "file": tmp_path / "file",
            "port": taken.getsockname()[1],
        }
        settings = [[*quick_settings(tmp_path), setting.format(**names)] for setting, _ in REFUSED]
        commands = [["up", *(word for each in words for word in ("--set", each))] for words in settings]
        done = subprocess.run(
            [sys.executable, "-c", ONE_AFTER_ANOTHER, json.dumps(commands)],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            timeout=WHOLE_PROGRAM_S,
            check=True,
            env=os.environ | {"NO_COLOR": "1", NO_FORKS: "1"},
        )
    assert json.loads(done.stdout) == [2] * len(REFUSED)
    for number, (_, told) in enumerate(REFUSED):
        said = (tmp_path / f"{number}.err").read_text()
        assert said.startswith("error "), said
        assert said.count("\n") == 1, said
        assert told in said
        assert (tmp_path / f"{number}.out").read_text().strip() == "[]", "nothing heavy was loaded to find that out"
    assert not list((tmp_path / "run").glob("*.url"))
    assert not (tmp_path / "run" / "logs").exists()


@pytest.mark.examination
async def test_without_a_suite_it_learns_and_a_person_ships(tmp_path, up, simulated_users):
    run = up("evaluate.suite=''", "learn.publish_every=50", "learn.max_lead=2")
    assert "nothing ships by itself" in await run.until(run.said, "it said so")

    before = await live(await run.serving())
    store = open_store(run.config)
    async with simulated_users(run):
        await run.doing("train", "waiting for a verdict on v2")  # 50 steps would never come: it offered what it had
    candidate = await store.read_ref("candidate")
    assert candidate not in (None, before)
    assert await store.read_ref("live") == before
    with open_log(run.config) as log:
        alarms = [row async for _, row in log.read(0, {Alarm})]
    assert [(alarm.name, str(alarm.state)) for alarm in alarms] == [("release:suite", "raised")]
    assert 'ostinato_alarm{name="release:suite"} 1.0' in await metrics(run)
    words = [sys.executable, "-m", "ostinato.cli", "ship", "--reason", "ann looked", *run.words]
    done = await asyncio.to_thread(subprocess.run, words, capture_output=True, text=True, check=True)
    assert "ostinato rollback" in done.stdout
    async with asyncio.timeout(WHOLE_PROGRAM_S):
        while await live(run.url) != candidate:
            await asyncio.sleep(0.2)
