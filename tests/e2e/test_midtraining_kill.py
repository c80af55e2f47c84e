"""`ostinato corpus build` and `ostinato train --corpus` as a user runs them; killed with -9, the same command ends with the same bytes."""

import os
import signal
import subprocess
import sys

import pytest

from ostinato.testing.tiny import tiny_model

OSTINATO = (sys.executable, "-m", "ostinato.cli")


def words(place, out):
    return [
        *OSTINATO, "train", "--corpus", str(place / "corpus"), "--out", str(out), "--tokens", "4096", "--batch-tokens", "512",
        "--length", "64:1", "--length", "128:1", "--held-out", "0.2", "--measure-every", "1", "--keep-every", "1",
        "--learning-rate", "3e-3", "--set", f"model.source='{place / 'tiny'}'", "--set", "model.numerics=fast",
    ]  # fmt: skip


@pytest.fixture
def place(tmp_path):
    tiny_model(tmp_path / "tiny")
    (tmp_path / "mine").mkdir()
    for number in range(40):
        names = " ".join(f"part{number * n % 97}" for n in range(20))
        (tmp_path / "mine" / f"m{number}.py").write_text(f"def f{number}(x):\n    # {names}\n    return x + {number}\n")
    build = [*OSTINATO, "corpus", "build", f"{tmp_path}/mine", "--out", str(tmp_path / "corpus"), "--near", "1"]
    built = subprocess.run(
        [*build, "--set", f"model.source='{tmp_path / 'tiny'}'"], capture_output=True, text=True, check=True
    )
    assert "40 files" in built.stdout
    return tmp_path


@pytest.mark.examination
def test_killed_at_any_step_it_ends_with_the_same_weights(place):
    subprocess.run(words(place, place / "straight"), check=True, capture_output=True)
    killed = 0
    for after in (1, 4):
        with subprocess.Popen(words(place, place / "out"), stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("step") and int(line.split()[1]) >= after:
                    os.kill(process.pid, signal.SIGKILL)
                    break
            killed += process.wait() == -signal.SIGKILL
    assert killed == 2
    ended = subprocess.run(words(place, place / "out"), check=True, capture_output=True, text=True)
    assert "step     0" not in ended.stdout, "it went on, and did not begin again"
    straight, out = (place / name / "model.safetensors" for name in ("straight", "out"))
    assert straight.read_bytes() == out.read_bytes()
