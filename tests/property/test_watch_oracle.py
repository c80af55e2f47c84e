"""What the watcher says of each call's lines is the truth, which is known by construction: scripted people in real repositories."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.fakes.coding_world import PEOPLE, World, play

from ostinato.core.conversation import calling_turn
from ostinato.core.line_survival import line_spans
from ostinato.core.records import ParsedCall, Reward
from ostinato.reward.baseline import Baseline
from ostinato.reward.config import RewardConfig
from ostinato.reward.credit import SingleRollout, by_episode
from ostinato.reward.functions import agent
from ostinato.reward.line_credit import turn_lines
from ostinato.serve.feedback.intake import parse_feedback
from ostinato.testing.records import a_turn


@pytest.mark.parametrize("often", PEOPLE)
@settings(max_examples=2, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.randoms(use_true_random=False), st.integers(3, 7))
def test_survival_is_the_truth_line_by_line_and_call_by_call(often, random, steps):
    with tempfile.TemporaryDirectory() as place, World(Path(place), random) as world:
        play(world, steps, [often])
        told = {(event.target, event.name): event.value for event in world.events.values()}
        truth = {
            (call.id, name): len(kept) / call.written
            for call in world.calls
            if call.written
            for name, kept in call.expected.items()
        }
        assert told == truth
        numbered = [event for event in world.events.values() if event.lines]
        for event in numbered:
            (call,) = (call for call in world.calls if call.id == event.target)
            kept = {call.places[id] for id in call.expected[event.name]}
            check_credit(call, event, kept)
        assert len(numbered) >= 0.5 * len(told), "where a line could have come from two places, none is named"


def check_credit(call, event, kept):
    """The signal names the lines that are kept, and the tokens that wrote each line are credited with its own fate."""
    written = json.dumps({"path": "a.py", "content": call.text})
    text = f'<tool_call>\n{{"name": "write", "arguments": {written}}}\n</tool_call>'
    made = (ParsedCall(name="write", start=0, end=len(text)),)
    turn = replace(a_turn(calling_turn(call.id) or "", sampled=tuple(text.encode())), text=text, calls=made)
    signals = parse_feedback(event.to_json(), tenant="default", now=20.0)
    reward = agent(turn, signals, 99.0, window=30.0)
    assert isinstance(reward, Reward)
    (survival,) = signals[0].lines
    followed = {line for first, last in survival.followed for line in range(first, last + 1)}
    assert {line for first, last, value in reward.lines[0].runs for line in range(first, last + 1) if value > 0} == kept
    assert followed == set(call.places.values())
    told = turn_lines(turn, reward, lambda token: bytes([token]))
    credit = SingleRollout(RewardConfig(user_cap=1.0), Baseline(), lines={turn.id: told})
    whole = [reward.value] if told.differ else []
    advantages = credit(by_episode([turn]), {turn.id: reward.value})[turn.id] if reward.value or whole else ()
    for line, (start, end) in enumerate(line_spans(turn, 0, "content", survival.lines), 1):
        if line in followed:
            assert {value > 0 for value in advantages[start:end]} <= {line in kept}
            assert 0.0 not in advantages[start:end]
