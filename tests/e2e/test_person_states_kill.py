"""People's states survive kill -9: whatever was saved is gone on from, and the bits are those of a process that was never killed."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.unit.adapt.people import RULES, cache_at, folded, log_of, packed, traffic

CHILD = """
import asyncio, sys
from pathlib import Path
from ostinato.adapt.state_fold import StateFold
from tests.unit.adapt.people import RULES, cache_at, traffic
from ostinato.testing.log import MemoryLog

async def main(directory, rows):
    log, fold = MemoryLog(), None
    for number, row in enumerate(rows):
        await log.append(row)
    fold = StateFold(log, cache_at(directory), RULES)
    await fold.start()
    kept, log.rows = log.rows, log.rows[: fold.cursor]
    while len(log.rows) < len(kept):
        log.rows = kept[: len(log.rows) + 3]
        await fold.catch_up()
        print("saving", flush=True)
        await fold.save()
        print(fold.cursor, flush=True)
        sys.stdin.readline()  # until it is let, so that it is not through before it is killed

asyncio.run(main(Path(sys.argv[1]), traffic(6, 150)))
"""


def test_a_process_killed_at_any_time_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    """kill -9 after the first, the second, ... saved place that the child tells, after a part of the time of its next write."""
    reached, rng = 0, random.Random(5)
    for kill in (1, 2, 4, 7, 1, 2, 1):
        command = [sys.executable, "-c", CHILD, str(tmp_path)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
        with subprocess.Popen(command, cwd=Path(__file__).parents[2], **pipes) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            places, took_s = [], 0.0
            for _ in range(kill):
                assert child.stdout.readline() == b"saving\n"
                began = time.perf_counter()
                places.append(int(child.stdout.readline()))
                took_s = time.perf_counter() - began
                child.stdin.write(b"\n")
            assert child.stdout.readline() == b"saving\n"
            time.sleep(rng.random() * took_s)
            os.kill(child.pid, signal.SIGKILL)
        assert places[0] > reached
        reached = places[-1]
    rows = traffic(6, 150)

    async def compare() -> None:
        log = await log_of(rows)
        cache = cache_at(tmp_path)
        assert cache.begin(RULES.hash)[0] >= reached
        fold = await folded(log, cache)
        assert fold.cursor == len(log.rows)
        assert packed(fold, rows) == packed(await folded(log, cache_at(tmp_path / "undisturbed")), rows)

    asyncio.run(compare())
