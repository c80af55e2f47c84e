"""Values of turns: the head, advantages over turns, and a trainer that uses them, is killed, refuses a step, or has them off."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from ostinato.core.errors import BadWeights
from ostinato.core.records import Arm
from ostinato.core.samples import Sample
from ostinato.testing.records import a_turn
from ostinato.testing.tiny import tiny_model
from ostinato.train import values as module
from ostinato.train.config import TrainConfig
from ostinato.train.trainer import PolicyTrainer
from ostinato.train.values import TurnValues, ValueHead, features_of, gae_over_turns

torch.set_num_threads(1)
CONFIG = TrainConfig(compute="fp32", publish="fp32", learning_rate=1e-3, warmup_steps=0, microbatch_tokens=64)
VALUED = CONFIG.model_copy(update={"value_lambda": 1.0})
WIDTH = 8


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def sample(name, advantage, *, episode=None, tokens=1, scale=1.0, cut=False, **more):
    turn = replace(a_turn(f"{name}:0", sampled=range(7, 7 + tokens), **more), episode=episode or f"e-{name}")
    return Sample(turn=turn, reward=0.0, advantages=(advantage,) * tokens, scale=scale, cut=cut)


def taught(trace=1.0, *, batches=30, worlds=False, noise=0.0):
    """Values that have learned that the first coordinate of a state is its credit's sign."""
    values, rng = TurnValues(trace), np.random.default_rng(0)
    arm = Arm.WORLD if worlds else Arm.LIVE
    for number in range(batches):
        states, signs = states_of(rng, 32)
        drawn = 0.8 * signs + noise * rng.standard_normal(32)
        some = [sample(f"{number}-{i}", float(each), arm=arm) for i, each in enumerate(drawn)]
        values.learn(values.credit(some, states))
    return values


def states_of(rng, count, signs=None):
    signs = rng.choice([-1.0, 1.0], count) if signs is None else np.array(signs)
    states = rng.standard_normal((count, WIDTH)).astype(np.float32) * 0.1
    states[:, 0] += 2.0 * signs
    states[:, 1] -= 2.0 * signs
    return states, signs


def credits(valued):
    return [each.advantages[0] for each in valued.samples]


# ---------------------------------------------------------------- advantages over turns


def discounted(rewards, values, trace, after):
    """GAE as it is written elsewhere: from rewards and values, from the end on. `after`: the value behind the last turn."""
    found, later, behind = [], 0.0, after
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        later = reward + behind - value + trace * later
        behind = value
        found.append(later)
    return found[::-1]


@pytest.mark.parametrize("trace", [0.0, 0.3, 0.95, 1.0])
def test_from_residuals_alone_it_is_generalised_advantage_estimation(trace):
    rng = np.random.default_rng(3)
    rewards, values = rng.standard_normal(12), rng.standard_normal(12)
    reached = np.cumsum(rewards[::-1])[::-1]
    found = gae_over_turns([str(n) for n in range(12)], (reached - values).tolist(), trace)
    assert found == pytest.approx(discounted(rewards, values, trace, 0.0))


def test_without_a_trace_of_later_turns_it_is_the_step_in_value():
    assert gae_over_turns(["a", "b", "c"], [1.0, 0.25, -0.5], 0.0) == [0.75, 0.75, -0.5]
    assert gae_over_turns(["a", "b", "c"], [1.0, 0.25, -0.5], 1.0) == [1.0, 0.25, -0.5], "the residuals themselves"


def test_choices_of_one_call_are_each_followed_by_the_next_call():
    assert gae_over_turns(["a", "b", "b", "c"], [1.0, 0.5, 0.1, 0.2], 0.0) == pytest.approx([0.7, 0.3, -0.1, 0.2])


