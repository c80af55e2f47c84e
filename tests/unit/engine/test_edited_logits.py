"""Answers whose logits were edited: in form, and the same numbers in engine and trainer, to the bit."""

import asyncio
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from ostinato.core import nucleus
from ostinato.core.conversation import Conversation, Demand, Message, Role
from ostinato.core.errors import BadRequest, NoSignal
from ostinato.core.generation import Generate
from ostinato.core.records import Finish, PolicyVersion, Sampling, Span
from ostinato.core.samples import Sample
from ostinato.engine.config import EngineConfig
from ostinato.engine.embedded.engine import TorchEngine
from ostinato.engine.embedded.sampler import Draw, draw
from ostinato.model.load import build
from ostinato.model.logit_edits import Edit
from ostinato.testing.records import a_turn
from ostinato.testing.tiny_engine import tiny_engine
from ostinato.train.config import TrainConfig
from ostinato.train.policy import token_logprobs
from ostinato.train.replay import AnswerEdits
from ostinato.train.trainer import PolicyTrainer

CONFIG = TrainConfig(compute="fp32", publish="fp32", learning_rate=1e-3)
V0 = PolicyVersion(number=0, hash="seed0")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
ASKED = Conversation(messages=(Message(role=Role.USER, text="A point?"),), demand=Demand(schema=SCHEMA))


async def turns_of(tiny, sampling, *, n=1, prompt=ASKED):
    """The answers to one request as turns."""
    ids = tuple(tiny.renderer.chat(prompt))
    request = Generate(id="r", slot="live", prompt_ids=ids, sampling=sampling, n=n)
    chunks = [chunk async for chunk in tiny.engine.generate(request)]
    found = []
    for index in range(n):
        mine = [chunk for chunk in chunks if chunk.index == index]
        sampled = tuple(token for chunk in mine for token in chunk.ids)
        turn = replace(
            a_turn(f"{sampling.seed}-{index}:0"),
            prompt_ids=ids,
            sampled_ids=sampled,
            logprobs=tuple(value for chunk in mine for value in chunk.logprobs),
            spans=(Span(policy=V0, tokens=len(sampled)),),
            nucleus=b"".join(chunk.nucleus for chunk in mine),
            sampling=sampling,
            finish=mine[-1].finish,
            text="".join(chunk.text for chunk in mine),
        )
        found.append(turn)
    return found


def bits(values):
    return torch.tensor(values, dtype=torch.float32).view(torch.int32).tolist()


@pytest.mark.parametrize("top_p", [1.0, 0.95])
async def test_answers_keep_their_schema_and_the_trainer_has_the_engines_bits(tmp_path, top_p):
    async with tiny_engine(tmp_path) as tiny:
        grammar = tiny.renderer.grammar(ASKED)
        sampling = Sampling(max_tokens=150, grammar=grammar, presence_penalty=0.3, logit_bias=((65, 1.5),), top_p=top_p)
        turns = [turn for seed in range(6) for turn in await turns_of(tiny, replace(sampling, seed=seed), n=5)]
        trainer = PolicyTrainer(tiny.path, CONFIG)
    for turn in turns:
        assert turn.finish is Finish.STOP
        value = json.loads(turn.text)
        assert {*value} == {"name", "sizes"}
        assert len(value["name"]) <= 6
        assert all(0 <= size <= 99 for size in value["sizes"])
        assert len(value["sizes"]) <= 3
    assert len({turn.text for turn in turns}) > 25, "a model's own words"
    assert [bits(found) for found in trainer.score(turns)] == [bits(turn.logprobs) for turn in turns]
    plain = [replace(turn, sampling=replace(turn.sampling, grammar="", top_p=1.0)) for turn in turns]
    assert trainer.score(plain) != [turn.logprobs for turn in turns], "without the mask there are other numbers"
    samples = [Sample(turn=turn, reward=1.0, advantages=(1.0,) * len(turn.sampled_ids)) for turn in turns]
    metrics = trainer.step(samples).metrics
    assert (metrics["mismatch_differing"], metrics["grammar_refused"], metrics["turns"]) == (0, 0, len(turns))


