"""Fuzzes the gateway's routes with arbitrary bodies: each must be answered or refused by name, in good time.

    python -m tests.examinations.fuzz.requests --minutes 10 [--routes chat,responses] [--seed 1]

--minutes is per route. Bodies are those of clients and agents, with parts replaced, removed, duplicated, nested or filled
with other JSON (Hypothesis), and arbitrary bytes; they go through the whole gateway, in memory, in front of a scripted engine. Findings
are a status of 500 or above, an answer that takes longer than LONGEST_S, and an answer that is neither JSON nor a stream. Prints a table
and writes results/fuzz_requests.json; a finding is printed with its body, shrunk by Hypothesis.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from tests.unit.serve.gateway_world import world

from ostinato.testing.engine import FakeEngine

RESULT = Path(__file__).parents[1] / "results" / "fuzz_requests.json"
LONGEST_S = 5.0
ROUND = 300  # bodies between two checks of the clock
CALL = 'Look.\n<tool_call>\n{"name": "read", "arguments": {"path": "a.py"}}\n</tool_call>'
SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string"}},
    "required": ["path"],
    "additionalProperties": False,
}

CHAT = {
    "model": "m", "stream": True, "stream_options": {"include_usage": True}, "n": 2, "temperature": 0.7, "top_p": 1.0, "seed": 7,
    "stop": ["x"], "max_tokens": 20, "logprobs": True, "top_logprobs": 2, "presence_penalty": 0.5, "frequency_penalty": 0.1,
    "logit_bias": {"7": 1.0}, "user": "ann", "tool_choice": "auto", "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "tools": [{"type": "function", "function": {"name": "read", "description": "d", "parameters": SCHEMA, "strict": False}}],
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "fix it"}]},
        {"role": "assistant", "content": None, "reasoning_content": "hm",
         "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "read", "arguments": "{\"path\": \"a\"}"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "text"},
        {"role": "user", "content": "go on"},
    ],
}  # fmt: skip
DEMAND = {
    "model": "m", "max_tokens": 20, "messages": [{"role": "user", "content": "hi"}], "tool_choice": "required", "tools": CHAT["tools"],
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
}  # fmt: skip
MESSAGES = {
    "model": "m", "max_tokens": 20, "stream": True, "temperature": 1.0, "stop_sequences": ["x"], "metadata": {"user_id": "ann"},
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
    "thinking": {"type": "disabled"}, "tool_choice": {"type": "auto"},
    "tools": [{"name": "read", "description": "d", "input_schema": SCHEMA}],
    "messages": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "Look."},
            {"type": "tool_use", "id": "t1", "name": "read", "input": {"path": "a"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "is_error": False, "content": [{"type": "text", "text": "x"}]},
            {"type": "text", "text": "go on"}]},
    ],
}  # fmt: skip
RESPONSES = {
    "model": "m", "instructions": "s", "stream": True, "max_output_tokens": 20, "store": True, "include": ["reasoning.encrypted_content"],
    "tool_choice": "auto", "parallel_tool_calls": False, "text": {"format": {"type": "text"}, "verbosity": "low"}, "metadata": {"a": "b"},
    "previous_response_id": None, "user": "ann",
    "tools": [{"type": "function", "name": "read", "parameters": SCHEMA, "strict": False},
              {"type": "custom", "name": "exec", "description": "d", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}}],
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "r"}]},
        {"role": "user", "content": "a"},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "id": "fc", "call_id": "c1", "name": "read", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "x"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "exec", "input": "y"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "z"}]},
    ],
}  # fmt: skip
COMPLETIONS = {
    "model": "m",
    "prompt": "once",
    "max_tokens": 5,
    "n": 2,
    "stream": False,
    "logprobs": 2,
    "stop": "x",
    "echo": False,
}
FEEDBACK = [
    {"id": "s1", "target": "chatcmpl-3f:0", "name": "accepted", "value": True, "source": "human", "occurred_at": "2026-01-31T12:00:00Z",
     "comment": "c", "correction": "d"},
    {"id": "s2", "target": "call_chatcmpl-3f_0_0", "name": "undone", "source": "code", "retracts": "s1"},
]  # fmt: skip
ATTRIBUTES = [
    {"key": "event.name", "value": {"stringValue": "tool_decision"}},
    {"key": "decision", "value": {"stringValue": "accept"}},
    {"key": "tool_use_id", "value": {"stringValue": "call_chatcmpl-3f_0_0"}},
    {
        "key": "list",
        "value": {"arrayValue": {"values": [{"intValue": "7"}, {"doubleValue": 0.5}, {"boolValue": True}]}},
    },
]
LOGS = {"resourceLogs": [{"resource": {"attributes": ATTRIBUTES}, "scopeLogs": [{"logRecords": [
    {"timeUnixNano": "1", "body": {"stringValue": "claude_code.tool_decision"}, "attributes": ATTRIBUTES}]}]}]}  # fmt: skip
TRACES = {"resourceSpans": [{"scopeSpans": [{"spans": [
    {"traceId": "5b8efff798038103d269b633813fc60c", "spanId": "eee19b7ec3c1b174", "name": "execute_tool", "startTimeUnixNano": "1",
     "endTimeUnixNano": "2", "attributes": ATTRIBUTES, "status": {"code": 2},
     "events": [{"timeUnixNano": "1", "name": "gen_ai.evaluation.result", "attributes": ATTRIBUTES}]}]}]}]}  # fmt: skip
ROUTES: dict[str, tuple[str, list[Any]]] = {
    "chat": ("/v1/chat/completions", [CHAT, DEMAND]),
    "messages": ("/v1/messages", [MESSAGES]),
    "count": ("/v1/messages/count_tokens", [MESSAGES]),
    "responses": ("/v1/responses", [RESPONSES]),
    "completions": ("/v1/completions", [COMPLETIONS]),
    "feedback": ("/v1/feedback", [FEEDBACK, FEEDBACK[0]]),
    "logs": ("/v1/logs", [LOGS]),
    "traces": ("/v1/traces", [TRACES]),
}
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
NASTY = st.sampled_from(
    [
        "",
        "\ud800",
        "\x00",
        "</tool_call>",
        "<|im_end|>",
        "a" * 5000,
        -1,
        0,
        1 << 70,
        1e308,
        [],
        {},
        [[]] * 40,
        {"$ref": "#"},
        "(a+)+$",
    ]
)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all parts of a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(path for key, part in inner for path in places(part, (*at, key)))]


@st.composite
def bodies(draw: Any, examples: list[Any]) -> Any:
    """An example with a few of its parts changed."""
    body = copy.deepcopy(draw(st.sampled_from(examples)))
    for _ in range(draw(st.integers(0, 4))):
        path, new = draw(st.sampled_from(places(body))), copy.deepcopy(draw(NASTY | VALUES))
        if path:
            change(draw, body, path, new)
        elif draw(st.booleans()):
            return new
    return body


def change(draw: Any, body: Any, path: tuple[Any, ...], new: Any) -> None:
    """Change the part of a body at a path."""
    *before, key = path
    holder = reduce(getitem, before, body)
    match draw(st.sampled_from(["replace", "drop", "double", "nest", "add"])):
        case "replace":
            holder[key] = new
        case "drop":
            del holder[key]
        case "double" if isinstance(holder, list):
            holder.extend(copy.deepcopy(holder[key]) for _ in range(draw(st.integers(1, 30))))
        case "nest":
            for _ in range(draw(st.integers(1, 80))):
                holder[key] = [holder[key]] if isinstance(new, list) else {"a": holder[key]}
        case _:
            if isinstance(holder, dict):
                holder[draw(st.text(max_size=8))] = new


class Gateway:
    """A gateway on a thread of its own. `post` returns status and content type, or raises TimeoutError."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._ready, self._stop = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Gateway:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._live())

    async def _live(self) -> None:
        quota = {"calls_per_s": 1e9, "burst": 1e9, "events_per_s": 1e9, "bytes_per_s": 1e12}
        async with world(engine=FakeEngine(lambda _: CALL), quota=quota, next_message=True) as w:
            self._world = w
            self._ready.set()
            await self._stop.wait()

    def post(self, path: str, data: bytes) -> tuple[int, str]:
        async def send() -> tuple[int, str]:
            self._world.log.rows.clear()  # the rows would fill the memory
            reply = await self._world.http.post(path, content=data, headers={"content-type": "application/json"})
            return reply.status_code, reply.headers.get("content-type", "")

        return asyncio.run_coroutine_threadsafe(send(), self._loop).result(LONGEST_S)


