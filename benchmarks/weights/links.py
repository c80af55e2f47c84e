"""Four followers on distant, unreliable, narrow lines: their lag behind the publisher, and the share of the line that they use.

    python -m benchmarks.weights.links [--cache DIR] [--versions 20] [--every 4] [--cap 100] [--repeats 3]
    python -m benchmarks.weights.links --url http://127.0.0.1:9000 --bucket weights    # MinIO or the like, instead of moto

A publisher writes versions of SmolLM2-135M (real bf16 tensors, about 1% of the elements moved by one ordered ULP each time) into an S3
bucket. Each follower is a process that runs `Follower.watch` behind a line of its own (`tests.fakes.link`): its round trip, TCP's
slow start, a cap for all its connections together, and 1% of requests answered 503 or cut in mid-body. There is a full transfer first,
with no connection open, and another after the deltas. Lag is the time from the ref's move to weights whose hashes are all checked.
Before that, without followers, a computing thread measures how much publishing slows down work in the same process.

Prints tables; writes benchmarks/results/weight_links.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import numpy as np
from benchmarks.contender import RESULTS, ROOT, machine
from benchmarks.weights.links_report import measured, tables
from benchmarks.weights.links_trainer import Stalls, Training, Versions, held_up, warm
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TransferSpeedColumn

from ostinato.core.records import PolicyVersion
from ostinato.core.weights import Weights
from ostinato.weights.follow.follower import FollowerConfig
from ostinato.weights.publish.publisher import Published, PublisherConfig, VersionPublisher
from ostinato.weights.store.bucket import BucketConfig, BucketStore

ROUND_TRIPS_MS = (43, 58, 145, 300)
CAPS_MBIT = (1000, 500, 200, 100, 50, 20, 10)
PROBE_BYTES = 64 << 20
FULL_TIMEOUT_S = 600.0
WIDTH = 150  # of the printed tables


class Child:
    """A subprocess that exchanges JSON lines; see links_roles.py."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, role: str) -> Child:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "benchmarks.weights.links_roles",
            role,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 28,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        return cls(process)

    async def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a process of the benchmark ended (exit status {await self._process.wait()})")
        return json.loads(line)

    async def ask(self, **what: Any) -> dict[str, Any]:
        self.tell(**what)
        return await self.hear()

    def tell(self, **what: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what).encode() + b"\n")

    async def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        await self._process.wait()


class Stamped(BucketStore):
    """A bucket that records when the ref `live` was moved."""

    moved = 0.0

    async def move_ref(self, ref: str, old: str | None, new: str) -> None:
        await super().move_ref(ref, old, new)
        if ref == "live":
            self.moved = time.monotonic()


@dataclass
class Run:
    """Records of one run: versions with the time of their ref's move, the followers' messages, and the requests on the lines."""

    versions: list[dict[str, Any]] = field(default_factory=list)
    heard: list[list[dict[str, Any]]] = field(default_factory=list)
    passed: list[list[dict[str, Any]]] = field(default_factory=list)

    def arrived(self, number: int) -> bool:
        return all(any(said.get("number", -1) >= number for said in heard) for heard in self.heard)


def settings(args: argparse.Namespace, endpoint: str, prefix: str) -> dict[str, Any]:
    """A BucketConfig as a dict, which the processes send to each other."""
    options = {"aws_endpoint": endpoint, "aws_region": os.environ.get("AWS_REGION", "us-east-1")}
    for key in ("aws_access_key_id", "aws_secret_access_key"):
        options[key] = os.environ.get(key.upper(), "test")
    return {"url": f"s3://{args.bucket}/{prefix}", "options": options, "parallel": args.parallel}


async def uncapped(args: argparse.Namespace, server: str, lines: Child) -> float:
    """Bytes per second that the server and the proxies carry for four readers at once, without cap, distance or failures."""
    near = BucketStore(BucketConfig.model_validate(settings(args, server, "probe")))
    name = await near.put(np.random.default_rng(0).bytes(PROBE_BYTES))
    line = {"round_trip_s": 0.0, "bytes_s": 1e12, "window": 1 << 40, "handshakes": 0}
    urls = (await lines.ask(do="open", server=server, lines=[line] * 4))["urls"]
    stores = [BucketStore(BucketConfig.model_validate(settings(args, url, "probe"))) for url in urls]
    best = 0.0
    for _ in range(3):
        started = time.monotonic()
        await asyncio.gather(*(store.get(name) for store in stores))
        best = max(best, 4 * PROBE_BYTES / (time.monotonic() - started))
    return best


