"""Unmodified coding agents over the real engine and a real model: the trainer's log-probabilities equal the engine's, bit for bit.

The answers are scripted, so that the task is solved, and each token's log-probability is the model's own. SmolLM2's context is
extended, since the agents' prompts are longer than it. Needs the agents: `make agents`.
"""

import json
from pathlib import Path

import pytest
import torch
from tests.agents.running import AGENTS
from tests.agents.scripted import scripted_engine, stretched
from tests.agents.solving import answer, installed, passes, solve
from tests.examinations.exactness.measures import gap

from ostinato.core.records import Branch, Turn
from ostinato.model.numerics import contract
from ostinato.model.renderer import HFRenderer
from ostinato.train.config import TrainConfig
from ostinato.train.trainer import PolicyTrainer

RESULT = Path(__file__).parents[1] / "examinations" / "results" / "agents.json"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    if not any(map(installed, AGENTS)):  # it is made before `agent` looks
        pytest.skip("needs the agents: make agents")
    return stretched(tmp_path_factory.mktemp("model"))


async def test_every_turn_of_a_session_has_the_trainers_bits(agent, repo, home, path, monkeypatch):
    torch.set_num_threads(1)
    arithmetic = contract(torch.bfloat16, "exact", 1, block=32)
    renderer = HFRenderer(path)

    def script(text):
        results = text.count("<tool_response>\n")
        return answer(agent.steps(repo), uses_tools=agent.uses_tools, told="</tools>" in text, results=results)

    async with scripted_engine(path, renderer, arithmetic, script, monkeypatch) as engine:
        log, refused = await solve(agent, repo, home, engine, renderer, longest_s=500, chunk_timeout_s=400)
        reused = engine.stats()["prefix_hit_tokens"]
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
    """Write an agent's figures to the results file, beside those of the other agents."""
    known = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    RESULT.write_text(json.dumps(known | {name: found}, indent=1) + "\n")