def campaign(gateway: Gateway, name: str, minutes: float, start: int, tick: Callable[[float], None]) -> dict[str, Any]:
    """Fuzz one route. Returns its counts by status and the slowest answer in seconds. Raises AssertionError for a finding."""
    path, examples = ROUTES[name]
    statuses, longest, slowest, began, round = Counter[int](), 0.0, b"", time.monotonic(), start
    while time.monotonic() - began < 60 * minutes:

        @settings(max_examples=ROUND, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @seed(round)
        @given(bodies(examples).map(lambda body: json.dumps(body).encode()) | st.binary(max_size=200))
        def run(data: bytes) -> None:
            nonlocal longest, slowest
            sent = time.monotonic()
            status, kind = gateway.post(path, data)
            longest, slowest = max((longest, slowest), (time.monotonic() - sent, data))
            statuses[status] += 1
            assert status < 500, f"{path} answers {status} to {data!r}"
            assert kind.startswith(("application/json", "text/event-stream")), f"{path} answers {kind!r} to {data!r}"

        run()
        round += 1
        tick(time.monotonic() - began)
    told = {str(status): count for status, count in sorted(statuses.items())}
    found = {"minutes": minutes, "bodies": statuses.total(), "statuses": told, "longest_s": float(f"{longest:.3f}")}
    return found | {"slowest": [len(slowest), slowest[:300].decode(errors="replace")]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="for each route")
    parser.add_argument("--routes", default=",".join(ROUTES))
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    console, found = Console(), dict[str, Any]()
    with Gateway() as gateway, Progress(console=console) as progress:
        for name in args.routes.split(","):
            task = progress.add_task(name, total=60 * args.minutes)
            found[name] = campaign(
                gateway, name, args.minutes, args.seed, lambda done, task=task: progress.update(task, completed=done)
            )
            known = json.loads(RESULT.read_text()) if RESULT.exists() else {}
            RESULT.write_text(json.dumps(known | found, indent=1) + "\n")
    table = Table("route", "bodies", "statuses", "longest s")
    for name, row in found.items():
        table.add_row(name, str(row["bodies"]), str(row["statuses"]), str(row["longest_s"]))
    console.print(table)


if __name__ == "__main__":
    main()
