"""The trainer and other arithmetics: what is labelled, refused, masked, replayed, and what breaks the promise of exact mode."""

import logging
import math
import re
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ostinato.core import routes as codec
from ostinato.core.errors import NoSignal
from ostinato.core.records import PolicyVersion, Span
from ostinato.core.samples import Sample
from ostinato.model import routing
from ostinato.model.attention import CausalAttend, hidden
from ostinato.testing.engine import CONTRACT
from ostinato.testing.records import a_sample, a_turn
from ostinato.testing.tiny import tiny_model, tiny_moe
from ostinato.train.config import TrainConfig
from ostinato.train.trainer import PolicyTrainer

torch.set_num_threads(1)
CONFIG = TrainConfig(compute="fp32", publish="fp32", learning_rate=1e-3, warmup_steps=0, turn_tokens=8, clip=1e9)
FAST = replace(CONTRACT, mode="fast")
FAR = math.log(3)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_moe(tmp_path_factory.mktemp("model") / "moe", layers=2, experts=8, top_k=2)


def batch(trainer: PolicyTrainer, n: int = 6, *, numerics: str = CONTRACT.id, version: int = 0) -> list[Sample]:
    """Turns whose logprobs are the trainer's own, to the bit."""
    turns = [
        a_turn(f"t{i}:0", prompt=b"%d def f(" % (i % 2), sampled=b"):%d\n" % i, numerics=numerics, version=version)
        for i in range(n)
    ]
    scores = trainer.score(turns)
    return [
        a_sample(replace(turn, logprobs=scored), 1.0 if i % 2 else -0.7)
        for i, (turn, scored) in enumerate(zip(turns, scores, strict=True))
    ]


def moved(sample: Sample, by: float, **changes: object) -> Sample:
    """The same sample as if the engine had found each logprob lower by `by`, so that d = by."""
    return replace(sample, turn=replace(sample.turn, logprobs=tuple(lp - by for lp in sample.turn.logprobs), **changes))


def gradient(trainer: PolicyTrainer) -> np.ndarray:
    return np.array(trainer.state().moments["exp_avg"]) / (1 - CONFIG.beta1)


def test_a_kept_promise_is_silent_and_nothing_is_masked(path: Path, caplog: pytest.LogCaptureFixture):
    trainer = PolicyTrainer(path, CONFIG, CONTRACT)
    metrics = trainer.step(batch(trainer)).metrics
    assert (metrics["mismatch_tokens"], metrics["mismatch_differing"], metrics["mismatch_max_abs"]) == (24, 0, 0)
    assert (metrics["masked_turns"], metrics["masked_share"], metrics["foreign_turns"], metrics["refused_turns"]) == (
        0,
    ) * 4
    assert metrics["ess"] == 1.0
    assert not caplog.records


def one_bit_off(sample: Sample) -> Sample:
    first, *rest = sample.turn.logprobs
    wrong = (float(np.nextafter(np.float32(first), np.float32(0))), *rest)
    return replace(sample, turn=replace(sample.turn, logprobs=wrong))


@pytest.mark.parametrize("place", [0, 5])  # in the first micro-batch, and in the last
def test_a_broken_promise_makes_the_step_one_of_fast_mode_and_raises_an_alarm(
    path: Path, caplog: pytest.LogCaptureFixture, place: int
):
    """Nothing vouches for the others then: a turn of the own contract that is off as a whole is masked, as fast mode would."""
    config = CONFIG.model_copy(update={"microbatch_tokens": 16})
    trainer, quick = PolicyTrainer(path, config, CONTRACT), PolicyTrainer(path, config, FAST)
    given = batch(trainer)
    given[2] = moved(given[2], FAR, spans=(Span(policy=PolicyVersion(number=9, hash="x"), tokens=4),))
    broken = [one_bit_off(s) if i == place else s for i, s in enumerate(given)]
    kept = PolicyTrainer(path, config, CONTRACT).step(given).metrics
    assert (kept["masked_turns"], kept["alarm_promise"], kept["mismatch_differing"]) == (0, 0, 0)
    with caplog.at_level(logging.ERROR):
        metrics = trainer.step(broken).metrics
    assert metrics["microbatches"] > 1
    assert (metrics["masked_turns"], metrics["alarm_promise"], metrics["mismatch_differing"]) == (1, 1, 1)
    assert CONTRACT.id in caplog.text
    assert re.search(r"1 of \d+ tokens", caplog.text)
    quick.step([replace(s, turn=replace(s.turn, numerics=FAST.id)) for s in broken])
    assert (gradient(trainer) == gradient(quick)).all()