@pytest.mark.parametrize(
    "edits",
    [
        {"presence_penalty": 1.5},
        {"frequency_penalty": -0.7},
        {"logit_bias": ((66, 4.0), (258, -100.0))},
        {"presence_penalty": -1.0, "frequency_penalty": 0.5, "temperature": 0.6},
        {"top_p": 0.8},
        {"top_p": 0.5, "temperature": 1.4},
        {
            "top_p": 0.9,
            "temperature": 0.7,
            "presence_penalty": -1.0,
            "frequency_penalty": 0.5,
            "logit_bias": ((66, 4.0),),
        },
    ],
)
async def test_penalties_and_biases_are_the_trainers_too(tmp_path, edits):
    async with tiny_engine(tmp_path) as tiny:
        sampling = Sampling(max_tokens=40, seed=3, **edits)
        turns = await turns_of(tiny, sampling, n=3)
        plain = await turns_of(tiny, Sampling(max_tokens=40, seed=3), n=3)
        trainer = PolicyTrainer(tiny.path, CONFIG)
    assert [turn.sampled_ids for turn in turns] != [turn.sampled_ids for turn in plain]
    assert [bits(found) for found in trainer.score(turns)] == [bits(turn.logprobs) for turn in turns]


def near_25(rows=6, vocab=700):
    """bf16 logits whose largest are near 25, where bf16 steps by 0.125."""
    logits_MV = 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(5))
    logits_MV[:, 7], logits_MV[:, 9], logits_MV[:, 11] = 25.0, 24.5, 24.75
    return logits_MV.bfloat16()


@pytest.mark.parametrize("kernels", ["own", "torch"])
def test_a_small_bias_on_a_large_bf16_logit_changes_the_probability_by_what_it_should(kernels):
    logits_MV = near_25()
    edit = Edit(np.array([7, 9]), np.array([0.05, -0.03], np.float32), None)
    rows = [Draw(temperature=0.8, top_p=1.0, u=0.1 * i, edit=edit if i % 2 else None) for i in range(6)]
    want_MV = logits_MV.double()
    want_MV[1::2, 7] += 0.05
    want_MV[1::2, 9] -= 0.03
    want_MV = (want_MV / 0.8).log_softmax(-1)
    plain = draw(logits_MV.clone(), [replace(row, edit=None) for row in rows], kernels)
    drawn = draw(logits_MV.clone(), rows, kernels)
    assert drawn.logprobs == pytest.approx([float(want_MV[i, token]) for i, token in enumerate(drawn.tokens)], abs=4e-6)
    assert bits(drawn.logprobs)[::2] == bits(plain.logprobs)[::2], "rows without an edit keep their bits"
    assert drawn.tokens[::2] == plain.tokens[::2]

    def states():
        return torch.eye(6).bfloat16().requires_grad_()

    def learned(edits):
        """Log-probabilities and the logits' gradient, of the drawn tokens, as the trainer computes them."""
        rows_MM, targets_M = states(), torch.tensor(drawn.tokens)
        found = token_logprobs(
            lambda each: each @ logits_MV,
            rows_MM,
            targets_M,
            torch.full((6,), 0.8),
            lambda a, b: edits,
            kernels=kernels,
        )
        found.sum().backward()
        return found.tolist(), rows_MM.grad

    found, gradient = learned(dict.fromkeys((1, 3, 5), edit))
    assert bits(found) == bits(drawn.logprobs), "the trainer has the engine's bits"
    _, without = learned({})
    assert gradient.dtype == torch.bfloat16
    assert torch.equal(gradient[::2], without[::2])
    assert not torch.equal(gradient[1::2], without[1::2])


async def test_a_frequent_token_becomes_rare(tmp_path):
    async with tiny_engine(tmp_path) as tiny:
        often = Sampling(max_tokens=200, seed=1, temperature=0.3, logit_bias=((258, -100.0),))
        (plain,) = await turns_of(tiny, often)
        (varied,) = await turns_of(tiny, replace(often, frequency_penalty=2.0))
    assert len({*varied.sampled_ids}) > 2 * len({*plain.sampled_ids})


async def test_what_does_not_follow_its_grammar_is_not_trained_on(tmp_path):
    async with tiny_engine(tmp_path) as tiny:
        sampling = Sampling(max_tokens=150, seed=1, grammar=tiny.renderer.grammar(ASKED))
        (turn,) = await turns_of(tiny, sampling)
        trainer = PolicyTrainer(tiny.path, CONFIG)
    wrong = replace(turn, id="wrong:0", sampled_ids=(turn.sampled_ids[1], *turn.sampled_ids[1:]))
    none = replace(turn, id="none:0", sampling=replace(sampling, grammar="no grammar"))

    def samples(*turns):
        return [Sample(turn=each, reward=1.0, advantages=(1.0,) * len(each.sampled_ids)) for each in turns]

    metrics = trainer.step(samples(turn, wrong, none)).metrics
    assert (metrics["turns"], metrics["grammar_refused"]) == (1, 2)
    with pytest.raises(NoSignal, match="follows its grammar"):
        trainer.step(samples(wrong))


