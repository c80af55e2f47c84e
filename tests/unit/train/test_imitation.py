"""A start by imitation: what was shown becomes likelier, every message of an episode, and nothing that cannot be shown is passed over."""

import json
import math

import pytest
import torch

from ostinato.app.imitation import imitate_into, read_demonstrations
from ostinato.config import load
from ostinato.core.conversation import Conversation, Message, Role, Tool, ToolCall
from ostinato.core.errors import BadConfig, BadRequest
from ostinato.model.renderer import HFRenderer
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
    with pytest.raises(BadConfig, match="--out"):
        imitate_into(load(None, words), [SHORT], tmp_path / "out", epochs=1, batch=4, on_step=told.append)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2 is not JSON"),
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
