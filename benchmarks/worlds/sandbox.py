"""How fast sandboxes start, run, fork and stop, compared with bubblewrap on the same machine in the same run.

    python -m benchmarks.worlds.sandbox [--rounds 3] [--starts 300] [--runs 10000]

A start covers everything from the call until the box's last process is gone: namespaces, file system, filter, one program, the answer, the
exit. bubblewrap runs the same program in namespaces of its own (--unshare-all), without a filter on system calls, Landlock or limits. Boxes
yield to all other processes, so on a busy machine their rates say little, but their CPU time does (it includes the zygote's own start).
Prints a table and writes benchmarks/results/sandbox.json. Figures of different runs compare only where the machine was alike and quiet.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import resource
import shutil
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from benchmarks.contender import RESULTS
from rich.console import Console
from rich.table import Table

from ostinato.core.sandbox import Limits, SandboxSpec
from ostinato.worlds.sandbox import Boxes, SandboxConfig, SingleRuns

RESULT = RESULTS / "sandbox.json"
BODY = """
import json
def fib(n):
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a
values = [fib(n) for n in range(50)]
text = json.dumps(values)
assert json.loads(text) == values
print(sum(values))
"""
BWRAP = ["bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", "/usr", "/usr", "--symlink", "usr/lib", "/lib", "--symlink",
         "usr/lib64", "/lib64", "--symlink", "usr/bin", "/bin", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp",
         "/bin/true"]  # fmt: skip


async def many(one: Callable[[], Awaitable[object]], count: int, parallel: int) -> dict[str, float]:
    """Call `one` `count` times, `parallel` at once. Returns the rate and the percentiles of a call's duration."""
    times: list[float] = []
    left = iter(range(count))

    async def worker() -> None:
        for _ in left:
            begun = time.perf_counter()
            await one()
            times.append(time.perf_counter() - begun)

    begun = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(parallel)))
    taken = time.perf_counter() - begun
    times.sort()
    return {
        "per_s": count / taken,
        "p50_ms": times[len(times) // 2] * 1e3,
        "p99_ms": times[int(len(times) * 0.99)] * 1e3,
    }


async def bwrap() -> None:
    process = await asyncio.create_subprocess_exec(*BWRAP)
    assert await process.wait() == 0


async def boxed(boxes: Boxes) -> None:
    box = await boxes.start(SandboxSpec())
    assert (await box.exec(["/bin/true"], timeout=20)).code == 0
    await box.stop()


def summed(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Medians over the rounds, with the worst rate and the worst tail."""
    found = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    return found | {
        "worst_per_s": min(each["per_s"] for each in rounds),
        "worst_p99_ms": max(each["p99_ms"] for each in rounds),
    }


async def starts(rounds: int, count: int) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    async with SingleRuns(SandboxConfig(concurrency=64)) as runs:
        boxes = Boxes()
        await runs.check()
        cases = {
            "single run, /bin/true": lambda: runs.run(["/bin/true"], timeout=20),
            "single run, ten-line Python body": lambda: runs.run(BODY, timeout=20),
            "box with a state, own network, /bin/true": lambda: boxed(boxes),
        }
        if shutil.which("bwrap"):
            cases["bwrap --unshare-all, /bin/true"] = bwrap
        for parallel in (1, 2, 16):
            rows: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
            for _ in range(rounds):
                for name, one in cases.items():
                    rows[name].append(await many(one, count, parallel))
            found |= {f"{name}, {parallel} at once": summed(each) for name, each in rows.items()}
        box = await boxes.start(SandboxSpec())
        live = [await many(lambda: box.exec(["/bin/true"], timeout=20), count, 1) for _ in range(rounds)]
        found["call in a live box, /bin/true, 1 at once"] = summed(live)
        await boxes.close()
    return found


async def forks(rounds: int) -> dict[str, float]:
    """Write a workspace of 200 MB in a box, then time 128 forks of it, each ready for calls."""
    boxes, times = Boxes(), list[float]()
    for _ in range(rounds):
        box = await boxes.start(SandboxSpec(limits=Limits(memory_mb=400, disk_mb=300)))
        filled = await box.exec(
            ["sh", "-c", "for i in $(seq 200); do head -c 1048576 /dev/urandom > f$i || exit 1; done"], timeout=60
        )
        assert filled.code == 0
        begun = time.perf_counter()
        made = await box.fork(128)
        times.append((time.perf_counter() - begun) * 1e3)
        await asyncio.gather(*(each.write("f1", b"mine") for each in made))
        assert (await made[-1].read("f1"), await made[0].exec(["wc", "-c", "f200"], timeout=20))[0] == b"mine"
        await asyncio.gather(*(each.stop() for each in made), box.stop())
    await boxes.close()
    return {"median_ms": statistics.median(times), "worst_ms": max(times)}


async def processor(count: int) -> dict[str, float]:
    """Milliseconds of CPU time per start, including the host's side, without the kernel's later cleanup."""
    found: dict[str, float] = {}

    def used() -> float:
        both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(each.ru_utime + each.ru_stime for each in both)

    for name, program in {"single run, /bin/true": ["/bin/true"], "single run, ten-line Python body": BODY}.items():
        runs = SingleRuns(SandboxConfig())
        await runs.check()
        begun = used()
        await many(lambda: runs.run(program, timeout=60), count, 2)  # noqa: B023 - finished before the next iteration
        runs.close()
        found[name] = (used() - begun) * 1e3 / count
    boxes, begun = Boxes(), used()
    await many(lambda: boxed(boxes), count, 2)
    await boxes.close()
    found["box with a state, own network, /bin/true"] = (used() - begun) * 1e3 / count
    if shutil.which("bwrap"):
        begun = used()
        await many(bwrap, count, 2)
        found["bwrap --unshare-all, /bin/true"] = (used() - begun) * 1e3 / count
    return found


def traces() -> dict[str, int]:
    """Counts of possible leftovers: processes, mounts, cgroups, files."""
    groups = sum(1 for _ in Path("/sys/fs/cgroup").rglob("ostinato-*"))
    mounts = len(Path("/proc/self/mountinfo").read_text().splitlines())
    states = [path.read_text().rpartition(")")[2].split()[:2] for path in Path("/proc").glob("[0-9]*/stat")]
    mine = [state for state, parent in states if int(parent) == os.getpid()]
    return {"processes": len(mine), "mounts": mounts, "groups": groups, "temporary files": len(os.listdir("/tmp"))}


async def leftovers(count: int) -> dict[str, int]:
    """The leftovers of `count` runs: the counts after them minus those before."""
    before = traces()
    async with SingleRuns(SandboxConfig(concurrency=4)) as runs:
        await many(lambda: runs.run(["/bin/sh", "-c", "echo x > /tmp/x; sleep 60 & exit 0"], timeout=20), count, 4)
    after = traces()
    return {name: after[name] - before[name] for name in before}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--starts", type=int, default=300)
    parser.add_argument("--runs", type=int, default=10_000)
    given = parser.parse_args()
    found = {
        "machine": {"kernel": platform.release(), "cores": os.cpu_count(), "root": os.geteuid() == 0},
        "starts": asyncio.run(starts(given.rounds, given.starts)),
        "processor ms of one start": asyncio.run(processor(given.starts)),
        "fork of 200 MB x 128": asyncio.run(forks(given.rounds)),
        f"left by {given.runs} runs": asyncio.run(leftovers(given.runs)),
    }
    table = Table("what", "per s", "worst", "p50 ms", "p99 ms", "worst p99")
    for name, row in found["starts"].items():
        table.add_row(
            name, *(f"{row[key]:.1f}" for key in ("per_s", "worst_per_s", "p50_ms", "p99_ms", "worst_p99_ms"))
        )
    console = Console(width=140)
    console.print(table)
    for name in list(found)[2:]:
        console.print(name, found[name])
    RESULT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