def chosen_cap(rate: float) -> int:
    """The widest line (Mbit/s) such that four of them need at most 40% of the capacity of server and proxies."""
    return next((cap for cap in CAPS_MBIT if 4 * cap * 125_000 <= 0.4 * rate), CAPS_MBIT[-1])


async def rehearsal(args: argparse.Namespace, server: str, versions: Versions) -> dict[str, Any]:
    """Publish without followers while a thread computes, and measure the time that the thread loses."""
    store = BucketStore(BucketConfig.model_validate(settings(args, server, f"rehearsal-{time.time_ns()}")))
    publisher, training, stalls = VersionPublisher(store, PublisherConfig(threads=args.threads)), Training(), Stalls()
    watching = asyncio.create_task(stalls.run())
    training.start()
    await asyncio.sleep(2)
    quiet_from = time.monotonic()
    await asyncio.sleep(6)
    quiet_to = time.monotonic()
    spans: list[tuple[float, float, str]] = []
    base: PolicyVersion | None = None
    for number in range(args.rehearsals + 1):
        weights = await asyncio.to_thread(versions.next) if number else versions.now()
        began = time.monotonic()
        done = await asyncio.create_task(publisher.publish(number, weights, run="rehearsal", base=base, ref="live"))
        spans.append((began, time.monotonic(), done.kind))
        base = done.policy
        await asyncio.sleep(1)
    training.end()
    watching.cancel()
    quiet = training.within(quiet_from, quiet_to)
    slice_s = (quiet_to - quiet_from) / len(quiet)
    rows = [
        {"kind": kind, **held_up(training, a, b, slice_s), "loop_late_s": stalls.worst(a, b)} for a, b, kind in spans
    ]
    return {
        "quiet_slice_s": slice_s,
        "quiet_queued_share": sum(one.queued_s for one in quiet) / (quiet_to - quiet_from),
        "quiet_loop_late_s": stalls.worst(quiet_from, quiet_to),
        "publications": rows,
    }


async def run(args: argparse.Namespace, server: str, lines: Child, versions: Versions, seed: int) -> Run:
    """One full transfer, the deltas, and another full transfer, with four followers throughout."""
    prefix = f"run-{time.time_ns()}"
    store = Stamped(BucketConfig.model_validate(settings(args, server, prefix)))
    publisher = VersionPublisher(store, PublisherConfig(threads=args.threads, anchor_every=4096, anchor_share=1e9))
    wanted = [
        {"round_trip_s": ms / 1e3, "bytes_s": args.cap * 125_000, "fail": args.fail, "seed": 10 * seed + at}
        for at, ms in enumerate(ROUND_TRIPS_MS)
    ]
    urls = (await lines.ask(do="open", server=server, lines=wanted))["urls"]
    children = [await Child.start("follower") for _ in urls]
    found = Run(heard=[[] for _ in urls])
    ears: list[asyncio.Task[None]] = []
    try:
        for child, url in zip(children, urls, strict=True):
            await child.ask(bucket=settings(args, url, prefix), follower={"keep": 1, "interval_s": args.interval})
        ears = [asyncio.create_task(_listen(*pair)) for pair in zip(children, found.heard, strict=True)]

        async def publish(number: int, weights: Weights, base: PolicyVersion | None) -> PolicyVersion:
            done = await publisher.publish(number, weights, run="links", base=base, ref="live")
            found.versions.append(_version(done, store.moved))
            return done.policy

        base = await publish(0, versions.now(), None)
        await _arrive(found, ears, lines, 0, "first full transfer")
        for number in range(1, args.versions + 1):
            due = time.monotonic() + args.every
            base = await publish(number, await asyncio.to_thread(versions.next), base)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
        await _arrive(found, ears, lines, args.versions, "deltas")
        if args.versions:
            await publish(args.versions + 1, await asyncio.to_thread(versions.next), None)
            await _arrive(found, ears, lines, args.versions + 1, "second full transfer")
        found.passed = (await lines.ask(do="passed"))["passed"]
    finally:
        for ear in ears:
            ear.cancel()
        await asyncio.gather(*(child.end() for child in children), return_exceptions=True)
    return found


def _version(done: Published, moved: float) -> dict[str, Any]:
    return {
        "number": done.policy.number,
        "root": done.policy.hash,
        "manifest": done.manifest,
        "kind": done.kind,
        "bytes": done.bytes,
        "full_bytes": done.full_bytes,
        "changed": done.changed,
        "publish_s": done.seconds,
        "at": moved,
    }


