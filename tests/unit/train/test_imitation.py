"""A start by imitation: what was shown becomes likelier, every message of an episode, and nothing that cannot be shown is passed over."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from ostinato.app.supervised import imitate_into, read_demonstrations
from ostinato.config import load
from ostinato.core.conversation import Conversation, Message, Role, Tool, ToolCall
from ostinato.core.errors import BadConfig, BadRequest
from ostinato.core.records import PolicyVersion, Span
from ostinato.core.samples import Sample
from ostinato.model.renderer import HFRenderer
from ostinato.testing.records import a_turn
from ostinato.testing.tiny import tiny_model
from ostinato.train.config import TrainConfig
from ostinato.train.imitation import imitate, shown_turns
from ostinato.train.trainer import PolicyTrainer

torch.set_num_threads(1)
LOOK = Tool(name="look", description="Look.", parameters={"type": "object", "properties": {"at": {"type": "string"}}})
SHOWN = Conversation(
    messages=(
        Message(role=Role.USER, text="How many?"),
        Message(role=Role.ASSISTANT, calls=(ToolCall(id="a", name="look", arguments='{"at": "x"}'),)),
        Message(role=Role.TOOL, text="7", answers="a"),
        Message(role=Role.ASSISTANT, text="7"),
    ),
    tools=(LOOK,),
)

SHORT = Conversation(messages=(Message(role=Role.USER, text="How many?"), Message(role=Role.ASSISTANT, text="Seven.")))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def renderer(path):
    return HFRenderer(path)


def test_prompt_and_answer_are_what_a_served_turn_has(renderer):
    call, answer = shown_turns(SHOWN, renderer)
    asked = Conversation(messages=SHOWN.messages[:1], tools=SHOWN.tools)
    assert list(call.prompt_ids) == renderer.chat(asked)
    said = renderer.decode(call.sampled_ids[:-1])
    assert said == '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'
    assert renderer.decode(answer.sampled_ids[:-1]) == "7"
    assert {turn.sampled_ids[-1] for turn in (call, answer)} <= set(renderer.stop_ids())
    assert call.episode == answer.episode
    whole = [*call.prompt_ids, *call.sampled_ids]
    assert list(answer.prompt_ids[: len(whole)]) == whole, "the second goes on from the first, token for token"


@pytest.mark.parametrize("messages", [SHOWN.messages[:1], ()])
def test_a_demonstration_without_an_answer_is_refused(messages, renderer):
    with pytest.raises(BadRequest, match="assistant"):
        shown_turns(Conversation(messages=messages), renderer)


def test_what_was_shown_becomes_likely_and_the_step_is_the_likelihoods_own(path, renderer):
    config = TrainConfig(compute="fp32", publish="fp32", learning_rate=3e-3, warmup_steps=0, turn_tokens=8)
    trainer = PolicyTrainer(path, config)
    shown = [shown_turns(SHORT, renderer)]
    before = sum(math.fsum(each) for each in trainer.score(shown[0]))
    steps = list(imitate(trainer, shown * 3, epochs=8, batch=2, seed=0))
    after = sum(math.fsum(each) for each in trainer.score(shown[0]))
    assert len(steps) == 16, "the last batch of an epoch may be small"
    assert after > 0.1 * before
    assert all(step.metrics["ess"] == pytest.approx(1.0) for step in steps), "log-probabilities are of the moment"


def test_the_file_is_the_chat_apis_and_the_outcome_a_model_directory(path, tmp_path):
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}
    look = {"name": "look", "description": "Look.", "parameters": dict(LOOK.parameters)}
    row = {
        "messages": [
            {"role": "user", "content": "How many?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "a", "content": "7"},
            {"role": "assistant", "content": "7"},
        ],
        "tools": [{"type": "function", "function": look}],
    }
    file = tmp_path / "shown.jsonl"
    file.write_text(json.dumps(row) + "\n\n")
    assert read_demonstrations(file) == [SHOWN]
    words = [f"model.source='{path}'", "model.numerics=fast", "train.learning_rate=1e-3"]
    told = []
    imitate_into(load(None, words), [SHORT], tmp_path / "out", epochs=2, batch=4, on_step=told.append)
    assert [learned.step for learned in told] == [1, 2]
    again = PolicyTrainer(tmp_path / "out", TrainConfig(compute="fp32", publish="fp32"))
    start = PolicyTrainer(path, TrainConfig(compute="fp32", publish="fp32"))
    turns = shown_turns(SHORT, HFRenderer(tmp_path / "out"))
    assert math.fsum(again.score(turns)[0]) > math.fsum(start.score(turns)[0])
    for taken in (tmp_path / "out", file):
        with pytest.raises(BadConfig, match="--out"):
            imitate_into(load(None, words), [SHORT], taken, epochs=1, batch=4, on_step=told.append)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2 is not JSON.*; write one object"),
        ("[]", '"messages", a list'),
        ('{"messages": [], "answer": 1}', "no field 'answer'"),
        ('{"messages": [1]}', "lists of objects"),
        ('{"messages": [{"role": "nobody", "content": "x"}]}', r"messages\[0\].role"),
        ('{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "holds image"),
    ],
)
def test_a_bad_line_is_named(line, said, tmp_path):
    file = tmp_path / "shown.jsonl"
    file.write_text(f'{{"messages": [{{"role": "user", "content": "x"}}]}}\n{line}\n')
    with pytest.raises(BadConfig, match=said):
        read_demonstrations(file)


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "none.jsonl").write_text("\n")
    with pytest.raises(BadConfig, match="empty"):
        read_demonstrations(tmp_path / "none.jsonl")


# ---------------------------------------------------------------- corrections, beside credit

RIGHT, VOCABULARY = (90, 33), 260
RULE, ELSEWHERE = (257, 47, 58, 69, 80, 258), (257, 91, 102, 113, 124, 258)


def logprobs_of(trainer, prompt):
    """Of every token as the next one."""
    asked = [a_turn("q", prompt=prompt, sampled=(token,)) for token in range(VOCABULARY)]
    return np.array([score[0] for score in trainer.score(asked)])


def chance(trainer):
    """That the answer is the right one."""
    return math.exp(math.fsum(trainer.score([a_turn("q", prompt=RULE, sampled=RIGHT)])[0]))


def taught(path, *, steps, corrections, seed=0):
    """A trainer after so many batches of eight answers, of which those are accepted that begin with the right two tokens."""
    config = TrainConfig(compute="fp32", publish="fp32", learning_rate=1e-3, warmup_steps=0, turn_tokens=2)
    trainer, rng = PolicyTrainer(path, config), np.random.default_rng(seed)

    def drawn(logprobs_V):
        token = int(rng.choice(VOCABULARY, p=np.exp(logprobs_V) / np.exp(logprobs_V).sum()))
        return token, float(logprobs_V[token])

    first_V = logprobs_of(trainer, RULE)
    for _ in range(steps):
        policy, turns = PolicyVersion(number=trainer.step_count, hash=""), []
        for i in range(8):
            token, logprob = drawn(first_V)
            ids, logprobs = [token], [logprob]
            if token == RIGHT[0]:  # else the rest of the answer decides nothing
                token, logprob = drawn(logprobs_of(trainer, (*RULE, token)))
                ids, logprobs = [*ids, token], [*logprobs, logprob]
            turn = a_turn(f"t{i}:0", prompt=RULE, sampled=ids)
            turns.append(replace(turn, logprobs=tuple(logprobs), spans=(Span(policy=policy, tokens=len(ids)),)))
        right_N = np.array([turn.sampled_ids == RIGHT for turn in turns], float)
        if not right_N.std() and not corrections:
            continue  # nothing tells a good turn from a bad one: no step is taken
        advantages_N = (right_N - right_N.mean()) / (right_N.std() or 1.0)
        samples = []
        for turn, right, advantage in zip(turns, right_N.tolist(), advantages_N.tolist(), strict=True):
            samples.append(Sample(turn=turn, reward=right, advantages=(advantage,) * len(turn.sampled_ids)))
            if corrections and not right:
                turn = replace(turn, sampled_ids=RIGHT, logprobs=(0.0, 0.0), spans=(Span(policy=policy, tokens=2),))
                samples.append(Sample(turn=turn, reward=0.0, advantages=(corrections,) * 2, shown=True))
        trainer.step(samples)
        first_V = logprobs_of(trainer, RULE)
    return trainer


def test_a_rule_that_only_corrections_state_is_learned_in_a_tenth_of_the_turns(path):
    start = PolicyTrainer(path, TrainConfig(compute="fp32", publish="fp32"))
    corrected, judged = taught(path, steps=10, corrections=0.1), taught(path, steps=100, corrections=0.0)
    assert chance(start) < 1e-4
    assert chance(corrected) > 0.25
    assert chance(judged) < 1e-4, "nobody accepts what is never said"
    before_V, after_V = logprobs_of(start, ELSEWHERE), logprobs_of(corrected, ELSEWHERE)
    moved = float((np.exp(before_V) * (before_V - after_V)).sum())
    assert moved < 0.15, "nats a token, on a prompt that nobody corrected"


def test_a_demonstration_beside_turns_is_its_own_term_of_the_gradient(path):
    """Turns without credit and one demonstration: the step of imitation alone, but for the normaliser, to which Adam is blind."""
    config = TrainConfig(compute="fp32", publish="fp32", learning_rate=1e-3, warmup_steps=0, epsilon=1e-30, clip=1e30)
    shown = a_turn("d:0", prompt=RULE, sampled=(*RIGHT, 92))
    alone, beside = PolicyTrainer(path, config), PolicyTrainer(path, config)
    (scores,) = alone.score([shown])
    own = replace(shown, logprobs=scores)
    alone.step([Sample(turn=own, reward=1.0, advantages=(1.0,) * 3)])
    plain = a_turn("p:0", prompt=ELSEWHERE, sampled=(5, 6))
    plain = replace(plain, logprobs=beside.score([plain])[0])
    wrong = replace(shown, logprobs=(-50.0,) * 3)  # as nobody sampled it, no log-probability of it means anything
    learned = beside.step(
        [
            Sample(turn=plain, reward=0.0, advantages=(0.0, 0.0)),
            Sample(turn=wrong, reward=0.0, advantages=(0.5,) * 3, shown=True),
        ]
    )
    assert learned.metrics["demonstrations"] == 1.0
    assert learned.metrics["tokens_sampled"] == 2.0, "what is measured about a batch is about its turns"
    assert learned.metrics["ess"] == pytest.approx(1.0)
    for prompt in (RULE, ELSEWHERE):
        assert np.allclose(logprobs_of(alone, prompt), logprobs_of(beside, prompt), atol=1e-4)
    assert not np.allclose(logprobs_of(alone, RULE), logprobs_of(PolicyTrainer(path, config), RULE), atol=1e-2)
