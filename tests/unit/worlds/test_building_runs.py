"""Test results come out of a sandbox that runs third-party code: no forged answer ends a build or spoils its budget."""

import base64
import json
import zlib
from types import SimpleNamespace

import pytest

from ostinato.core.errors import Unavailable
from ostinato.core.sandbox import SandboxSpec
from ostinato.worlds.building.runs import SuiteJob, SuiteRuns

HONEST = {
    "id": "0", "functions": [["a.py", 1]], "tests": {"t.py::a": ["passed", 0.1]}, "uncollected": {}, "ran": {"t.py::a": [0]},
    "code": 0, "stopped": False, "hung": False, "signal": 0, "cpu": 0.5, "changed": [],
}  # fmt: skip
FORGED = [
    {"tests": ["t.py::a"]}, {"tests": {"t.py::a": "passed"}}, {"ran": {"t.py::a": [7]}}, {"ran": 3}, {"functions": [["a.py"]]},
    {"code": float("inf")}, {"signal": float("nan")}, {"cpu": float("nan")}, {"cpu": -5.0}, {"cpu": float("inf")}, {"cpu": 10**400},
    {"tests": {"t.py::a": ["passed", float("nan")]}}, {"changed": 3}, {"uncollected": []},
]  # fmt: skip


class Backend:
    """Starts sandboxes whose program prints these lines."""

    def __init__(self, *lines):
        self.lines = lines

    async def start(self, spec):
        return self

    async def stop(self):
        pass

    async def exec(self, argv, **options):
        return SimpleNamespace(stdout=b"\n".join(self.lines), stderr=b"", code=0, killed_reason="")


def line(answer):
    return base64.b64encode(zlib.compress(json.dumps(answer).encode()))


async def run(*lines):
    runs = SuiteRuns(Backend(*lines), SandboxSpec(), "python3", ())
    return runs, await runs.run([SuiteJob(id="a", targets=())], 0)


async def test_an_honest_answer_is_read():
    runs, (outcome,) = await run(line(HONEST), line({"cpu": 0.75}))
    assert outcome.passed == {"t.py::a"}
    assert outcome.ran == {"t.py::a": {("a.py", 1)}}
    assert runs.cpu == 0.75


@pytest.mark.parametrize("forged", FORGED)
async def test_a_forged_answer_is_none(forged):
    runs, (outcome,) = await run(
        line(HONEST), line(HONEST | forged | {"id": "1"}), line({"cpu": forged.get("cpu", 0.75)})
    )
    assert outcome is not None
    assert runs.cpu in (0.5, 0.75)
    with pytest.raises(Unavailable, match="gave no answer"):
        await run(line(HONEST | forged))


async def test_lines_that_are_no_answers_are_passed_over():
    deep = base64.b64encode(zlib.compress(b"[" * 200_000))
    _, (outcome,) = await run(b"hello", b"####", base64.b64encode(b"no zlib"), deep, line([1]), line(HONEST))
    assert outcome is not None
