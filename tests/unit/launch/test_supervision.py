"""The supervisor over real processes: little programs that say what a worker says, and then die, hang or fail."""

import asyncio
import contextlib
import os
import re
import signal
import sys
import textwrap
import time

import pytest
from tests.deadlines import PATIENT_S

from ostinato.core.errors import StorageFull
from ostinato.launch.placing.process import WorkerProcess
from ostinato.launch.placing.supervision import Condition, Supervisor, WorkerFailed
from ostinato.placing_config import SuperviseConfig

HEAD = """
import json, os, signal, sys, time
pipe = int(os.environ["OSTINATO_PULSE_FD"])
def say(doing="working", **more):
    os.write(pipe, json.dumps({"doing": doing, **more}).encode() + b"\\n")
def work(**more):
    while True:
        say(**more)
        time.sleep(0.05)
def until(name):
    while not os.path.exists(os.path.join(os.environ["PLACE"], name)):
        say()
        time.sleep(0.05)
def fail():
    say(failed="BadConfig: no such function", certain=True)
    sys.exit(2)
"""
LIMITS = SuperviseConfig(silence_s=60.0, stop_s=1.0, tries=3, window_s=60.0, longest_wait_s=0.05)
SILENCE_S = 2.0  # of tests of silence; on a busy machine, a worker that speaks may be unheard for a moment


class Crew:
    """Workers by name and program, a supervisor over them, and what it said."""

    def __init__(self, directory, *, front=None, head_start_s=0.0, silence_s=LIMITS.silence_s, **programs):
        self.said = []
        workers = [
            WorkerProcess(name, (sys.executable, "-S", "-c", HEAD + textwrap.dedent(text)), directory / f"{name}.log")
            for name, text in programs.items()
        ]
        for worker in workers:
            worker.env = {"PLACE": str(directory)}
        limits = LIMITS.model_copy(update={"silence_s": silence_s})
        self.supervisor = Supervisor(
            workers,
            limits,
            lambda who, what: self.said.append(f"{who} {what}"),
            front=front,
            head_start_s=head_start_s,
        )
        self.watched = {each.worker.name: each for each in self.supervisor.watched}

    @contextlib.asynccontextmanager
    async def running(self):
        task = asyncio.create_task(self.supervisor.run())
        try:
            yield task
        finally:
            self.supervisor.stop()
            with contextlib.suppress(WorkerFailed):
                await task

    async def until(self, condition, timeout_s=PATIENT_S):
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.01)

    def alive(self, name):
        worker = self.watched[name].worker
        return worker.running and worker.sign is not None


async def test_a_dead_worker_is_started_again_and_all_are_stopped_together(tmp_path):
    crew = Crew(tmp_path, one="work()", two="work()")
    async with crew.running():
        await crew.until(lambda: crew.alive("one") and crew.alive("two"))
        first = crew.watched["one"].worker.pid
        os.kill(first, signal.SIGKILL)
        await crew.until(lambda: crew.watched["one"].worker.pid != first and crew.alive("one"))
        assert crew.watched["one"].reason == "was killed by SIGKILL; is memory short?"
        assert (crew.watched["one"].restarts, crew.watched["two"].restarts) == (1, 0)
        pids = [each.worker.pid for each in crew.watched.values()]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert {each.condition for each in crew.watched.values()} == {Condition.STOPPED}
    assert not [line for line in crew.said if "was killed" in line and "within" in line]


async def test_the_others_start_once_the_front_is_ready(tmp_path):
    crew = Crew(tmp_path, front="serve", head_start_s=1e6, train="work()", serve="until('go'); work(ready=True)")
    async with crew.running():
        await crew.until(lambda: crew.alive("serve"))
        assert crew.watched["train"].worker.pid == 0
        (tmp_path / "go").touch()
        await crew.until(lambda: crew.alive("train"))
        assert crew.watched["serve"].worker.was_ready


@pytest.mark.parametrize(("serve", "head_start_s"), [("work()", 0.3), ("until('go')", 1e6)], ids=["slow", "ended"])
async def test_the_others_start_though_the_front_is_never_ready(tmp_path, serve, head_start_s):
    (tmp_path / "go").touch()
    crew = Crew(tmp_path, front="serve", head_start_s=head_start_s, train="work()", serve=serve)
    async with crew.running():
        await crew.until(lambda: crew.alive("train"))


async def test_what_still_waits_for_its_first_start_can_be_stopped(tmp_path):
    crew = Crew(tmp_path, front="serve", head_start_s=1e6, train="work()", serve="work()")
    async with crew.running():
        await crew.until(lambda: crew.alive("serve"))
    assert (crew.watched["train"].worker.pid, crew.watched["train"].condition) == (0, Condition.STOPPED)


async def test_kills_from_outside_never_end_the_run(tmp_path):
    crew = Crew(tmp_path, one="work()")
    async with crew.running() as task:
        for _ in range(LIMITS.tries + 2):
            await crew.until(lambda: crew.alive("one"))
            pid = crew.watched["one"].worker.pid
            os.kill(pid, signal.SIGKILL)
            await crew.until(lambda pid=pid: crew.watched["one"].worker.pid != pid)
        assert not task.done()


