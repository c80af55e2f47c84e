"""Writes a rollout as an ATIF-v1.8 trajectory (Agent Trajectory Interchange Format, as in Harbor 0.25.0), which `worlds grade` reads.

A step is a system, user or agent message; the results of an agent's tool calls are the observation of its step. Data that ATIF has no
field for (why the rollout ended, changed files, turn ids, arguments that are not an object) is under `extra`, with the key "ostinato".
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, cast

from ostinato.core.conversation import Message, Role, Tool, ToolCall
from ostinato.core.records import Turn
from ostinato.core.sandbox import Change
from ostinato.worlds.harness.rollout import Rollout
from ostinato.worlds.outcome_files import OWN, SCHEMA

Json = dict[str, Any]
_SOURCES = {Role.SYSTEM: "system", Role.USER: "user", Role.ASSISTANT: "agent"}


def atif_of(
    rollout: Rollout,
    *,
    version: str,
    episode: str | None = None,
    model: str | None = None,
    tools: Sequence[Tool] = (),
    turns: Mapping[str, Turn] | None = None,
) -> Json:
    """The rollout's trajectory, built from JSON types.

    Args:
        rollout: the rollout to convert.
        version: Ostinato's version.
        episode: the run's id.
        model: the gateway's name for its model.
        tools: the tools offered to the model.
        turns: turns of the log by id, whose token ids and log-probabilities are included.
    """
    name = rollout.harness.partition("@")[0]
    agent: Json = {"name": f"ostinato-{name}", "version": version, "extra": {OWN: {"harness": rollout.harness}}}
    if model is not None:
        agent["model_name"] = model
    if tools:
        agent["tool_definitions"] = [_declared(tool) for tool in tools]
    counts: Json = {"total_steps": 0, "extra": {OWN: dict(rollout.effort)}}
    for field, effort in (("total_prompt_tokens", "prompt_tokens"), ("total_completion_tokens", "tokens")):
        if effort in rollout.effort:
            counts[field] = int(rollout.effort[effort])
    steps = _steps(rollout, turns or {})
    counts["total_steps"] = len(steps)
    own: Json = {
        "task": rollout.task,
        "ended": rollout.ended.value,
        "turns": list(rollout.turns),
        "changes": [_written_change(change) for change in rollout.changes],
        "detail": dict(rollout.detail),
    }
    whole: Json = {
        "schema_version": SCHEMA,
        "agent": agent,
        "steps": steps,
        "final_metrics": counts,
        "extra": {OWN: own},
    }
    return whole if episode is None else {**whole, "session_id": episode, "trajectory_id": episode}


def _steps(rollout: Rollout, turns: Mapping[str, Turn]) -> list[Json]:
    """One step for each message that is not a tool result. The last assistant messages correspond to the rollout's turns, in order."""
    steps: list[Json] = []
    calling: dict[str, Json] = {}
    answers = [number for number, message in enumerate(rollout.messages) if message.role is Role.ASSISTANT]
    asked = dict(
        zip(answers[-len(rollout.turns) :] if rollout.turns else [], rollout.turns[-len(answers) :], strict=False)
    )
    for number, message in enumerate(rollout.messages):
        if message.role is Role.TOOL:
            _observe(steps, calling, message)
            continue
        step: Json = {"step_id": len(steps) + 1, "source": _SOURCES[message.role], "message": message.text}
        if message.role is Role.ASSISTANT:
            if message.reasoning:
                step["reasoning_content"] = message.reasoning
            if message.calls:
                step["tool_calls"] = [_written_call(call) for call in message.calls]
                calling |= {call.id: step for call in message.calls}
            turn = asked.get(number)
            if turn is None:
                step["is_copied_context"] = True  # given by the task: the model did not say it here
            else:
                step |= {"llm_call_count": 1, "extra": {OWN: {"turn": turn}}}
                if turn in turns:
                    step["metrics"] = _metrics(turns[turn])
        steps.append(step)
    return steps


def _observe(steps: list[Json], calling: Mapping[str, Json], message: Message) -> None:
    """Add a tool result to the last step if that step made the call, else as a step of its own."""
    result: Json = {"content": message.text, "extra": {OWN: {"answers": message.answers, "failed": message.failed}}}
    step: Json | None = calling.get(message.answers)
    # only the last step may still get results: a step of its own keeps an order that ATIF cannot express otherwise
    if step is not None and step is steps[-1]:
        result["source_call_id"] = message.answers
    else:
        alone: Json = {"step_id": len(steps) + 1, "source": "user", "message": "", "extra": {OWN: {"result": True}}}
        steps.append(alone)
        step = alone
    step.setdefault("observation", {"results": []})["results"].append(result)


def _metrics(turn: Turn) -> Json:
    return {
        "prompt_tokens": len(turn.prompt_ids),
        "completion_tokens": len(turn.sampled_ids),
        "prompt_token_ids": list(turn.prompt_ids),
        "completion_token_ids": list(turn.sampled_ids),
        "logprobs": list(turn.logprobs),
        "extra": {OWN: {"policies": [[span.policy.number, span.policy.hash, span.tokens] for span in turn.spans]}},
    }


def _written_call(call: ToolCall) -> Json:
    """A tool call. The text of its arguments is kept beside the parsed values, because the text is what the model wrote."""
    own = {"arguments": call.arguments}
    return {"tool_call_id": call.id, "function_name": call.name, "arguments": call.values() or {}, "extra": {OWN: own}}


def _written_change(change: Change) -> Json:
    data = base64.b64encode(change.data).decode()
    return {"path": change.path, "kind": change.kind.value, "base64": data, "executable": change.executable}


def _declared(tool: Tool) -> Json:
    about = {"name": tool.name, "description": tool.description, "parameters": cast("Json", tool.parameters)}
    return {"type": "function", "function": about}
