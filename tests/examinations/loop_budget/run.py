"""How long the worst requests keep the gateway's event loop, and how long they keep everybody else's streams waiting.

    python -m tests.examinations.loop_budget.run [--repeats 5] [--context 8192] [--only TEXT]

The gateway runs with a real tokenizer and chat template, on an engine that answers at once and a log in memory, so that nothing else
computes. For each body of `tests.fakes.worst_bodies`: "step" is the longest step of the loop in processor time, "wait" the longest time
by which a timer of one millisecond came late, which includes what other threads did while they held the interpreter. Medians and maxima
over the repeats; run it on an idle machine. Prints the worst of each route, and writes tests/examinations/results/loop_budget.json.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.fakes.loop_steps import loop_steps
from tests.fakes.worst_bodies import bodies

from ostinato.core.interpreter import settle
from ostinato.model.renderer import HFRenderer
from ostinato.serve.config import QuotaConfig, ServeConfig
from ostinato.serve.gateway import create_app
from ostinato.testing.engine import FakeEngine
from ostinato.testing.log import MemoryLog
from ostinato.testing.serving import serving
from ostinato.testing.tiny import tiny_model

RESULT = Path(__file__).parents[1] / "results" / "loop_budget.json"
QUOTA = QuotaConfig(calls_per_s=1e6, burst=1e6, events_per_s=1e6, bytes_per_s=1e12)
TICK_S = 0.001
SHOWN = 6


def post(url: str, path: str, body: bytes) -> int:
    """The status of one request, sent from another thread."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=600)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


async def latest(ended: asyncio.Event) -> float:
    """The longest time by which a timer came late until `ended`."""
    worst, before = 0.0, time.perf_counter()
    while not ended.is_set():
        await asyncio.sleep(TICK_S)
        now = time.perf_counter()
        worst, before = max(worst, now - before - TICK_S), now
    return worst


async def measured(url: str, path: str, body: bytes) -> tuple[int, float, float]:
    """Status, longest step and longest wait of one request."""
    ended = asyncio.Event()
    watching = asyncio.create_task(latest(ended))
    with loop_steps() as steps:
        status = await asyncio.to_thread(post, url, path, body)
    ended.set()
    return status, max(step.seconds for step in steps), await watching


async def examine(args: argparse.Namespace) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        model = tiny_model(Path(directory) / "model", context=args.context)
        app = create_app(
            engine=FakeEngine(lambda request: "hello", context=args.context),
            renderer=HFRenderer(model),
            log=MemoryLog(),
            config=ServeConfig(quota=QUOTA),
            clock=lambda: 1_000.0,
            model_name="m",
        )
        settle()  # as the serving worker does
        async with serving(app) as url:
            for path, name, body in bodies():
                if args.only not in f"{path} {name}":
                    continue
                data = json.dumps(body).encode()
                rounds = [await measured(url, path, data) for _ in range(args.repeats)]
                found.append(
                    {"path": path, "body": name, "bytes": len(data), "status": rounds[0][0]}
                    | {
                        f"{what}_{word}": statistic(each[place] for each in rounds)
                        for what, place in (("step", 1), ("wait", 2))
                        for word, statistic in (("p50", statistics.median), ("max", max))
                    }
                )
    return found


def print_table(found: list[dict[str, Any]]) -> None:
    print(f"{'route':<28}{'body':<34}{'status':>7}{'step p50':>10}{'max':>8}{'wait p50':>10}{'max':>8}   ms")
    for path in dict.fromkeys(row["path"] for row in found):
        rows = sorted((row for row in found if row["path"] == path), key=lambda row: -row["wait_p50"])
        for row in rows[:SHOWN]:
            cells = [1e3 * row[name] for name in ("step_p50", "step_max", "wait_p50", "wait_max")]
            print(
                f"{path:<28}{row['body']:<34}{row['status']:>7}{cells[0]:>10.1f}{cells[1]:>8.1f}{cells[2]:>10.1f}{cells[3]:>8.1f}"
            )
    steps, waits = (sorted(row[name] for row in found) for name in ("step_max", "wait_max"))
    print(
        f"{len(found)} bodies: longest step {1e3 * steps[-1]:.1f} ms (half of the bodies: {1e3 * statistics.median(steps):.1f} at most), "
        f"longest wait {1e3 * waits[-1]:.1f} ms (half: {1e3 * statistics.median(waits):.1f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--context", type=int, default=8_192, help="the model's, in tokens")
    parser.add_argument("--only", default="", help="bodies whose route and name contain this")
    parser.add_argument("--result", type=Path, default=RESULT)
    args = parser.parse_args()
    found = asyncio.run(examine(args))
    print_table(found)
    args.result.parent.mkdir(exist_ok=True)
    args.result.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
