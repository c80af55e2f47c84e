"""People's latency beside rollouts that would fill every place of the engine: the wait for a first token, and the speed of the rest.

    python -m benchmarks.serving.people_first        # about three minutes on two idle cores

A real gateway with the embedded engine (a random model of 384 x 5; 32 places), 8 simulated people who ask for 48 tokens, wait half a second
and ask again, and 96 rollouts of 64 tokens that restart at once. There are three cases: people alone, beside rollouts, and beside
rollouts that give way (`serve.first_token_s`, `serve.tokens_per_s`). Writes benchmarks/results/people_first.json, with every wait and
speed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
from benchmarks.contender import RESULTS, machine

from ostinato.app.storage import home
from ostinato.config import load
from ostinato.launch.commands.crew import launch
from ostinato.launch.commands.demo import ready
from ostinato.record.roles import hold
from ostinato.testing.tiny import tiny_model

PEOPLE, ROLLOUTS, PLACES = 8, 96, 32
LONGEST_S, LEAST = 0.5, 60.0
CASES = {"people alone": (0, False), "beside rollouts": (ROLLOUTS, False), "rollouts give way": (ROLLOUTS, True)}


def settings(place: Path, *, first: bool) -> list[str]:
    return [
        f"run.directory='{place / 'run'}'",
        f"model.source='{tiny_model(place / 'model', hidden=384, layers=5)}'",
        "model.name='tiny'",
        "listen.port=0",
        "serve.page=false",
        *([f"serve.first_token_s={LONGEST_S}", f"serve.tokens_per_s={LEAST}"] if first else []),
        f"engine.max_batch={PLACES}",
        'learn.source="worlds"',
    ]


class Load:
    """People and rollouts at one gateway. `answers`: for each answer the time of its call, seconds to the first token and tokens/s after
    it. `ended`: the number of finished rollouts."""

    def __init__(self, session: aiohttp.ClientSession, url: str, key: str) -> None:
        self._session, self._url, self._key = session, url, key
        self._draw = random.Random(0)
        self.answers: list[tuple[float, float, float]] = []
        self.ended = self.failed = 0

    def _body(self, tokens: int, *, stream: bool) -> dict[str, Any]:
        text = "".join(self._draw.choices("abcdefgh ", k=60))
        return {
            "model": "tiny",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": tokens,
            "stream": stream,
        }

    async def person(self, until: float) -> None:
        """Ask, read the answer and pause, until `until`."""
        await asyncio.sleep(self._draw.random())
        while time.monotonic() < until:
            asked = time.monotonic()
            body = self._body(48, stream=True)
            async with self._session.post(f"{self._url}/v1/chat/completions", json=body) as reply:
                if reply.status != 200:
                    self.failed += 1
                    await asyncio.sleep(0.5)
                    continue
                first, came = True, asked
                async for line in reply.content:
                    if first and line.startswith(b"data: "):
                        came, first = time.monotonic(), False
                if not first:
                    self.answers.append((asked, came - asked, 47 / (time.monotonic() - came)))
            await asyncio.sleep(0.5)

    async def rollout(self, until: float) -> None:
        """Run one rollout after the other, until `until`."""
        headers = {"X-Ostinato-Key": self._key, "X-Ostinato-Slot": "world"}
        while time.monotonic() < until:
            body = self._body(64, stream=False)
            async with self._session.post(f"{self._url}/v1/chat/completions", json=body, headers=headers) as reply:
                await reply.read()
                self.ended += reply.status == 200
                self.failed += reply.status != 200


async def measured(rollouts: int, first: bool, seconds: float, warm_s: float) -> dict[str, Any]:
    """Measure one case, in a run of its own."""
    with tempfile.TemporaryDirectory() as place:
        config = load(None, settings(Path(place), first=first))
        with hold(home(config).root, "up"):
            async with launch(config, lambda *_: None, names=("serve", "train")) as launched:
                url = await launched.during(ready(launched.home, ("world",)))
                connector = aiohttp.TCPConnector(limit=0)
                async with aiohttp.ClientSession(connector=connector) as session:
                    loaded = Load(session, url, home(config).admin_key())
                    began = time.monotonic()
                    until = began + warm_s + seconds
                    async with asyncio.TaskGroup() as group:
                        for _ in range(PEOPLE):
                            group.create_task(loaded.person(until))
                        for _ in range(rollouts):
                            group.create_task(loaded.rollout(until))
        counted = [each for each in loaded.answers if each[0] > began + warm_s]
        waits, speeds = sorted(wait for _, wait, _ in counted), sorted(speed for *_, speed in counted)
        return {
            "answers": len(counted),
            "first_p50_s": statistics.median(waits),
            "first_p95_s": waits[int(0.95 * len(waits))],
            "speed_p50": statistics.median(speeds),
            "speed_p5": speeds[int(0.05 * len(speeds))],
            "rollouts_per_s": loaded.ended / (warm_s + seconds),
            "failed": loaded.failed,
            "waits": [round(wait, 4) for wait in waits],
            "speeds": [round(speed, 2) for speed in speeds],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--warm", type=float, default=15.0, help="seconds before anything is counted")
    parser.add_argument("--out", type=Path, default=RESULTS / "people_first.json")
    args = parser.parse_args()
    before, rows = machine(), {}
    for name, (rollouts, first) in CASES.items():
        rows[name] = found = asyncio.run(measured(rollouts, first, args.seconds, args.warm))
        print(
            f"{name:<18} {found['answers']} answers, first token p50 {found['first_p50_s']:.2f} s, p95 {found['first_p95_s']:.2f} s, "
            f"then {found['speed_p50']:.0f} tokens/s (p5 {found['speed_p5']:.0f}); {found['rollouts_per_s']:.1f} rollouts/s, "
            f"{found['failed']} failed",
            flush=True,
        )
    args.out.write_text(
        json.dumps({"first_token_s": LONGEST_S, "tokens_per_s": LEAST, "rows": rows, "machine": before}, indent=1)
        + "\n"
    )


if __name__ == "__main__":
    main()