def test_the_credit_of_an_episode_follows_its_turns_whatever_stands_between_and_whichever_window_they_are_in():
    """Two episodes, turn by turn in turns, one of them over a compaction: its second turn's prompt does not continue the first's."""
    values, rng = taught(0.0), np.random.default_rng(5)
    states, _ = states_of(rng, 4, [1.0, 1.0, -1.0, -1.0])
    one, two = (
        [sample(f"{name}{n}", 0.5, episode=name, prompt=(n + 1, 9, ord(name))) for n in range(2)] for name in "xy"
    )
    mixed = credits(values.credit([one[0], two[0], one[1], two[1]], states))
    alone = credits(values.credit([one[0], one[1]], states[[0, 2]]))
    again = credits(values.credit([two[0], two[1]], states[[1, 3]]))
    # people's credit keeps its RMS, so compare within the episode
    assert mixed[0] / mixed[2] == pytest.approx(alone[0] / alone[1])
    assert mixed[1] / mixed[3] == pytest.approx(again[0] / again[1])
    assert mixed[0] < 0 < mixed[2], "the first turn led from a good state to a bad one"


# ---------------------------------------------------------------- the head


def test_what_the_state_tells_is_taken_out_of_the_credit_and_the_rest_keeps_its_size():
    values, rng = taught(noise=0.3), np.random.default_rng(9)
    states, signs = states_of(rng, 200)
    surprise = rng.standard_normal(200) * 0.3
    valued = values.credit(
        [sample(str(i), float(0.8 * s + e)) for i, (s, e) in enumerate(zip(signs, surprise, strict=True))], states
    )
    found = np.array(credits(valued))
    assert abs(np.corrcoef(found, signs)[0, 1]) < 0.15
    assert np.corrcoef(found, surprise)[0, 1] > 0.98
    rms = np.sqrt(np.mean((0.8 * signs + surprise) ** 2))
    assert np.sqrt(np.mean(found**2)) == pytest.approx(rms)
    assert valued.metrics["value_explained"] == pytest.approx(0.64 / (0.64 + 0.09), abs=0.03)
    assert valued.metrics["value_trust"] > 0.95


def test_a_head_that_knows_nothing_is_not_trusted():
    """Credit that no state tells: after 30 batches the head changes hardly anything, where its own predictions would have cost a tenth."""
    values, rng = TurnValues(1.0), np.random.default_rng(1)
    cost, trusted = [], []
    for number in range(60):
        states, _ = states_of(rng, 16)
        drawn = rng.standard_normal(16)
        some = [sample(f"{number}-{i}", float(each)) for i, each in enumerate(drawn)]
        valued = values.credit(some, states)
        trusted.append(valued.metrics["value_trust"])
        cost.append(-valued.metrics["value_explained"])
        values.learn(valued)
    assert np.mean(cost[10:]) < 0.01
    assert np.mean(trusted[10:]) < 0.6


def test_nothing_known_nothing_changed():
    """To the bit, before a batch was learned from and before its predictions were tried."""
    values, (states, _) = TurnValues(1.0), states_of(np.random.default_rng(0), 3)
    some = [sample("a", 0.7, tokens=3), sample("b", -0.1), sample("c", 1.3)]
    for _ in range(2):
        valued = values.credit(some, states)
        assert valued.samples == some
        values.learn(valued)
    assert values.credit(some, states).samples != some


def test_predictions_are_made_before_the_batch_is_learned_from():
    """A value that had seen its own turn's return would not be a baseline."""
    states, _ = states_of(np.random.default_rng(2), 8)
    values, again = taught(), taught()
    one = values.credit([sample(str(i), 1.0) for i in range(8)], states)
    other = again.credit([sample(str(i), 1.0 if i else -5.0) for i in range(8)], states)
    units = [np.sqrt(np.mean([x**2 for x in credits(each)])) for each in (one, other)]
    assert units[0] == pytest.approx(1.0)
    # e = target - value: with the same values in units of the batch
    assert one.metrics["value_trust"] == other.metrics["value_trust"]
    before = values.state().tobytes()
    values.credit([sample(str(i), 9.0) for i in range(8)], states)
    assert values.state().tobytes() == before


