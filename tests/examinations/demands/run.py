"""A real model's answers under a JSON schema: do they conform to it, and does the trainer reproduce the engine's bits?

    python -m tests.examinations.demands.run [--requests 1000] [--open 32] [--cache DIR]

Schemas are drawn at random (objects in objects, arrays, enumerations, patterns, numbers with bounds) and sent to the gateway, which
serves SmolLM2 in bf16 under an exact contract. Every answer is checked by the jsonschema library. Every stored turn is scored again by
the trainer, which replays the grammar from the turn alone. The counts are of answers that break their schema or do not end, and of
log-probabilities with different bits; both must be 0. "without the mask" is a control that must not be 0. The same prompts are also run
without a schema, to measure the cost of the masks. Writes tests/examinations/results/demands.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import torch
from rich.progress import Progress
from tests.examinations.exactness.measures import gap
from tests.unit.serve.gateway_world import world

from ostinato.core.records import Finish, PolicyVersion, Turn
from ostinato.core.weights import Snapshot
from ostinato.engine.config import EngineConfig
from ostinato.engine.embedded.engine import TorchEngine
from ostinato.model.load import build, load_model, resolve, weights_of
from ostinato.model.numerics import contract
from ostinato.model.renderer import HFRenderer
from ostinato.train.config import TrainConfig
from ostinato.train.trainer import PolicyTrainer

RESULT = Path(__file__).parents[1] / "results" / "demands.json"
WORDS = ("name", "city", "size", "tags", "kind", "price", "day", "owner", "code", "level")
MAX_TOKENS = 400


def schema(chance: random.Random, depth: int = 0) -> dict[str, Any]:
    """A random schema that bounds the length of every string."""
    kinds = ["text", "number", "choice", "flag", "code"] + ([] if depth > 1 else ["object", "array"])
    match "object" if depth == 0 else chance.choice(kinds):
        case "object":
            names = chance.sample(WORDS, chance.randint(1, 3))
            return {
                "type": "object",
                "properties": {name: schema(chance, depth + 1) for name in names},
                "required": chance.sample(names, chance.randint(0, len(names))),
                "additionalProperties": False,
            }
        case "array":
            return {
                "type": "array",
                "items": schema(chance, depth + 1),
                "minItems": chance.randint(0, 1),
                "maxItems": 3,
            }
        case "number":
            return {"type": "integer", "minimum": chance.randint(-5, 5), "maximum": chance.randint(10, 5000)}
        case "choice":
            return {"enum": chance.sample(["red", 'a "b"', "née", 7, None, True], 3)}
        case "flag":
            return {"type": "boolean"}
        case "code":
            return {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}
        case _:
            return {"type": "string", "maxLength": chance.randint(5, 25)}


async def ask(w: Any, number: int, form: dict[str, Any] | None) -> str:
    talk = [{"role": "user", "content": f"Describe thing number {number} as JSON."}]
    fields: dict[str, Any] = {"messages": talk, "max_tokens": MAX_TOKENS if form else 40, "seed": number}
    if form:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "thing", "schema": form}}
    status, _, body = await w.chat(**fields)
    if status != 200:
        raise RuntimeError(f"{status}: {body} for {form}")
    return body["choices"][0]["message"]["content"]


async def traffic(w: Any, forms: list[dict[str, Any] | None], open: int, progress: Progress) -> tuple[list[str], float]:
    """Send the requests, `open` at once. Returns the answers and the seconds taken."""
    task, gate = progress.add_task("asking", total=len(forms)), asyncio.Semaphore(open)

    async def one(number: int, form: dict[str, Any] | None) -> str:
        async with gate:
            text = await ask(w, number, form)
        progress.advance(task)
        return text

    began = time.perf_counter()
    return await asyncio.gather(*(one(i, form) for i, form in enumerate(forms))), time.perf_counter() - began


def judged(text: str, form: dict[str, Any]) -> str:
    try:
        jsonschema.validate(json.loads(text), form)
    except json.JSONDecodeError:
        return "no JSON"
    except jsonschema.ValidationError as error:
        return f"breaks its schema: {error.message}"
    return "valid"


def rescored(path: Path, turns: list[Turn]) -> dict[str, Any]:
    """Compare the trainer's numbers with the engine's, with the grammar and, on 50 turns, without it."""
    config = TrainConfig(compute="bf16", publish="bf16")
    trainer = PolicyTrainer(path, config, contract(torch.bfloat16, "exact", 1, block=32))
    found = gap(turns, trainer.score(turns))
    part = [replace(turn, sampling=replace(turn.sampling, grammar="")) for turn in turns[:50]]
    control = gap(part, trainer.score(part))
    return {
        "differing": found.differing,
        "tokens_scored": found.tokens,
        "without the mask": {"differing": control.differing, "tokens": control.tokens},
    }


async def examined(path: Path, requests: int, open: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    renderer, weights = HFRenderer(path), weights_of(load_model(path, torch.bfloat16))
    arithmetic = contract(torch.bfloat16, "exact", 1, block=32)
    engine = TorchEngine(
        build(path, torch.bfloat16),
        renderer,
        EngineConfig(max_batch=open),
        contract=arithmetic,
        grammars=renderer.grammars,
    )
    chance = random.Random(1)
    forms = [schema(chance) for _ in range(requests)]
    await engine.start()
    try:
        await engine.load("live", Snapshot(policy=PolicyVersion(number=0, hash="0" * 64), weights=weights))
        with Progress() as progress:
            async with world(engine=engine, renderer=renderer, chunk_timeout_s=600) as w:
                texts, seconds = await traffic(w, [*forms], open, progress)
                turns = [row for row in w.log.rows if isinstance(row, Turn)]
                before = engine.stats()["tokens"]
                _, plain_s = await traffic(w, [None] * (requests // 4), open, progress)
                plain = engine.stats()["tokens"] - before
    finally:
        await engine.close()
    verdicts = Counter(judged(text, form) for text, form in zip(texts, forms, strict=True))
    tokens = sum(len(turn.sampled_ids) for turn in turns)
    return {
        "requests": requests,
        "verdicts": dict(verdicts),
        "cut by the budget": sum(turn.finish is Finish.LENGTH for turn in turns),
        "tokens": tokens,
        "tokens_per_s": round(tokens / seconds, 1),
        "tokens_per_s_without_a_demand": round(plain / plain_s, 1),
        **rescored(path, turns),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--open", type=int, default=32, help="requests at once")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "ostinato-cache")
    given = parser.parse_args()
    found = asyncio.run(examined(resolve("smollm2", given.cache), given.requests, given.open))
    RESULT.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")
    print(json.dumps(found, indent=2, ensure_ascii=False))
    if (
        found["verdicts"] != {"valid": given.requests}
        or found["differing"]
        or not found["without the mask"]["differing"]
    ):
        raise SystemExit("an answer broke its demand, or a bit differed")


if __name__ == "__main__":
    main()
