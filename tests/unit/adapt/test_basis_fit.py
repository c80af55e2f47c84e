"""Directions are fitted to the model's own answers: a dial moves what it is named after, by the stated unit, and noise gets none."""

import numpy as np
import pytest
import torch

from ostinato.adapt.fit import ATTRIBUTES, PROMPTS, fit_basis, steerable
from ostinato.adapt.safety import silenced
from ostinato.core.errors import BadConfig
from ostinato.core.steering import Basis
from ostinato.model.attention import CausalAttend, hidden, logits
from ostinato.model.steering import mean_probabilities, score_features
from ostinato.testing.tiny_engine import tiny_engine

VOCAB, LENGTH = 60, 12
LIKED = np.arange(10, 22)


def softmax(logits_PV):
    mass = np.exp(logits_PV - logits_PV.max(1, keepdims=True))
    return mass / mass.sum(1, keepdims=True)


def answers_of(logits_PV, each, seed):
    """[P * each, T]: answers of a policy that knows only the prompt."""
    sums_PV = softmax(logits_PV).cumsum(1)
    u = np.random.default_rng(seed).random((len(logits_PV), each * LENGTH))
    drawn = [np.minimum(np.searchsorted(sums, some), VOCAB - 1) for sums, some in zip(sums_PV, u, strict=True)]
    return np.concatenate([row.reshape(each, LENGTH) for row in drawn])


def test_a_dial_moves_its_attribute_by_the_stated_unit_and_noise_gets_none():
    rng = np.random.default_rng(1)
    logits_PV, each = rng.standard_normal((24, VOCAB)), 60
    answers_NT, numbers_N = answers_of(logits_PV, each, 2), np.arange(24).repeat(each)
    expected_PV = LENGTH * softmax(logits_PV)
    tokens_M = steerable(expected_PV.mean(0), {11, 59}, 50)
    counts_NV = np.stack([np.bincount(row, minlength=VOCAB) for row in answers_NT])
    features_NM = (counts_NV - expected_PV[numbers_N])[:, tokens_M]
    liked = np.isin(answers_NT, LIKED).sum(1).astype(float)
    found = fit_basis(features_NM, {"liked": liked, "noise": rng.random(len(liked))}, numbers_N.tolist(), tokens_M, "w")
    assert len(tokens_M) == 50
    assert not {11, 59}.intersection(tokens_M.tolist())
    assert found.basis.names == ("liked",)
    assert found.explained["liked"] > 0.5
    assert found.explained["noise"] < 0.02
    (direction_M,) = found.basis.directions_KM
    means = []
    for dial in (-0.25, 0.25):
        steered_PV = logits_PV.copy()
        steered_PV[:, tokens_M] += dial * direction_M
        means.append(np.isin(answers_of(steered_PV, 400, 3), LIKED).sum(1).mean())
    deviation = (liked - liked.reshape(24, each).mean(1).repeat(each)).std()
    assert (means[1] - means[0]) / (0.5 * deviation) == pytest.approx(1.0, abs=0.15)


async def test_score_features_are_the_gradient_of_the_answers_log_probability(tmp_path):
    async with tiny_engine(tmp_path) as tiny:
        reserved, opening = tiny.renderer.reserved_ids(), tiny.renderer.encode("<tool_call>")
        stops = tiny.renderer.stop_ids()
        prompt, sampled, tokens_M = (70, 71, 72), (97, 65, 97, 40), np.array([40, 65, 97, 200])
        (found_M,) = score_features(tiny.model, [(prompt, sampled)], tokens_M)
        ids = torch.tensor([*prompt, *sampled[:-1]])
        with torch.no_grad():
            states = hidden(tiny.model, ids, torch.arange(6), CausalAttend([6]))
            logits_TV = logits(tiny.model, states[2:]).double()
        shift = torch.zeros(4, dtype=torch.double, requires_grad=True)
        pushed = logits_TV + torch.zeros(260, dtype=torch.double).index_put((torch.from_numpy(tokens_M),), shift)
        pushed.log_softmax(-1)[range(4), sampled].sum().backward()
        mean_V = mean_probabilities(tiny.model, [(prompt, sampled)])
    assert found_M == pytest.approx(shift.grad.numpy(), abs=1e-5)
    assert mean_V == pytest.approx(logits_TV.softmax(-1).mean(0).numpy(), abs=1e-6)
    assert reserved >= {256, 257, *opening} - stops, "control tokens and what opens a call"
    assert stops, "a tokenizer without an end would show nothing here"
    assert not reserved & (stops - {*opening}), "how long an answer is, is a matter of form"


def test_what_nothing_explains_is_refused_with_the_remedy():
    rng = np.random.default_rng(0)
    features = rng.standard_normal((80, 5))
    numbers = np.arange(80) // 8
    with pytest.raises(BadConfig, match="give more answers"):
        fit_basis(features, {"same": [1.0] * 80}, numbers, np.arange(5), "w")


def test_the_attributes_measure_what_they_are_named_after():
    text = "Well, you can do this! I'd start:\n1. **Rest**, then\n2. run."
    found = {name: measure(text, True) for name, measure in ATTRIBUTES.items()}
    assert found == {
        "brief": 1.0,
        "lists": 1.0,
        "exclaims": 1.0,
        "speaks_to_reader": pytest.approx(1 / 10),
        "commas": pytest.approx(2 / 10),
        "first_person": pytest.approx(1 / 10),
        "bold": 1.0,
        "long_words": pytest.approx(3.4, abs=0.3),
    }
    assert {name: measure("", False) for name, measure in ATTRIBUTES.items()} == dict.fromkeys(ATTRIBUTES, 0.0)
    assert len({*PROMPTS}) == len(PROMPTS) > 40


def test_a_demanded_dial_that_is_noise_does_nothing():
    """Its unit would be what it takes to move nothing."""
    for seed in range(12):
        rng = np.random.default_rng(seed)
        features, numbers = rng.standard_normal((400, 6)), np.arange(400) // 10
        measured = {"liked": features[:, 0] + 0.3 * rng.standard_normal(400), "noise": rng.standard_normal(400)}
        found = fit_basis(features, measured, numbers, np.arange(6), "w", names=("noise", "liked"))
        assert found.basis.names == ("noise", "liked")
        noise_M, liked_M = found.basis.directions_KM
        assert np.abs(liked_M).max() > 0.5
        assert np.abs(noise_M).max() <= 5.0 * (found.explained["noise"] >= 0.02)


def test_a_dropped_dial_of_a_canary_keeps_its_name():
    basis = Basis(("brief", "lists"), np.arange(3), np.ones((2, 3), np.float32), "w")
    found = silenced(basis, ["brief"])
    assert (found.names, found.directions_KM.tolist()) == (basis.names, [[0.0] * 3, [1.0] * 3])
