"""Killed with -9 at random instants, a trainer ends with the bits of one that was left alone."""

import hashlib
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from tests.fakes.fork_server import FORK_SERVER

from ostinato.core.records import Arm, Finish, PolicyVersion, Sampling, Span, Turn
from ostinato.core.samples import Sample
from ostinato.testing.records import a_sample
from ostinato.testing.tiny import tiny_model
from ostinato.train import checkpoint
from ostinato.train.config import TrainConfig
from ostinato.train.trainer import PolicyTrainer

STEPS = 6
CONFIG = TrainConfig(compute="fp32", learning_rate=1e-3, turn_tokens=8, microbatch_tokens=60)


def batch(step: int) -> list[Sample]:
    """What the log would hold for this step: the same for every run."""
    draw = random.Random(step)
    made: list[Sample] = []
    for index in range(10):
        sampled = tuple(draw.randrange(256) for _ in range(draw.randrange(1, 8)))
        turn = Turn(
            id=f"{step}-{index}:0",
            episode="e",
            parent=None,
            user="u",
            tenant="default",
            arm=Arm.LIVE,
            propensity=1.0,
            prompt_ids=tuple(b"def f(x):"[: draw.randrange(3, 9)]),
            sampled_ids=sampled,
            logprobs=tuple(-5.0 - draw.random() for _ in sampled),
            spans=(Span(policy=PolicyVersion(number=0, hash="start"), tokens=len(sampled)),),
            sampling=Sampling(max_tokens=8),
            finish=Finish.STOP,
            text="",
            started_at=0.0,
            ended_at=0.0,
        )
        made.append(a_sample(turn, draw.gauss(0, 1)))
    return made


def train(model: Path, store: Path, upto: int) -> str:
    """Resume from the store if there is something, go on to step `upto` with a checkpoint after each, return the state's hash."""
    torch.set_num_threads(1)
    trainer = PolicyTrainer(model, CONFIG)
    found = checkpoint.load(store)
    if found is not None:
        trainer.restore(found)
    while trainer.step_count < upto:
        trainer.step(batch(trainer.step_count + 1))
        checkpoint.save(store, trainer.state())
    state = trainer.state()
    digest = hashlib.sha256()
    for arrays in (state.weights, state.moments):
        for name in sorted(arrays):
            digest.update(arrays[name].tobytes())
    for name, array in sorted(trainer.weights().items()):
        digest.update(name.encode() + array.data.tobytes())
    return digest.hexdigest()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny", dtype="bfloat16")


@pytest.fixture(scope="module")
def undisturbed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return train(model, tmp_path_factory.mktemp("straight"), STEPS)


def test_three_steps_resumed_for_three_more_equal_six(model: Path, undisturbed: str, tmp_path: Path):
    halfway = train(model, tmp_path, 3)
    assert halfway != undisturbed
    assert train(model, tmp_path, STEPS) == undisturbed


@pytest.mark.parametrize("kills", [4, pytest.param(12, marks=pytest.mark.examination)])
def test_killed_at_random_instants_the_run_ends_with_the_same_bits(
    model: Path, undisturbed: str, tmp_path: Path, kills: int
):
    done = FORK_SERVER.run([sys.executable, "-m", "tests.e2e.test_train_resume", model, tmp_path, kills])
    assert done.returncode == 0, done.stderr
    report = dict(line.split("=") for line in done.stdout.split())
    assert int(report["kills"]) >= kills
    assert int(report["kept_steps"]) >= 1, "no kill fell between a checkpoint and the end: nothing was resumed"
    assert report["hash"] == undisturbed
    assert train(model, tmp_path, STEPS) == undisturbed


def undisturbed_seconds(model: Path, store: Path) -> tuple[float, float]:
    """Seconds from a start to its first checkpoint, and from one checkpoint to the next."""
    store.mkdir()
    started = time.perf_counter()
    child = os.fork()
    if child == 0:
        train(model, store, STEPS)
        os._exit(0)
    wait_for_checkpoint(store, child)
    first = time.perf_counter()
    os.waitpid(child, 0)
    return first - started, (time.perf_counter() - first) / (STEPS - 1)


def wait_for_checkpoint(store: Path, child: int) -> None:
    """Until there is one more than now, or the child has ended (it stays to be waited for)."""
    before = (store / "LATEST").read_text() if (store / "LATEST").exists() else ""
    while not (store / "LATEST").exists() or (store / "LATEST").read_text() == before:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return
        time.sleep(0.001)


def torment(model: Path, store: Path, kills: int) -> None:
    """Start the run again and again until so many starts were killed, one at least behind a checkpoint; one that was faster is compared
    and begun anew.

    Forks, because a fresh interpreter takes seconds to import.
    """
    draw, starts, killed, resumed = random.Random(11), 0, 0, 0
    answer, answers = store.with_name("answer"), set[str]()
    torch.set_num_threads(1)
    undisturbed_seconds(model, store.with_name("warming"))  # the first run on a machine compiles the kernels
    start, step = undisturbed_seconds(model, store.with_name("timing"))
    while True:
        last = killed >= kills and (resumed > 0 or starts > 20 * kills)
        child = os.fork()
        if child == 0:
            answer.write_text(train(model, store, STEPS))
            os._exit(0)
        if not last:
            if starts % 2:  # somewhere in a start, then somewhere after one more checkpoint: machines differ in speed
                wait_for_checkpoint(store, child)
                time.sleep(step * draw.uniform(0.0, 0.5))
            else:
                time.sleep(start * draw.uniform(0.1, 1.0))
            os.kill(child, signal.SIGKILL)
        starts += 1
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            killed += 1
            resumed += checkpoint.load(store) is not None
            continue
        answers.add(answer.read_text())
        if last:
            break
        shutil.rmtree(store)
        store.mkdir()
    sys.stdout.write(f"kills={killed} kept_steps={resumed} hash={','.join(answers)}\n")


if __name__ == "__main__":
    torment(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