def test_a_person_who_is_cut_teaches_no_more_with_values():
    """The value is cut as the person's credit: with `scale` 0.1 a turn that the recorded credit made 0.08 stays below 0.3."""
    values, rng = taught(), np.random.default_rng(4)
    states, _ = states_of(rng, 20, [1.0, -1.0] * 10)
    others = [sample(str(i), 0.8 if i % 2 == 0 else -0.8) for i in range(19)]
    loud = sample("loud", -0.08, scale=0.1)
    quiet = replace(loud, scale=1.0)
    at = np.concatenate([states[:19], states[:1]])
    cut, uncut = (abs(credits(values.credit([*others, each], at))[-1]) for each in (loud, quiet))
    assert cut < 0.8
    assert uncut > 5 * 0.08
    ratio = [replace(each, scale=0.1, advantages=(each.advantages[0] * 0.1,)) for each in others]
    all_cut = credits(values.credit([*ratio, loud], at))
    none_cut = credits(values.credit([*others, replace(loud, scale=1.0, advantages=(-0.8,))], at))
    assert all_cut == pytest.approx([0.1 * each for each in none_cut])


def test_a_flood_of_one_persons_turns_teaches_no_more_than_their_part():
    """Forty turns of one person, cut to a fortieth each, weigh as one turn, and no state is worth more than a bound."""
    states, _ = states_of(np.random.default_rng(0), 2, [1.0, -1.0])
    flood = [sample(f"f{i}", -0.9 / 40, scale=1 / 40) for i in range(40)]
    at = np.concatenate([states, np.repeat(states[:1], 40, axis=0)])
    _, _, counts = TurnValues(1.0).credit([sample("a", 0.9), sample("b", -0.9), *flood], at).lessons[False]
    assert counts[2:].sum() == pytest.approx(counts[0])
    values = taught()
    values._heads[False]._targets_F *= 1e6
    values._heads[False]._weights_F = None
    valued = values.credit([sample("a", 1.0), sample("b", -1.0)], states)
    assert max(map(abs, credits(valued))) < 1 + module.MAX_VALUE


def test_a_turn_without_credit_gets_none():
    values, (states, _) = taught(worlds=True), states_of(np.random.default_rng(0), 3)
    some = [sample("flat", 0.0, arm=Arm.WORLD), sample("a", 0.5, arm=Arm.WORLD), sample("b", -0.5, arm=Arm.WORLD)]
    valued = values.credit(some, states)
    assert valued.samples[0] == some[0]
    assert valued.samples[1] != some[1]


def test_worlds_and_people_have_heads_of_their_own():
    values, (states, _) = taught(worlds=True), states_of(np.random.default_rng(0), 2, [1.0, -1.0])
    people = [sample("a", 0.5), sample("b", -0.5)]
    assert values.credit(people, states).samples == people, "what worlds taught says nothing of people"


def test_tokens_of_a_turn_keep_their_differences():
    values, (states, _) = taught(), states_of(np.random.default_rng(0), 4, [1.0, -1.0, 1.0, -1.0])
    lined = replace(sample("a", 0.0, tokens=3), advantages=(1.0, 0.4, -0.2))
    rest = [sample(str(i), 0.8 if i % 2 == 0 else -0.9) for i in range(1, 4)]
    found = values.credit([lined, *rest], states).samples[0].advantages
    assert found[0] - found[1] == pytest.approx(found[1] - found[2])
    assert found[0] - found[1] > 0


