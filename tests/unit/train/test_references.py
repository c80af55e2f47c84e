"""The release has a price and the anchor a bound; weights are fetched when a token needs them, and leave no trace."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ostinato.core.errors import BadWeights, NoSignal
from ostinato.core.records import PolicyVersion, Span
from ostinato.core.samples import Sample
from ostinato.core.weights import Weights
from ostinato.testing.engine import CONTRACT
from ostinato.testing.records import a_sample, a_turn
from ostinato.testing.tiny import tiny_model
from ostinato.train.config import TrainConfig
from ostinato.train.references import References
from ostinato.train.trainer import PolicyTrainer

torch.set_num_threads(1)
V0, V1, V2 = (PolicyVersion(number=number, hash=f"{number:064x}") for number in range(3))
CONFIG = TrainConfig(
    compute="fp32",
    publish="fp32",
    learning_rate=1e-3,
    warmup_steps=0,
    turn_tokens=8,
    clip=1e9,
    microbatch_tokens=24,
    kl_beta=0.5,
    anchor_kl=None,
)
ANCHORED = CONFIG.model_copy(update={"kl_beta": 0.0, "anchor_kl": 1000.0, "anchor_limit": 1e6, "anchor_tokens": 8})


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


class Store:
    """Versions by number, and which were asked for."""

    def __init__(self, **versions: Weights) -> None:
        self._versions, self.asked = versions, []

    def __call__(self, policy: PolicyVersion) -> Weights:
        self.asked.append(policy)
        return self._versions[f"v{policy.number}"]


def batch(trainer: PolicyTrainer, *, version: PolicyVersion = V0, numerics: str = "") -> list[Sample]:
    """Six turns with prompts of their own, as the trainer's present weights would have sampled them."""
    turns = [
        a_turn(f"{i}:0", prompt=b"%d def f(" % i, sampled=b"x%d):\n" % i, version=version.number, numerics=numerics)
        for i in range(6)
    ]
    scores = trainer.score(turns)
    return [
        a_sample(replace(turn, logprobs=scored), 1.0 if i % 2 else -0.7)
        for i, (turn, scored) in enumerate(zip(turns, scores, strict=True))
    ]


def logprobs(samples: list[Sample]) -> np.ndarray:
    return np.concatenate([sample.turn.logprobs for sample in samples])


def changed(path: Path) -> Weights:
    """Another policy's weights."""
    other = PolicyTrainer(path, CONFIG.model_copy(update={"learning_rate": 2e-3}))
    other.step(batch(other))
    return other.weights()


def bits(trainer: PolicyTrainer) -> dict[str, bytes]:
    return {name: array.data.tobytes() for name, array in trainer.weights().items()}


