"""Inside a sandbox: runs sealed tests under pytest and reports the values that they saw, without knowing the expected ones.

Reads one job from stdin: `witness`, the name of the module that sealed tests import; `paths`, the test files; `deleted`, files to delete
first; `fresh`, files whose bytecode is stale; `path`, entries to prepend to the import path. Writes lines of JSON: ``["collected", ids]``,
``["start", id]``, ``["saw", key, kind, ...]``, ``["failed", id]`` or ``["skipped", id]``, ``["end", id]``.
"""

import json
import os
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ostinato.worlds.grading.inside.encoding import Opaque, encode

Tell = Callable[..., None]


class Raised:
    """Replaces ``pytest.raises``: suppresses any Exception, and reports it."""

    def __init__(self, tell: Tell, key: str) -> None:
        self.tell, self.key = tell, key
        self.type: Any = None
        self.value: Any = None

    @property
    def exception(self) -> Any:
        """The error, under the attribute name that unittest uses."""
        return self.value

    def __enter__(self) -> "Raised":
        return self

    def __exit__(self, kind: Any, error: Any, at: Any) -> bool:
        self.type, self.value = kind, error
        names = [] if kind is None else [each.__name__ for each in kind.__mro__]
        self.tell("saw", self.key, "raised", names, "" if error is None else str(error)[:2000])
        return kind is None or issubclass(kind, Exception)


def witness_module(name: str, tell: Tell) -> types.ModuleType:
    """Return the module whose functions sealed tests call."""
    module = types.ModuleType(name)

    def equal(key: str, seen: Any) -> None:
        try:
            tell("saw", key, "value", encode(seen))
        except Opaque as opaque:
            tell("saw", key, "opaque", str(opaque))

    def pair(key: str, left: Any, right: Any) -> None:
        try:
            tell("saw", key, "values", encode(left), encode(right))
        except Opaque:
            tell("saw", key, "truth", bool(left == right))

    def truth(key: str, claim: Any) -> None:
        tell("saw", key, "truth", bool(claim))

    def raises(key: str) -> Raised:
        return Raised(tell, key)

    for function in (equal, pair, truth, raises):
        setattr(module, function.__name__, function)
    return module


class Narrator:
    """A pytest plugin that reports each test's course and outcome."""

    def __init__(self, tell: Tell) -> None:
        self.tell = tell

    def pytest_collection_finish(self, session: Any) -> None:
        """Report the collected tests, in order."""
        self.tell("collected", [item.nodeid for item in session.items])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Report that a test starts."""
        self.tell("start", nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Report a phase of a test (setup, call or teardown) that failed or was skipped."""
        if not report.passed or hasattr(report, "wasxfail"):
            self.tell("skipped" if report.skipped or hasattr(report, "wasxfail") else "failed", report.nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Report that a test has ended."""
        self.tell("end", nodeid)


def prepare(job: dict[str, Any]) -> None:
    """Delete the deleted files and the cached bytecode of fresh files, which may be stale, and set the import path."""
    for path in job["deleted"]:
        if os.path.isfile(path):
            os.unlink(path)
    for path in job["fresh"]:
        folder, name = os.path.split(path)
        cached = os.path.join(folder, "__pycache__")
        for stale in os.listdir(cached) if os.path.isdir(cached) else ():
            if stale.startswith(f"{name.removesuffix('.py')}."):
                os.unlink(os.path.join(cached, stale))
    sys.dont_write_bytecode = True
    sys.path[:0] = [os.path.abspath(each) for each in job["path"]]


def main() -> None:
    """Run one job."""
    job = json.loads(sys.stdin.buffer.read())
    channel = os.dup(1)
    null = os.open("/dev/null", os.O_RDWR)
    for standard in (0, 1):
        os.dup2(null, standard)

    def tell(*event: Any) -> None:
        line = json.dumps(event).encode() + b"\n"
        while line:
            line = line[os.write(channel, line) :]

    prepare(job)
    import pytest

    sys.modules[job["witness"]] = witness_module(job["witness"], tell)
    options = [
        "-q", "--tb=no", "--assert=plain", "--color=no", "-p", "no:cacheprovider", "-o", "addopts=", "--rootdir=.",
        "--continue-on-collection-errors", "--disable-warnings",
    ]  # fmt: skip
    pytest.main([*options, *job["paths"]], plugins=[Narrator(tell)])
    os._exit(0)


if __name__ == "__main__":
    main()
