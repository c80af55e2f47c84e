"""A replay without a person, killed with SIGKILL at random instants: does it end, at every step, with the bits of a training without them?

`python -m tests.examinations.erasure.run --steps 40 --kills 20` takes minutes, most of them for starts of the trainer. Prints how stale the
turns of the replayed steps are, and how far from the truth the lesser variants end.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tests.e2e import test_erasure_replay as case

from ostinato.app.erasure import ErasureFiles, ErasureRequest
from ostinato.app.storage import open_run
from ostinato.config import Config
from ostinato.run_directory import Home


async def forgotten(config: Config) -> None:
    with open_run(config) as run:
        upto = await run.log.forget("default", case.GONE)
        ErasureFiles(run.home).request(ErasureRequest(tenant="default", user=case.GONE, upto=upto))


def replayed(config: Config) -> int:
    """Start the trainer in a process of its own, which does the replay first. Returns its pid."""
    if child := os.fork():
        return child
    torch.set_num_threads(1)
    asyncio.run(case.resumed(config))
    os._exit(0)


def torment(config: Config, kills: int, seconds: float, truth: dict[int, str]) -> tuple[int, int, int]:
    """Kill the trainer at random instants of a replay's time; begin anew when it was faster. Returns the numbers of replays that ended, of
    those that ended with other bits, and of kills after which there was more of a replay than before.
    """
    draw, ended, other, further, saved = random.Random(11), 0, 0, 0, -1
    place = config.run.directory
    fresh = place.with_name("fresh")
    shutil.copytree(place, fresh)
    killed = 0
    while killed < kills or ended == 0:
        child = replayed(config)
        if killed < kills and survived(child, seconds * draw.uniform(0.05, 0.5)):
            os.kill(child, signal.SIGKILL)
            killed += 1
        os.waitpid(child, 0)
        before, saved = (
            saved,
            max((int(path.name.split("-")[0]) for path in place.glob("erasure/work/checkpoints/0*")), default=saved),
        )
        further += saved > before
        if (job := ErasureFiles(Home(place)).job()) is not None and job.phase == "release":
            ended, other, saved = ended + 1, other + (case.noted(config) != truth), -1
            shutil.rmtree(place)
            shutil.copytree(fresh, place)
    return ended, other, further


def survived(child: int, seconds: float) -> bool:
    """True if the child still runs after so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return False
        time.sleep(0.002)
    return True


def tell(lines: list[dict[str, Any]]) -> None:
    """Print how stale the turns of the replayed steps are."""
    for line in lines[:: max(1, len(lines) // 8)]:
        print(f"  step {line['step']}: effective share of its turns {line.get('ess_turns', math.nan):.3f}")
    for line in lines:
        if line["refused"]:
            print(f"  step {line['step']} was refused: {line['refused'][:150]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--kills", type=int, default=20)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        config = asyncio.run(case.trained_run(Path(folder), given.steps))
        asyncio.run(forgotten(config))
        truth = asyncio.run(case.plainly(config, credits_anew=True, own_references=True))
        whole = config.run.directory.with_name("undisturbed")
        shutil.copytree(config.run.directory, whole)
        started = time.monotonic()
        undisturbed = config.model_copy(update={"run": config.run.model_copy(update={"directory": whole})})
        os.waitpid(replayed(undisturbed), 0)
        seconds = time.monotonic() - started
        same = case.noted(undisturbed) == truth
        print(
            f"{len(truth)} steps again in {seconds:.1f} s: {'the' if same else 'OTHER'} bits of a training without the person"
        )
        tell(case.lines_of(next((whole / "erasure").glob("*.steps.jsonl"))))
        for name, credits, references in (
            ("rows dropped, credits and references recorded", False, False),
            ("rows dropped, credits anew, references recorded", True, False),
            ("rows dropped, credits recorded, references its own", False, True),
        ):
            roots = asyncio.run(case.plainly(config, credits_anew=credits, own_references=references))
            print(f"  {name}: first other bits at step {next((n for n in truth if roots[n] != truth[n]), None)}")
        ended, other, further = torment(config, given.kills, seconds, truth)
        print(
            f"killed {given.kills} times, {further} times with more of a replay than before; {ended} replays ended, {other} with other bits"
        )
        return 0 if same and not other else 1


if __name__ == "__main__":
    sys.exit(main())
