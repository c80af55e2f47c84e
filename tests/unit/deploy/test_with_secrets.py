"""Secrets from files reach the configuration and the environment, and no command line."""

import importlib.util
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from tests.deadlines import WHOLE_PROGRAM_S

from ostinato.config import load
from ostinato.core.errors import BadConfig

PROGRAM = Path(__file__).parents[3] / "deploy" / "with_secrets.py"
SPEC = importlib.util.spec_from_file_location("with_secrets", PROGRAM)
assert SPEC is not None
assert SPEC.loader is not None
with_secrets = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(with_secrets)
KEY, OTHER, ADMIN = "acme:sk-0123456789abcdef", "bolt:sk-fedcba9876543210", "admin-0123456789abcdef"


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "o.toml").write_text('[serve]\ncontrol_share = 0.2\n[listen]\nhost = "0.0.0.0"\n')
    (tmp_path / "keys").write_text(f"{KEY}\n\n{OTHER}\n")
    (tmp_path / "admin").write_text(f"{ADMIN}\n")
    (tmp_path / "empty").write_text("\n")
    return tmp_path


def test_the_configuration_has_them_beside_what_it_had(files):
    command, environment = with_secrets.prepared(
        [
            f"--config={files}/o.toml",
            f"--lines=serve.api_keys={files}/keys",
            f"--text=serve.admin_key={files}/admin",
            f"--env=OSTINATO_LOG_PASSWORD={files}/admin",
            "--",
            "ostinato",
            "up",
            "--on",
            "ray",
        ]
    )
    assert command[:-1] == ["ostinato", "up", "--on", "ray", "--config"]
    assert environment == {"OSTINATO_LOG_PASSWORD": ADMIN}
    made = Path(command[-1])
    config = load(made)
    assert [key.get_secret_value() for key in config.serve.api_keys] == [KEY, OTHER]
    assert config.serve.admin_key is not None
    assert config.serve.admin_key.get_secret_value() == ADMIN
    assert (config.serve.control_share, config.listen.host) == (0.2, "0.0.0.0")
    assert stat.S_IMODE(made.stat().st_mode) == 0o600
    assert stat.S_IMODE(made.parent.stat().st_mode) == 0o700
    assert not any(secret in word for secret in (KEY, OTHER, ADMIN) for word in command)


def test_without_secrets_in_it_the_file_stays_as_it_is(files):
    command, environment = with_secrets.prepared([f"--config={files}/o.toml", "--", "ostinato", "status"])
    assert (command, environment) == (["ostinato", "status", "--config", f"{files}/o.toml"], {})


def test_what_commands_that_ended_left_is_removed_and_nobody_else_s(files):
    """A container that starts again keeps /tmp, and the command its number."""
    options = [f"--config={files}/o.toml", f"--text=serve.admin_key={files}/admin", "--", "true"]
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    old, own, alive = (files / f"with-secrets-{pid}-abc" for pid in (ended.pid, os.getpid(), os.getppid()))
    other = files / "with-secrets-notes"
    for each in (old, own, alive, other):
        each.mkdir()
        (each / "ostinato.json").write_text("{}")
    planted = files / f"with-secrets-{ended.pid}-link"
    planted.symlink_to(other)
    made = [Path(with_secrets.prepared(options)[0][-1]).parent for _ in range(2)]
    assert not old.exists()
    assert not own.exists()
    assert not made[0].exists()
    assert made[1].exists()
    assert alive.exists()
    assert (other / "ostinato.json").exists()
    assert planted.is_symlink()


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("--text=serve.admin_key={files}/none", "none cannot be read"),
        ("--env=X={files}/empty", "empty is empty"),
        ("--lines=serve.api_keyz={files}/keys", "did you mean 'serve.api_keys'"),
    ],
)
def test_what_is_wrong_is_said_without_the_secret(files, option, why):
    with pytest.raises(BadConfig, match=why) as caught:
        with_secrets.prepared([f"--config={files}/o.toml", option.format(files=files), "--", "true"])
    assert KEY not in str(caught.value)


def test_it_becomes_the_command(files):
    said = "import os, sys; print(os.getpid(), os.environ['WORD'], sys.argv[1:])"
    ran = subprocess.Popen(
        [
            sys.executable,
            PROGRAM,
            f"--config={files}/o.toml",
            f"--env=WORD={files}/admin",
            "--",
            sys.executable,
            "-c",
            said,
        ],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    out, _ = ran.communicate(timeout=WHOLE_PROGRAM_S)
    assert out.strip() == f"{ran.pid} {ADMIN} {['--config', f'{files}/o.toml']}"


def test_a_command_that_cannot_be_prepared_is_not_run(files):
    ran = subprocess.run(
        [sys.executable, PROGRAM, f"--config={files}/o.toml", f"--env=WORD={files}/none", "--", "echo", "ran"],
        capture_output=True,
        text=True,
        timeout=WHOLE_PROGRAM_S,
    )
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith("with-secrets: the secret ")
    assert json.dumps(KEY) not in ran.stderr
