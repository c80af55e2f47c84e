"""Hints: the gradient of the divergence from the same weights behind a hint, on the hinted turn's tokens and on no other's."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from ostinato.core import nucleus
from ostinato.core.records import Sampling
from ostinato.core.samples import Sample
from ostinato.model.logit_edits import Edit
from ostinato.testing.records import a_turn
from ostinato.testing.tiny import tiny_model
from ostinato.train.config import TrainConfig
from ostinato.train.policy import hint_divergence
from ostinato.train.trainer import PolicyTrainer

torch.set_num_threads(1)
ASKED, HINTED, ELSEWHERE = (257, 47, 58, 258), (257, 47, 99, 98, 58, 258), (257, 91, 102, 258)
CONFIG = TrainConfig(compute="fp32", publish="fp32", learning_rate=1e-3, warmup_steps=0, epsilon=1e-30, clip=1e30)
VOCABULARY = 260


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def scored(trainer, turn):
    return replace(turn, logprobs=trainer.score([turn])[0])


def sample(turn, advantage, hinted=()):
    return Sample(turn=turn, reward=0.0, advantages=(advantage,) * len(turn.sampled_ids), hinted=hinted)


def odds(trainer, prompt):
    """Of every token as the next one."""
    asked = [a_turn("q", prompt=prompt, sampled=(token,)) for token in range(VOCABULARY)]
    return np.exp(np.array([score[0] for score in trainer.score(asked)], np.float64))


def kl(p, q):
    return float((p * np.log(p / q)).sum())


def disliked(trainer):
    """A token that is less likely behind the hint than without it."""
    return int(np.argmin(np.log(odds(trainer, HINTED)) - np.log(odds(trainer, ASKED))))


def test_the_policy_moves_to_what_it_would_say_behind_the_hint(path):
    trainer = PolicyTrainer(path, CONFIG)
    token, teacher = disliked(trainer), odds(trainer, HINTED)
    before = odds(trainer, ASKED)
    bad = scored(trainer, a_turn("a:0", prompt=ASKED, sampled=(token,)))
    other = scored(trainer, a_turn("b:0", prompt=ELSEWHERE, sampled=(5, 6)))
    learned = trainer.step([sample(bad, 0.0), sample(other, 0.0), sample(bad, 1.0, HINTED)])
    assert kl(teacher, odds(trainer, ASKED)) < 0.7 * kl(teacher, before)
    assert learned.metrics["hints"] == 1.0
    assert learned.metrics["hint_share"] == 1.0
    assert learned.metrics["hint_kl"] == pytest.approx(kl(teacher, before), rel=1e-4)
    assert learned.metrics["turns"] == 2.0, "what is measured about a batch is about its turns"


def test_turns_without_a_hint_are_no_part_of_the_term(path):
    """The gradient is that of the hinted turn alone: to the bit the weights of a batch in which the other turns said something else."""
    roots = []
    for others in ((5, 6), (70, 71)):
        trainer = PolicyTrainer(path, CONFIG)
        bad = scored(trainer, a_turn("a:0", prompt=ASKED, sampled=(disliked(trainer),)))
        other = scored(trainer, a_turn("b:0", prompt=ELSEWHERE, sampled=others))
        weights = trainer.step([sample(bad, 0.0), sample(other, 0.0), sample(bad, 1.0, HINTED)]).weights
        roots.append({name: np.array(array.data) for name, array in weights.items()})
    assert all(np.array_equal(roots[0][name], roots[1][name]) for name in roots[0])


def test_a_token_that_the_teacher_likes_is_left_to_the_outcome(path):
    trainer = PolicyTrainer(path, CONFIG)
    ratios = np.log(odds(trainer, HINTED)) - np.log(odds(trainer, ASKED))
    liked = scored(trainer, a_turn("a:0", prompt=ASKED, sampled=(int(np.argmax(ratios)),)))
    other = scored(trainer, a_turn("b:0", prompt=ELSEWHERE, sampled=(5, 6)))
    before = odds(trainer, ASKED)
    batch = [sample(liked, 0.0), sample(other, 0.3), sample(liked, 1.0, HINTED)]
    twin = PolicyTrainer(path, CONFIG)
    learned, without = trainer.step(batch), twin.step(batch[:2])
    assert (learned.metrics["hint_share"], learned.metrics["hint_kl"]) == (0.0, 0.0)
    assert np.array_equal(odds(trainer, ASKED), odds(twin, ASKED))
    assert without.metrics["grad_norm"] == learned.metrics["grad_norm"]
    assert not np.array_equal(odds(trainer, ASKED), before), "the other turn's credit moved it"


def test_only_admitted_turns_are_learned_from(path):
    """A hint of a turn whose nucleus was not recorded stays out with its turn."""
    trainer = PolicyTrainer(path, CONFIG)
    bad = scored(trainer, a_turn("a:0", prompt=ASKED, sampled=(disliked(trainer),)))
    cut = replace(bad, sampling=Sampling(max_tokens=1, temperature=1.0, top_p=0.5))
    other = scored(trainer, a_turn("b:0", prompt=ELSEWHERE, sampled=(5, 6)))
    learned = trainer.step([sample(cut, 0.0), sample(other, 0.3), sample(cut, 1.0, HINTED)])
    assert "hints" not in learned.metrics
    allowed = nucleus.encode(np.array(sorted({bad.sampled_ids[0], 7, 9})))
    kept = replace(cut, id="c:0", nucleus=allowed)
    again = PolicyTrainer(path, CONFIG)
    known = scored(again, kept)
    learned = again.step([sample(known, 0.0), sample(other, 0.3), sample(known, 1.0, HINTED)])
    assert learned.metrics["hints"] == 1.0
    assert math.isfinite(learned.metrics["hint_kl"])


@pytest.mark.parametrize("edited", [False, True])
def test_gradient_and_divergence_are_those_of_plain_operations(edited):
    """Against float64 operations written out here; more tokens than one chunk; a forbidden token and a bias for some rows."""
    torch.manual_seed(0)
    tokens, width, vocabulary = 600, 8, 33
    head = torch.randn(vocabulary, width)
    student = torch.randn(tokens, width, requires_grad=True)
    teacher = student.detach() + 0.3 * torch.randn(tokens, width)
    targets = torch.randint(0, vocabulary - 1, (tokens,))
    temperatures = torch.where(torch.arange(tokens) % 2 == 0, 1.0, 0.7)
    bits = np.ones(vocabulary, np.bool_)
    bits[-1] = False
    edit = Edit(ids=np.array([2]), values=np.array([0.5], np.float32), allowed=np.packbits(bits, bitorder="little"))
    rows = {3, 511, 512, 599} if edited else set()

    def edits(start, stop):
        return {row: edit for row in rows if start <= row < stop}

    found, opened = hint_divergence(
        lambda x: x @ head.T, student, teacher, targets, temperatures, edits if edited else None
    )
    weights = torch.rand(tokens)
    (found * weights).sum().backward()

    own = student.detach().double().requires_grad_()

    def logprobs(states):
        logits = states @ head.double().T
        shift = torch.zeros(tokens, vocabulary, dtype=torch.float64)
        for row in rows:
            shift[row, 2], shift[row, -1] = 0.5, -1e30
        return ((logits + shift) / temperatures.double()[:, None]).log_softmax(-1)

    log_t, log_s = logprobs(teacher.double()), logprobs(own)
    wanted_open = (log_t - log_s).gather(1, targets[:, None])[:, 0] < 0
    wanted = (log_t.exp() * (log_t - log_s)).sum(-1) * wanted_open
    (wanted * weights).sum().backward()
    assert torch.equal(opened, wanted_open)
    assert 0.2 < float(opened.float().mean()) < 0.8
    assert torch.allclose(found.double(), wanted, atol=1e-5)
    assert student.grad is not None
    assert own.grad is not None
    assert torch.allclose(student.grad.double(), own.grad, atol=1e-5)
