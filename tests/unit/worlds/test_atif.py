"""What an ATIF trajectory says of a rollout, step by step."""

from tests.fakes.atif import atif_of

from ostinato.core.conversation import Message, Role, Tool, ToolCall
from ostinato.testing.records import a_turn
from ostinato.worlds.harness.rollout import Ended, Rollout
from ostinato.worlds.outcome_files import rollout_of

FIRST = a_turn("chatcmpl-0:0")
CALLS = (
    ToolCall(id="call_chatcmpl-0_0_0", name="read", arguments='{"path": "calc.py"}'),
    ToolCall(id="call_chatcmpl-0_0_1", name="read", arguments="{"),
)
ROLLOUT = Rollout(
    task="calc-1",
    harness="tools@3f2a",
    ended=Ended.SUBMITTED,
    messages=(
        Message(role=Role.SYSTEM, text="You have tools."),
        Message(role=Role.USER, text="Go."),
        Message(role=Role.ASSISTANT, text="Which file?"),  # given by the task
        Message(role=Role.USER, text="calc.py"),
        Message(role=Role.ASSISTANT, text="I look.", calls=CALLS),
        Message(role=Role.TOOL, text="1\tx", answers=CALLS[0].id),
        Message(role=Role.TOOL, text="error: no object", answers=CALLS[1].id, failed=True),
        Message(role=Role.ASSISTANT, text="Done."),
    ),
    turns=("chatcmpl-0:0", "chatcmpl-1:0"),
    effort={"tokens": 10.0, "prompt_tokens": 20.0},
)


def steps(**given):
    return atif_of(ROLLOUT, version="0.1", turns={FIRST.id: FIRST}, **given)["steps"]


def test_steps_are_numbered_and_results_lie_with_their_calls():
    found = steps()
    assert [step["step_id"] for step in found] == [1, 2, 3, 4, 5, 6]
    assert [step["source"] for step in found] == ["system", "user", "agent", "user", "agent", "agent"]
    assert [result["source_call_id"] for result in found[4]["observation"]["results"]] == [call.id for call in CALLS]
    assert [call["arguments"] for call in found[4]["tool_calls"]] == [{"path": "calc.py"}, {}]


def test_only_what_was_sampled_has_a_turn_and_its_tokens():
    found = steps()
    assert [step.get("is_copied_context") for step in found] == [None, None, True, None, None, None]
    assert [step.get("llm_call_count") for step in found] == [None, None, None, None, 1, 1]
    assert found[4]["metrics"]["completion_token_ids"] == list(FIRST.sampled_ids)
    assert found[4]["metrics"]["logprobs"] == list(FIRST.logprobs)
    assert "metrics" not in found[5]


def test_totals_and_tools_are_told():
    whole = atif_of(ROLLOUT, version="0.1", episode="w1", model="m", tools=(Tool(name="read"),))
    totals = whole["final_metrics"]
    assert (totals["total_prompt_tokens"], totals["total_completion_tokens"], totals["total_steps"]) == (20, 10, 6)
    assert whole["agent"]["tool_definitions"][0]["function"]["name"] == "read"
    assert (whole["session_id"], whole["agent"]["name"]) == ("w1", "ostinato-tools")
    assert rollout_of(whole) == ROLLOUT
