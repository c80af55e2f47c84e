"""What is seen of a machine and of a conversation, and what is never written down."""

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from ostinato.core.errors import BadRequest, NotFound, Unavailable
from ostinato.core.sandbox import ExecResult
from ostinato.testing.records import a_turn
from ostinato.worlds.fidelity.look import shape
from ostinato.worlds.fidelity.observation import Observation, of_turns, parse_observation
from ostinato.worlds.fidelity.observe import observe, read_observations, script


class Here:
    """A sandbox that is none: for scripts of Ostinato's own."""

    def __init__(self, **env):
        self.env = env

    async def exec(self, argv, *, stdin=b"", cwd=None, env=None, timeout):
        run = await asyncio.create_subprocess_exec(
            *argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ) | self.env
        )
        out, err = await run.communicate()
        return ExecResult(code=run.returncode, stdout=out, stderr=err, timed_out=False, killed_reason=None, seconds=0.1)


async def test_the_script_sees_a_machine_and_says_no_secret():
    seen = await observe(Here(MY_TOKEN="hunter2", IS_SANDBOX="1", HOME="/home/ann"), "m1", python=sys.executable)
    assert seen.group == "m1"
    assert seen.features["env:MY_TOKEN"] == seen.features["env:IS_SANDBOX"] == 1.0
    assert seen.features["kernel.system"] == "Linux"
    assert seen.features["ms.true"] > 0.0
    assert seen.features["tool:sed"] == 1.0
    assert "hunter2" not in seen.line()
    assert "ann" not in [
        part for value in seen.features.values() if isinstance(value, str) for part in value.split("/")
    ]
    assert len({name.split(".")[0].split(":")[0] for name in seen.features}) > 12


async def test_a_sandbox_without_python_says_so():
    class Bare(Here):
        async def exec(self, argv, **more):
            return ExecResult(
                code=127, stdout=b"", stderr=b"not found", timed_out=False, killed_reason=None, seconds=0.0
            )

    with pytest.raises(Unavailable, match="put python3 into it"):
        await observe(Bare(), "m1")


def test_the_script_runs_alone_as_an_operator_runs_it():
    done = subprocess.run(
        [sys.executable, "-I", "-", "web-1"], input=script(), capture_output=True, text=True, check=True
    )
    assert parse_observation(done.stdout).group == "web-1"
    unnamed = subprocess.run([sys.executable, "-I", "-"], input=script(), capture_output=True, text=True, check=True)
    assert os.uname().nodename not in parse_observation(unnamed.stdout).group


def test_names_are_shapes():
    assert shape("web-12.lan") == "a-0.a"
    assert shape("worker-7f9c4d-x2x9q") != "worker-7f9c4d-x2x9q"


def test_a_file_of_observations_is_read_back_and_its_wrong_line_is_named(tmp_path):
    one = Observation(group="a", features={"x": 1.0, "y": "z"})
    file = tmp_path / "seen.jsonl"
    file.write_text(one.line() + "\n\n" + one.line() + "\n")
    assert read_observations(file) == (one, one)
    file.write_text(one.line() + "\n" + '{"group": "a"}\n')
    with pytest.raises(BadRequest, match="line 2"):
        read_observations(file)
    with pytest.raises(NotFound):
        read_observations(tmp_path / "none.jsonl")


@pytest.mark.parametrize("line", ["", "[]", '{"group": 1, "features": {}}', '{"group": "a", "features": {"x": []}}'])
def test_what_is_no_observation_is_refused(line):
    with pytest.raises(BadRequest):
        parse_observation(line)


def test_turns_are_read_by_their_control_tokens_and_times():
    pieces = {0: b"", **{at: bytes([at]) for at in range(1, 256)}}
    prompt = (0, *b"system\nUse /repo now", 0, 0, *b"user\nhi there", 0)
    turns = [
        replace(a_turn("a:0", prompt=prompt), started_at=10.0, ended_at=11.0),
        replace(a_turn("b:0", prompt=prompt), started_at=14.0, ended_at=17.0),
    ]
    seen = of_turns(turns, pieces.__getitem__, "g").features
    assert (seen["turns"], seen["gap_s"], seen["seconds"], seen["user.chars"]) == (2.0, 3.0, 2.0, 8.0)
    assert seen["system.word:/repo"] == 1.0
    assert "there" not in json.dumps(seen)
    assert "there" not in of_turns(turns, pieces.__getitem__, "g").line()
    with pytest.raises(BadRequest):
        of_turns([], pieces.__getitem__, "g")


def test_what_was_asked_is_a_hash_of_peoples_words_and_never_of_the_operators():
    pieces = {0: b"", **{at: bytes([at]) for at in range(1, 256)}}

    def asked(system, user):
        prompt = (0, *b"system\n" + system, 0, 0, *b"user\n" + user, 0)
        return of_turns([a_turn("a:0", prompt=prompt)], pieces.__getitem__, "g").asked

    assert asked(b"Use /repo", b"mend it") == asked(b"You are simulated", b"mend it") != ""
    assert asked(b"Use /repo", b"mend it") != asked(b"Use /repo", b"break it")


def test_lines_of_before_there_was_a_question_are_read_still():
    assert parse_observation('{"group": "a", "features": {"x": 1}}') == Observation(group="a", features={"x": 1.0})
    assert "asked" not in Observation(group="a", features={}).line()
    with pytest.raises(BadRequest):
        parse_observation('{"group": "a", "asked": 3, "features": {}}')
