"""What is tried in an environment: `doctor`, `up` with a call, its feedback and Ctrl-C, a short demo, and signals in each phase."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.examinations.machines.environments import Environment, Place

LONGEST_S = 600.0  # for a start that compiles every kernel on a busy machine
LEFT_S = 120.0  # for what a command left to end by itself, there
_DEFECT = re.compile(r"Traceback|^\w*(Error|Exception)\b", re.MULTILINE)
_SERVING = re.compile(r"serving (http\S+)/v1")
PHASES = (  # the signal, and the line of output after which it is sent
    (signal.SIGINT, "reserved http"),
    (signal.SIGINT, "loading its code"),
    # of what comes at once, only the last is said
    (signal.SIGINT, "loading the model|publishing version 0|serving http"),
    (signal.SIGTERM, "serving http"),
    (signal.SIGHUP, "serving http"),
)


class Unmet(Exception):
    """An environment does not do what it should. The message is one line."""


@dataclass
class Command:
    """A command of ours that runs in an environment, and its output so far."""

    process: subprocess.Popen[bytes]
    output: Path

    def said(self) -> str:
        """All of its output."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.output.read_text(errors="replace"))

    def until(self, words: str, longest_s: float = LONGEST_S) -> re.Match[str]:
        """Wait for words in its output. Raises Unmet if it ends before, or takes too long."""
        end = time.monotonic() + longest_s
        while (found := re.search(words, self.said())) is None:
            if self.process.poll() is not None and re.search(words, self.said()) is None:
                raise Unmet(
                    f"it ended with code {self.process.returncode} before it said {words!r}: {first_error(self.said())}"
                )
            if time.monotonic() > end:
                raise Unmet(f"it did not say {words!r} within {longest_s:.0f} s: {last_line(self.said())}")
            time.sleep(0.1)
        return found

    def ended(self, longest_s: float = LONGEST_S) -> int:
        """Its exit code. Raises Unmet if it does not end."""
        try:
            return self.process.wait(longest_s)
        except subprocess.TimeoutExpired:
            raise Unmet(f"it does not end within {longest_s:.0f} s: {last_line(self.said())}") from None


def first_error(said: str) -> str:
    """The first line that looks like an error, else the last line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    wanted = (line for line in lines if re.match(r"error |✗ |\w*(Error|Exception)\b", line) or "cannot run" in line)
    return next(wanted, lines[-1] if lines else "it said nothing")


def last_line(said: str) -> str:
    """The last line of an output."""
    lines = said.strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def settings(environment: Environment, place: Place, run: Path) -> list[str]:
    """The `--set` words of a run in this environment."""
    tiny = (f"model.source='{place.model}'", "model.dtype='float32'") if environment.model == "tiny" else ()
    words = (f"run.directory='{run}'", "listen.port=0", *tiny, *environment.settings)
    return [part for word in words for part in ("--set", word)]


def variables(environment: Environment, place: Place) -> dict[str, str]:
    """The environment's variables: ours with its changes. Names of folders become those of the place."""
    found = dict(os.environ) | {"COLUMNS": "400"}
    for name, value in environment.variables.items():
        found.pop(name, None)
        if value is not None:
            found[name] = str(place.place / value) if value in ("home", "bin", "site") else value
    return found


