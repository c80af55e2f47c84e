"""The cost to a vLLM server's open streams of following the weight store, compared with vLLM's own reload from a directory.

    python -m benchmarks.peers vllm
    python -m benchmarks.weights.vllm_follower [--streams 8] [--swaps 5] [--changed 0.01] [--compile] [--cache DIR]

A chain of versions of SmolLM2-135M, each with the given share of all elements changed, is swapped in under streaming requests, in three
alternating ways: *recompute* and *keep* are ours with either policy for the key-value cache; *reload* is vLLM's `reload_weights` from an
exported directory between `/pause?mode=keep` and `/resume`, not counting the export. *pause* is the time from the request to pause to the
answer to resume, *gap* the longest wait between two chunks of any stream around the swap, and *calm* the longest without a swap. Prints a
table and writes benchmarks/results/vllm_follower.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch
from benchmarks.contender import PEERS, RESULTS, ROOT, machine, texts
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from tests.fakes.vllm import VllmServer

from ostinato.core.records import PolicyVersion
from ostinato.core.weights import WeightArray, Weights
from ostinato.model.load import load_model, resolve, weights_of
from ostinato.weights.follow.drive import VllmFollower
from ostinato.weights.follow.follower import Follower
from ostinato.weights.publish.publisher import Published, VersionPublisher
from ostinato.weights.store.directory import DirectoryStore

WAYS = ("recompute", "keep", "reload")
TOKENS = 1500
CALM_S = 5.0
console = Console(stderr=True)


def changed(weights: Weights, share: float, seed: int) -> Weights:
    """Flip the lowest bit of a share of the elements, which is what a training step does to most elements that it changes."""
    draw, found = np.random.default_rng(seed), {}
    for name, array in weights.items():
        codes = array.data.view("<u2").copy()
        codes[draw.random(codes.size) < share] ^= 1
        found[name] = WeightArray(array.dtype, array.shape, codes.view(np.uint8))
    return found


class Streams:
    """Concurrent streaming requests. A request that ends is followed by another until `stop`."""

    def __init__(self, url: str, session: aiohttp.ClientSession, count: int) -> None:
        self._url, self._session = url, session
        self.times: list[list[float]] = [[] for _ in range(count)]
        self.dropped = 0
        self._prompts = texts(count, 400, seed=7)
        self._tasks = [asyncio.create_task(self._one(number)) for number in range(count)]

    async def _one(self, number: int) -> None:
        while True:
            body = {"model": "model", "prompt": self._prompts[number], "max_tokens": TOKENS, "stream": True}
            done = False
            async with self._session.post(f"{self._url}/v1/completions", json=body | {"ignore_eos": True}) as reply:
                async for line in reply.content:
                    done = done or line.startswith(b"data: [DONE]")
                    if line.startswith(b"data: {"):
                        self.times[number].append(time.perf_counter())
            self.dropped += not done

    async def stop(self) -> None:
        for task in self._tasks:
            self.dropped += task.done()  # a task that has ended by itself failed; a running one is cancelled here
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def settled(self, since: float) -> None:
        """Wait until every stream has received two chunks after `since`, because a gap is known only once it has ended."""
        while not all(len(times) > 1 and times[-2] > since for times in self.times):
            if failed := [task for task in self._tasks if task.done()]:
                failed[0].result()
            await asyncio.sleep(0.05)

    def longest_gap(self, start: float, end: float) -> float:
        gaps = [b - a for times in self.times for a, b in pairwise(times) if b >= start and a <= end]
        return max(gaps, default=0.0)


class Reload:
    """vLLM's own way of loading new weights, from a directory prepared beforehand."""

    def __init__(
        self, url: str, session: aiohttp.ClientSession, follower: Follower, files: list[Path], at: Path
    ) -> None:
        self._url, self._session, self._follower, self._files, self._at = url, session, follower, files, at

    async def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        async with self._session.post(self._url + path, json=body) as reply:
            text = await reply.text()
            assert reply.status == 200, text
            return json.loads(text) if text else None

    async def swap(self, policy: PolicyVersion) -> float:
        """Swap to a version. Returns the pause in seconds."""
        await self._follower.materialise(policy, self._at, self._files)
        started = time.perf_counter()
        await self.post("/pause?mode=keep&clear_cache=false")
        await self.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(self._at)}})
        await self.post("/reset_prefix_cache?reset_running_requests=true")
        await self.post("/resume")
        return time.perf_counter() - started

    async def answer(self) -> Any:
        """Greedy tokens and logprobs of one prompt, computed anew."""
        await self.post("/reset_prefix_cache")
        body = {"model": "model", "prompt": texts(1, 400, seed=8)[0], "max_tokens": 16, "temperature": 0, "logprobs": 5}
        return (await self.post("/v1/completions", body))["choices"][0]["logprobs"]


async def publish(store: DirectoryStore, path: Path, count: int, share: float) -> list[Published]:
    weights: Weights = dict(weights_of(load_model(path, torch.bfloat16)))
    publisher, base, found = VersionPublisher(store), None, []
    for number in range(count):
        done = await publisher.publish(number, weights, run="vllm", base=base)
        found.append(done)
        base, weights = done.policy, changed(weights, share, number)
    return found


