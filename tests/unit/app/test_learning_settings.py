"""What `learn.batch = "auto"` means for the desk, and for the trainer's learning rate."""

import math
from dataclasses import replace

import pytest

from ostinato.app.numerics import training
from ostinato.app.trainer import ModelTokens, taught_by
from ostinato.config import Config, load
from ostinato.core.records import ParsedCall
from ostinato.reward.line_credit import token_starts
from ostinato.testing.records import a_turn
from ostinato.testing.tiny import tiny_model
from ostinato.train.config import TrainConfig
from ostinato.train.trainer import batch_factor


@pytest.mark.parametrize(
    ("words", "every", "base"),
    [
        ([], True, 144),
        (["learn.batch=32"], False, None),
        (["learn.source=both", "worlds.groups=4"], False, None),
        (["learn.source=worlds", "worlds.groups=4"], False, None),
        (["train.base_turns=60"], True, 60),
    ],
)
def test_a_step_takes_all_turns_unless_their_number_is_set_or_rollouts_share_it(words, every, base):
    config = load(None, ["model.compute=bf16", *words])
    assert (taught_by(config).every, training(config).base_turns) == (every, base)


def test_the_learning_rate_grows_with_the_root_of_a_steps_turns_to_twice_as_much():
    config = TrainConfig(base_turns=144)
    assert [batch_factor(turns, config) for turns in (10, 144, 288, 576, 5_000)] == [1.0, 1.0, math.sqrt(2), 2.0, 2.0]
    assert batch_factor(5_000, TrainConfig()) == 1.0


def test_a_corrections_tokens_take_the_place_of_an_answer_that_is_text_alone(tmp_path):
    tokens = ModelTokens(tiny_model(tmp_path / "tiny", context=64))
    text, end = "no", 258
    turn = replace(a_turn(sampled=(*b"yes", end)), text="yes")
    ids = tokens.answer_ids(turn, text)
    assert ids[-1] == end, "as the answer ended"
    assert b"".join(map(tokens.token_bytes, ids)) == b"no"
    assert tokens.answer_ids(replace(turn, sampled_ids=turn.sampled_ids[:-1]), text) == ids[:-1]
    others = {
        "calls": replace(turn, calls=(ParsedCall(name="look", start=0, end=3),)),
        "unknown calls": replace(turn, calls=None),
        "a grammar": replace(turn, sampling=replace(turn.sampling, grammar="start: /no/")),
        "no room": replace(turn, prompt_ids=(1,) * 62),
    }
    assert {why: tokens.answer_ids(other, text) for why, other in others.items()} == dict.fromkeys(others, ())


def test_corrections_are_imitated_only_if_that_is_set():
    assert taught_by(Config()).corrections == 0.0
    assert taught_by(load(None, ["learn.corrections=0.1"])).corrections == 0.1


def test_a_models_own_tokens_spell_an_answers_text_with_its_end_token(tmp_path):
    tokens = ModelTokens(tiny_model(tmp_path / "tiny"))
    said = "one\ntwo \N{SLIGHTLY SMILING FACE}\n"
    ids = (*tokens.answer_ids(replace(a_turn(sampled=(258,)), text=""), said),)
    turn = replace(a_turn(sampled=ids), text=said)
    starts = token_starts(turn, tokens.token_bytes)
    assert starts is not None
    assert [starts[at] for at in (0, 4, 8, 12, -1)] == [0, 4, 8, 9, len(said)], "four tokens begin within one character"
