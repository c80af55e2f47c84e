"""A real model as the judge of next messages: how often is it right, and how often does it agree with the rules?

    python -m tests.examinations.judge.run [--url URL --model NAME --key-env VARIABLE] [--cache DIR]

The messages are the 119 that were written after the rules and only scored (tests/unit/serve/scored_follow_ups.py). Without --url the judge
is SmolLM2 of 135 million parameters behind our own gateway, constrained to the schema of its answer. Precision and recall are against the
labels; a message without a verdict of the judge counts as missed. Writes tests/examinations/results/judge.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from tests.unit.serve.gateway_world import world
from tests.unit.serve.scored_follow_ups import ONLY_SCORED

from ostinato.core.records import PolicyVersion
from ostinato.core.weights import Snapshot
from ostinato.engine.config import EngineConfig
from ostinato.engine.embedded.engine import TorchEngine
from ostinato.model.load import build, load_model, resolve, weights_of
from ostinato.model.numerics import contract
from ostinato.model.renderer import HFRenderer
from ostinato.serve.config import JudgeConfig
from ostinato.serve.feedback.followups import typed
from ostinato.serve.feedback.next_message import DISSATISFIED, NextMessage, kind_of
from ostinato.serve.judge_prompt import VERSION, Case
from ostinato.serve.message_judge import Judge, LabelledMessage
from ostinato.serve.metrics import Metrics

RESULT = Path(__file__).parents[1] / "results" / "judge.json"
Words = dict[int, NextMessage]


@asynccontextmanager
async def smollm2(cache: Path) -> AsyncGenerator[str]:
    """Yields the base URL of a gateway that serves SmolLM2."""
    path = resolve("smollm2", cache)
    torch.set_num_threads(1)
    renderer = HFRenderer(path)
    engine = TorchEngine(
        build(path, torch.bfloat16),
        renderer,
        EngineConfig(max_batch=4),
        contract=contract(torch.bfloat16, "exact", 1, block=32),
        grammars=renderer.grammars,
    )
    await engine.start()
    try:
        weights = weights_of(load_model(path, torch.bfloat16))
        await engine.load("live", Snapshot(policy=PolicyVersion(number=0, hash="0" * 64), weights=weights))
        async with world(engine=engine, renderer=renderer, real=True, chunk_timeout_s=600) as w:
            yield f"{w.url}/v1"
    finally:
        await engine.close()


def cases() -> list[tuple[NextMessage, LabelledMessage]]:
    """Each message's label, and the rules' verdict on it."""
    found: list[tuple[NextMessage, LabelledMessage]] = []
    for meant, message, before, answer in ONLY_SCORED:
        case = Case(request=before, answer=answer, message=typed(message).text)
        found.append((meant, LabelledMessage(case, kind_of(case.message, case.request, case.answer))))
    return found


async def heard(config: JudgeConfig, messages: Sequence[LabelledMessage]) -> tuple[Words, dict[str, float]]:
    """The judge's verdicts by message, and the counts of its metrics."""
    metrics, words = Metrics(), Words()
    judge = Judge(config, metrics)
    await judge.start()
    for number, ruled in enumerate(messages):
        judge.ask("default", str(number), ruled, lambda word, number=number: words.update({number: word}))
    while (done := counted(metrics, "judge_words") + counted(metrics, "judge_no_words")) < len(messages):
        print(f"{done:g} of {len(messages)}", end="\r", flush=True)
        await asyncio.sleep(1.0)
    await judge.close()
    silent = {
        sample.labels["reason"]: sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "ostinato_judge_no_words_total"
    }
    return words, silent | {"tokens": counted(metrics, "judge_tokens")}


def counted(metrics: Metrics, name: str) -> float:
    samples = (sample for family in metrics.registry.collect() for sample in family.samples)
    return sum(sample.value for sample in samples if sample.name == f"ostinato_{name}_total")


def scores(pairs: Sequence[tuple[NextMessage, NextMessage | None]]) -> dict[str, str]:
    """Precision and recall as counts, for each label and for all dissatisfied labels together."""
    groups = {"dissatisfied": DISSATISFIED} | {kind.value: frozenset({kind}) for kind in NextMessage}
    found: dict[str, str] = {}
    for name, kinds in groups.items():
        right = sum(meant in kinds and said in kinds for meant, said in pairs)
        told, meant = sum(said in kinds for _, said in pairs), sum(meant in kinds for meant, _ in pairs)
        found[name] = f"precision {right} of {told}, recall {right} of {meant}"
    return found


async def examined(url: str, model: str, key_env: str) -> dict[str, Any]:
    config = JudgeConfig(url=url, model=model, key_env=key_env, calls_per_minute=100_000, timeout_s=600.0)
    labelled = cases()
    began = time.perf_counter()
    words, counts = await heard(config, [ruled for _, ruled in labelled])
    seconds = time.perf_counter() - began
    said = [words.get(number) for number in range(len(labelled))]
    agreed = sum(word is ruled.kind for word, (_, ruled) in zip(said, labelled, strict=True))
    return {
        "judge": f"{VERSION}, {model}",
        "messages": len(labelled),
        "seconds_each": round(seconds / len(labelled), 2),
        "counted": counts,
        "words": dict(Counter(word.value for word in words.values())),
        "judge against labels": scores([(meant, word) for (meant, _), word in zip(labelled, said, strict=True)]),
        "rules against labels": scores([(meant, ruled.kind) for meant, ruled in labelled]),
        "agrees with the rules": f"{agreed} of {len(labelled)}",
    }


async def with_own_judge(cache: Path) -> dict[str, Any]:
    async with smollm2(cache) as url:
        return {**await examined(url, "m", ""), "judge": f"{VERSION}, SmolLM2-135M-Instruct"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="", help="of another judge, up to and with /v1")
    parser.add_argument("--model", default="")
    parser.add_argument("--key-env", default="", help="the variable that holds its key")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "ostinato-cache")
    given = parser.parse_args()
    asked = examined(given.url, given.model, given.key_env) if given.url else with_own_judge(given.cache)
    found = asyncio.run(asked)
    RESULT.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")
    print(json.dumps(found, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
