"""Turns that were sampled in whole numbers teach the trainer, which computes in floats: labelled, measured, corrected for."""

from dataclasses import replace

import torch

from ostinato.core.generation import Generate
from ostinato.core.records import PolicyVersion, Sampling, Span
from ostinato.core.weights import Snapshot
from ostinato.engine.config import EngineConfig
from ostinato.model.attention import CausalAttend, hidden, logits
from ostinato.model.linear import choose_integers
from ostinato.model.load import build
from ostinato.model.numerics import contract
from ostinato.testing.records import a_sample, a_turn
from ostinato.testing.tiny_engine import tiny_engine
from ostinato.train.config import TrainConfig
from ostinato.train.trainer import PolicyTrainer

PROMPTS = [b"def f(%d" % i for i in range(8)]
CONFIG = TrainConfig(compute="fp32", publish="fp32", learning_rate=3e-3, warmup_steps=0, turn_tokens=12, kl_beta=0.0)


def wanted(ids) -> float:
    """Even tokens are wanted."""
    return sum(token % 2 == 0 for token in ids) / len(ids)


async def sampled(engine, number):
    """Four answers to each prompt, as turns."""
    turns = []
    for i, prompt in enumerate(PROMPTS):
        request = Generate(
            id=f"r{i}",
            slot="live",
            prompt_ids=tuple(prompt),
            n=4,
            sampling=Sampling(max_tokens=12, seed=9 * i + number),
        )
        answers = {index: ([], []) for index in range(4)}
        async for chunk in engine.generate(request):
            answers[chunk.index][0].extend(chunk.ids)
            answers[chunk.index][1].extend(chunk.logprobs)
        for index, (ids, logprobs) in answers.items():
            turn = a_turn(f"{number}.{i}.{index}:0", prompt=prompt, sampled=ids, numerics=engine.numerics())
            spans = (Span(policy=engine.slots()["live"], tokens=len(ids)),)
            turns.append(replace(turn, logprobs=tuple(logprobs), spans=spans, sampling=Sampling(max_tokens=12)))
    return turns


def odds(tiny, trainer, turns) -> float:
    """The mean probability of a wanted token wherever these turns sampled one, under the trainer's present weights."""
    model, shares = build(tiny.path)(trainer.weights()), []
    for turn in turns:
        ids = torch.tensor([*turn.prompt_ids, *turn.sampled_ids[:-1]])
        with torch.inference_mode():
            states = hidden(model, ids, torch.arange(len(ids)), CausalAttend([len(ids)]))
            chances = logits(model, states[len(turn.prompt_ids) - 1 :]).float().softmax(-1)
        shares.append(chances[:, ::2].sum(-1).mean().item())
    return sum(shares) / len(shares)


def gained(before, after, given) -> float:
    """By how much a step raised the probability of what was rewarded and lowered that of the rest: advantage times log ratio."""
    return sum(
        advantage * (new - old)
        for sample, olds, news in zip(given, before, after, strict=True)
        for advantage, old, new in zip(sample.advantages, olds, news, strict=True)
    )


async def test_steps_on_rounded_rollouts_learn_and_say_how_far_apart_the_arithmetics_are(tmp_path):
    integers = choose_integers([64, 128])
    rounded = contract(torch.float32, "fast", threads=1, block=16, quantisation=integers.name)
    plain = contract(torch.float32, "fast", threads=1, block=16)
    assert rounded.id != plain.id
    config = EngineConfig(kv_tokens=4096, block=16)
    async with tiny_engine(tmp_path, config, integers=integers, contract=rounded) as tiny:
        trainer, first, before = PolicyTrainer(tiny.path, CONFIG, plain), [], 0.0
        for number in range(4):
            policy = PolicyVersion(number=number, hash=f"v{number}")
            await tiny.engine.load("live", Snapshot(policy=policy, weights=trainer.weights()))
            turns = await sampled(tiny.engine, number)
            assert {turn.numerics for turn in turns} == {rounded.id}
            if not first:
                first, before = turns, odds(tiny, trainer, turns)
            rewards = [wanted(turn.sampled_ids) for turn in turns]
            mean = sum(rewards) / len(rewards)
            given = [a_sample(turn, reward - mean) for turn, reward in zip(turns, rewards, strict=True)]
            scores = trainer.score(turns)
            metrics = trainer.step(given).metrics
            assert gained(scores, trainer.score(turns), given) > 0
            assert metrics["foreign_turns"] == len(turns)
            assert metrics["foreign_differing"] > 0, "the trainer computes in floats"
            assert metrics["foreign_k3"] < 1e-2
            assert metrics["mismatch_tokens"] == 0
            assert metrics["masked_share"] < 0.1
            assert metrics["ess"] > 0.9
        assert odds(tiny, trainer, first) > before
