"""One step on the tiny model: it moves the right way, moves everything, or moves nothing."""

import gc
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ostinato.core.errors import BadConfig, BadWeights, Corrupt, NoSignal
from ostinato.core.records import Arm, Finish, PolicyVersion, Sampling, Span, Turn
from ostinato.core.samples import Sample
from ostinato.model.attention import CausalAttend, hidden, logits
from ostinato.model.load import load_model
from ostinato.testing.records import a_sample
from ostinato.testing.tiny import tiny_model
from ostinato.train import losses, packing
from ostinato.train import passes as module
from ostinato.train.config import TrainConfig
from ostinato.train.trainer import PolicyTrainer

torch.set_num_threads(1)
START = PolicyVersion(number=0, hash="start")
CONFIG = TrainConfig(
    compute="fp32", publish="fp32", learning_rate=1e-3, warmup_steps=0, turn_tokens=8, microbatch_tokens=40
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def turn(prompt: str, sampled: str, *, policy: PolicyVersion = START, temperature: float = 1.0) -> Turn:
    return Turn(
        id=f"{prompt}{sampled}:0",
        episode="e",
        parent=None,
        user="u",
        tenant="default",
        arm=Arm.LIVE,
        propensity=1.0,
        prompt_ids=tuple(prompt.encode()),
        sampled_ids=tuple(sampled.encode()),
        logprobs=(0.0,) * len(sampled),
        spans=(Span(policy=policy, tokens=len(sampled)),) if sampled else (),
        sampling=Sampling(max_tokens=8, temperature=temperature),
        finish=Finish.STOP,
        text=sampled,
        started_at=0.0,
        ended_at=0.0,
    )


def samples(trainer: PolicyTrainer, *pairs: tuple[Turn, float]) -> list[Sample]:
    """Turns as this trainer's present weights would have sampled them."""
    scores = trainer.score([turn for turn, _ in pairs])
    return [
        a_sample(replace(turn, logprobs=scored), value, reward=value)
        for (turn, value), scored in zip(pairs, scores, strict=True)
    ]


def batch(trainer: PolicyTrainer) -> list[Sample]:
    heads = ["def add(a, b):", "def add(a, c):", "def sub(a, b):"]
    return samples(trainer, *((turn(heads[i % 3], f" ret{i}ab"), 1.0 if i % 2 else -0.7) for i in range(9)))


def snapshot(trainer: PolicyTrainer) -> dict[str, bytes]:
    return {name: array.data.tobytes() for name, array in trainer.weights().items()}


def test_score_equals_the_models_own_log_softmax(path: Path):
    trainer, model = PolicyTrainer(path, CONFIG), load_model(path, torch.float32)
    turns = [turn("hello wor", "ld"), turn("hello", " you", temperature=0.5), turn("x", "")]
    found = trainer.score(turns)
    for one, scored in zip(turns[:2], found, strict=False):
        ids = torch.tensor(one.prompt_ids + one.sampled_ids)
        with torch.inference_mode():
            states = hidden(model, ids, torch.arange(len(ids)), CausalAttend([len(ids)]))
            logp = (logits(model, states) / one.sampling.temperature).log_softmax(-1)
        expected = [logp[len(one.prompt_ids) - 1 + t, token].item() for t, token in enumerate(one.sampled_ids)]
        assert scored == pytest.approx(expected, abs=1e-5)
    assert found[2] == ()


def test_packed_loss_and_gradient_equal_the_unpacked_ones(path: Path, monkeypatch: pytest.MonkeyPatch):
    def gradient(config: TrainConfig) -> tuple[torch.Tensor, dict[str, float]]:
        trainer = PolicyTrainer(path, config)
        learned = trainer.step(batch(trainer))
        # after one step AdamW's mean is the clipped gradient times (1 - beta1): undo both
        mean = torch.from_numpy(np.array(trainer.state().moments["exp_avg"]))
        return mean / (1 - config.beta1) / learned.metrics["clip_scale"], dict(learned.metrics)

    packed, packed_metrics = gradient(CONFIG)
    assert packed_metrics["tokens_saved"] > 50
    monkeypatch.setattr(packing, "_common_prefix", lambda one, other: 0)
    alone, alone_metrics = gradient(CONFIG)
    assert alone_metrics["tokens_saved"] == 0
    assert alone_metrics["microbatches"] > packed_metrics["microbatches"]
    assert packed_metrics["loss"] == pytest.approx(alone_metrics["loss"], abs=1e-6)
    scale = alone.abs().max().item()
    assert scale > 1e-3
    torch.testing.assert_close(packed, alone, atol=1e-5 * scale, rtol=0)


def test_a_step_tells_how_hard_people_and_worlds_push(path: Path):
    trainer = PolicyTrainer(path, CONFIG)
    served, simulated = samples(trainer, (turn("a", "bcd"), 0.5), (turn("a", "bce"), -1.0))
    simulated = replace(simulated, turn=replace(simulated.turn, arm=Arm.WORLD), weight=0.5, summed=True)
    metrics = trainer.step([replace(served, weight=0.5), simulated]).metrics
    assert metrics["push_people"] == pytest.approx(0.25 * math.sqrt(3))
    assert metrics["push_worlds"] == pytest.approx(math.sqrt(3))
    assert "push_worlds" not in trainer.step([served]).metrics


def test_a_trainer_must_be_told_its_arithmetic(path: Path):
    """ "auto" is the engine's, whatever this CPU is quick in."""
    with pytest.raises(BadConfig, match='set it to "bf16" or "fp32"'):
        PolicyTrainer(path, CONFIG.model_copy(update={"compute": "auto"}))


def test_a_step_holds_no_more_at_its_last_micro_batch_than_at_its_second(path: Path, monkeypatch: pytest.MonkeyPatch):
    held: list[int] = []
    gc.freeze()  # what is there already is not looked through

    def look(*args: Any, **named: Any) -> torch.Tensor:
        found = (one for one in gc.get_objects() if issubclass(type(one), torch.Tensor))
        tensors = (one for one in found if one.layout is torch.strided)  # packed ones of other tests have no storage
        held.append(sum(tensor.untyped_storage().nbytes() for tensor in tensors))
        return losses.policy_loss(*args, **named)

    trainer = PolicyTrainer(path, CONFIG)
    rewards = {"a": 1.0, "b": -0.7, "c": 1.0, "d": -0.7, "e": 1.0, "f": -0.7}
    chosen = samples(
        trainer, *((turn(f"{letter} = [1, 2, 3, 4, 5, 6]", " ret1234"), rewards[letter]) for letter in rewards)
    )
    monkeypatch.setattr(module, "policy_loss", look)
    trainer.step(chosen)
    assert len(held) == len(rewards)
    assert held[-1] - held[1] < 1000, held


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_every_master_tensor_and_every_published_tensor_changes(path: Path, compute: str):
    trainer = PolicyTrainer(path, CONFIG.model_copy(update={"compute": compute, "publish": "bf16"}))
    before = {name: array.copy() for name, array in trainer.state().weights.items()}
    first = trainer.weights()
    kept = {name: array.data.tobytes() for name, array in first.items()}
    learned = trainer.step(batch(trainer))
    for name, array in trainer.state().weights.items():
        assert (array != before[name]).mean() > 0.2, name  # rows of unused tokens move too: the head is a softmax
        assert learned.weights[name].dtype == "BF16"
    embedding = "model.embed_tokens.weight"
    assert learned.weights[embedding].data.tobytes() != kept[embedding]
    assert {name: array.data.tobytes() for name, array in first.items()} == kept, "published bytes must not move"
    assert (learned.step, learned.policy_number) == (1, 1)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_one_turn_moves_the_policy_in_the_direction_of_its_advantage(path: Path, advantage: float):
    trainer = PolicyTrainer(path, CONFIG)
    given = samples(trainer, (turn("def f(x):", " return x"), advantage))
    learned = trainer.step(given)
    after = sum(trainer.score([given[0].turn])[0])
    change = after - sum(given[0].turn.logprobs)
    assert change * advantage > 0.05
    assert learned.metrics["mismatch_max_abs"] == pytest.approx(0.0, abs=1e-5)
    assert learned.metrics["ess"] == pytest.approx(1.0)


def test_a_nan_changes_nothing_and_the_next_step_is_as_if_it_had_not_been(path: Path):
    trainer, twin = PolicyTrainer(path, CONFIG), PolicyTrainer(path, CONFIG)
    good = batch(trainer)
    bad = [a_sample(good[0].turn, float("nan")), *good[1:]]
    before = snapshot(trainer)
    with pytest.raises(BadWeights, match="step 1 refused"):
        trainer.step(bad)
    assert snapshot(trainer) == before
    assert trainer.step_count == 0
    trainer.step(good)
    twin.step(good)
    assert snapshot(trainer) == snapshot(twin)


def shifted(given: list[Sample], by: Callable[[int, int], float]) -> list[Sample]:
    """As if the sampler had found each token likelier by so much: `by(turn, token)`, so that d is minus that."""
    return [
        replace(
            sample,
            turn=replace(sample.turn, logprobs=tuple(lp + by(i, t) for t, lp in enumerate(sample.turn.logprobs))),
        )
        for i, sample in enumerate(given)
    ]


@pytest.mark.parametrize(
    ("by", "why"),
    [
        (lambda i, t: 12.0, "the mean weight is 6.14e-06"),  # every weight alike: ESS/n of the tokens is 1
        (lambda i, t: 12.0 if t else 0.0, "k3 is"),
        (lambda i, t: 3.0 * draw(i, t), "k3 is"),  # heavy tails
        (lambda i, t: 2 * abs(draw(i, t)), "the mean weight is 0.3"),  # all to one side
        (lambda i, t: 4.0 if i else 0.0, "the mean weight is 0.127"),  # one turn of nine is left
    ],
)
def test_samples_that_the_policy_has_left_behind_are_refused(path: Path, by: Callable[[int, int], float], why: str):
    trainer = PolicyTrainer(path, CONFIG)
    before = snapshot(trainer)
    with pytest.raises(NoSignal, match=f"has left these samples behind.*{why}"):
        trainer.step(shifted(batch(trainer), by))
    assert snapshot(trainer) == before
    assert trainer.step_count == 0


def draw(i: int, t: int) -> float:
    """A normal number for a token, the same in every run."""
    return float(np.random.default_rng((i, t)).normal())


def drawn(trainer: PolicyTrainer, count: int, length: int, seed: int) -> list[Sample]:
    """Turns that the trainer's present policy samples itself, rewarded for even bytes."""
    torch.manual_seed(seed)
    model, prompt = trainer._policy.model, tuple(b"def f(x):")
    ids = torch.tensor(prompt).repeat(count, 1)
    for _ in range(length):
        width = ids.shape[1]
        with torch.no_grad():
            states = hidden(model, ids.flatten(), torch.arange(width).repeat(count), CausalAttend([width] * count))
            chances = logits(model, states[width - 1 :: width]).float().softmax(-1)
        ids = torch.cat([ids, torch.multinomial(chances, 1)], 1)
    turns = [
        replace(turn("def f(x):", "x" * length), id=f"{i}:0", sampled_ids=tuple(row))
        for i, row in enumerate(ids[:, len(prompt) :].tolist())
    ]
    evens = [sum(token % 2 == 0 for token in one.sampled_ids) / length - 0.5 for one in turns]
    return samples(trainer, *zip(turns, (value / 0.18 for value in evens), strict=True))


def test_turns_of_a_few_steps_ago_are_learned_from(path: Path):
    """The ordinary stale case: the policy itself drew them, and then took four more steps, far larger ones than in a product."""
    trainer = PolicyTrainer(path, CONFIG.model_copy(update={"microbatch_tokens": 1024, "turn_ess": 0.3}))
    batches = [drawn(trainer, 64, 8, seed) for seed in range(5)]
    found = [trainer.step(given).metrics for given in batches]
    assert found[0]["trust"] == pytest.approx(1.0, abs=1e-4)
    assert [metrics["on_policy"] for metrics in found] == [1.0, 0.0, 0.0, 0.0, 0.0], "as their versions say"
    assert found[0]["whole_turns"] == 1.0
    assert found[4]["drift_k3"] > 0.05
    assert 0.4 < found[4]["trust"] < 0.95
    assert all(0.9 < metrics["mean_weight"] < 1.1 for metrics in found), "they were drawn as recorded"


def test_the_learning_rate_is_scaled_by_trust_and_warms_up(path: Path):
    trainer = PolicyTrainer(path, CONFIG.model_copy(update={"warmup_steps": 2}))
    metrics = trainer.step(shifted(batch(trainer), lambda i, t: 0.3)).metrics
    assert metrics["ess"] == pytest.approx(1.0)
    assert metrics["trust"] == pytest.approx(math.exp(-0.3), rel=1e-4)
    assert metrics["learning_rate"] == pytest.approx(1e-3 * 0.5 * metrics["trust"])


def test_a_batch_without_any_gradient_is_refused(path: Path):
    trainer = PolicyTrainer(path, CONFIG)
    with pytest.raises(NoSignal, match="exactly 0"):
        trainer.step(samples(trainer, (turn("a", "bc"), 0.0)))
    with pytest.raises(NoSignal, match="none of 1 turns"):
        trainer.step(samples(trainer, (turn("a", ""), 1.0)))


def test_a_checkpoint_of_another_model_is_refused(path: Path, tmp_path: Path):
    other = PolicyTrainer(tiny_model(tmp_path / "other", hidden=32), CONFIG)
    trainer = PolicyTrainer(path, CONFIG)
    before = snapshot(trainer)
    with pytest.raises(Corrupt, match="not this model"):
        trainer.restore(other.state())
    assert snapshot(trainer) == before


def test_recomputing_activations_gives_the_same_gradient(path: Path):
    plain, thrifty = PolicyTrainer(path, CONFIG), PolicyTrainer(path, CONFIG.model_copy(update={"recompute_tokens": 0}))
    given = batch(plain)
    assert plain.step(given).metrics["grad_norm"] == pytest.approx(thrifty.step(given).metrics["grad_norm"], rel=1e-6)


def test_going_back_to_a_release_restores_its_weights_and_drops_the_momentum(path: Path):
    trainer = PolicyTrainer(path, CONFIG)
    release, before = trainer.weights(), snapshot(trainer)
    trainer.step(batch(trainer))
    assert snapshot(trainer) != before
    trainer.go_back(release)
    assert snapshot(trainer) == before
    assert not trainer.state().moments["exp_avg"].any()
    assert trainer.step_count == 1
    with pytest.raises(BadWeights, match="no tensor"):
        trainer.go_back({})
    assert snapshot(trainer) == before


def test_a_skipped_step_counts_and_moves_nothing(path: Path):
    trainer = PolicyTrainer(path, CONFIG)
    before = snapshot(trainer)
    trainer.skip_step()
    assert (trainer.step_count, snapshot(trainer)) == (1, before)
    assert trainer.step(batch(trainer)).policy_number == 2