def test_an_episode_that_goes_on_is_bootstrapped_by_the_value_of_its_last_turn():
    """Nothing is known of what follows: were the end of what is here taken for the end, a head that expects failure would make every
    turn a success.
    """
    values, rng = taught(), np.random.default_rng(6)
    states, _ = states_of(rng, 4, [-1.0, -1.0, -1.0, 1.0])
    # the recorded credit of a cut episode is about 0
    some = [sample(str(n), 0.01, episode="long") for n in range(3)] + [sample("other", 0.8)]
    open_, closed = (credits(values.credit(some, states, going_on)) for going_on in ([("default", "long")], []))
    assert all(each > 0.3 for each in closed[:3])
    assert all(abs(each) < 0.1 for each in open_[:3])
    valued = values.credit(some, states, [("default", "long")])
    assert len(valued.lessons[False][1]) == 1, "what is not known is not learned"


def test_a_step_up_before_the_cut_is_credited():
    values, rng = taught(), np.random.default_rng(6)
    states, _ = states_of(rng, 3, [-1.0, 1.0, 1.0])
    some = [sample(str(n), 0.01, episode="long") for n in range(2)] + [sample("other", 0.8)]
    found = credits(values.credit(some, states, [("default", "long")]))
    assert found[0] > 5 * abs(found[1]), "it led from a bad state to a good one"


def test_large_states_are_projected_always_alike():
    states = np.random.default_rng(0).standard_normal((5, 1_000)).astype(np.float32)
    found = features_of(states)
    assert found.shape == (5, module.MOST_FEATURES)
    assert np.array_equal(found, features_of(states))
    assert found.var() == pytest.approx(1.0, abs=0.1)
    inner = (found @ found.T) / module.MOST_FEATURES
    centred = states - states.mean(1, keepdims=True)
    wanted = np.corrcoef(centred)
    assert np.abs(inner - wanted).max() < 0.2
    assert found[0, :3].tolist() == pytest.approx(features_of(states[:1])[0, :3].tolist())


def test_a_heads_state_is_all_of_it():
    values, (states, signs) = taught(noise=0.2), states_of(np.random.default_rng(8), 32)
    some = [sample(str(i), float(s)) for i, s in enumerate(signs)]
    again = TurnValues(1.0)
    again.restore(values.state())
    assert again.state().tobytes() == values.state().tobytes()
    for each in (values, again):
        each.learn(each.credit(some, states))
    assert again.state().tobytes() == values.state().tobytes()
    assert again.credit(some, states).samples == values.credit(some, states).samples
    again.restore(None)
    assert again.credit(some, states).samples == some


def test_a_head_by_recursive_least_squares_is_ridge_regression():
    head, rng = ValueHead(4), np.random.default_rng(0)
    x, y, w = rng.standard_normal((50, 4)), rng.standard_normal(50), rng.random(50)
    head.learn(x, y, w)
    centred = y - np.average(y, weights=w)
    wanted = np.linalg.solve(x.T @ (w[:, None] * x) + module.RIDGE * np.eye(4), x.T @ (w * centred))
    assert head.predict(x) == pytest.approx(x @ wanted)


def test_the_level_of_returns_is_left_to_the_baseline():
    """A batch in which all did well raises what the baseline expects; were it also what a head expects, V would know it twice."""
    values, (states, _) = taught(noise=0.3), states_of(np.random.default_rng(0), 32)
    before = credits(values.credit([sample(str(i), 0.5 - i % 2) for i in range(32)], states))
    rng = np.random.default_rng(1)
    for number in range(3):
        good, signs = states_of(rng, 64)
        some = [sample(f"{number}-{i}", float(2.0 + 0.8 * sign)) for i, sign in enumerate(signs)]
        values.learn(values.credit(some, good))
    after = credits(values.credit([sample(str(i), 0.5 - i % 2) for i in range(32)], states))
    assert np.mean(after) == pytest.approx(np.mean(before), abs=0.1)


# ---------------------------------------------------------------- in the trainer