def test_the_gradient_is_that_of_the_edited_distribution(tmp_path):
    torch.manual_seed(0)
    weight = torch.randn(37, 8, requires_grad=True)
    states, targets, heat = torch.randn(5, 8), torch.tensor([3, 5, 3, 7, 9]), torch.tensor([1.0, 0.7, 1.0, 2.0, 1.0])
    may = np.zeros(40, np.uint8)
    may[[3, 5, 11, 36]] = 1
    packed = np.packbits(may, bitorder="little")
    edits = {
        1: Edit(*NONE, packed),
        2: Edit(np.array([3, 4]), np.array([0.5, -2.0], np.float32), packed),
        4: Edit(np.array([9]), np.array([-1.0], np.float32), None),
    }
    coefficients = torch.tensor([1.0, -2.0, 0.5, 1.0, 3.0])

    def expected():
        logits = states @ weight.T
        added, mask = torch.zeros(5, 37), torch.zeros(5, 37, dtype=torch.bool)
        added[2, 3], added[2, 4], added[4, 9] = 0.5, -2.0, -1.0
        mask[1], mask[2] = torch.from_numpy(may[:37] == 0), torch.from_numpy(may[:37] == 0)
        shaped = (logits + added).masked_fill(mask, -torch.inf) / heat[:, None]
        return shaped.log_softmax(-1).gather(1, targets[:, None])[:, 0]

    want = expected()
    (want * coefficients).sum().backward()
    gradient, weight.grad = weight.grad, None
    for keep in (True, False):
        found = token_logprobs(lambda hidden: hidden @ weight.T, states, targets, heat, lambda a, b: edits, keep=keep)
        torch.testing.assert_close(found, want, atol=1e-5, rtol=0)
        (found * coefficients).sum().backward()
        torch.testing.assert_close(weight.grad, gradient, atol=1e-5, rtol=1e-5)
        weight.grad = None


NONE = np.array([], np.int64), np.array([], np.float32)


def test_a_constant_advantage_has_no_gradient_under_top_p_whatever_the_trainers_weights():
    """Every outcome of the sampler's draw, each with its probability: on the sampler's weights, and on others with importance weights."""
    torch.manual_seed(1)
    sampler, states_1D = torch.randn(40, 8), torch.randn(1, 8)
    drawn = draw(states_1D @ sampler.T, [Draw(temperature=0.9, top_p=0.8, u=0.5)])
    (ids,) = nucleus.decode(drawn.nuclei[0], 1)
    assert 3 < len(ids) < 30
    sampling = Sampling(max_tokens=1, temperature=0.9, top_p=0.8)
    turns = [replace(a_turn(sampled=(t,)), sampling=sampling, nucleus=drawn.nuclei[0]) for t in ids.tolist()]
    states_KD, heat_K, targets_K = states_1D.repeat(len(ids), 1), torch.full((len(ids),), 0.9), torch.from_numpy(ids)
    edits = AnswerEdits(no_grammars)
    assert all(map(edits.admits, turns))

    def logprobs(weight, changes):
        return token_logprobs(lambda states: states @ weight.T, states_KD, targets_K, heat_K, changes)

    behaviour_K = logprobs(sampler, lambda a, b: edits.replay(turns, a, b))
    assert behaviour_K.exp().sum() == pytest.approx(1.0, abs=1e-6), "all outcomes of the draw"
    moved = sampler + 0.3 * torch.randn(40, 8)
    (recomputed,) = nucleus.decode(draw(states_1D @ moved.T, [Draw(temperature=0.9, top_p=0.8, u=0.5)]).nuclei[0], 1)
    assert {*recomputed} != {*ids}, "the trainer cannot find the set again once it has moved"
    sizes = {}
    for name, start, changes in (
        ("same weights", sampler, lambda a, b: edits.replay(turns, a, b)),
        ("moved weights", moved, lambda a, b: edits.replay(turns, a, b)),
        ("whole distribution", sampler, None),
        ("recomputed set", moved, lambda a, b: dict.fromkeys(range(a, b), Edit(*NONE, bits_of(recomputed)))),
    ):
        weight = start.clone().requires_grad_()
        now_K = logprobs(weight, changes)
        seen = now_K.isfinite()
        # E[pi / mu grad log pi], the sum over outcomes of mu
        (behaviour_K.exp() * (now_K.detach() - behaviour_K).exp() * now_K)[seen].sum().backward()
        sizes[name] = float(weight.grad.norm())
    assert max(sizes["same weights"], sizes["moved weights"]) < 1e-5
    assert min(sizes["whole distribution"], sizes["recomputed set"]) > 0.02


def bits_of(ids):
    may = np.zeros(40, np.bool_)
    may[ids] = True
    return np.packbits(may, bitorder="little")