def test_when_a_step_is_taken_again_nothing_is_left_of_the_failed_micro_batch(
    path: Path, caplog: pytest.LogCaptureFixture
):
    """It would stand in memory beside the largest micro-batch of the second pass."""
    trainer = PolicyTrainer(path, CONFIG.model_copy(update={"microbatch_tokens": 16}), CONTRACT)
    given = batch(trainer)
    made: list[weakref.ref[torch.Tensor]] = []
    left: list[int] = []
    honest = trainer._policy.logprobs

    def watched(*args, **named) -> torch.Tensor:
        left.append(sum(each() is not None for each in made))
        found = honest(*args, **named)
        made.append(weakref.ref(found))
        return found

    trainer._policy.logprobs = watched
    metrics = trainer.step([one_bit_off(given[0]), *given[1:]]).metrics
    assert metrics["alarm_promise"] == 1
    assert len(left) == metrics["microbatches"] + 1
    assert left[1] == 0, "the first micro-batch broke the promise"


def test_a_broken_promise_can_refuse_the_step(path: Path):
    strict = CONFIG.model_copy(update={"broken_promise": "refuse"})
    trainer, twin = PolicyTrainer(path, strict, CONTRACT), PolicyTrainer(path, strict, CONTRACT)
    given = batch(trainer)
    with pytest.raises(NoSignal, match=r"1 of 24 tokens of the same weights .*ostinato doctor"):
        trainer.step([one_bit_off(given[0]), *given[1:]])
    assert trainer.step_count == 0
    trainer.step(given)
    twin.step(given)
    assert (gradient(trainer) == gradient(twin)).all()


def test_fast_mode_promises_nothing(path: Path, caplog: pytest.LogCaptureFixture):
    quick = PolicyTrainer(path, CONFIG, FAST)
    given = [one_bit_off(s) if i == 0 else s for i, s in enumerate(batch(quick, numerics=FAST.id))]
    metrics = quick.step(given).metrics
    assert (metrics["mismatch_differing"], metrics["alarm_promise"]) == (1, 0)
    assert not caplog.records


def test_the_routes_of_a_step_that_is_taken_twice_are_counted_once(moe: Path):
    trainer = PolicyTrainer(moe, CONFIG.model_copy(update={"microbatch_tokens": 16}), CONTRACT)
    given = routed(trainer, batch(trainer, numerics=CONTRACT.id))
    metrics = trainer.step([*given[:5], one_bit_off(given[5])]).metrics
    assert metrics["alarm_promise"] == 1
    assert metrics["router_routed"] == 2 * metrics["tokens"]


def test_foreign_turns_are_labelled_and_measured_apart(path: Path):
    trainer = PolicyTrainer(path, CONFIG, CONTRACT)
    given = batch(trainer)
    given[0] = moved(given[0], 0.1, numerics="f" * 16)
    given[1] = moved(given[1], 0.1, numerics="")
    given[2] = moved(given[2], -0.2, spans=(Span(policy=PolicyVersion(number=9, hash="x"), tokens=4),))
    metrics = trainer.step(given).metrics
    assert (metrics["foreign_turns"], metrics["foreign_tokens"], metrics["turns"]) == (2, 8, 6)
    assert metrics["foreign_log_ppl_abs_diff"] == pytest.approx(0.1, abs=1e-5)
    assert (metrics["stale_tokens"], metrics["mismatch_tokens"]) == (4, 12)
    assert metrics["stale_k1"] == pytest.approx(0.2, abs=1e-5)
    assert metrics["mismatch_differing"] == 0


def test_a_trainer_of_unknown_arithmetic_labels_and_masks_nothing(path: Path):
    trainer = PolicyTrainer(path, CONFIG)
    metrics = trainer.step([moved(s, FAR) if i == 1 else s for i, s in enumerate(batch(trainer))]).metrics
    assert (metrics["foreign_turns"], metrics["masked_turns"]) == (0, 0)