def batches(trainer, count, *, tokens=3):
    """Batches whose credit the prompt's first token tells, sampled by the weights of the time."""
    rng = np.random.default_rng(0)
    for number in range(count):
        some = []
        for i in range(12):
            good = bool(rng.random() < 0.5)
            prompt = (257, 90 if good else 40, *rng.integers(100, 200, 3).tolist(), 258)
            turn = a_turn(f"{number}-{i}:0", prompt=prompt, sampled=rng.integers(65, 90, tokens).tolist())
            value = (0.9 if good else -0.9) + 0.2 * float(rng.standard_normal())
            some.append(Sample(turn=turn, reward=value, advantages=(value,) * tokens))
        scores = trainer.score([each.turn for each in some])
        yield [replace(each, turn=replace(each.turn, logprobs=score)) for each, score in zip(some, scores, strict=True)]


def bits(trainer):
    return {name: bytes(array.data) for name, array in trainer.weights().items()}


def test_a_trainer_with_values_learns_what_prompts_tell(path):
    trainer = PolicyTrainer(path, VALUED)
    told = [trainer.step(each).metrics["value_explained"] for each in batches(trainer, 12)]
    assert told[0] == 0.0
    assert min(told[6:]) > 0.4


def test_without_values_nothing_of_them_is_there(path):
    """Credit as recorded, to the bit, whatever a batch's row says of scales and cuts; no state, no metric."""
    plain, off = PolicyTrainer(path, CONFIG), PolicyTrainer(path, CONFIG)
    for each in batches(plain, 3):
        one = plain.step(each)
        other = off.step([replace(sample, scale=0.5, cut=True) for sample in each])
        assert not [name for name in one.metrics if "value" in name]
        assert one.metrics["grad_norm"] == other.metrics["grad_norm"]
    assert bits(plain) == bits(off)
    assert "values" not in plain.state().moments


def test_the_first_steps_with_values_are_those_without(path):
    """Until a prediction was tried, nothing is changed, to the bit."""
    plain, valued = PolicyTrainer(path, CONFIG), PolicyTrainer(path, VALUED)
    first, second, third = batches(plain, 3)
    for each in (first, second):
        plain.step(each)
        valued.step(each)
        assert bits(plain) == bits(valued)
    plain.step(third)
    valued.step(third)
    assert bits(plain) != bits(valued)


def test_the_weights_before_the_step_give_the_values_and_a_refused_step_teaches_none(path):
    trainer, twin = PolicyTrainer(path, VALUED), PolicyTrainer(path, VALUED)
    for each in batches(trainer, 4):
        trainer.step(each)
        broken = [replace(each[0], advantages=(float("nan"),) * 3), *each[1:]]
        with pytest.raises(BadWeights):
            twin.step(broken)
        twin.step(each)
    assert bits(trainer) == bits(twin)


def test_a_trainer_that_is_killed_takes_the_same_steps_again(path, tmp_path):
    trainer = PolicyTrainer(path, VALUED)
    made = list(batches(trainer, 6))
    for number, each in enumerate(made):
        trainer.step(each)
        if number == 2:
            trainer.save(tmp_path, cursor=0, keep=1)
    again = PolicyTrainer(path, VALUED)
    again.step(made[5])  # what it had begun is gone
    assert again.resume(tmp_path)
    for each in made[3:]:
        again.step(each)
    assert bits(trainer) == bits(again)
    assert trainer.state().moments["values"].tobytes() == again.state().moments["values"].tobytes()


def test_a_checkpoint_without_values_begins_them_anew(path, tmp_path):
    plain, valued = PolicyTrainer(path, CONFIG), PolicyTrainer(path, VALUED)
    for each in batches(plain, 3):
        plain.step(each)
        valued.step(each)
    plain.save(tmp_path, cursor=0, keep=1)
    assert valued.resume(tmp_path)
    assert valued.state().moments["values"].tobytes() == TurnValues(1.0).state().tobytes()


def test_only_a_trainer_of_one_rank_has_values():
    with pytest.raises(ValueError, match=r"train\.value_lambda"):
        TrainConfig(value_lambda=1.0, ranks=2)