async def test_what_can_never_run_ends_all_at_once_with_its_own_reason(tmp_path):
    failing = "say(failed=\"BadConfig: model.source 'x': no such directory\", certain=True); sys.exit(2)"
    crew = Crew(tmp_path, one=failing, two="work()")
    async with crew.running() as task:
        async with asyncio.timeout(PATIENT_S):
            with pytest.raises(WorkerFailed, match=r"one cannot run: BadConfig: model.source 'x': no such directory"):
                await task
    assert crew.watched["one"].condition is Condition.FAILED
    assert crew.watched["one"].restarts == 0
    assert crew.watched["two"].condition is Condition.STOPPED


@pytest.mark.parametrize("before", ["starting", "ready", "starting_again"])
async def test_what_can_never_run_stays_down_and_the_others_go_on(tmp_path, before):
    crew = Crew(
        tmp_path, front="serve", serve="until('go'); work(ready=True)", train="until('fail'); fail()", other="work()"
    )
    async with crew.running() as task:
        if before != "starting":
            (tmp_path / "go").touch()
            await crew.until(lambda: crew.watched["serve"].worker.was_ready)
        if before == "starting_again":
            (tmp_path / "go").unlink()
            os.kill(crew.watched["serve"].worker.pid, signal.SIGKILL)
            await crew.until(lambda: crew.watched["serve"].restarts == 1 and crew.alive("serve"))
        (tmp_path / "fail").touch()
        await crew.until(lambda: crew.watched["train"].condition is Condition.FAILED)
        await asyncio.sleep(2 * LIMITS.longest_wait_s)
        assert not task.done()
        await crew.until(
            lambda: crew.alive("serve") and crew.alive("other")
        )  # their first signs may take a busy machine a while
        assert not task.done()
        assert "train cannot run: BadConfig: no such function; serve goes on without it" in crew.said
    assert task.exception() is None
    assert crew.watched["train"].condition is Condition.FAILED
    assert {crew.watched[name].condition for name in ("serve", "other")} == {Condition.STOPPED}


@pytest.mark.parametrize("end", ["time.sleep(3600)", "sys.exit(1)"])
async def test_a_front_that_has_served_is_never_given_up(tmp_path, end):
    serve = f"say(ready=True); until('ready'); {end}"
    crew = Crew(
        tmp_path,
        front="serve",
        silence_s=SILENCE_S if "sleep" in end else LIMITS.silence_s,
        serve=serve,
        train="work()",
    )
    (tmp_path / "ready").touch()
    async with crew.running() as task:
        await crew.until(lambda: crew.alive("train"))
        trainer = crew.watched["train"].worker.pid
        await crew.until(lambda: crew.watched["serve"].restarts > LIMITS.tries + 1)
        assert not task.done()
        assert crew.watched["train"].worker.pid == trainer
    assert task.exception() is None


async def test_a_front_that_never_served_is_given_up(tmp_path):
    crew = Crew(tmp_path, front="serve", serve="sys.exit(1)", train="work()")
    async with crew.running() as task:
        async with asyncio.timeout(PATIENT_S):
            with pytest.raises(WorkerFailed, match=r"serve cannot run \(3 failures in 60 s\)"):
                await task


async def test_all_ends_where_the_front_fails(tmp_path):
    crew = Crew(tmp_path, front="serve", serve="say(ready=True); until('fail'); fail()", train="work()")
    async with crew.running() as task:
        await crew.until(lambda: crew.watched["serve"].worker.was_ready)
        (tmp_path / "fail").touch()
        async with asyncio.timeout(PATIENT_S):
            with pytest.raises(WorkerFailed, match="serve cannot run: BadConfig: no such function"):
                await task


async def test_what_fails_again_and_again_is_given_up_after_so_many_tries(tmp_path):
    crew = Crew(tmp_path, one='say(failed="Unavailable: the bucket is gone"); sys.exit(2)', two="work()")
    async with crew.running() as task:
        async with asyncio.timeout(PATIENT_S):
            with pytest.raises(
                WorkerFailed, match=r"one cannot run \(3 failures in 60 s\): Unavailable: the bucket is gone"
            ):
                await task
    assert crew.watched["one"].restarts == LIMITS.tries - 1
    assert sum("starts again" in line for line in crew.said) == LIMITS.tries - 1


async def test_one_that_could_say_nothing_is_quoted(tmp_path):
    crew = Crew(tmp_path, one="import no_such_module_at_all")
    async with crew.running() as task:
        async with asyncio.timeout(PATIENT_S):
            with pytest.raises(WorkerFailed, match="ModuleNotFoundError: No module named 'no_such_module_at_all'"):
                await task