def test_refused_turns_are_as_if_they_had_not_been(path: Path):
    strict = CONFIG.model_copy(update={"foreign_numerics": "refuse"})
    trainer, twin = PolicyTrainer(path, strict, CONTRACT), PolicyTrainer(path, strict, CONTRACT)
    given = batch(trainer)
    mixed = [moved(s, 0.1, numerics="f" * 16) if i % 3 == 0 else s for i, s in enumerate(given)]
    metrics = trainer.step(mixed).metrics
    assert (metrics["refused_turns"], metrics["turns"], metrics["foreign_turns"]) == (2, 4, 0)
    twin.step([s for i, s in enumerate(given) if i % 3])
    assert (gradient(trainer) == gradient(twin)).all()
    with pytest.raises(NoSignal, match=rf"none of 2 turns .* {CONTRACT.id}"):
        trainer.step(mixed[::3])


@pytest.mark.parametrize("contract", [CONTRACT, FAST])
def test_masked_turns_leave_the_gradient_of_the_others_as_it_is(path: Path, contract):
    """Foreign turns under an exact contract, and any turn under a fast one, go when their mean ratio passes the bound."""
    trainer, twin = PolicyTrainer(path, CONFIG, contract), PolicyTrainer(path, CONFIG, contract)
    given = batch(trainer, numerics=contract.id)
    stamp = "f" * 16 if contract is CONTRACT else contract.id
    metrics = trainer.step([moved(s, FAR, numerics=stamp) if i < 2 else s for i, s in enumerate(given)]).metrics
    assert (metrics["masked_turns"], metrics["masked_share"]) == (2, pytest.approx(1 / 3))
    expected = twin.step(given[2:]).metrics
    scale = np.abs(gradient(twin)).max()
    np.testing.assert_allclose(gradient(trainer), gradient(twin), atol=1e-5 * scale)
    assert metrics["loss"] == pytest.approx(expected["loss"], abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    assert metrics["ess"] == 1.0


def stale(sample: Sample, by: float) -> Sample:
    """As if weights that are gone had made it, d = by."""
    old = Span(policy=PolicyVersion(number=9, hash="x"), tokens=len(sample.turn.sampled_ids))
    return moved(sample, by, spans=(old,))


def test_our_own_exact_turns_are_never_masked_and_null_masks_none(path: Path):
    trainer = PolicyTrainer(path, CONFIG, CONTRACT)
    given = [stale(s, FAR) if i == 1 else s for i, s in enumerate(batch(trainer))]
    assert trainer.step(given).metrics["masked_turns"] == 0
    loose = PolicyTrainer(path, CONFIG.model_copy(update={"sequence_mask": None}), CONTRACT)
    given = [moved(s, FAR, numerics="") if i == 1 else s for i, s in enumerate(batch(loose))]
    assert loose.step(given).metrics["masked_turns"] == 0


def test_a_batch_that_is_masked_whole_is_refused_and_changes_nothing(path: Path):
    trainer = PolicyTrainer(path, CONFIG, CONTRACT)
    before = {name: array.copy() for name, array in trainer.state().weights.items()}
    with pytest.raises(NoSignal, match="all 6 turns lie outside the sequence mask"):
        trainer.step([moved(s, FAR, numerics="") for s in batch(trainer)])
    assert all((before[name] == array).all() for name, array in trainer.state().weights.items())
    assert trainer.step(batch(trainer)).step == 1


def test_after_a_skipped_step_or_a_way_back_the_same_weights_are_known_as_the_same(path: Path):
    trainer = PolicyTrainer(path, CONFIG, CONTRACT)
    start = trainer.weights()
    trainer.skip_step()
    both = [*batch(trainer, version=0)[:3], *batch(trainer, version=1)[3:]]
    assert trainer.step(both).metrics["stale_tokens"] == 0
    trainer.go_back(start, 0)
    assert trainer.step(batch(trainer, version=0)).metrics["mismatch_tokens"] == 24
    assert trainer.step(batch(trainer, version=0)).metrics["stale_tokens"] == 24


# ---------------------------------------------------------------- experts


def routed(trainer: PolicyTrainer, samples: list[Sample]) -> list[Sample]:
    """The samples with the routes that this trainer's own weights choose."""
    model, done = trainer._policy.model, []
    found = routing.of(model)
    assert found is not None
    for sample in samples:
        ids = torch.tensor(sample.turn.prompt_ids + sample.turn.sampled_ids[:-1])
        with torch.no_grad(), found.record() as seen:
            hidden(model, ids, torch.arange(len(ids)), CausalAttend([len(ids)]))
        data = codec.encode(seen.ids_NLk().numpy(), found.experts)
        done.append(replace(sample, turn=replace(sample.turn, routes=data)))
    return done


@pytest.mark.parametrize("recompute_tokens", [CONFIG.recompute_tokens, 0])
def test_the_routes_of_the_same_weights_replay_without_a_flip(moe: Path, recompute_tokens: int):
    config = CONFIG.model_copy(update={"recompute_tokens": recompute_tokens})
    trainer, plain = (
        PolicyTrainer(moe, config, CONTRACT),
        PolicyTrainer(moe, config.model_copy(update={"router_replay": False}), CONTRACT),
    )
    given = routed(trainer, batch(trainer, numerics=CONTRACT.id))
    metrics = trainer.step(given).metrics
    assert metrics["router_flips"] == metrics["router_disagreements"] == metrics["router_refused"] == 0
    assert metrics["router_routed"] == 2 * metrics["tokens"]
    without = plain.step(given).metrics
    assert "router_routed" not in without
    assert without["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-5)


def test_other_routes_are_followed_and_counted_as_flips(moe: Path):
    trainer = PolicyTrainer(moe, CONFIG, CONTRACT)
    given = batch(trainer, numerics=CONTRACT.id)
    rng = np.random.default_rng(0)
    tokens = len(given[0].turn.prompt_ids) + len(given[0].turn.sampled_ids) - 1
    other = [
        np.stack([[rng.choice(8, 2, replace=False) for _ in range(2)] for _ in range(tokens)]).astype(np.uint8)
        for _ in given
    ]
    given = [replace(s, turn=replace(s.turn, routes=codec.encode(ids, 8))) for s, ids in zip(given, other, strict=True)]
    metrics = trainer.step(given).metrics
    assert metrics["router_flips"] > 0.5 * metrics["router_routed"]
    assert metrics["router_disagreements"] > 0, "random routes differ on the shared prompts"
    assert metrics["mismatch_differing"] > 0
    assert any("gate" in name and np.abs(array).any() for name, array in router_moments(trainer).items())


def router_moments(trainer: PolicyTrainer) -> dict[str, np.ndarray]:
    flat, at, found = trainer.state().moments["exp_avg"], 0, {}
    for name, array in trainer.state().weights.items():
        found[name] = flat[at : at + array.size]
        at += array.size
    return found


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda data: b"", "missing"),
        (lambda data: data[:-3], "truncated"),
        (lambda data: codec.encode(codec.decode(data)[:-1], 8), "truncated"),
        (lambda data: codec.encode(codec.decode(data)[:, :1], 8), "stale"),
        (lambda data: codec.encode(codec.decode(data), 16), "stale"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "corrupt"),
    ],
)
def test_routes_that_cannot_be_trusted_leave_their_turn_out_and_say_why(
    moe: Path, caplog: pytest.LogCaptureFixture, spoil, reason: str
):
    trainer = PolicyTrainer(moe, CONFIG, CONTRACT)
    given = routed(trainer, batch(trainer, numerics=CONTRACT.id))
    given[0] = replace(given[0], turn=replace(given[0].turn, routes=spoil(given[0].turn.routes)))
    metrics = trainer.step(given).metrics
    assert (metrics["router_refused"], metrics[f"router_refused_{reason}"], metrics["turns"]) == (1, 1, 5)
    assert "turn t0:0 is left out" in caplog.text
    with pytest.raises(NoSignal, match="router_replay=false"):
        trainer.step(given[:1])
    again = trainer.step(given[1:]).metrics  # what the refused batch left out is not counted here
    assert (again["router_refused"], again.get(f"router_refused_{reason}")) == (0, None)


def test_tokens_after_a_swap_are_stale_though_their_version_is_the_trainers(path: Path):
    trainer = PolicyTrainer(path, CONFIG, contract=CONTRACT)
    samples = batch(trainer)
    old, now = PolicyVersion(number=7, hash="7" * 64), samples[0].turn.spans[0].policy
    rest = len(samples[0].turn.sampled_ids) - 2
    swapped = moved(samples[0], 0.1, spans=(Span(policy=old, tokens=2), Span(policy=now, tokens=rest)))
    metrics = trainer.step([swapped, *samples[1:]]).metrics
    assert metrics["stale_tokens"] == rest + 2
    assert metrics["mismatch_tokens"] == sum(len(sample.turn.sampled_ids) for sample in samples[1:])
    assert metrics["mismatch_differing"] == 0
