"""Runs a package's tests inside a sandbox, once per job, each in a fork of an interpreter that has already imported pytest.

This script is passed to Python as `-c` text; it uses only the standard library and pytest. stdin is one JSON object::

    {"warm": ["pytest"], "jobs": [{"id": "a", "edits": {"calc.py": "..."}, "targets": ["tests"], "tests": [...] or null,
      "most_failing": 5, "seconds": 9.0, "covered": false, "backwards": false, "group": ""}]}

For each job it writes one line to stdout, base64 of zlib of JSON: each test's outcome and duration, collection errors, CPU seconds, and, if
`covered`, the functions that each test entered. A job is skipped if all tests of an earlier job of its group passed. The files are restored
after every job. The tested code can forge this output, so it may be used for building tasks, never for grading.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import json
import os
import resource
import select
import signal
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from typing import Any

AS_BYTES = 2 << 30
GRACE_S = 5.0


def paths() -> Iterator[str]:
    """Yield every file below the working directory, except installed packages."""
    for place, folders, names in os.walk("."):
        folders[:] = [each for each in folders if each != ".venv"]
        for name in names:
            yield os.path.join(place, name)


def read_files() -> dict[str, bytes]:
    """Return the content of all regular files, by path."""
    found = {}
    for path in paths():
        if not os.path.islink(path) and os.path.isfile(path):
            with contextlib.suppress(OSError), open(path, "rb") as file:
                found[path] = file.read()
    return found


def signatures() -> dict[str, tuple[int, int]]:
    """Return {path: (size, modification time)} of every file."""
    found = {}
    for path in paths():
        with contextlib.suppress(OSError):
            status = os.lstat(path)
            found[path] = (status.st_size, status.st_mtime_ns)
    return found


def restore(files: dict[str, bytes], before: dict[str, tuple[int, int]]) -> list[str]:
    """Undo a job's changes to files, and return the changed paths."""
    after = signatures()
    changed = sorted({path for path in before.keys() | after.keys() if before.get(path) != after.get(path)})
    for path in changed:
        with contextlib.suppress(OSError):
            if path in files:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "wb") as file:
                    file.write(files[path])
            else:
                os.unlink(path)
    return changed


class Recorder:
    """A pytest plugin that selects the tests, reports each outcome over the pipe `out`, and exits when too many tests have failed."""

    def __init__(self, job: dict[str, Any], out: int) -> None:
        self.out = out
        self.tests = None if job["tests"] is None else set(job["tests"])
        self.most_failing = job["most_failing"]
        self.backwards = job["backwards"]
        self.covered = job["covered"]
        self.failing = 0
        self.ended: dict[str, list[Any]] = {}
        self.codes: dict[int, Any] = {}
        self.root = os.getcwd() + "/"

    def send(self, **fields: Any) -> None:
        os.write(self.out, json.dumps(fields).encode() + b"\n")

    def on_call(self, frame: Any, event: str, _arg: Any) -> None:
        if event == "call":
            code = frame.f_code
            self.codes[id(code)] = code

    def start_tracing(self) -> None:
        self.codes = {}
        threading.setprofile(self.on_call)
        sys.setprofile(self.on_call)

    def stop_tracing(self, test: str) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        lines = set()
        for code in self.codes.values():
            path = os.path.abspath(code.co_filename)
            if path.startswith(self.root) and "/.venv/" not in path:
                lines.add((path[len(self.root) :], code.co_firstlineno))
        self.send(test=test, ran=sorted(lines))

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if self.tests is not None:
            items[:] = [item for item in items if item.nodeid in self.tests]
        if self.backwards:
            items.reverse()

    def pytest_collection_finish(self, session: Any) -> None:
        if self.covered:
            self.stop_tracing("")

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.send(uncollected=report.nodeid, reason=str(report.longrepr)[-300:])

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        if self.covered:
            self.start_tracing()

    def pytest_runtest_logreport(self, report: Any) -> None:
        ended = self.ended.setdefault(report.nodeid, ["none", 0.0])
        ended[1] += report.duration
        if report.failed:
            ended[0] = "failed"
        elif ended[0] != "failed" and (report.skipped or hasattr(report, "wasxfail")):
            ended[0] = "skipped"
        elif report.when == "call" and report.passed and ended[0] == "none":
            ended[0] = "passed"

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        if self.covered:
            self.stop_tracing(nodeid)
        ended = self.ended.get(nodeid, ["none", 0.0])
        self.send(test=nodeid, ended=ended[0], seconds=round(ended[1], 4))
        self.failing += ended[0] == "failed"
        if self.most_failing is not None and self.failing > self.most_failing:
            self.send(stopped=True)
            os._exit(0)  # the outcome is decided


