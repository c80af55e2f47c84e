"""The requests that cost a gateway the most for their size: by route, a name and a body of at most 2 MiB and 100,000 values."""

import json

from ostinato.serve.dialects.compaction_blocks import packed_token

N = 99_000  # values, of the 100,000 that a body may have
LONG = 2_000_000  # bytes, of the 2 MiB
USER = [{"role": "user", "content": "hi"}]
FUNCTION = {"name": "read", "parameters": {"type": "object", "properties": {}}}
CHATS = ("/v1/chat/completions", "/v1/messages", "/v1/responses")
COUNT = "/v1/messages/count_tokens"
LOGS = "/v1/logs"


def bodies():
    """(path, name, body) of each."""
    wide = {f"k{number}": 1 for number in range(5_000)}
    yield from _lists(wide)
    yield from _histories(wide)
    yield from _tools(wide)
    yield from _feedback(wide)


def _lists(wide):
    fields = {
        "/v1/chat/completions": (
            ("stop", "tools", "messages"),
            ("logit_bias", "metadata", "stream_options", "tool_choice", "response_format"),
        ),
        "/v1/completions": (("stop", "prompt"), ("logit_bias", "stream_options")),
        "/v1/messages": (("stop_sequences", "tools", "system", "messages"), ("metadata", "tool_choice", "thinking")),
        "/v1/responses": (("tools", "include", "input"), ("metadata", "tool_choice", "text")),
        "/v1/responses/compact": (("input",), ("metadata",)),
        COUNT: (("tools", "system", "messages"), ("tool_choice", "thinking")),
    }
    for path, (lists, objects) in fields.items():
        base = _asked(path)
        for field in lists:
            yield path, f"{field}: numbers", base | {field: [0.5] * N}
            yield path, f"{field}: texts", base | {field: ["x"] * N}
            yield path, f"{field}: empty objects", base | {field: [{}] * (N // 3)}
        for field in objects:
            yield path, f"{field}: wide", base | {field: wide}
        yield path, "unknown fields", base | wide
        yield path, "digits", base | {"temperature": 10**90}
    yield "/v1/completions", "prompt: ids", _asked("/v1/completions") | {"prompt": [65] * N}
    yield "/v1/completions", "prompt: a text", _asked("/v1/completions") | {"prompt": "ab " * (LONG // 3)}
    yield "/v1/completions", "prompt: a text that fits", _asked("/v1/completions") | {"prompt": "ab " * 20_000}


def _histories(wide):
    field = {"/v1/responses": "input"}
    for path in (*CHATS, COUNT):
        base, messages = _asked(path), field.get(path, "messages")

        def asked(said, base=base, messages=messages):
            return base | {messages: said}

        yield (
            path,
            "4,000 short messages",
            asked([{"role": ("user", "assistant")[n % 2], "content": "x"} for n in range(3_999)]),
        )
        yield path, "4,000 bad messages", asked([{"role": "user", "x": 1}] * 4_000)
        yield path, "a wide message", asked([{"role": "user", "content": "hi", **wide}])
        yield path, "one long text", asked([{"role": "user", "content": "word " * (LONG // 5)}])
        yield path, "a text of 60,000", asked([{"role": "user", "content": "word " * 12_000}])
        yield path, "digits", asked([{"role": "user", "content": "7" * 60_000}])
        yield path, "parts", asked([{"role": "user", "content": [{"type": _kind(path), "text": "x"}] * 30_000}])
        yield path, "bad parts", asked([{"role": "user", "content": [1] * N}])
        yield path, "control characters", asked([{"role": "user", "content": "\x00" * 60_000}])
    for name, arguments in (
        ("a JSON list of lists", '{"a":[' + ",".join(["[]"] * 500_000) + "]}"),
        ("deep JSON", '{"a":' + "[" * 100_000 + "]" * 100_000 + "}"),
        ("wide JSON", json.dumps({f"k{n}": 1.0 for n in range(100_000)})),
        ("long text", json.dumps({"text": "x" * 1_500_000})),
        ("broken", "{" * 1_000_000),
    ):
        calls = [{"id": "c1", "type": "function", "function": {"name": "read", "arguments": arguments}}]
        history = [*USER, {"role": "assistant", "content": None, "tool_calls": calls}]
        history += [{"role": "tool", "tool_call_id": "c1", "content": "ok"}]
        yield CHATS[0], f"arguments: {name}", _asked(CHATS[0]) | {"messages": history}
        items = [{"role": "user", "content": "hi"}]
        items += [{"type": "function_call", "call_id": "c1", "name": "read", "arguments": arguments}]
        items += [{"type": "function_call_output", "call_id": "c1", "output": "ok"}]
        yield CHATS[2], f"arguments: {name}", _asked(CHATS[2]) | {"input": items}
    for name, token in (
        ("long", "eyJh" * 350_000),
        ("wide", packed_token(wide, b"")),
        ("deep", packed_token({"a": "[" * N}, b"")),
    ):
        block = {"type": "compaction", "encrypted_content": token}
        for path in (CHATS[2], "/v1/responses/compact"):
            yield path, f"a block: {name}", _asked(path) | {"input": [block, *USER]}
        block = {"type": "compaction", "content": "x", "encrypted_content": token}
        history = [{"role": "user", "content": [block, {"type": "text", "text": "hi"}]}]
        yield CHATS[1], f"a block: {name}", _asked(CHATS[1]) | {"messages": history}
    for name, given in (("wide", wide), ("lists", {"a": [[]] * (N // 2)})):
        use = {"type": "tool_use", "id": "c1", "name": "read", "input": given}
        result = {"type": "tool_result", "tool_use_id": "c1", "content": "ok"}
        history = [*USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
        for path in ("/v1/messages", COUNT):
            yield path, f"arguments: {name}", _asked(path) | {"messages": history}


def _tools(wide):
    schema = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(N // 5)}}
    many = [FUNCTION | {"name": f"f{n}", "description": "x" * 1_000} for n in range(1_000)]
    for name, functions in (("a wide schema", [FUNCTION | {"parameters": schema}]), ("a thousand", many)):
        yield (
            CHATS[0],
            f"tools: {name}",
            _asked(CHATS[0]) | {"tools": [{"type": "function", "function": each} for each in functions]},
        )
        yield (
            CHATS[2],
            f"tools: {name}",
            _asked(CHATS[2]) | {"tools": [{"type": "function", **each} for each in functions]},
        )
        for path in ("/v1/messages", COUNT):
            tools = [
                {"name": each["name"], "description": each.get("description", ""), "input_schema": each["parameters"]}
                for each in functions
            ]
            yield path, f"tools: {name}", _asked(path) | {"tools": tools}
    yield CHATS[0], "tools: bad", _asked(CHATS[0]) | {"tools": [{"type": "function", "x": 1}] * 1_000}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    yield CHATS[0], "a form with a wide schema", _asked(CHATS[0]) | {"response_format": form}


def _feedback(wide):
    event = {"target": "chatcmpl-0:0", "name": "accepted", "value": 1.0}
    yield "/v1/feedback", "a thousand events", [event] * 1_000
    yield "/v1/feedback", "long comments", [event | {"comment": "x" * 60_000, "correction": "y" * 60_000}] * 16
    yield "/v1/feedback", "invisible comments", [event | {"comment": "\u200b" * 60_000}] * 10
    yield "/v1/feedback", "bad events", [{}] * 1_000
    yield "/v1/feedback", "a wide event", event | wide
    yield "/v1/feedback", "numbers", [1] * N
    text = {"stringValue": "x"}
    many = [{"key": f"k{n}", "value": text} for n in range(N // 4)]
    record = {"body": text, "attributes": many}
    yield LOGS, "a wide record", {"resourceLogs": [{"scopeLogs": [{"logRecords": [record]}]}]}
    yield LOGS, "many records", {"resourceLogs": [{"scopeLogs": [{"logRecords": [{"body": text}] * 20_000}]}]}
    deep = {"stringValue": "x"}
    for _ in range(25):
        deep = {"arrayValue": {"values": [deep]}}
    yield LOGS, "deep values", {"resourceLogs": [{"scopeLogs": [{"logRecords": [{"body": deep}] * 300}]}]}


def _asked(path):
    if path == "/v1/completions":
        return {"model": "m", "max_tokens": 4, "prompt": "x"}
    if path == "/v1/responses/compact":
        return {"model": "m", "input": "hi"}
    if path == "/v1/responses":
        return {"model": "m", "max_output_tokens": 4, "input": "hi"}
    return {"model": "m", "messages": USER} | ({} if path == COUNT else {"max_tokens": 4})


def _kind(path):
    return "input_text" if path == "/v1/responses" else "text"
