"""Unmodified coding agents over the real engine and a real model: what the trainer computes of their sessions are the engine's bits.

What is said is scripted, so that the task is solved, and each token's log-probability is the model's own. The context of SmolLM2 is
stretched, since the agents' prompts are longer than it. Needs the agents: `make agents`.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.agents.solving import answer, passes, solve
from tests.examinations.exactness.measures import gap

from ostinato.core.records import Branch, PolicyVersion, Turn
from ostinato.core.weights import Snapshot
from ostinato.engine.config import EngineConfig
from ostinato.engine.embedded import engine as embedded
from ostinato.engine.embedded.worker import EngineThread
from ostinato.model.attention import logits
from ostinato.model.load import build, load_model, resolve, weights_of
from ostinato.model.logprobs import RowSoftmax
from ostinato.model.numerics import contract
from ostinato.model.renderer import HFRenderer
from ostinato.train.config import TrainConfig
from ostinato.train.trainer import PolicyTrainer

CONTEXT = 65_536
RESULT = Path(__file__).parents[1] / "examinations" / "results" / "agents.json"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    found = tmp_path_factory.mktemp("model") / "stretched"
    shutil.copytree(resolve("smollm2", tmp_path_factory.mktemp("cache")), found)
    config = json.loads((found / "config.json").read_text())
    (found / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    return found


class Scripted(EngineThread):
    """The engine's thread, but for one thing: which token is taken is the script's word."""

    def _draw(self, model, drawing):
        rows_MV = logits(model, torch.stack([state for _, state in drawing]), rows=self._rows)
        forced = [self.script(sample)[sample.sampled] for sample, _ in drawing]
        found = RowSoftmax.of(rows_MV, torch.ones(len(forced))).logprobs(np.array(forced)).tolist()
        for (sample, _), token, logprob in zip(drawing, forced, found, strict=True):
            self._take(sample, token, logprob, ())


async def test_every_turn_of_a_session_has_the_trainers_bits(agent, repo, home, path, row_rule, monkeypatch):
    rows = row_rule(path, torch.bfloat16)
    torch.set_num_threads(1)
    arithmetic = contract(torch.bfloat16, "exact", 1, rows, block=32)
    renderer = HFRenderer(path)
    (stop,) = renderer.stop_ids()

    def script(sample):
        text = renderer.decode(sample.request.prompt_ids)
        results = text.count("<tool_response>\n")
        said = answer(agent.steps(repo), uses_tools=agent.uses_tools, told="</tools>" in text, results=results)
        return [*renderer.encode(said), stop]

    monkeypatch.setattr(Scripted, "script", staticmethod(script), raising=False)
    monkeypatch.setattr(embedded, "EngineThread", Scripted)
    engine = embedded.TorchEngine(
        build(path, torch.bfloat16), renderer, EngineConfig(kv_tokens=1 << 17), contract=arithmetic
    )
    await engine.start()
    try:
        weights = weights_of(load_model(path, torch.bfloat16))
        await engine.load("live", Snapshot(policy=PolicyVersion(number=0, hash="0" * 64), weights=weights))
        log, refused = await solve(agent, repo, home, engine, renderer, longest_s=500, chunk_timeout_s=400)
        reused = engine.stats()["prefix_hit_tokens"]
    finally:
        await engine.close()
    assert passes(repo)
    assert refused == []
    turns = [row for row in log.rows if isinstance(row, Turn)]
    later = [turn for turn in turns if turn.parent is not None]
    by_id = {turn.id: turn for turn in turns}
    for turn in later:
        known = by_id[turn.parent].prompt_ids + by_id[turn.parent].sampled_ids
        assert turn.prompt_ids[: len(known)] == known
    if agent.uses_tools:
        assert len(later) >= 2
        assert {turn.branch for turn in turns} == {Branch.NONE}
        assert reused > 0.9 * sum(len(turn.prompt_ids) for turn in later)
    trainer = PolicyTrainer(path, TrainConfig(compute="bf16", publish="bf16"), arithmetic)
    found = gap(turns, trainer.score(turns))
    assert found.tokens == sum(len(turn.sampled_ids) for turn in turns) > 20
    assert found.differing == 0
    note(
        agent.name,
        turns=len(turns),
        prompts=[len(turn.prompt_ids) for turn in turns],
        reused_of_later=[reused, sum(len(turn.prompt_ids) for turn in later)],
        tokens=found.tokens,
        differing=found.differing,
    )


def note(name, **found):
    """Keep what was found of an agent beside what the examinations found."""
    known = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    RESULT.write_text(json.dumps(known | {name: found}, indent=1) + "\n")
