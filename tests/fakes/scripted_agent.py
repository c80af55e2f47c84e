"""A coding agent in a few lines of standard library: it asks the model, runs the calls in its answer, and asks again."""

AGENT = r'''
import json, os, subprocess, sys, urllib.error, urllib.request

BASE, DIALECT, STREAM = os.environ["BASE_URL"], os.environ.get("DIALECT", "chat"), bool(os.environ.get("STREAM"))
PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
SAYS = {"user-agent": "scripted", "authorization": "Bearer none", "x-ostinato-slot": "live",
        "x-ostinato-episode": "another", "x-ostinato-group": "another", "x-ostinato-harness": "another",
        "x-ostinato-key": "guessed-0123456789",
        "content-type": "application/json"}

def send(method, path, body=None, headers=SAYS):
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    asked = urllib.request.Request(BASE + path, data=data, method=method, headers=headers)
    try:
        with urllib.request.urlopen(asked, timeout=300) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()

def ask(items, headers=SAYS, tools=True, **more):
    body = {"model": "mine", "stream": STREAM, "temperature": 0, "top_p": 0.5, **more}
    if DIALECT == "chat":
        body |= {"messages": items, "tools": [{"type": "function", "function": {"name": "bash", "parameters": SCHEMA}}]}
    elif DIALECT == "messages":
        body |= {"messages": items, "max_tokens": 128000, "tools": [{"name": "bash", "input_schema": SCHEMA}]}
    else:
        body |= {"input": items, "tools": [{"type": "function", "name": "bash", "parameters": SCHEMA}]}
    if not tools:
        del body["tools"]
    status, text = send("POST", PATHS[DIALECT], body, headers)
    if status != 200:
        raise SystemExit(f"{status}: {text}")
    return read(text)

def read(text):
    """What goes into the history, and the calls."""
    events = [json.loads(line[5:]) for line in text.splitlines() if line.startswith("data:") and "[DONE]" not in line]
    events = events or [json.loads(text)]
    if DIALECT == "chat":
        said = {"role": "assistant", "content": "", "tool_calls": []}
        for choice in (choice for event in events for choice in event["choices"]):
            part = choice.get("message") or choice.get("delta") or {}
            said["content"] += part.get("content") or ""
            said["tool_calls"] += [{key: call[key] for key in ("id", "type", "function")} for call in part.get("tool_calls") or []]
        calls = [(call["id"], json.loads(call["function"]["arguments"])) for call in said["tool_calls"]]
        if not calls:
            del said["tool_calls"]
        return [said], calls
    if DIALECT == "messages":
        blocks = []
        for event in events:
            if "content" in event:
                blocks = event["content"]
            elif event["type"] == "content_block_start":
                blocks.append(event["content_block"] | {"given": ""})
            elif event["type"] == "content_block_delta":
                blocks[-1]["text"] = blocks[-1].get("text", "") + event["delta"].get("text", "")
                blocks[-1]["given"] += event["delta"].get("partial_json", "")
        for block in blocks:
            given = block.pop("given", "")
            if block["type"] == "tool_use":
                block.pop("text", None)
                block["input"] = json.loads(given) if given else block["input"]
        return [{"role": "assistant", "content": blocks}], [(b["id"], b["input"]) for b in blocks if b["type"] == "tool_use"]
    whole = events[-1].get("response") or events[-1]
    return whole["output"], [(i["call_id"], json.loads(i["arguments"])) for i in whole["output"] if i["type"] == "function_call"]

def told(id, text):
    if DIALECT == "chat":
        return {"role": "tool", "tool_call_id": id, "content": text}
    if DIALECT == "messages":
        return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": id, "content": text}]}
    return {"type": "function_call_output", "call_id": id, "output": text}

def work(prompt):
    items = [{"role": "user", "content": prompt}]
    while True:
        said, calls = ask(items)
        items += said
        if not calls:
            return
        for id, given in calls:
            done = subprocess.run(["sh", "-c", given["command"]], capture_output=True, text=True)
            items.append(told(id, done.stdout + done.stderr))

def main():
    work(sys.argv[1])

if __name__ == "__main__":
    exec(os.environ.get("INSTEAD", "main()"))
'''


def agent_settings(instead="", **more):
    """Settings of `[worlds.harness.agent]` for the scripted agent. `instead`: Python that it runs in place of its work."""
    environment = {"BASE_URL": "{base_url}"} | ({"INSTEAD": instead} if instead else {})
    environment |= more.pop("environment", {})
    command = ["python3", "{home}/agent/main.py", "{prompt}"]
    return {"command": command, "files": {"agent/main.py": AGENT}, "environment": environment, **more}
