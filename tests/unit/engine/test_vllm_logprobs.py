"""vLLM's processed log-probabilities mean what ours mean, for the same logits, wherever a turn may be learned from.

Ours: softmax of the edited logits over the temperature, renormalised over the nucleus (`engine.embedded.sampler.draw`).
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.fakes.vllm_engine import vllm_engine
from tests.fakes.vllm_tokens import TokenVllm
from tests.unit.engine.test_vllm import ask, collect, version

from ostinato.core.errors import BadRequest
from ostinato.core.records import Sampling, SteeringBasis
from ostinato.core.steering import Basis, Steering
from ostinato.engine.embedded.sampler import Draw, draw
from ostinato.model.logit_edits import LogitEditor, edit_logits
from ostinato.model.logprobs import RowSoftmax
from ostinato.testing.engine import VOCAB_SIZE
from ostinato.testing.records import a_turn
from ostinato.train.replay import AnswerEdits

SCRIPT = "abracadabra, abracadabra"


def logits(place):
    return np.random.default_rng(place).normal(0.0, 3.0, VOCAB_SIZE).astype(np.float32)


def ours(sampling, ids):
    """What the embedded engine records for these tokens."""
    editor, found = LogitEditor.of(sampling, None), []
    for place, token in enumerate(ids):
        row_1V = torch.from_numpy(logits(place))[None].clone()
        if editor is not None:
            edit_logits(row_1V, {0: editor.edit()})
            editor.take(token)
        normal = RowSoftmax.of(row_1V, torch.tensor([sampling.temperature or 1.0]))
        found.append(float(normal.logprobs(np.array([token]))))
    return found


async def told(**sampling):
    fake = TokenVllm(SCRIPT)
    fake.logits = logits
    async with vllm_engine(fake) as engine:
        await engine.load("live", version(1))
        chunks = await collect(engine, ask(max_tokens=12, **sampling))
    assert not any(chunk.nucleus for chunk in chunks), "a server does not tell it"
    return [i for chunk in chunks for i in chunk.ids], [value for chunk in chunks for value in chunk.logprobs]


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"temperature": 0.0},
        {"temperature": 0.0, "top_p": 0.5},
        {"temperature": 0.8, "logit_bias": ((97, 2.5), (98, -4.0), (5, 30.0))},
        {"temperature": 0.8, "presence_penalty": 1.5, "frequency_penalty": -0.75},
        {"temperature": 1.2, "presence_penalty": -2.0, "frequency_penalty": 2.0, "logit_bias": ((97, -1.0),)},
    ],
)
async def test_temperature_biases_and_penalties_mean_the_same(sampling):
    ids, values = await told(**sampling)
    assert len(ids) == 12
    assert values == pytest.approx(ours(Sampling(**({"max_tokens": 12} | sampling)), ids), abs=2e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_steered_answers_are_biased_for_good_and_the_trainer_replays_the_same_edit(temperature):
    basis = Basis(("a",), np.array([97, 98]), np.array([[1.0, -0.25]], np.float32), "w")
    steering = Steering(basis=basis, dials=(0.875,), cap=0.1, budget=3.0)
    sampling = {"max_tokens": 12, "temperature": temperature, "logit_bias": ((98, 0.5),)}
    fake = TokenVllm(SCRIPT)
    fake.logits = logits
    async with vllm_engine(fake) as engine:
        assert engine.capabilities().steers == "static"
        await engine.load("live", version(1))
        chunks = await collect(engine, replace(ask(**sampling), steering=steering))
        with pytest.raises(BadRequest, match=r"steering\.dials are 2"):
            await collect(engine, replace(ask(**sampling), steering=replace(steering, dials=(0.1, 0.5))))
    ids, values = [i for chunk in chunks for i in chunk.ids], [v for chunk in chunks for v in chunk.logprobs]
    steered = chunks[-1].steered
    clip = temperature * 0.2**0.5
    pushes = {97: min(0.875, clip), 98: -0.21875}
    sent = fake.requests[-1]["sampling_params"]["logit_bias"]
    assert sent == pytest.approx({"97": pushes[97], "98": 0.5 + pushes[98]}, abs=1e-5)
    assert (steered.tokens, steered.features, steered.dials) == (12, (), (0.875,))
    assert 0.0 < steered.kl <= 12 * 0.1
    turn = replace(
        a_turn("t:0"),
        sampled_ids=tuple(ids),
        logprobs=tuple(values),
        sampling=Sampling(**sampling),
        steered=steered,
    )
    edits = AnswerEdits(lambda: pytest.fail("no grammar"))
    edits.set_bases([SteeringBasis.of(basis, at=1.0)])
    assert edits.knows_basis(turn)
    found = []
    for place, edit in edits.replay([turn], 0, 12).items():
        row_1V, _ = edit_logits(torch.from_numpy(logits(place))[None].clone(), {0: edit})
        normal = RowSoftmax.of(row_1V, torch.tensor([temperature]))
        found.append(float(normal.logprobs(np.array([ids[place]]))))
    assert values == pytest.approx(found, abs=2e-5)
    assert values != pytest.approx(ours(Sampling(**sampling), ids), abs=1e-3)
    assert edits.settle()["steered_over_cap"] == 0.0


async def test_a_nucleus_means_the_same_but_is_not_told_which_is_why_such_turns_are_held_back(monkeypatch):
    """Likely tokens, so that they lie within the nucleus."""
    kept = logits

    def favoured(place):
        row_V = kept(place).copy()
        row_V[SCRIPT.encode()[place]] = 12.0
        return row_V

    monkeypatch.setitem(globals(), "logits", favoured)
    ids, values = await told(temperature=1.0, top_p=0.5)
    whole = np.array(values) - ours(Sampling(max_tokens=12, temperature=1.0), ids)
    assert (whole > 1e-3).all(), "higher by the logarithm of the nucleus's mass"
    drawn = [
        draw(torch.from_numpy(logits(i))[None], [Draw(temperature=1.0, top_p=0.5, u=0.5)]) for i in range(len(ids))
    ]
    assert [row.tokens[0] for row in drawn] == ids
    assert values == pytest.approx([row.logprobs[0] for row in drawn], abs=2e-5)
    assert all(row.nuclei[0] for row in drawn)