async def test_a_stopped_process_is_killed_and_started_again(tmp_path):
    crew = Crew(tmp_path, silence_s=SILENCE_S, one="work()")
    async with crew.running():
        await crew.until(lambda: crew.alive("one"))
        pid = crew.watched["one"].worker.pid
        os.kill(pid, signal.SIGSTOP)
        await crew.until(lambda: crew.watched["one"].worker.pid != pid and crew.alive("one"))
        assert "gave no sign of life" in crew.watched["one"].reason
        assert "while working" in crew.watched["one"].reason


async def test_a_stage_has_its_own_limit(tmp_path):
    slow = """
        begun = time.monotonic()
        while True:
            say("loading the model", for_s=time.monotonic() - begun, limit_s=float(os.environ["LIMIT"]))
            time.sleep(0.05)
    """
    crew = Crew(tmp_path, silence_s=SILENCE_S, one=slow)
    crew.watched["one"].worker.env = {"LIMIT": "600"}
    async with crew.running():
        await crew.until(lambda: crew.alive("one"))
        await asyncio.sleep(2 * SILENCE_S)
        assert crew.watched["one"].restarts == 0, "a slow start is no hang"
    crew = Crew(tmp_path, silence_s=SILENCE_S, one=slow)
    crew.watched["one"].worker.env = {"LIMIT": "1.0"}
    async with crew.running():
        await crew.until(lambda: crew.watched["one"].restarts == 1)
        assert "longer than the 1 s allowed" in crew.watched["one"].reason


async def test_a_supervisor_that_stood_still_itself_kills_nobody(tmp_path):
    crew = Crew(tmp_path, silence_s=SILENCE_S, one="work()")
    async with crew.running():
        await crew.until(lambda: crew.alive("one"))
        time.sleep(2 * SILENCE_S)  # noqa: ASYNC251 (as if it had been stopped)
        await asyncio.sleep(0.5)
        assert crew.watched["one"].restarts == 0


async def test_one_that_will_not_end_is_killed_and_said_so(tmp_path, monkeypatch):
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN); work()"
    crew = Crew(tmp_path, one=stubborn, two="work()")
    stop = WorkerProcess.stop

    async def patient(worker, grace_s):
        return await stop(
            worker, grace_s if worker.name == "one" else PATIENT_S
        )  # who ends may have to wait for the machine

    monkeypatch.setattr(WorkerProcess, "stop", patient)
    async with crew.running():
        await crew.until(lambda: crew.alive("one") and crew.alive("two"))
    assert "one did not end within 1 s and was killed" in crew.said
    assert not [line for line in crew.said if line.startswith("two did not end")]


async def test_a_start_that_the_machine_refuses_is_a_failure_like_any_other(tmp_path):
    crew = Crew(tmp_path, one="work()")
    crew.watched["one"].worker.argv = (str(tmp_path / "no-such-program"),)
    async with crew.running() as task:
        async with asyncio.timeout(PATIENT_S):
            with pytest.raises(WorkerFailed, match=r"could not be started: .*no-such-program"):
                await task


@pytest.mark.parametrize(
    "refusal",
    [StorageFull("config.json cannot be written: no room"), OSError(30, "config.json cannot be written: read-only")],
)
async def test_a_disk_that_refuses_is_waited_for_however_long_it_does(tmp_path, refusal):
    """It refuses the start itself, and then what a worker writes: twice as often as failures would be too many."""
    crew, full = Crew(tmp_path, one="say(failed='StorageFull: no room', outside=True); sys.exit(2)"), [True]
    refused = []

    def before_start():
        if full[0]:
            refused.append(1)
            raise refusal

    crew.supervisor._before_start = before_start
    async with crew.running() as task:
        await crew.until(lambda: len(refused) >= 2 * LIMITS.tries)
        assert re.match(r"could not be started: .*config.json cannot be written", crew.watched["one"].reason)
        full[0] = False
        await crew.until(lambda: crew.watched["one"].restarts >= 4 * LIMITS.tries)
        assert not task.done()
        assert crew.watched["one"].reason == "StorageFull: no room"


async def test_a_worker_may_join_and_leave_while_the_others_go_on(tmp_path):
    crew = Crew(tmp_path, one="work()")
    async with crew.running():
        await crew.until(lambda: crew.alive("one"))
        first = crew.watched["one"].worker.pid
        program = (sys.executable, "-S", "-c", HEAD + "work()")
        late = WorkerProcess("late", program, tmp_path / "late.log", env={"PLACE": str(tmp_path)})
        crew.supervisor.add(late)
        await crew.until(lambda: late.sign is not None)
        os.kill(late.pid, signal.SIGKILL)
        killed = late.pid
        await crew.until(lambda: late.pid != killed and late.running)
        await crew.supervisor.remove("late")
        assert not late.running
        assert [each.worker.name for each in crew.supervisor.watched] == ["one"]
        assert crew.watched["one"].worker.pid == first
        crew.supervisor.add(late)
        await crew.until(lambda: late.running)
    assert not late.running
    assert not crew.watched["one"].worker.running