@contextlib.contextmanager
def started(
    environment: Environment, place: Place, name: str, *words: str, first: tuple[str, ...] = ()
) -> Generator[Command]:
    """`ostinato WORDS` in the environment, killed with all its children at the end if it still runs."""
    output = place.top / f"{name}.txt"
    argv = [*environment.prefix(place), *first, environment.python(), "-P", "-m", "ostinato.cli", *words]
    with output.open("wb") as file:
        process = subprocess.Popen(
            argv,
            cwd=place.place,
            env=variables(environment, place),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield Command(process, output)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def left(run: Path) -> list[int]:
    """The processes that still work for a run, by the arguments that name its directory."""
    found = list[int]()
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if os.fsencode(run) in each.read_bytes() and int(each.parent.name) != os.getpid():
                found.append(int(each.parent.name))
    return found


def post(url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON call from outside of the environment, never through a proxy. Raises Unmet for any answer but success."""
    call = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(call, timeout=LONGEST_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise Unmet(f"{url}: {error.code} {error.read()[:300]!r}") from None
    except OSError as error:
        raise Unmet(f"{url}: {error}") from None


def use(url: str, model: str) -> None:
    """Ask for an answer, and tell what came of it with as little as is needed."""
    asked = {"model": model, "messages": [{"role": "user", "content": "say something"}], "max_tokens": 4}
    answer = post(f"{url}/v1/chat/completions", asked)
    told = post(f"{url}/v1/feedback", {"target": answer["id"], "name": "accepted", "value": True})
    if told.get("status") != "accepted":
        raise Unmet(f"the feedback was {told}")


def doctor(environment: Environment, place: Place) -> str:
    """`ostinato doctor`."""
    with started(environment, place, "doctor", "doctor", *settings(environment, place, place.run)) as command:
        code = command.ended()
        return judged(environment, "doctor", code, command.said())


def up(environment: Environment, place: Place) -> str:
    """`ostinato up`, one call, its feedback, `ostinato status`, Ctrl-C, and nothing left."""
    with contextlib.ExitStack() as stack:
        if environment.beside:
            other = stack.enter_context(
                started(environment, place, "beside", "up", *settings(environment, place, place.place / "beside"))
            )
            other.until(_SERVING.pattern)
        words = settings(environment, place, place.run)
        command = stack.enter_context(started(environment, place, "up", "up", *words))
        if "up" in environment.refused:
            return judged(environment, "up", command.ended(), command.said())
        url = command.until(_SERVING.pattern)[1]
        use(url, "smollm2" if environment.model == "smollm2" else place.model.name)
        with started(environment, place, "status", "status", *words) as status:
            if status.ended() != 0:
                raise Unmet(f"status: {first_error(status.said())}")
        if "up" in environment.says:
            command.until(environment.says["up"])
        command.process.send_signal(signal.SIGINT)
        code = command.ended()
        if "starts again" in command.said():
            raise Unmet(f"a worker had to be started again: {first_error(command.said())}")
        clean(place.run)
        return judged(environment, "up", code, command.said())


def demo(environment: Environment, place: Place) -> str:
    """A demo of a few seconds of traffic, from its start to its report."""
    words = ["demo", "--minutes", "1" if environment.model == "smollm2" else "0.05", "--out", str(place.run / "report")]
    words += ["--directory", str(place.run / "demo"), *environment.demo]
    words += settings(environment, place, place.run / "demo")
    with started(environment, place, "demo", *words) as command:
        code = command.ended(900.0)
        if code == 0 and not (place.run / "report" / "report.html").is_file():
            raise Unmet("it wrote no report")
        clean(place.run)
        return judged(environment, "demo", code, command.said())


def ends(environment: Environment, place: Place) -> str:
    """Signals in each phase of a start: code 0 or the shell's code for the signal, no traceback, no process left."""
    for number, (which, words) in enumerate(PHASES):
        run = place.place / f"run{number}"
        with started(environment, place, f"ends{number}", "up", *settings(environment, place, run)) as command:
            command.until(words)
            command.process.send_signal(which)
            what = f"{which.name} after {words!r}"
            if (code := command.ended()) not in (0, 128 + which):
                raise Unmet(f"{what}: it ended with code {code}: {last_line(command.said())}")
            if _DEFECT.search(command.said()):
                raise Unmet(f"{what}: {first_error(command.said())}")
            clean(run)
    words = settings(environment, place, place.run)
    with started(environment, place, "nohup", "up", *words, first=("nohup",)) as command:
        url = command.until(_SERVING.pattern)[1]
        command.process.send_signal(signal.SIGHUP)
        use(url, place.model.name)  # it still answers
        command.process.send_signal(signal.SIGINT)
        if command.ended() != 0:
            raise Unmet(f"under nohup: {first_error(command.said())}")
        clean(place.run)
    return ""


def clean(run: Path) -> None:
    """Raise Unmet if a process still works for the run a while after its command ended."""
    end = time.monotonic() + LEFT_S
    while still := left(run):
        if time.monotonic() > end:
            raise Unmet(f"{len(still)} processes are left")
        time.sleep(0.1)


def judged(environment: Environment, check: str, code: int, said: str) -> str:
    """The line that says what was refused, or "". Raises Unmet if the code, or what was said, is not what it should be."""
    if _DEFECT.search(said):
        raise Unmet(f"a traceback: {first_error(said)}")
    if (check in environment.refused) != (code != 0):
        raise Unmet(f"it ended with code {code}: {first_error(said)}")
    if check in environment.says and not (found := re.search(f".*{environment.says[check]}.*", said)):
        raise Unmet(f"it did not say {environment.says[check]!r}: {first_error(said)}")
    return found[0].strip() if check in environment.says else ""


CHECKS = {"doctor": doctor, "up": up, "demo": demo, "ends": ends}
