"""Converts a rollout to ATIF-v1.8 (Agent Trajectory Interchange Format, as in Harbor 0.25.0) and back.

A step is a system, user or agent message; the results of an agent's tool calls are the observation of its step. Data that ATIF has no
field for (why the rollout ended, changed files, turn ids, arguments that are not an object) is under `extra`, with the key "ostinato".
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from ostinato.core.conversation import Message, Role, Tool, ToolCall
from ostinato.core.errors import BadConfig
from ostinato.core.records import Turn
from ostinato.core.sandbox import Change, ChangeKind
from ostinato.worlds.harness.rollout import Ended, Rollout

SCHEMA = "ATIF-v1.8"
OWN = "ostinato"
Json = dict[str, Any]
_SOURCES = {Role.SYSTEM: "system", Role.USER: "user", Role.ASSISTANT: "agent"}
_ROLES = {source: role for role, source in _SOURCES.items()}


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


def rollout_of(trajectory: Any) -> Rollout:
    """The rollout that `atif_of` wrote. Raises BadConfig for another program's trajectory, or an incomplete one."""
    try:
        if trajectory["schema_version"] != SCHEMA:
            raise BadConfig(f"schema_version is {trajectory['schema_version']!r}; {SCHEMA} is read")
        own = trajectory["extra"][OWN]
        return Rollout(
            task=_text(own["task"]),
            harness=_text(trajectory["agent"]["extra"][OWN]["harness"]),
            ended=Ended(own["ended"]),
            messages=tuple(message for step in trajectory["steps"] for message in _messages(step)),
            turns=tuple(_text(turn) for turn in own["turns"]),
            changes=tuple(_read_change(change) for change in own["changes"]),
            effort={_text(name): float(value) for name, value in trajectory["final_metrics"]["extra"][OWN].items()},
            detail=dict(own["detail"]),
        )
    except BadConfig:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise BadConfig(f"the trajectory was not written by Ostinato, or is not whole: {error!r}") from error


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


def _messages(step: Mapping[str, Any]) -> list[Message]:
    found: list[Message] = []
    if not step.get("extra", {}).get(OWN, {}).get("result"):
        calls = tuple(_read_call(call) for call in step.get("tool_calls", ()))
        reasoning = step.get("reasoning_content", "")
        role = _ROLES[step["source"]]
        found.append(Message(role=role, text=_text(step["message"]), reasoning=_text(reasoning), calls=calls))
    for result in step.get("observation", {}).get("results", ()):
        own = result["extra"][OWN]
        answers, failed = _text(own["answers"]), bool(own["failed"])
        found.append(Message(role=Role.TOOL, text=_text(result["content"]), answers=answers, failed=failed))
    return found


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


def _read_call(call: Mapping[str, Any]) -> ToolCall:
    own = call.get("extra", {}).get(OWN)
    arguments = json.dumps(call["arguments"]) if own is None else _text(own["arguments"])
    return ToolCall(id=_text(call["tool_call_id"]), name=_text(call["function_name"]), arguments=arguments)


def _written_change(change: Change) -> Json:
    data = base64.b64encode(change.data).decode()
    return {"path": change.path, "kind": change.kind.value, "base64": data, "executable": change.executable}


def _read_change(change: Mapping[str, Any]) -> Change:
    data = base64.b64decode(_text(change["base64"]), validate=True)
    kind, executable = ChangeKind(change["kind"]), bool(change["executable"])
    return Change(path=_text(change["path"]), kind=kind, data=data, executable=executable)


def _declared(tool: Tool) -> Json:
    about = {"name": tool.name, "description": tool.description, "parameters": cast("Json", tool.parameters)}
    return {"type": "function", "function": about}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise BadConfig(f"the trajectory was not written by Ostinato, or is not whole: {str(value)[:80]!r} is no text")
    return value
