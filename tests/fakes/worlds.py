"""A model that says what a script says, and a sandbox that is a dictionary: for tests of harnesses."""

import asyncio
import itertools
import json

from ostinato.core.conversation import Message, Role, ToolCall, call_id
from ostinato.core.errors import BadRequest, NotFound, TooLarge, Unavailable
from ostinato.core.sandboxing import Change, ChangeKind, ExecResult
from ostinato.worlds.harness.rollout import Answered


def says(text="", *calls, finish="stop"):
    """An answer: text, and calls as (tool, arguments), where arguments that are text stand as they are."""
    return text, calls, finish


class ScriptedModel:
    """Answers in turn; an exception is raised, an event is waited for. `asked` are the questions."""

    def __init__(self, *script):
        self.script = list(script)
        self.asked = []

    async def ask(self, messages, tools=(), *, max_tokens, stop=()):
        number = len(self.asked)
        self.asked.append((tuple(messages), tuple(tools), max_tokens, tuple(stop)))
        say = self.script[number]
        if isinstance(say, Exception):
            raise say
        if isinstance(say, asyncio.Event):
            await say.wait()
        text, calls, finish = say
        turn = f"chatcmpl-{number:x}:0"
        made = tuple(
            ToolCall(id=call_id(turn, k), name=name, arguments=given if isinstance(given, str) else json.dumps(given))
            for k, (name, given) in enumerate(calls)
        )
        message = Message(role=Role.ASSISTANT, text=text, calls=made)
        return Answered(turn=turn, message=message, finish=finish, prompt_tokens=10, tokens=5)


class DictSandbox:
    """Files in memory. `run(argv, files, stdin)` stands for programs: the exit code and what is printed."""

    def __init__(self, files=(), run=lambda argv, files, stdin: (0, b"")):
        self.before = dict(files)
        self.files = dict(files)
        self.run = run
        self.ran = []
        self.gone = False

    def _check(self, path):
        if self.gone:
            raise Unavailable("the sandbox is gone")
        if path.startswith("/") or ".." in path.split("/"):
            raise BadRequest(f"{path!r} lies outside of the working directory", field="path")

    async def exec(self, argv, *, stdin=b"", cwd=None, env=None, timeout):
        self._check("")
        self.ran.append((list(argv), dict(env or {}), timeout))
        told = self.run(list(argv), self.files, stdin)
        code, out = await told if asyncio.iscoroutine(told) else told
        reason = code if isinstance(code, str) else None
        return ExecResult(
            code=-9 if reason else code,
            stdout=out,
            stderr=b"",
            timed_out=reason == "timeout",
            killed_reason=reason,
            seconds=0.01,
        )

    async def read(self, path, *, most=1 << 20):
        self._check(path)
        if path not in self.files:
            raise NotFound(f"no file {path!r}")
        if len(self.files[path]) > most:
            raise TooLarge(f"{path!r} is larger than {most} bytes")
        return self.files[path]

    async def write(self, path, data):
        self._check(path)
        self.files[path] = data

    async def fork(self, count):
        return [DictSandbox(self.files, self.run) for _ in range(count)]

    async def diff(self):
        self._check("")
        written = [path for path in self.files if self.files[path] != self.before.get(path)]
        gone = [path for path in self.before if path not in self.files]
        return [Change(path=path, kind=ChangeKind.WRITTEN, data=self.files[path]) for path in sorted(written)] + [
            Change(path=path, kind=ChangeKind.DELETED) for path in sorted(gone)
        ]

    async def stop(self):
        self.gone = True


def unanswered(messages):
    """The calls in a conversation that no tool's message answers."""
    calls = list(itertools.chain.from_iterable(message.calls for message in messages))
    answered = [message.answers for message in messages if message.role is Role.TOOL]
    return [call for call in calls if answered.count(call.id) != 1]
