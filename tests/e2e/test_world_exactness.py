"""Exact mode while newer weights answer in the middle of rollouts: every token's logprob is that of its own version, to the bit."""

import asyncio
import logging

import pytest
import torch
from world_runs import SETTINGS, crew, steps, until_step, write_tasks

from ostinato.app.numerics import trainer_contract, training
from ostinato.app.storage import home, model_path, open_run
from ostinato.config import load
from ostinato.core.records import PolicyVersion, Turn
from ostinato.launch.commands.worlds.train import world_overrides
from ostinato.train.trainer import PolicyTrainer
from ostinato.weights.version.content import version_ref

TOKENS = 120


def differing(turn: Turn, scored: tuple[float, ...], version: PolicyVersion) -> tuple[int, int, int]:
    """How many of a turn's tokens are a version's own, how many of those have other bits, and how many of the others have."""
    own = torch.tensor([span.policy == version for span in turn.spans for _ in range(span.tokens)])
    other = torch.tensor(scored).view(torch.int32) != torch.tensor(turn.logprobs).view(torch.int32)
    return int(own.sum()), int((other & own).sum()), int((other & ~own).sum())


@pytest.mark.examination
async def test_tokens_on_both_sides_of_a_swap_are_their_own_versions_to_the_bit(tmp_path, quick_settings):
    tasks = write_tasks(tmp_path / "letters.jsonl", tokens=TOKENS)
    more = ["model.numerics='exact'", "engine.recompute_on_swap=true", "follow.interval_s=0.02", "worlds.group=8"]
    config = load(None, [*quick_settings(tmp_path, *world_overrides(tasks)), *SETTINGS, *more])
    place = home(config)
    async with asyncio.timeout(300), crew(config) as launched:
        await launched.during(until_step(place, 8))
    assert all(line["mismatch_differing"] == 0 for line in steps(place) if "mismatch_differing" in line)
    with open_run(config) as run:
        turns = [row async for _, row in run.log.read(0, {Turn}) if isinstance(row, Turn) and row.sampled_ids]
        versions = {span.policy for turn in turns for span in turn.spans}
        trainer = await asyncio.to_thread(
            lambda: PolicyTrainer(model_path(config), training(config), trainer_contract(config))
        )
        torch.set_num_threads(config.train.threads)
        found = torch.zeros(3, dtype=torch.int64)
        for policy in versions:
            named = await run.follower.resolve(version_ref(policy.hash))
            trainer.go_back(await run.follower.fetch(named), policy.number)
            mine = [turn for turn in turns if policy in [span.policy for span in turn.spans]]
            found += torch.tensor(list(map(differing, mine, trainer.score(mine), [policy] * len(mine)))).sum(0)
    tokens, wrong, foreign = found.tolist()
    across = [turn for turn in turns if len(turn.spans) > 1]
    counts = {
        "versions": len(versions),
        "turns": len(turns),
        "across a swap": len(across),
        "tokens": tokens,
        "foreign": foreign,
    }
    logging.getLogger(__name__).warning("%s", counts)
    assert tokens == sum(len(turn.sampled_ids) for turn in turns)
    assert len(across) >= 8, "no stream met a swap: nothing was shown"
    assert wrong == 0
    assert foreign > 0, "the control: another version's tokens have other bits"