async def _listen(child: Child, heard: list[dict[str, Any]]) -> None:
    while True:
        heard.append(await child.hear())


async def _arrive(found: Run, ears: Sequence[asyncio.Task[None]], lines: Child, number: int, what: str) -> None:
    """Wait until every follower has delivered version `number` or a later one, and show the lines' traffic meanwhile."""
    before: list[int] = (await lines.ask(do="bytes"))["bytes"]
    total = found.versions[-1]["bytes"] if found.versions[-1]["kind"] == "full" else None
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    end = time.monotonic() + FULL_TIMEOUT_S
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bars = [progress.add_task(f"{what}, {ms} ms", total=total) for ms in ROUND_TRIPS_MS]
        while not found.arrived(number):
            for ear in ears:
                if ear.done():
                    ear.result()
            if time.monotonic() > end:
                raise SystemExit(f"version {number} did not reach every follower within {FULL_TIMEOUT_S:.0f} s")
            now: list[int] = (await lines.ask(do="bytes"))["bytes"]
            for bar, old, new in zip(bars, before, now, strict=True):
                progress.update(bar, completed=new - old)
            await asyncio.sleep(0.25)


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    console = Console(stderr=True)
    versions = Versions(args.cache.expanduser() / args.model / "model.safetensors", args.share, args.seed)
    count = args.rehearsals + args.repeats * (args.versions + 1)
    with Progress(TextColumn("drawing versions"), BarColumn(), MofNCompleteColumn(), console=console) as progress:
        for _ in progress.track(versions.draw(count), total=count):
            pass
    await warm()
    before = machine()
    async with contextlib.AsyncExitStack() as stack:

        async def child(role: str) -> Child:
            started = await Child.start(role)
            stack.push_async_callback(started.end)
            return started

        server = args.url or (await (await child("bucket")).hear())["url"]
        if not args.url:
            keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
            boto3.client("s3", endpoint_url=server, **keys).create_bucket(Bucket=args.bucket)
        lines = await child("lines")
        rate = await uncapped(args, server, lines)
        args.cap = args.cap or chosen_cap(rate)
        console.print(
            f"uncapped, four readers: {rate / 1e6:.0f} MB/s; the lines get {args.cap} Mbit/s each, "
            f"{4 * args.cap * 125_000 / rate:.0%} of it"
        )
        blocked = await rehearsal(args, server, versions) if args.rehearsals else None
        runs: list[dict[str, Any]] = []
        for at in range(args.repeats):
            found = await run(args, server, lines, versions, args.seed + at)
            runs.append(measured(found.versions, found.heard, found.passed, args.cap * 125_000, ROUND_TRIPS_MS))
            if args.raw:
                args.raw.write_text(json.dumps(vars(found)))
    shown = {key: value for key, value in vars(args).items() if key in SETTINGS}
    return {"machine": before, "settings": shown, "uncapped_bytes_s": rate, "trainer": blocked, "runs": runs}


SETTINGS = ("versions", "every", "cap", "fail", "interval", "share", "seed", "repeats", "threads", "parallel")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/ostinato"))
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--versions", type=int, default=20, help="deltas between the two full transfers")
    parser.add_argument("--every", type=float, default=4.0, help="seconds from one version to the next")
    parser.add_argument(
        "--interval", type=float, default=FollowerConfig().interval_s, help="between two looks at the refs"
    )
    parser.add_argument("--share", type=float, default=0.01, help="of the elements that change")
    parser.add_argument("--cap", type=int, default=0, help="Mbit/s of a line; 0: what the server can serve with ease")
    parser.add_argument("--fail", type=float, default=0.01, help="share of requests that fail")
    parser.add_argument("--threads", type=int, default=PublisherConfig().threads, help="that code for the publisher")
    parser.add_argument("--parallel", type=int, default=BucketConfig().parallel, help="parts under way in one process")
    parser.add_argument("--rehearsals", type=int, default=5, help="deltas published without followers")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--url", default="", help="of an S3 server that takes requests under another host name")
    parser.add_argument("--bucket", default="weights")
    parser.add_argument("--raw", type=Path, help="also write every request of the last run to this file")
    parser.add_argument("--out", type=Path, default=RESULTS / "weight_links.json")
    args = parser.parse_args()
    result = asyncio.run(measure(args))
    console = Console()
    console.width = max(console.width, WIDTH)
    for table in tables(result):
        console.print(table)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
