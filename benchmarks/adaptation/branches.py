"""Whether a branch that is trained serves a tenant with opposite wishes better than shared weights do, in real processes on a tiny model.

    python -m benchmarks.adaptation.branches [--versions 12] [--people 8]

Acme's people accept answers that begin with a lower-case letter, bolt's all others. Once both teach one model, and once acme has a branch
(`learn.tenants`), where a quarter of its people stay on live. Each run ends once every trainer has published so many versions; the table
has the shares of answers accepted in the last quarter of each tenant's turns, by arm, with normal intervals over turns. Weights are moved
by the gate: acme's suite asks for its wish, the shared one for any answer at all.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import tempfile
from collections import defaultdict
from collections.abc import AsyncGenerator
from pathlib import Path

import aiohttp

from ostinato.app.branches import branch_configs
from ostinato.app.storage import home, open_log
from ostinato.config import Config, load
from ostinato.core.records import Signal, Turn
from ostinato.evaluate.statistics import wilson
from ostinato.launch.commands.crew import launch
from ostinato.launch.commands.demo import ready
from ostinato.record.roles import hold
from ostinato.status.progress_lines import Lines
from ostinato.testing.tiny import tiny_model

KEYS = {"acme": "sk-acme-0123456789abcdef", "bolt": "sk-bolt-0123456789abcdef"}
LIKED = {"acme": "^[a-z]", "bolt": "^[^a-z]"}
SAMPLING = {"max_tokens": 6, "temperature": 1.0}


def write_suite(path: Path, who: str, pattern: str) -> str:
    """Forty held-out prompts whose answers are graded by a pattern."""
    items = [
        {
            "id": f"{path.stem}{n}",
            "family": path.stem,
            "messages": [{"role": "user", "content": f"{who} says {n % 7}"}],
            "sampling": SAMPLING,
            "grader": "pattern",
            "pattern": pattern,
        }
        for n in range(40)
    ]
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return str(path)


def settings(directory: Path, *, branch: bool) -> Config:
    """A run on the tiny model, with acme's branch trained or not."""
    keys = ", ".join(f"'{tenant}:{key}'" for tenant, key in KEYS.items())
    own = write_suite(directory / "acme.jsonl", "acme", LIKED["acme"])
    words = [
        f"run.directory='{directory / 'run'}'",
        f"model.source='{tiny_model(directory / 'model')}'",
        "model.dtype='float32'",
        "listen.port=0",
        f"serve.api_keys=[{keys}]",
        "reward.options={window=0.3}",
        "reward.settle_s=0.1",
        "reward.max_staleness=12",
        "learn.batch=32",
        "learn.checkpoint_every=3",
        "learn.max_lead=8",
        "learn.poll_s=0.1",
        "train.compute='fp32'",
        "train.publish='fp32'",
        "train.learning_rate=2e-3",
        "train.turn_tokens=6",
        f"evaluate.suite='{write_suite(directory / 'shared.jsonl', 'somebody', '(?s).*')}'",
        "evaluate.gate.margin=0.2",
        "evaluate.gate.total_margin=0.3",
        "evaluate.gate.candidates_per_week=1",
        "evaluate.gate.sealed_share=0.0",
        "evaluate.gate.first_draws=2",
        "release.poll_s=0.2",
        "release.outcomes.maturity_s=0.3",
        "follow.interval_s=0.2",
    ]
    if branch:
        words += ["serve.branches=['acme']", "serve.branch_holdout=0.25", "learn.tenants=['acme']"]
        words.append(f"evaluate.tenant_suites={{acme=['{own}']}}")
    return load(None, words)


async def person(url: str, tenant: str, number: int, until: asyncio.Event) -> None:
    """Somebody of a tenant: asks, judges the answer by the tenant's wish, and goes on after any failure."""
    count = 0
    async with aiohttp.ClientSession(url, headers={"x-api-key": KEYS[tenant]}) as session:
        async with session.get("/health") as response:
            model = (await response.json())["model"]
        while not until.is_set():
            count += 1
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, KeyError):
                question = [{"role": "user", "content": f"{tenant} says {count % 7}"}]
                body = {"model": model, "user": f"{tenant}-{number}", "messages": question, **SAMPLING}
                async with session.post("/v1/chat/completions", json=body) as response:
                    reply = await response.json()
                text, turn = reply["choices"][0]["message"]["content"] or "", reply["ostinato"]["turns"][0]
                name = "accepted" if re.search(LIKED[tenant], text) else "rejected"
                event = {"id": f"{tenant}-{number}-{count}", "target": turn, "name": name, "value": True}
                async with session.post("/v1/feedback", json=event | {"source": "human"}) as response:
                    await response.read()


@contextlib.asynccontextmanager
async def crowds(url: str, each: int) -> AsyncGenerator[None]:
    """So many people of each tenant, at work inside the block."""
    until = asyncio.Event()
    tasks = [asyncio.create_task(person(url, tenant, n, until)) for tenant in KEYS for n in range(each)]
    try:
        yield
    finally:
        until.set()
        await asyncio.gather(*tasks)


def published(config: Config) -> int:
    """How many versions a run's trainer has published."""
    return sum(line["kind"] == "published" for line in Lines(home(config).progress("train")).new())


async def accepted(config: Config) -> dict[str, tuple[int, int]]:
    """By tenant and arm, the answers accepted and all that were judged, of the last quarter of each tenant's turns."""
    turns: defaultdict[str, list[Turn]] = defaultdict(list)
    said: dict[str, str] = {}
    with open_log(config) as log:
        async for _, row in log.read(0, {Turn, Signal}):
            if isinstance(row, Signal):
                said[row.turn] = row.name
            elif isinstance(row, Turn) and row.arm.people:
                turns[row.tenant].append(row)
    found: defaultdict[str, list[bool]] = defaultdict(list)
    for tenant, every in turns.items():
        for turn in every[-len(every) // 4 :]:
            if turn.id in said:
                found[f"{tenant}, arm {turn.arm}"].append(said[turn.id] == "accepted")
    return {name: (sum(good), len(good)) for name, good in sorted(found.items())}


async def measure(*, branch: bool, versions: int, people: int) -> dict[str, tuple[int, int]]:
    """One run, until every trainer has published so many versions."""
    with tempfile.TemporaryDirectory() as place:
        config = settings(Path(place), branch=branch)
        with hold(home(config).root, "up"):
            async with launch(config, lambda who, what: print(who, what)) as launched:
                url = await launched.during(ready(launched.home, ("live",)))
                async with crowds(url, people):
                    while min(map(published, (config, *branch_configs(config)))) < versions:
                        await asyncio.sleep(0.5)
        return await accepted(config)


def main() -> None:
    """Print both runs' tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=int, default=12)
    parser.add_argument("--people", type=int, default=8)
    options = parser.parse_args()
    for branch in (False, True):
        found = asyncio.run(measure(branch=branch, versions=options.versions, people=options.people))
        print(f"\n{'a branch for acme' if branch else 'one model for both'}:")
        for name, (good, count) in found.items():
            low, high = wilson(good, count)
            print(f"  {name:20} {100 * good / count:5.1f}%  95% {100 * low:.1f} to {100 * high:.1f}  of {count} turns")


if __name__ == "__main__":
    main()
