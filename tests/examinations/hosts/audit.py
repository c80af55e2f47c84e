"""The final state of the log, the weight store and the gateways, as one JSON object, read from the operator's own host.

``python -m tests.examinations.hosts.audit all|refs BEGAN ENDED URL,URL WORD ...``
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections import Counter
from dataclasses import asdict
from typing import Any

import aiohttp
from tests.examinations.hosts.settings import ADMIN_KEY
from tests.oracles.turn_accounting import recount

from ostinato.app.storage import open_run
from ostinato.config import Config, load
from ostinato.core.records import Arm, Batch, ReleaseEvent, Reward, Signal, Turn
from ostinato.evaluate.acceptance import by_arm, live_minus_control
from ostinato.status.observed_run import RunObserver, last_third


async def rows(log: Any) -> dict[str, Any]:
    """Every row that the verdict needs, as plain values."""
    turns: dict[str, Any] = {}
    signals: Counter[str] = Counter()
    found: dict[str, Any] = {
        "turns": turns,
        "doubled turns": 0,
        "signals": signals,
        "batches": [],
        "releases": [],
        "rewards": 0,
    }
    last, gaps = 0, 0
    async for place, row in log.read(0, {Turn, Signal, Batch, ReleaseEvent, Reward}):
        gaps += place <= last
        last = place
        match row:
            case Turn():
                found["doubled turns"] += row.id in turns
                turns[row.id] = {
                    "episode": row.episode, "user": row.user, "arm": row.arm.value, "text": row.text, "finish": row.finish.value,
                    "at": row.started_at, "roots": sorted({span.policy.hash for span in row.spans}), "numerics": row.numerics,
                }  # fmt: skip
            case Signal():
                signals[f"{row.tenant}/{row.id}"] += 1
            case Batch():
                torn = len(row.credits) != len(row.turns)
                found["batches"].append(
                    {"step": row.step, "turns": row.turns, "at": row.at, "torn": torn, "back": row.base is not None}
                )
            case ReleaseEvent():
                previous = row.previous and row.previous.number
                event = {
                    "action": row.action,
                    "number": row.policy.number,
                    "hash": row.policy.hash,
                    "previous": previous,
                }
                found["releases"].append(event | {"at": row.at, "actor": row.detail.get("actor"), "reason": row.reason})
            case Reward():
                found["rewards"] += 1
            case _:
                pass
    return found | {"rows out of order": gaps}


async def acceptance(run: Any, began: float, ended: float) -> dict[str, Any]:
    """Acceptance as in the demo: shares by arm with 95% intervals over users, in the first and the last third, and live minus control."""
    seen = await RunObserver(run.home, run.log).look()
    thirds = {
        "first third": seen.between(began, began + (ended - began) / 3),
        "last third": last_third(seen, began, ended),
    }
    found: dict[str, Any] = {}
    for name, rated in thirds.items():
        arms = by_arm(rated)
        found[name] = {arm.value: asdict(arms[arm]) for arm in (Arm.LIVE, Arm.CONTROL) if arm in arms}
        gap = live_minus_control(rated)
        found[name]["live minus control"] = {"mean": gap.mean, "lower": gap.lower, "upper": gap.upper}
    return found


async def slots(urls: list[str]) -> list[dict[str, str]]:
    """The versions that each gateway serves, by slot; empty for a gateway that does not answer."""
    found: list[dict[str, str]] = []
    headers = {"x-api-key": ADMIN_KEY}
    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=10)) as session:
        for url in urls:
            served: dict[str, str] = {}
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError):
                async with session.get(f"{url}/health") as response:
                    served = {name: slot["hash"] for name, slot in (await response.json())["slots"].items()}
            found.append(served)
    return found


async def standing(run: Any, urls: list[str]) -> dict[str, Any]:
    """The versions of the refs, and those that the gateways serve."""
    found: dict[str, str] = {}
    for name in ("live", "control", "previous"):
        policy = await run.follower.resolve(name)
        found |= {} if policy is None else {name: policy.hash}
    return {"refs": found, "slots": await slots(urls)}


async def main(config: Config, what: str, began: float, ended: float, urls: list[str]) -> None:
    with open_run(config) as run:
        found = await standing(run, urls)
        if what == "all":
            counted = await recount(run.log)
            versions = [name.removeprefix("version/") for name in await run.store.refs() if name.startswith("version/")]
            found |= {"account": asdict(counted), "balanced": counted.balanced, "versions": versions}
            found |= await rows(run.log) | {"acceptance": await acceptance(run, began, ended)}
    print(json.dumps(found))


if __name__ == "__main__":
    what, began, ended, urls, *words = sys.argv[1:]
    asyncio.run(main(load(None, words), what, float(began), float(ended), urls.split(",")))
