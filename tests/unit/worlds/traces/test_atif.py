"""What an ATIF trajectory says of a rollout, step by step."""

from tests.fakes.tasks import WRONG, calc_task
from tests.fakes.worlds import DictSandbox, ScriptedModel, says

from ostinato.core.conversation import Message, Role
from ostinato.testing.records import a_turn
from ostinato.worlds.harness.toolbox import TOOLS
from ostinato.worlds.harness.tools import ToolLoop
from ostinato.worlds.traces.atif import atif_of


async def trajectory():
    given = (
        Message(role=Role.USER, text="Go."),
        Message(role=Role.ASSISTANT, text="Which file?"),
        Message(role=Role.USER, text="calc.py"),
    )
    model = ScriptedModel(says("I look.", ("read", {"path": "calc.py"}), ("read", "{")), says("Done.", ("submit", {})))
    rollout = await ToolLoop().run(calc_task(messages=given), model, DictSandbox({"calc.py": WRONG}))
    first = a_turn("chatcmpl-0:0")
    return first, atif_of(rollout, version="0.1", episode="w1", model="m", tools=TOOLS, turns={first.id: first})


async def test_steps_are_numbered_and_results_lie_with_their_calls():
    _, made = await trajectory()
    steps = made["steps"]
    assert [step["step_id"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert [step["source"] for step in steps] == ["system", "user", "agent", "user", "agent", "agent"]
    results = steps[4]["observation"]["results"]
    assert [result["source_call_id"] for result in results] == [call["tool_call_id"] for call in steps[4]["tool_calls"]]
    assert [call["arguments"] for call in steps[4]["tool_calls"]] == [{"path": "calc.py"}, {}]
    assert made["final_metrics"]["total_completion_tokens"] == 10


async def test_only_what_was_sampled_has_a_turn_and_its_tokens():
    first, made = await trajectory()
    steps = made["steps"]
    assert [step.get("is_copied_context") for step in steps] == [None, None, True, None, None, None]
    assert [step.get("llm_call_count") for step in steps] == [None, None, None, None, 1, 1]
    assert steps[4]["metrics"]["completion_token_ids"] == list(first.sampled_ids)
    assert steps[4]["metrics"]["logprobs"] == list(first.logprobs)
    assert "metrics" not in steps[5]
