"""A session of 300 turns in each dialect: the cost of a turn at its beginning and at its end, and the tokens that training computes for it.

    python -m benchmarks.serving.long_session [--turns 300]

One thread, without HTTP, engine and log, as in `benchmarks.serving.dialects`. Each call carries the whole session, as agents send it, so
the time to parse its JSON grows with it; Ostinato's own cost is shown beside that. "packed" is the number of tokens that the trainer
computes for all turns, divided by the tokens of their tree. Writes benchmarks/results/long_session.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.contender import RESULTS, machine
from benchmarks.serving.dialects import LINE, SHAPES, Known, one_call

from ostinato.core.records import Turn
from ostinato.model.load import resolve
from ostinato.model.renderer import HFRenderer
from ostinato.serve.calls.caller import ROUTES
from ostinato.serve.wire.body import parse_json
from ostinato.train.config import TrainConfig
from ostinato.train.packing import TokenTurn, microbatches, pack

READ = LINE * 12
PARTS = 5


def packed_over_tree(turns: list[Turn]) -> float:
    """The ratio of the tokens computed for these turns, in all micro-batches, to the tokens of their tree."""
    paths = [TokenTurn(prompt=turn.prompt_ids, sampled=turn.sampled_ids) for turn in turns]
    config = TrainConfig()
    batches = microbatches(paths, config.microbatch_tokens, largest=config.largest_microbatch)
    computed = sum(pack([paths[index] for index in batch]).tokens for batch in batches)
    return computed / pack(paths).tokens


def session(path: str, count: int, renderer: HFRenderer) -> dict[str, Any]:
    """Milliseconds of a call and of parsing its JSON by fifths of the session, its tokens, and the tokens that training computes."""
    route = next(route for route in ROUTES if route.path == path)
    make, more = SHAPES[path]
    known = Known(renderer)
    history: list[dict[str, Any]] = [{"role": "user", "content": LINE}]
    turns: list[Turn] = []
    taken: list[tuple[float, float]] = []
    data = b""
    for number in range(count):
        data = json.dumps(make(history)).encode()
        began = time.perf_counter()
        parse_json(data, depth=64, values=1_000_000)
        read = time.perf_counter()
        answer, turn = one_call(number, route, known, renderer, data)
        taken.append((time.perf_counter() - read, read - began))
        turns.append(turn)
        history += more(json.loads(answer))
        history.append({"role": "user", "content": f"Go on with part {number}.\n{READ}"})
    fifth = count // PARTS
    middle = [
        [1e3 * statistics.median(part) for part in zip(*taken[i * fifth : (i + 1) * fifth], strict=True)]
        for i in range(PARTS)
    ]
    return {
        "call_ms": [round(whole, 2) for whole, _ in middle],
        "json_ms": [round(read, 2) for _, read in middle],
        "body_kb": len(data) // 1024,
        "tokens": len(turns[-1].prompt_ids) + len(turns[-1].sampled_ids),
        "continued": sum(turn.parent == before.id for before, turn in pairwise(turns)),
        "turns": count,
        "packed_over_tree": round(packed_over_tree(turns), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=300)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "ostinato")
    parser.add_argument("--out", type=Path, default=RESULTS / "long_session.json")
    args = parser.parse_args()
    renderer = HFRenderer(resolve("smollm2", args.cache))
    table: dict[str, Any] = {"machine": machine()}
    for path in SHAPES:
        row = table[path] = session(path, args.turns, renderer)
        print(
            f"{path:22} {row['tokens']:6} tokens, {row['body_kb']} KB: call {row['call_ms']} ms, of it JSON {row['json_ms']}; "
            f"{row['continued']} of {row['turns'] - 1} continued; packed {row['packed_over_tree']}x the tree"
        )
    args.out.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
