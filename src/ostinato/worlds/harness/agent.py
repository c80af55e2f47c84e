"""The harness for third-party agents: their settings, and the agent's process in the sandbox from start to end.

Data flow: task -> command -> process in the sandbox -> loopback port -> relay -> gateway ... -> changed files in the sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path

from blake3 import blake3
from pydantic import BaseModel, Field, field_validator

from ostinato.core.conversation import Message
from ostinato.core.errors import BadConfig, Unavailable
from ostinato.core.records import Purpose
from ostinato.core.sandbox import Change, ExecResult, Limits, SandboxSpec
from ostinato.core.seams import Sandbox
from ostinato.worlds.harness.gateway import GRACE_S, EpisodeModel
from ostinato.worlds.harness.relay import Dialect, ModelRelay
from ostinato.worlds.harness.rollout import Ended, Model, Rollout, harness_hash, timed_out, worked
from ostinato.worlds.tasks.task import Task

HOME = "/tmp"  # the home directory of the programs in every sandbox


class AgentConfig(BaseModel, frozen=True, extra="forbid"):
    """`[worlds.harness.agent]`, or `[worlds.harness.agent-NAME]` for one of several.

    These placeholders are filled in `command`, `environment` and `files`: {prompt} with the task's messages, {base_url} with the address of
    the agent's model, without /v1, {model} with the model's name, {workdir} and {home} with the sandbox's directories.
    """

    command: tuple[str, ...] = Field(
        min_length=1, description="The program and its arguments. It runs in the working directory with an empty stdin."
    )
    environment: dict[str, str] = Field(
        default_factory=dict[str, str], description="Environment variables of the agent, in place of the sandbox's."
    )
    files: dict[str, str] = Field(
        default_factory=dict[str, str],
        description="Files that are written before the agent starts, such as its settings: path below {home} -> text.",
    )
    runtime: dict[str, str] = Field(
        default_factory=dict[str, str],
        description="The agent's installation: path in the sandbox -> directory of this machine, mounted read-only.",
    )
    dialect: Dialect = Field(
        default="chat", description="API that the agent speaks: chat (chat completions), messages or responses."
    )
    version: str = Field(default="", description="The agent's version. Informational, but part of the harness's hash.")
    turns: int = Field(
        default=64, ge=1, description="Most model calls per rollout, or the task's `turns` if that is lower."
    )
    answer_tokens: int = Field(
        default=32768, ge=1, description="Token budget of one rollout: most tokens of all the model's answers together."
    )
    sent_bytes: int = Field(
        default=128 << 20, ge=1024, description="Most bytes of requests that the agent may send in one rollout."
    )
    memory_mb: int = Field(
        default=1024, ge=32, description="Memory of the sandbox in MiB, or the task's limit if that is larger."
    )
    disk_mb: int = Field(
        default=256, ge=1, description="Disk of the sandbox in MiB, or the task's limit if that is larger."
    )
    processes: int = Field(
        default=128, ge=4, description="Most processes and threads, or the task's limit if that is larger."
    )
    open_files: int = Field(
        default=1024, ge=8, le=1024, description="Most open files per process, or the task's limit if that is larger."
    )
    output_bytes: int = Field(
        default=1 << 20,
        ge=1024,
        description="Bytes that the agent may print to stdout or stderr before it is killed.",
    )

    @field_validator("files")
    @classmethod
    def _check_files(cls, files: dict[str, str]) -> dict[str, str]:
        for path in files:
            if not path or path.startswith("/") or ".." in path.split("/") or path.endswith("/") or "\0" in path:
                raise ValueError(f"{path!r} must be a relative path without '..': it lies below {HOME}")
        return files


# ---------------------------------------------------------------- the harness


_VERSION = 1
_PORT = 8321
_WRITE_FILE = 'mkdir -p "$(dirname "$1")" && cat > "$1"'
_TAIL_CHARS = 500  # of the agent's output that the explanation quotes


class CodingAgent:
    """Implements `Harness` for any program that calls its model over HTTP, in one of three API dialects, at a configurable address.

    The hash covers the names and sizes of the files in `runtime`, but not its paths on this machine. Raises BadConfig if a directory of
    `runtime` does not exist.
    """

    def __init__(self, name: str, config: AgentConfig) -> None:
        self.name, self.config = name, config
        self._mounts = {place: os.path.realpath(os.path.expanduser(path)) for place, path in config.runtime.items()}
        for place, path in self._mounts.items():
            if not os.path.isdir(path):
                raise BadConfig(
                    f"worlds.harness.{name}.runtime: {config.runtime[place]!r} is no directory; name the one that holds the agent's program"
                )
        made_of = {place: directory_digest(path) for place, path in self._mounts.items()}
        self.hash = harness_hash("agent", _VERSION, runtime=made_of, config=config.model_dump(exclude={"runtime"}))

    def spec(self, task: Task) -> SandboxSpec:
        """Return the task's sandbox with the agent's runtime mounted, and with limits large enough for the agent."""
        names = [each.name for each in fields(Limits)]
        limits = {name: max(getattr(task.spec.limits, name), getattr(self.config, name)) for name in names}
        return replace(task.spec, mounts={**task.spec.mounts, **self._mounts}, limits=Limits(**limits))

    async def run(self, task: Task, model: Model, sandbox: Sandbox | None) -> Rollout:
        """Run the agent until it exits or uses up a budget. Raises Unavailable."""
        if sandbox is None or not isinstance(model, EpisodeModel):
            raise ValueError(f"the harness {self.name!r} needs a sandbox, and a model behind a gateway")
        clock = asyncio.get_running_loop().time
        start = clock()
        deadline = start + task.timeout_s
        relay = ModelRelay(
            model,
            self.config.dialect,
            turns=min(task.turns, self.config.turns),
            tokens=task.tokens,
            answer_tokens=self.config.answer_tokens,
            sent_bytes=self.config.sent_bytes,
            deadline=deadline,
        )
        listener = await sandbox.listen(_PORT)

        async def work() -> tuple[Ended, str]:
            try:
                named = await relay.start(listener)
                return await self._work(task, relay, sandbox, named, deadline)
            finally:
                await relay.close()
                listener.close()

        ended, why, changes = await worked(sandbox, work())
        return self._rollout(task, relay, ended, why, changes, clock() - start)

    async def _work(
        self, task: Task, relay: ModelRelay, sandbox: Sandbox, named: str, deadline: float
    ) -> tuple[Ended, str]:
        words = {
            "{prompt}": "\n\n".join(message.text for message in task.messages),
            "{base_url}": f"http://127.0.0.1:{_PORT}",
            "{model}": named,
            "{workdir}": task.spec.workdir,
            "{home}": HOME,
        }
        for path, text in self.config.files.items():
            argv = ["sh", "-c", _WRITE_FILE, "sh", f"{HOME}/{path}"]
            put = await sandbox.exec(argv, stdin=_filled(text, words).encode(), timeout=30.0)
            if put.code:
                raise Unavailable(f"{path} cannot be put into the sandbox: {put.stderr.decode(errors='replace')}")
        left = max(0.01, deadline - asyncio.get_running_loop().time())
        grace = 2 * GRACE_S  # for an answer in progress at the deadline to end
        working = asyncio.ensure_future(
            sandbox.exec(
                [_filled(word, words) for word in self.config.command],
                env={name: _filled(value, words) for name, value in self.config.environment.items()},
                timeout=left + grace,
            )
        )
        try:
            await asyncio.wait({working, relay.over}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not working.done() and not relay.over.done():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(relay.rest(), grace)
                return Ended.TIMEOUT, timed_out(task)
            if relay.over.done():
                return relay.over.result()
            return _ending(working.result(), relay)
        finally:
            working.cancel()
            # the process's own exception does not matter any more; a cancellation of the rollout is still raised
            await asyncio.gather(working, return_exceptions=True)

    def _rollout(
        self, task: Task, relay: ModelRelay, ended: Ended, why: str, changes: tuple[Change, ...], seconds: float
    ) -> Rollout:
        """Return the rollout, with its turns in the order in which they ended, except that the last one for the task itself is moved to the
        end, because a rollout's grade goes to its last turn.
        """
        own = [answer for answer, purpose in relay.heard if purpose is Purpose.TASK]
        graded = [own[-1].turn] if own else []
        messages: list[Message] = [*task.messages]
        for answer in own:
            messages.append(answer.message)
            messages += [relay.told[call.id] for call in answer.message.calls if call.id in relay.told]
        return Rollout(
            task=task.id,
            harness=f"{self.name}@{self.hash}",
            ended=ended if own else Ended.FAILED,
            messages=tuple(messages),
            turns=(*(answer.turn for answer, _ in relay.heard if answer.turn not in graded), *graded),
            changes=changes,
            effort={**_effort(relay), "seconds": seconds},
            detail={"why": why or ended.value} if why or not own else {},
        )


def _ending(result: ExecResult, relay: ModelRelay) -> tuple[Ended, str]:
    printed = (result.stdout + b"\n" + result.stderr).decode("utf-8", "replace").strip()[-_TAIL_CHARS:]
    if relay.outgrown:
        return Ended.LENGTH, relay.outgrown
    if result.killed_reason or result.code:
        return Ended.SUBMITTED, f"the agent ended with {result.killed_reason or result.code}: {printed}"
    last = relay.heard[-1][0] if relay.heard else None
    return (Ended.LENGTH if last is not None and last.cut else Ended.SUBMITTED), ("" if last else printed)


def _effort(relay: ModelRelay) -> Mapping[str, float]:
    answers = [answer for answer, _ in relay.heard]
    return {
        "turns": float(len(answers)),
        "tokens": float(sum(answer.tokens for answer in answers)),
        "calls": float(sum(len(answer.message.calls) for answer in answers)),
        "errors": float(sum(message.failed for message in relay.told.values())),
        "windows": 1.0 + max((answer.window for answer in answers), default=0),
    }


def _filled(text: str, words: Mapping[str, str]) -> str:
    """Fill a template's placeholders in a single pass, so that placeholders inside a prompt are left alone."""
    return re.sub("|".join(map(re.escape, words)), lambda found: words[found[0]], text)


@functools.cache
def directory_digest(path: str) -> str:
    """Return 16 hex digits of a hash of the names and sizes of a directory's files, without `__pycache__`. Cached per process."""
    digest = blake3()
    for root, directories, names in os.walk(path):
        directories[:] = sorted(name for name in directories if name != "__pycache__")
        for name in sorted(names):
            size = os.lstat(f"{root}/{name}").st_size
            digest.update(f"{Path(root, name).relative_to(path)}\0{size}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:16]
