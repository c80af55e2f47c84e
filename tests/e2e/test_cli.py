"""The command line as a person meets it: help that helps, errors with a way out, looking at a run and taking a release back."""

import json
import os
import socket
import subprocess
import sys

import pytest
from tests.deadlines import WHOLE_PROGRAM_S
from tests.fakes.fork_server import FORK_SERVER

from ostinato.app.evaluation import open_releases
from ostinato.app.storage import open_log, open_run
from ostinato.config import load
from ostinato.core.weights import Learned
from ostinato.launch.workers.prepare import prepare
from ostinato.model.load import load_model
from ostinato.model.tensors import weights_of
from ostinato.record.roles import hold
from ostinato.testing.tiny import tiny_model
from ostinato.weights.publish.publisher import Candidates, VersionPublisher

COMMANDS = [
    *("up", "demo", "serve", "train", "release", "housekeeping", "config", "eval", "status", "log"),
    *("forget", "ship", "approve", "refuse", "rollback"),
    *("weights", "doctor", "connect"),
]
SHOWN = {"COLUMNS": "140", "NO_COLOR": "1"}


def ostinato(*words, code=0):
    command, env = [sys.executable, "-m", "ostinato.cli", *words], os.environ | SHOWN
    return said(
        subprocess.run(command, capture_output=True, text=True, timeout=WHOLE_PROGRAM_S, check=False, env=env), code
    )


def forked(*words, code=0):
    """As `ostinato`, in a process that begins with the libraries that the command would import."""
    return said(
        FORK_SERVER.run([sys.executable, "-m", "ostinato.cli", *words], timeout=WHOLE_PROGRAM_S, env=SHOWN), code
    )


def said(done, code):
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def test_help_names_every_command():
    text = ostinato("--help")
    assert [command for command in COMMANDS if f" {command} " not in text] == []


def test_a_plan_says_what_does_not_fit():
    text = ostinato("weights", "plan", "--parameters", "1e12", "--changed", "0.01")
    assert "10.1 GB" in text
    assert "does not fit" in text
    assert "8 shards fit" in text
    assert "does not fit" not in forked("weights", "plan", "--parameters", "1e12", "--shards", "16")
    assert "changed" in forked("weights", "plan", "--parameters", "1e12", "--changed", "0.5", code=2)


@pytest.mark.parametrize("command", ["demo", "rollback", "eval"])
def test_each_commands_help_explains_its_options(command):
    text = ostinato(command, "--help")
    assert "--config" in text
    assert "--set" in text
    assert len(text.splitlines()) > 8


def test_a_wrong_key_is_one_line_with_the_right_one():
    text = ostinato("status", "--set", "lern.batch=3", code=2)
    assert "did you mean 'learn.batch'" in text


def test_who_looks_for_a_setting_among_the_options_is_told_how_settings_are_given():
    assert "--set listen.port=9000" in ostinato("up", "--port", "9000", code=2)
    assert "--set" not in ostinato("upp", code=2)


def test_a_run_that_does_not_exist_is_said_so(tmp_path):
    assert "no run in" in forked("status", "--set", f"run.directory={tmp_path / 'none'}", code=2)


def test_an_open_address_without_keys_is_refused(tmp_path):
    text = forked("serve", "--set", f"run.directory={tmp_path}", "--set", "listen.host=0.0.0.0", code=2)
    assert "api_keys" in text


@pytest.fixture
async def shipped(tmp_path):
    """A run with three releases, v0 to v2, made without a trainer."""
    model = tiny_model(tmp_path / "model")
    settings = [f"run.directory='{tmp_path / 'run'}'", f"model.source='{model}'", "model.dtype='float32'"]
    config = load(None, settings)
    with open_run(config) as run:
        path = await prepare(run, lambda _: None)
        candidates = Candidates(VersionPublisher(run.store, config.publish), "test", 1, lambda _: None)
        candidates.last = await run.follower.resolve("base")
        for number in (1, 2):
            weights = weights_of(load_model(path, model_dtype()))
            name = next(iter(weights))
            array = weights[name]
            data = array.data.copy()
            data[3] ^= number  # another exponent bit: other weights, still finite
            changed = dict(weights) | {name: type(array)(array.dtype, array.shape, data)}
            policy = await candidates.publish(Learned(step=number, policy_number=number, weights=changed, metrics={}))
            before = await run.store.read_ref("live")
            await run.store.move_ref("live", before, policy.hash)
            await open_releases(run).watch()  # writes the ledger line of a ref that was moved by hand
    return [word for setting in settings for word in ("--set", setting)]


def model_dtype():
    import torch

    return torch.float32


