"""Unmodified coding agents run out of room: their requests for a summary are told from the task when they arrive, and the window that
begins with one goes on with its episode. Needs the agents: `make agents`.
"""

import json
from dataclasses import replace

import pytest
from tests.agents.running import AGENTS, call
from tests.agents.solving import HOME, installed, solve

from ostinato.core.records import Branch, Purpose, Turn
from ostinato.serve.calls.compaction import SUMMARY_PROMPTS
from ostinato.testing.engine import FakeEngine, decode
from ostinato.testing.renderer import ByteRenderer

CONTEXT = 4_000_000
FACTS = "\n".join(
    f"{i}. The function read_{i} in parser_{i}.py returns None where it should raise an error." for i in range(8)
)
SUMMARY = f"<analysis>We looked.</analysis>\n<summary>\n{FACTS}\n</summary>"
LONG = "seq 1 2500"  # prints 11 KB, more than the agents' thresholds below leave free
THEN = "Thank you. And now?"
AIDER = ("aider", "--yes-always", "--no-show-model-warnings")
AUTO = {  # what is answered until they summarise by themselves
    "codex": [call("exec_command", cmd=command) for command in (LONG, "true")],
    "opencode": [call("bash", command=LONG, description="count")],
}
COMMANDS = {  # the task; what makes the agent summarise; what goes on from the summary
    "claude-code": [
        ("claude", "-p", "Say hello.", "--dangerously-skip-permissions"),
        ("claude", "-c", "-p", "/compact", "--dangerously-skip-permissions"),
        ("claude", "-c", "-p", THEN, "--dangerously-skip-permissions"),
    ],
    "codex": [
        (
            "codex",
            "exec",
            "--dangerously-bypass-approvals-and-sandbox",
            "-c",
            "model_auto_compact_token_limit=44000",
            "Count.",
        )
    ],
    "opencode": [("opencode", "run", "Count.")],
    "qwen-code": [
        ("qwen", "-p", "Say hello.", "--yolo"),
        ("qwen", "-c", "-p", "/compress", "--yolo"),
        ("qwen", "-c", "-p", THEN, "--yolo"),
    ],
    "aider": [
        (*AIDER, "--message", "Say hello.", "calc.py"),
        (*AIDER, "--restore-chat-history", "--max-chat-history-tokens", "5", "--message", THEN, "calc.py"),
    ],
}
LINKED = ("claude-code", "codex", "opencode")  # the others name no session, and move or reword the summary


@pytest.fixture(params=[agent for agent in AGENTS if agent.name in COMMANDS], ids=lambda agent: agent.name)
def forgetful(request):
    if not installed(request.param):
        pytest.skip("needs the agents: make agents")
    return request.param


def small(home, agent):
    """Settings under which opencode has little room: it takes its window from them."""
    if agent.name != "opencode":
        return
    (path,) = home.rglob("opencode.json")
    told = json.loads(path.read_text())
    told["provider"]["ostinato"]["models"]["m"]["limit"] = {"context": 42_000, "output": 4_000}
    path.write_text(json.dumps(told))


async def test_an_agents_summary_is_recognised_when_its_request_arrives(forgetful, repo, home):
    asked, steps = [], AUTO.get(forgetful.name, [])

    def script(request):
        text = decode(request.prompt_ids)
        asked.append(text)
        if any(
            words in text
            for prompt in SUMMARY_PROMPTS
            for words in (prompt.ends, prompt.begins or prompt.system)
            if words
        ):
            return SUMMARY if "state_snapshot" not in text else f"<state_snapshot>\n{FACTS}\n</state_snapshot>"
        ours = sum("</tools>" in said for said in asked)
        return steps[ours - 1] if "</tools>" in text and ours <= len(steps) else "Hello."

    engine, renderer = FakeEngine(script, context=CONTEXT), ByteRenderer(context=CONTEXT)
    agents = [replace(forgetful, command=command) for command in COMMANDS[forgetful.name]]
    log, refused = await solve(agents, repo, home, engine, renderer, settings=small)
    assert refused == []
    turns = [row for row in log.rows if isinstance(row, Turn)]
    summaries = [turn for turn in turns if turn.purpose is Purpose.COMPACTION]
    assert len(summaries) == 1
    assert FACTS in summaries[0].text
    after = turns[turns.index(summaries[0]) + 1 :]
    assert after
    if forgetful.name in LINKED:
        window = after[0].window
        assert window is not None
        assert (after[0].branch, window.begins_with) == (Branch.COMPACTED, summaries[0].id)


PACKAGES = {
    "Claude": "node_modules/@anthropic-ai/claude-code-linux-x64/claude",
    "Codex": "node_modules/@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl/bin/codex",
    "opencode": "node_modules/opencode-linux-x64/bin/opencode",
    "qwen-code": "node_modules/@qwen-code/qwen-code/chunks",
    "aider": "aider/lib",
}


@pytest.mark.parametrize("name", PACKAGES)
def test_the_words_by_which_a_summary_is_told_stand_in_the_agents_package(name):
    place = HOME / PACKAGES[name]
    if not place.exists():
        pytest.skip("needs the agents: make agents")
    files = [place] if place.is_file() else [*place.rglob("*.js"), *place.rglob("aider/prompts.py")]
    text = b"\n".join(path.read_bytes() for path in files)
    words = [text_of for prompt in SUMMARY_PROMPTS if prompt.agent.startswith(name) for text_of in wanted(prompt)]
    assert words
    assert [found for found in words if found.encode() not in text] == []


def wanted(prompt):
    """Its words, each line apart; what the agent puts together from several texts is looked for piece by piece."""
    lines = [line for part in (prompt.system, prompt.begins, prompt.holds, prompt.ends) for line in part.splitlines()]
    return [piece for line in lines for piece in line.replace("ONLY. Do", "ONLY\x00Do").split("\x00") if piece]
