"""The grader's rules that need no sandbox; `tests/e2e/test_envs_grader.py` grades real bodies."""

import json

import pytest

from ostinato.core.errors import BadRequest
from ostinato.core.sandbox import ExecResult
from ostinato.worlds.grading.completion import python_tests, truncate_body


@pytest.mark.parametrize(
    ("text", "body"),
    [
        ("    return 1\n", "    return 1\n"),
        ("\n    return 1\nprint(f(1))\n", "\n    return 1\n"),
        ("    x = 1\n\n    return x\n```\nThis function", "    x = 1\n\n    return x\n"),
        ("    return 1\n    ```\n", "    return 1\n"),
        ("\treturn 1\ndef g():\n    return 2", "\treturn 1\n"),
        ("return 1", ""),
        ("", ""),
        ("\n\n", ""),
        ("   \n```", ""),
    ],
)
def test_a_body_ends_at_the_first_unindented_line_or_fence(text, body):
    assert truncate_body(text) == body


class Answers:
    """A fake sandbox: `say` makes stdout from the judge's secret second message."""

    def __init__(self, say, code=0):
        self.say, self.code, self.runs = say, code, 0

    async def run(self, program, *, files=None, stdin=b"", timeout):
        self.runs += 1
        first, second = (int(part) for part in stdin[:32].split())
        assert len(stdin) == 32 + first + second
        nonce = json.loads(stdin[32 + first :])[1]
        return ExecResult(
            code=self.code, stdout=self.say(nonce), stderr=b"", timed_out=False, killed_reason=None, seconds=0.01
        )


HEAD = 'def f(x):\n    """Return x."""\n'


@pytest.mark.parametrize(
    ("say", "code", "score"),
    [
        (lambda nonce: nonce.encode() + b"\n", 0, 1.0),
        (lambda nonce: nonce.encode(), 1, 0.0),
        (lambda nonce: b"ok\n", 0, 0.0),
        (lambda nonce: b"", 0, 0.0),
    ],
)
async def test_only_the_nonce_with_exit_code_zero_passes(say, code, score):
    assert await python_tests(HEAD, "    return x", "assert f(1) == 1\n", Answers(say, code)) == score


async def test_an_empty_or_huge_body_needs_no_sandbox():
    box = Answers(lambda nonce: nonce.encode())
    assert await python_tests(HEAD, "", "", box) == 0.0
    assert await python_tests(HEAD, "print()", "", box) == 0.0
    assert await python_tests(HEAD, "    return x" + " " * 30_000 + "+ 1", "", box) == 0.0
    assert box.runs == 0


async def test_a_head_without_a_function_is_refused():
    with pytest.raises(BadRequest, match="head"):
        await python_tests("x = 1\n", "    return 1", "", Answers(lambda nonce: b""))
