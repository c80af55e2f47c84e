"""The cost of a dialect: from an agent's call as JSON to the ids of a prompt whose prefix is known, and from an answer with a call to JSON.

    python -m benchmarks.serving.dialects [--repeats 200]

One thread, without HTTP, engine and log: parsing and typing the body, recognising the conversation, rendering its new part, parsing the
answer, writing it, remembering the turn. As with an agent, each call continues the one before. The body holds a system prompt, tools and
a history of a given number of bytes. The tokenizer is SmolLM2's; its template knows no tools, so the prompt holds them as text. Writes
benchmarks/results/dialects.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.contender import RESULTS, machine

from ostinato.core.records import Arm, Finish, PolicyVersion, Sampling, Span, Turn
from ostinato.model.load import resolve
from ostinato.model.renderer import HFRenderer
from ostinato.serve.calls.caller import ROUTES
from ostinato.serve.calls.conversations import AnswerParser, ConversationScope, Sessions, chain_of
from ostinato.serve.config import ServeConfig
from ostinato.serve.dialects.dialect import Counts, Heading, Tokens, Whole
from ostinato.serve.dialects.items import ItemCache
from ostinato.serve.wire.body import parse_json

SIZES = (3_000, 80_000)
LINE = "    the handler reads the request, checks the key and writes the answer\n"
ARGUMENTS = {"path": "src/handler.py", "text": LINE * 4}
ANSWER = f"Let me write it.\n<tool_call>\n{json.dumps({'name': 'write', 'arguments': ARGUMENTS})}\n</tool_call>"
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}}
SCOPE = ConversationScope(tenant="default", user="u42", arm="live")
POLICY = PolicyVersion(number=0, hash="none")


def messages_body(history: list[dict[str, Any]]) -> dict[str, Any]:
    tools = [{"name": "write", "description": "Write a file.", "input_schema": SCHEMA}]
    return {"model": "m", "max_tokens": 1000, "system": LINE * 10, "tools": tools, "messages": history, "stream": True}


def messages_more(answer: dict[str, Any]) -> list[dict[str, Any]]:
    use = next(block for block in answer["content"] if block["type"] == "tool_use")
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "written\n" + LINE}
    return [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]


def chat_body(history: list[dict[str, Any]]) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": "write", "parameters": SCHEMA}}]
    return {"model": "m", "tools": tools, "messages": [{"role": "system", "content": LINE * 10}, *history]}


def chat_more(answer: dict[str, Any]) -> list[dict[str, Any]]:
    said = answer["choices"][0]["message"]
    kept = {name: said[name] for name in ("role", "content", "tool_calls")}
    return [kept, {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "written\n" + LINE}]


def responses_body(history: list[dict[str, Any]]) -> dict[str, Any]:
    tools = [{"type": "function", "name": "write", "parameters": SCHEMA, "strict": False}]
    return {"model": "m", "instructions": LINE * 10, "tools": tools, "input": history}


def responses_more(answer: dict[str, Any]) -> list[dict[str, Any]]:
    output: list[dict[str, Any]] = answer["output"]
    call = output[-1]["call_id"]
    return [*output, {"type": "function_call_output", "call_id": call, "output": "written\n" + LINE}]


Shape = tuple[Callable[[list[dict[str, Any]]], dict[str, Any]], Callable[[dict[str, Any]], list[dict[str, Any]]]]
SHAPES: dict[str, Shape] = {
    "/v1/chat/completions": (chat_body, chat_more),
    "/v1/messages": (messages_body, messages_more),
    "/v1/responses": (responses_body, responses_more),
}


class Known:
    """What a gateway keeps of a tenant's conversations, with its default bounds."""

    def __init__(self, renderer: HFRenderer) -> None:
        config = ServeConfig()
        self.items = ItemCache(config.history_bytes)
        self.sessions = Sessions(renderer, budget=10_000_000)


