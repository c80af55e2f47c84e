"""How to run each agent, and the answers of a policy that solves the task with it."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

TASK = "Fix calc.py so that the tests pass."
FIXED = "sed -i 's/a - b/a + b/' calc.py"
TEST = "python -m pytest -q"


@dataclass(frozen=True)
class Agent:
    """One agent. `script` finishes its installation by npm ("" if nothing remains to be done, None if the agent comes from PyPI)."""

    name: str
    package: str
    command: tuple[str, ...]
    steps: Callable[[Path], list[str]]
    script: str | None = None
    uses_tools: bool = True


def call(name, **arguments):
    """A call as the model writes it, in a layout that no agent uses."""
    return f"On it.\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, indent=1)}\n</tool_call>"


def claude_steps(repo):
    path = str(repo / "calc.py")
    return [
        call("Read", file_path=path),
        call("Edit", old_string="a - b", new_string="a + b", file_path=path),
        call("Bash", command=TEST, timeout=60000.0),
    ]


def codex_steps(repo):
    return [call("exec_command", cmd=cmd) for cmd in ("cat calc.py", FIXED, TEST)]


def opencode_steps(repo):
    path = str(repo / "calc.py")
    return [
        call("read", filePath=path),
        call("edit", filePath=path, oldString="a - b", newString="a + b"),
        call("bash", command=TEST, description="run the tests"),
    ]


def qwen_steps(repo):
    path = str(repo / "calc.py")
    return [
        call("read_file", file_path=path),
        call("edit", file_path=path, old_string="a - b", new_string="a + b"),
        call("run_shell_command", command=TEST, is_background=False),
    ]


def mini_steps(repo):
    return [call("bash", command=cmd) for cmd in ("cat calc.py", FIXED, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")]


def aider_steps(repo):
    block = "<<<<<<< SEARCH\n    return a - b\n=======\n    return a + b\n>>>>>>> REPLACE"
    return [f"It subtracts.\n\ncalc.py\n```python\n{block}\n```\n"]


AGENTS = [
    Agent(
        name="claude-code",
        package="@anthropic-ai/claude-code@2.1.330",
        script="node_modules/@anthropic-ai/claude-code/install.cjs",
        command=("claude", "-p", TASK, "--dangerously-skip-permissions"),
        steps=claude_steps,
    ),
    Agent(
        name="codex",
        package="@openai/codex@0.169.0",
        script="",
        command=("codex", "exec", "--dangerously-bypass-approvals-and-sandbox", TASK),
        steps=codex_steps,
    ),
    Agent(
        name="opencode",
        package="opencode-ai@1.18.33",
        script="node_modules/opencode-ai/postinstall.mjs",
        command=("opencode", "run", TASK),
        steps=opencode_steps,
    ),
    Agent(
        name="qwen-code",
        package="@qwen-code/qwen-code@0.24.4",
        script="",
        command=("qwen", "-p", TASK, "--yolo"),
        steps=qwen_steps,
    ),
    Agent(
        name="mini-swe-agent",
        package="mini-swe-agent==2.4.6 mcp",
        command=("mini", "-y", "--exit-immediately", "-t", TASK),
        steps=mini_steps,
    ),
    Agent(
        name="aider",
        package="aider-chat==0.86.2",
        command=(
            "aider",
            "--yes-always",
            "--edit-format",
            "diff",
            "--no-show-model-warnings",
            "--message",
            TASK,
            "calc.py",
        ),
        steps=aider_steps,
        uses_tools=False,
    ),
]
