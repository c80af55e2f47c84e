"""Grading real bodies in the real sandbox: right ones pass, tricks do not."""

import pytest
import pytest_asyncio

from ostinato.demo.tasks import load
from ostinato.worlds.grading.completion import python_tests
from ostinato.worlds.sandbox import SandboxConfig, SingleRuns

HEAD = 'def add(a, b):\n    """Return the sum."""\n'
TESTS = "assert add(1, 2) == 3\nassert add('é', '\\ud800') == 'é\\ud800'\nassert add([1], [2]) == [1, 2]\n"

TRICKS = {
    "prints": "    print('ok')",
    "exits": "    import sys; sys.exit(0)",
    "exits hard": "    import os; os._exit(0)",
    "wrong": "    return a",
    "syntax": "    return (a +",
    "raises": "    raise AssertionError",
    "equal to all": "    class Any(int):\n        def __eq__(self, other): return True\n    return Any(7)",
    "repr": "    class R:\n        def __repr__(self): return '__import__(\"os\").getpid()'\n    return R()",
    "builtins": "    import builtins\n    builtins.AssertionError = ValueError\n    builtins.compile = None\n    return 0",
    "stack walk": "    import sys, gc\n    print([o for o in gc.get_objects() if isinstance(o, dict) and 'nonce' in o])\n    return 0",
    "forged pipe": "    import os\n    for fd in range(64):\n        try: os.write(fd, b'1\\n3')\n"
    "        except OSError: pass\n    return 0",
    "kills the judge": "    import os\n    os.kill(os.getppid(), 9)\n    return 3",
    "closes all": "    import os\n    os.closerange(0, 64)\n    return 3",
    "huge answer": "    return 'x' * 10_000_000",
    "memory": "    return bytearray(1 << 30)",
}


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox():
    async with SingleRuns(SandboxConfig()) as box:
        yield box


@pytest.mark.parametrize(
    "body", ["    return a + b", "\n    return a + b\nprint('more')", "    c = a + b\n    return c\n```\n"]
)
async def test_right_bodies_pass(sandbox, body):
    assert await python_tests(HEAD, body, TESTS, sandbox) == 1.0


@pytest.mark.parametrize("name", TRICKS)
async def test_tricks_fail(sandbox, name):
    assert await python_tests(HEAD, TRICKS[name], TESTS, sandbox) == 0.0


async def test_an_undying_loop_fails_at_the_deadline(sandbox):
    loop = "    while True:\n        try:\n            while True: pass\n        except BaseException: pass\n"
    assert await python_tests(HEAD, loop, TESTS, sandbox, timeout=0.5) == 0.0


async def test_shipped_references_pass_in_the_sandbox(sandbox):
    for task in load()[::40]:
        assert await python_tests(task.head, task.solution, task.tests, sandbox) == 1.0, task.id
        assert await python_tests(task.head, "    pass\n", task.tests, sandbox) == 0.0, task.id