async def measure(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    path, store = resolve("smollm2", args.cache), DirectoryStore(work / "store")
    versions = await publish(store, path, 2 + len(WAYS) * args.swaps, args.changed)
    follower, place = Follower(store), {"url": str(work / "store")}
    files = [file for file in path.iterdir() if file.suffix in (".json", ".jinja")]
    python, log, source = PEERS / "vllm" / "bin" / "python", work / "vllm.log", ROOT
    options = [] if args.compile else ["--enforce-eager"]
    with VllmServer(python, path, source=source, work=work, log=log, options=options) as server:
        with console.status("starting vLLM"):
            await server.ready()
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
            VllmFollower(server.url, follower, place) as recompute,
            VllmFollower(server.url, follower, place, kv="keep") as keep,
        ):
            theirs = Reload(server.url, session, follower, files, work / "export")
            first = await recompute.swap(versions[1].policy)
            streams = Streams(server.url, session, args.streams)
            await asyncio.sleep(CALM_S)
            start = time.perf_counter()
            await asyncio.sleep(2 * CALM_S)
            calm, runs = streams.longest_gap(start, time.perf_counter()), []
            for number, way, done in tracked(versions[2:]):
                start = time.perf_counter()
                if way == "reload":
                    swap = {"pause_s": await theirs.swap(done.policy)}
                else:
                    made = await (recompute if way == "recompute" else keep).swap(done.policy)
                    swap = {"pause_s": made.pause_s, "load_s": made.load_s, "staged_s": made.staged_s}
                ended = time.perf_counter()
                start = ended - swap["pause_s"] if way == "reload" else start  # do not count the export
                await streams.settled(ended)
                gap = streams.longest_gap(start, ended)
                await asyncio.sleep(CALM_S)
                runs.append({"way": way, "swap": number, "bytes": done.bytes, "gap_s": gap, **swap})
            await streams.stop()
            same = await same_answers(recompute, theirs, versions)
    return {
        "streams": args.streams,
        "changed": args.changed,
        "compile": args.compile,
        "dropped": streams.dropped,
        "calm_gap_s": calm,
        "full_bytes": versions[0].full_bytes,
        "first": {"staged_s": first.staged_s, "pause_s": first.pause_s, "load_s": first.load_s},
        "reload_answers_as_ours": same,
        "runs": runs,
    }


async def same_answers(ours: VllmFollower, theirs: Reload, versions: list[Published]) -> bool:
    """Whether vLLM's own reload of a version gives the logprobs that ours gives, bit for bit."""
    found = []
    for swap in (ours.swap, theirs.swap):
        await ours.swap(versions[0].policy)
        await swap(versions[-1].policy)
        found.append(await theirs.answer())
    return found[0] == found[1]


def tracked(versions: list[Published]):  # noqa: ANN201 (a generator)
    """Yield the number, the way and the version of each swap; the ways alternate."""
    columns = (TextColumn("swaps"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(versions))
        for number, done in enumerate(versions):
            yield number // len(WAYS), WAYS[number % len(WAYS)], done
            progress.advance(task)


def show(result: dict[str, Any]) -> None:
    table = Table("way", "pause p50", "pause max", "load p50", "gap p50", "fetch p50", "read", box=None, pad_edge=False)
    for way in WAYS:
        mine = [run for run in result["runs"] if run["way"] == way]
        values = {key: [run[key] for run in mine if key in run] for key in ("pause_s", "load_s", "gap_s", "staged_s")}
        read = result["full_bytes"] if way == "reload" else np.median([run["bytes"] for run in mine])
        fetch = f"{np.median(values['staged_s']):.2f} s" if values["staged_s"] else "-"
        table.add_row(
            way,
            f"{1e3 * np.median(values['pause_s']):.0f} ms",
            f"{1e3 * max(values['pause_s']):.0f} ms",
            f"{1e3 * np.median(values['load_s']):.0f} ms" if values["load_s"] else "-",
            f"{1e3 * np.median(values['gap_s']):.0f} ms",
            fetch,
            f"{read / 1e6:.1f} MB",
        )
    out = Console()
    out.print(table)
    out.print(
        f"vLLM's own reload answers {'like' if result['reload_answers_as_ours'] else 'otherwise than'} ours; "
        f"{result['streams']} streams, {result['dropped']} dropped; longest gap without a swap {result['calm_gap_s']:.2f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--swaps", type=int, default=5, help="by each way")
    parser.add_argument("--changed", type=float, default=0.01)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/ostinato"))
    args = parser.parse_args()
    if not (PEERS / "vllm" / "bin" / "python").exists():
        raise SystemExit("vLLM is not there: run `python -m benchmarks.peers vllm`")
    before = machine()
    with tempfile.TemporaryDirectory(prefix="ostinato-vllm-") as work:
        result = {"machine": before, **asyncio.run(measure(args, Path(work)))}
    show(result)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "vllm_follower.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