async def test_a_release_is_taken_back_and_the_store_is_sound(shipped, tmp_path):
    assert "shipped" in forked("log", "--kind", "releases", *shipped)
    text = forked("status", *shipped)
    assert "0 turns = 0 trained" in text
    assert "no `ostinato up` has run here" in text
    assert json.loads(forked("status", "--json", *shipped))["turns"]["ingested"] == 0
    chain = forked("weights", "log", *shipped)
    assert [line.split()[0] for line in chain.splitlines()[1:4]] == ["v2", "v1", "v0"]
    assert "v1" in forked("rollback", "--reason", "test", "--actor", "ann", *shipped)
    assert "rolled_back" in forked("log", "--kind", "releases", *shipped)
    assert "by ann  test" in forked("log", "--kind", "releases", *shipped)
    assert "nothing waits for approval" in forked("approve", *shipped, code=2)
    assert "v7 was never released" in forked("rollback", "v7", *shipped, code=2)
    assert "released: v0, v1" in forked("rollback", "deadbeef", *shipped, code=2)
    assert "v0" in forked("rollback", "0", *shipped)
    assert "is live already" in forked("ship", "v0", *shipped, code=2)
    assert "live is v2" in forked("ship", *shipped), "the candidate, unless another is named"
    assert "by hand" in forked("log", "--kind", "releases", *shipped)
    assert "sound" in forked("weights", "fsck", *shipped)
    target = tmp_path / "out"
    forked("weights", "export", str(target), *shipped)
    load_model(target, model_dtype())
    assert "not empty" in forked("weights", "export", str(target), *shipped, code=2)


def test_doctor_looks_at_every_part_and_each_failure_names_its_remedy(tmp_path):
    model, run = tiny_model(tmp_path / "model"), tmp_path / "run"
    fast = ["--set", f"run.directory={run}", "--set", f"model.source={model}", "--set", "listen.port=0"]
    fast += [
        "--set",
        "evaluate.gate.margin=0.2",
        "--set",
        "evaluate.gate.total_margin=0.2",
    ]  # the demo's suite is small
    text = forked("doctor", *fast, "--set", "model.dtype=float32", "--set", "evaluate.suite=demo")
    parts = (
        "Python",
        "torch",
        "device",
        "SQLite",
        "sandbox",
        "model",
        "context",
        "speed",
        "numerics",
        "reward",
        "suite",
        "memory",
        "disk",
        "log",
        "erasure",
        "dials",
        "port",
    )
    found = [line.split()[1] for line in text.splitlines() if line.startswith("✓")]
    assert found == list(parts)
    assert "each can be graded here" in text
    assert not run.exists(), "it only looks"
    (tmp_path / "file").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        wrong = {
            "run.directory": tmp_path / "file" / "run",
            "model.source": "/no/such/model",
            "listen.port": taken.getsockname()[1],
            "evaluate.suite": "/no/such/suite.jsonl",
            "reward.function": "nobodys:kept",
        }
        text = forked("doctor", *(word for key, value in wrong.items() for word in ("--set", f"{key}={value}")), code=1)
    failed = {line.split()[1]: line for line in text.splitlines() if line.startswith("✗")}
    assert set(failed) >= {"model", "reward", "suite", "disk", "port"}
    for part, remedy in (
        ("model", "give one, or a hub name"),
        ("reward", "reward.function"),
        ("suite", "check evaluate.suite"),
        ("disk", "name another place"),
        ("port", "set listen.host and listen.port"),
    ):
        assert remedy in failed[part]


def test_a_second_demo_does_not_remove_the_running_one(tmp_path):
    place = tmp_path / "run"
    place.mkdir()
    (place / "demo").write_text("")
    (place / "log.db").write_text("precious")
    words = (
        "demo",
        "--directory",
        str(place),
        "--out",
        str(tmp_path),
        "--set",
        f"model.source={tiny_model(tmp_path / 'm')}",
    )
    with hold(place, "up"):
        text = forked(*words, code=2)
        assert f"another up process (pid {os.getpid()}) already uses" in text
        assert (place / "log.db").read_text() == "precious"
    (place / "demo").unlink()
    assert "not an earlier demo's" in forked(*words, code=2)
    assert (place / "log.db").read_text() == "precious"


def test_a_run_is_looked_at_while_another_process_writes_to_it(shipped):
    words = [word for word in shipped if word != "--set"]
    config = load(None, words)
    with open_log(config), hold(config.run.directory, "up"), hold(config.run.directory, "housekeeping"):
        assert "0 turns" in forked("status", *shipped)
        assert "shipped" in forked("log", *shipped)
        assert "would delete" in forked("weights", "gc", "--dry-run", *shipped)