def one_call(number: int, route: Any, known: Known, renderer: HFRenderer, data: bytes) -> tuple[bytes, Turn]:
    """Process one call. Returns the body of its answer, and its turn."""
    sessions = known.sessions
    request = route.parse(parse_json(data, depth=64, values=1_000_000), known.items)
    question = sessions.look(SCOPE, request.conversation, chain_of(SCOPE, request.conversation))
    prompt = sessions.render(question)
    ids = (*_sampled(renderer), min(renderer.stop_ids()))
    turn = Turn(
        id=f"{route.kind}-{number:032x}:0", episode="e", parent=prompt.parent, user="u42", tenant="default",
        arm=Arm.LIVE, propensity=1.0, prompt_ids=prompt.ids, sampled_ids=ids, logprobs=(-1.0,) * len(ids),
        spans=(Span(policy=POLICY, tokens=len(ids)),), sampling=Sampling(max_tokens=1000), finish=Finish.TOOL_CALLS,
        text=ANSWER, started_at=0.0, ended_at=0.0,
    )  # fmt: skip
    reading = AnswerParser(renderer.reader(request.conversation, turn.id))
    for start in range(0, len(ANSWER), 4):
        reading.take(ANSWER[start : start + 4], last=start + 4 >= len(ANSWER))
    counts = Counts(prompt=len(prompt.ids), answer=len(ids))
    heading = Heading(
        id=turn.id.removesuffix(":0"), created=0.0, model="m", choices=1, prompt_tokens=counts.prompt, count_usage=False
    )
    whole = Whole(message=reading.message(), tokens=Tokens(ids, turn.logprobs), finish=turn.finish)
    body = route.writer(request, heading, None).body([whole], counts, {"turns": [turn.id]})
    sessions.remember(question, turn, reading.message())
    return body, turn


_KEPT: list[int] = []


def _sampled(renderer: HFRenderer) -> list[int]:
    """The answer's ids, which an engine would have sampled."""
    if not _KEPT:
        _KEPT.extend(renderer.encode(ANSWER))
    return _KEPT


def measure(path: str, size: int, repeats: int, renderer: HFRenderer) -> dict[str, float]:
    """Times of calls of about this size, from growing conversations: `size` bytes, and up to 1,000 bytes or a quarter more."""
    route = next(route for route in ROUTES if route.path == path)
    make, more = SHAPES[path]
    seconds: list[float] = []
    number, reused = 0, 0
    while len(seconds) < repeats:
        known = Known(renderer)
        history: list[dict[str, Any]] = [{"role": "user", "content": LINE}]
        data = json.dumps(make(history)).encode()
        while len(data) < max(1.25 * size, size + 1000):
            number += 1
            began = time.perf_counter()
            answer, turn = one_call(number, route, known, renderer, data)
            took = time.perf_counter() - began
            if len(data) >= size:
                seconds.append(took)
                reused += turn.parent is not None
            history += more(json.loads(answer))
            data = json.dumps(make(history)).encode()
    ordered = sorted(seconds)
    return {
        "calls": len(ordered),
        "continued": reused,
        "p50_ms": 1e3 * statistics.median(ordered),
        "p99_ms": 1e3 * ordered[int(0.99 * (len(ordered) - 1))],
        "calls_per_s": len(ordered) / sum(ordered),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "ostinato")
    parser.add_argument("--out", type=Path, default=RESULTS / "dialects.json")
    args = parser.parse_args()
    renderer = HFRenderer(resolve("smollm2", args.cache))
    table: dict[str, Any] = {"machine": machine()}
    for path in SHAPES:
        for size in SIZES:
            row = table[f"{path} {size}"] = measure(path, size, args.repeats, renderer)
            print(
                f"{path:22} {size:6} bytes  p50 {row['p50_ms']:6.2f} ms  p99 {row['p99_ms']:6.2f} ms  "
                f"{row['calls_per_s']:6.0f} calls/s  {row['continued']} of {row['calls']} continued"
            )
    args.out.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