def test_tokens_of_the_release_are_their_own_reference_and_nothing_is_fetched(path: Path):
    trainer, store = PolicyTrainer(path, CONFIG), Store()
    metrics = trainer.step(batch(trainer), References(release=V0, anchor=V0, fetch=store)).metrics
    assert store.asked == []
    assert metrics["kl_k1"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_the_release_is_fetched_only_if_it_has_a_price(path: Path, beta: float):
    trainer = PolicyTrainer(path, CONFIG.model_copy(update={"kl_beta": beta}))
    store = Store(v0=trainer.weights())
    metrics = trainer.step(batch(trainer, version=V1), References(release=V0, fetch=store)).metrics
    assert store.asked == ([V0] if beta else [])
    assert ("kl_k1" in metrics) == bool(beta)


def test_other_tokens_are_measured_under_its_weights_which_leave_no_trace(path: Path):
    trainer, twin = PolicyTrainer(path, CONFIG), PolicyTrainer(path, CONFIG.model_copy(update={"kl_beta": 0.0}))
    release, before = changed(path), bits(trainer)
    judge = PolicyTrainer(path, CONFIG)
    judge.go_back(release)
    given = batch(trainer, version=V1)
    expected = logprobs(given) - np.concatenate(judge.score([sample.turn for sample in given]))
    metrics = trainer.step(given, References(release=V0, fetch=Store(v0=release))).metrics
    assert metrics["kl_k1"] == pytest.approx(float(expected.mean()), abs=1e-5)
    assert abs(expected.mean()) > 1e-3
    twin.step(given)
    assert bits(trainer) != bits(twin), "the penalty must move the weights"
    with pytest.raises(BadWeights, match="no tensor"):
        trainer.step(batch(trainer, version=V1), References(release=V2, fetch=Store(v2={})))
    assert bits(trainer) != before
    again = PolicyTrainer(path, CONFIG)
    again.step(given, References(release=V0, fetch=Store(v0=release)))
    assert bits(again) == bits(trainer)


@pytest.mark.parametrize("case", ["foreign", "after a swap"])
def test_captured_logprobs_of_another_arithmetic_or_of_older_keys_are_not_taken_for_the_releases(path: Path, case: str):
    """The sampler's version is the release's, and yet what it recorded is off by 0.1 nats: the release's own weights are asked."""
    trainer = PolicyTrainer(path, CONFIG, CONTRACT)
    given = batch(trainer, version=V1, numerics=CONTRACT.id)
    turn = given[0].turn
    recorded = tuple(lp - 0.1 for lp in turn.logprobs)
    if case == "foreign":
        turn = replace(turn, logprobs=recorded, numerics="f" * 16)
    else:
        spans = (Span(policy=V2, tokens=1), Span(policy=V1, tokens=len(turn.sampled_ids) - 1))
        turn = replace(turn, logprobs=recorded, spans=spans)
    given[0] = replace(given[0], turn=turn)
    store = Store(v1=trainer.weights())
    metrics = trainer.step(given, References(release=V1, fetch=store)).metrics
    assert store.asked == [V1]
    assert metrics["kl_k1"] == pytest.approx(0.0, abs=1e-6), "the trainer still holds the release's weights"
    assert metrics["kl_k3"] == pytest.approx(0.0, abs=1e-9)


# ---------------------------------------------------------------- the anchor


def test_a_part_of_the_batch_is_measured_against_the_anchor_and_every_part_has_its_turn(path: Path):
    trainer, anchor = PolicyTrainer(path, ANCHORED), changed(path)
    free = PolicyTrainer(path, ANCHORED.model_copy(update={"anchor_kl": None}))
    judge = PolicyTrainer(path, CONFIG)
    judge.go_back(anchor)
    store = Store(v0=anchor)
    given = batch(trainer, version=V1)
    ratio = np.concatenate(judge.score([sample.turn for sample in given])) - logprobs(given)
    by_turn = (np.exp(ratio) - 1 - ratio).reshape(6, -1).mean(1)
    first = trainer.step(given, References(release=V1, anchor=V0, fetch=store)).metrics
    assert store.asked == [V0]
    assert (first["anchor_tokens"], first["microbatches"]) == (10, 3)
    assert first["anchor_kl"] == pytest.approx(by_turn[:2].mean(), rel=1e-3)
    assert (first["alarm_anchor"], first["anchor_beta"]) == (0, 0)
    free.step(given)
    assert bits(free) == bits(trainer), "within the bound it is only measured"
    trainer.restore(PolicyTrainer(path, ANCHORED).state())
    trainer.skip_step()
    second = trainer.step(given, References(release=V1, anchor=V0, fetch=store)).metrics
    assert second["anchor_kl"] == pytest.approx(by_turn[2:4].mean(), rel=1e-3)


def test_beyond_the_bound_every_token_has_a_price_and_an_alarm_is_raised(path: Path):
    strict = ANCHORED.model_copy(update={"anchor_kl": 1e-3, "anchor_beta": 0.5})
    trainer, anchor = PolicyTrainer(path, strict), changed(path)
    given = batch(trainer, version=V1)
    store = Store(v0=anchor)
    metrics = trainer.step(given, References(release=V1, anchor=V0, fetch=store)).metrics
    assert metrics["alarm_anchor"] == 1
    assert metrics["anchor_tokens"] == metrics["tokens_sampled"]
    assert metrics["anchor_beta"] > 1
    twin = PolicyTrainer(path, CONFIG.model_copy(update={"kl_beta": metrics["anchor_beta"]}))
    twin.step(given, References(release=V0, fetch=store))
    assert bits(twin) == bits(trainer), "the price is that of a nat from a release, with the anchor's beta"


def test_the_price_grows_with_the_excess(path: Path):
    found = []
    for bound in (0.02, 0.01, 0.005):
        trainer = PolicyTrainer(path, ANCHORED.model_copy(update={"anchor_kl": bound, "anchor_tokens": 1000}))
        given = batch(trainer, version=V1)
        metrics = trainer.step(given, References(anchor=V0, fetch=Store(v0=changed(path)))).metrics
        found.append(metrics["anchor_beta"])
        assert metrics["anchor_beta"] == pytest.approx(0.1 * max(0.0, metrics["anchor_kl"] / bound - 1), rel=1e-4)
    assert found == sorted(found)
    assert found[0] < found[1]


def test_beyond_the_limit_no_step_is_taken(path: Path):
    trainer = PolicyTrainer(path, ANCHORED.model_copy(update={"anchor_kl": 1e-4, "anchor_limit": 1e-3}))
    before = bits(trainer)
    with pytest.raises(NoSignal, match=r"nats per token from its anchor, beyond train.anchor_limit"):
        trainer.step(batch(trainer, version=V1), References(anchor=V0, fetch=Store(v0=changed(path))))
    assert bits(trainer) == before
    assert trainer.step_count == 0


def test_while_the_anchor_is_the_release_one_pass_serves_both(path: Path):
    config = ANCHORED.model_copy(update={"kl_beta": 0.5})
    trainer, anchor = PolicyTrainer(path, config), changed(path)
    store = Store(v0=anchor)
    metrics = trainer.step(batch(trainer, version=V1), References(release=V0, anchor=V0, fetch=store)).metrics
    assert store.asked == [V0]
    assert metrics["anchor_tokens"] == metrics["tokens_sampled"]
    assert metrics["anchor_kl"] == pytest.approx(metrics["kl_k3"], rel=1e-5)


def test_many_small_steps_stay_within_the_bound_of_the_anchor(path: Path):
    """Without a bound the same rewards lead three times as far; the last release follows, so its price does not hold them."""
    distances = {}
    for bound in (None, 0.05):
        trainer = PolicyTrainer(
            path, CONFIG.model_copy(update={"anchor_kl": bound, "anchor_tokens": 1000, "kl_beta": 0.01})
        )
        start = PolicyTrainer(path, CONFIG)
        first = start.weights()
        for number in range(24):
            now = PolicyVersion(number=number + 1, hash=f"{number + 1:064x}")
            store = Store(v0=first, **{f"v{number + 1}": trainer.weights()})
            trainer.step(batch(trainer, version=now), References(release=now, anchor=V0, fetch=store))
        given = batch(trainer, version=V1)
        ratio = np.concatenate(start.score([sample.turn for sample in given])) - logprobs(given)
        distances[bound] = float((np.exp(ratio) - 1 - ratio).mean())
    assert distances[0.05] < 0.34 * distances[None], distances