def fix_randomness() -> None:
    """Make Hypothesis draw few examples, and the same ones each time."""
    hypothesis = sys.modules.get("hypothesis")
    if hypothesis is not None:
        quiet = list(hypothesis.HealthCheck)
        hypothesis.settings.register_profile(
            "fixed", derandomize=True, database=None, max_examples=25, deadline=None, suppress_health_check=quiet
        )
        hypothesis.settings.load_profile("fixed")


def run_pytest(job: dict[str, Any], out: int) -> None:
    """Run pytest with the job's limits, then exit. For a fork."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    seconds = int(job["seconds"]) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (AS_BYTES, AS_BYTES))
    fix_randomness()
    import pytest

    recorder = Recorder(job, out)
    if job["covered"]:
        recorder.start_tracing()
    arguments = [
        "-q", "--tb=no", "--assert=plain", "--color=no", "-p", "no:cacheprovider", "-o", "addopts=", "--rootdir=.",
        "--continue-on-collection-errors", "--disable-warnings", *job["targets"],
    ]  # fmt: skip
    code = pytest.main(arguments, plugins=[recorder])
    recorder.send(code=int(code))
    os._exit(0)


def drain(out: int, pid: int, seconds: float) -> tuple[list[dict[str, Any]], bool]:
    """Return the fork's messages until it ends, and whether it exceeded its time limit. Kill its process group at the end."""
    data = bytearray()
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([out], [], [], min(left, 1.0))[0]:
            continue
        part = os.read(out, 1 << 16)
        data += part
        if not part or (data.endswith(b"}\n") and b'\n{"code"' in data[-40:]):
            break
    hung = left <= 0
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    messages = []
    for line in bytes(data).split(b"\n"):
        with contextlib.suppress(ValueError):  # a truncated line
            messages.append(json.loads(line))
    return [each for each in messages if isinstance(each, dict)], hung


def summary(job: dict[str, Any], messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Combine the fork's messages into one answer."""
    answer: dict[str, Any] = {
        "id": job["id"],
        "tests": {},
        "uncollected": {},
        "ran": {},
        "code": None,
        "stopped": False,
    }
    numbers: dict[tuple[str, int], int] = {}
    for each in messages:
        if "ended" in each:
            answer["tests"][each["test"]] = [each["ended"], each["seconds"]]
        elif "ran" in each:
            answer["ran"][each["test"]] = [numbers.setdefault((path, line), len(numbers)) for path, line in each["ran"]]
        elif "uncollected" in each:
            answer["uncollected"][each["uncollected"]] = each["reason"]
        elif "stopped" in each:
            answer["stopped"] = True
        elif "code" in each:
            answer["code"] = each["code"]
    answer["functions"] = list(numbers)
    return answer


def run_job(job: dict[str, Any], files: dict[str, bytes]) -> dict[str, Any]:
    """Run one job: edit the files, fork, read the messages, restore the files."""
    for path, text in job["edits"].items():
        with open(path, "w", encoding="utf-8", newline="") as file:
            file.write(text)
    before = signatures()
    edited = {os.path.join(".", path) for path in job["edits"]}
    out, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(out)
            run_pytest(job, write)
        finally:
            os._exit(97)
    os.close(write)
    messages, hung = drain(out, pid, 2 * job["seconds"] + GRACE_S)
    os.close(out)
    _, status, used = os.wait4(pid, 0)
    changed = restore(files, before)
    for path in edited:
        with open(path, "wb") as file:
            file.write(files[path])
    answer = summary(job, messages)
    ended_by = -os.waitstatus_to_exitcode(status) if os.WIFSIGNALED(status) and answer["code"] is None else 0
    answer.update(
        cpu=used.ru_utime + used.ru_stime,
        hung=hung or ended_by == signal.SIGXCPU,
        signal=ended_by,
        changed=changed[:20],
    )
    return answer


def main() -> None:
    """Read the jobs from stdin and write their answers to stdout."""
    request = json.loads(sys.stdin.buffer.read())
    sys.dont_write_bytecode = True
    sys.path[:] = [each for each in sys.path if each] + [os.getcwd()]
    for name in request["warm"]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    files = read_files()
    settled: set[str] = set()  # groups with a job that passed
    for job in request["jobs"]:
        if job["group"] in settled:
            continue
        answer = run_job(job, files)
        if job["group"] and all(answer["tests"].get(test, [""])[0] == "passed" for test in job["tests"]):
            settled.add(job["group"])
        sys.stdout.write(base64.b64encode(zlib.compress(json.dumps(answer).encode(), 1)).decode() + "\n")
        sys.stdout.flush()
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    total = own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
    sys.stdout.write(base64.b64encode(zlib.compress(json.dumps({"cpu": total}).encode(), 1)).decode() + "\n")


if __name__ == "__main__":
    main()