def no_grammars():
    raise AssertionError("no turn has a grammar")


async def test_what_top_p_left_open_must_be_known_and_hold_the_tokens(tmp_path):
    async with tiny_engine(tmp_path) as tiny:
        (turn,) = await turns_of(tiny, Sampling(max_tokens=30, seed=5, top_p=0.7))
        trainer = PolicyTrainer(tiny.path, CONFIG)
    sets = nucleus.decode(turn.nucleus, len(turn.sampled_ids))
    outside = next(token for token in range(256) if token not in sets[0])
    wrong = replace(turn, id="wrong:0", sampled_ids=(outside, *turn.sampled_ids[1:]))
    others = replace(turn, id="none:0", nucleus=b""), replace(turn, id="short:0", nucleus=nucleus.encode(sets[0]))
    samples = [
        Sample(turn=each, reward=1.0, advantages=(1.0,) * len(each.sampled_ids)) for each in (turn, wrong, *others)
    ]
    metrics = trainer.step(samples).metrics
    assert (metrics["turns"], metrics["grammar_refused"], metrics["mismatch_differing"]) == (1, 3, 0)


def form(pattern):
    schema = {"type": "string", "pattern": pattern}
    return Conversation(messages=ASKED.messages, demand=Demand(schema=schema))


async def test_a_grammar_that_grows_too_complex_ends_its_own_samples_and_no_others(tmp_path):
    async with tiny_engine(tmp_path) as tiny:
        grows = tiny.renderer.grammar(form("^[a-z]{6}((a?){300}a{300}|b)$"))
        plain = Sampling(max_tokens=40, seed=5)
        sampling = Sampling(max_tokens=40, seed=5, grammar=tiny.renderer.grammar(ASKED))
        alone = await turns_of(tiny, plain) + await turns_of(tiny, sampling)
        failing = [turns_of(tiny, Sampling(max_tokens=40, seed=0, grammar=grows), n=2) for _ in range(2)]
        free, formed, *failed = await asyncio.gather(turns_of(tiny, plain), turns_of(tiny, sampling), *failing)
        assert free + formed == alone, "the neighbours have the same tokens and log-probabilities as without it"
        for turn in (turn for turns in failed for turn in turns):
            assert turn.finish is Finish.GRAMMAR
            assert not turn.finish.trainable
            assert 258 not in turn.sampled_ids, "the end token that a failed matcher still allows was not sampled"
        biased = Sampling(max_tokens=40, seed=1, grammar=grows, logit_bias=((*tiny.renderer.encode("b"), 50.0),))
        (later,) = await turns_of(tiny, biased)
        assert (later.finish, later.text) == (Finish.STOP, '"bbbbbbb"'), (
            "an answer that stays clear of the limits ends as usual"
        )


async def test_an_engine_without_grammars_refuses_one_before_any_token(tmp_path):
    async with tiny_engine(tmp_path) as tiny:
        assert tiny.engine.capabilities().follows_grammars
        with pytest.raises(BadRequest, match="cannot be enforced"):
            await turns_of(tiny, Sampling(max_tokens=9, grammar="nonsense"))
        with pytest.raises(BadRequest, match="logit_bias"):
            await turns_of(tiny, Sampling(max_tokens=9, logit_bias=((9999, 1.0),)))
        assert tiny.engine.stats()["tokens"] == 0
        bare = TorchEngine(build(tiny.path), tiny.renderer, EngineConfig(kv_tokens=1024, block=16))
        assert not bare.capabilities().follows_grammars


async def test_the_likeliest_tokens_come_with_each_one_under_the_same_edits(tmp_path):
    async with tiny_engine(tmp_path) as tiny:
        sampling = Sampling(max_tokens=60, seed=2, temperature=0.8, grammar=tiny.renderer.grammar(ASKED))
        request = Generate(id="r", slot="live", prompt_ids=(1, 2, 3), sampling=sampling, n=2, tops=5)
        chunks = [chunk async for chunk in tiny.engine.generate(request)]
    assert len(chunks) > 20
    for chunk in chunks:
        (token,), (logprob,), (tops,) = chunk.ids, chunk.logprobs, chunk.tops
        values = [value for _, value in tops]
        assert values == sorted(values, reverse=True)
        assert 1 <= len(tops) <= 5
        assert sum(map(math.exp, values)) <= 1 + 1e-5
        assert logprob <= values[0]
        assert dict(tops).get(token, logprob) == logprob
        assert token in dict(tops) or len(tops) == 5, "who is not among them is less likely than they"
    assert chunks[0].tops[0] == ((*chunks[0].ids, 0.0),), "only a brace may begin the object"
