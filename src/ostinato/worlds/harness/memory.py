"""Context compaction by the model itself: a rollout that outgrows its context window continues in a new one that begins with a summary.

When the conversation reaches the window's token budget, the harness asks the model, in the same window, to summarise it. The next window
holds the opening (system message and task) and one user message with the summary and with facts that the harness itself knows. The policy
samples the summaries, and they are captured as turns with the purpose `compaction`, so the rollout's reward trains them like all other
turns (Composer 2, arXiv:2603.24477, section 4.1). The same holds for summaries that are refused for their form.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from pydantic import BaseModel, Field, model_validator

from ostinato.core.conversation import Message, Role, Tool
from ostinato.core.errors import BadConfig
from ostinato.core.records import Purpose
from ostinato.core.sandbox import Change, ChangeKind
from ostinato.core.seams import Sandbox
from ostinato.worlds.harness.rollout import OVERRAN, Ended, Model, ModelAnswer, RolloutOver, timed_out
from ostinato.worlds.harness.toolbox import cut_middle
from ostinato.worlds.tasks.task import Task

MEMORY_VERSION = 1
"""Must be incremented with every change to what the model sees of its memory."""

Told = Literal["files", "summaries", "calls", "tokens", "seconds"]
Left = Callable[[], Mapping[str, float]]

_BYTES_PER_TOKEN = 4  # an estimate, until the gateway has counted tokens
_LAST_MESSAGE_DIVISOR = 8  # the repeated last message takes at most 1/8 of the window
_MOST_FILES, _MOST_PATH = 20, 60  # changed files that are listed, and characters of a path
_FRAME = re.compile(r"(?<!=)={3,}(?=\s*(?:memory|end of)\b)", re.IGNORECASE)
_MARKUP = re.compile(
    r"<[|\uff5c][^<>\s]{1,40}[|\uff5c]>|</?(?:tool_call|tool_response|think|start_of_turn|end_of_turn)>|\[/?(?:INST|TOOL_CALLS)\]"
)
_LEFT_OUT = "[too long for the context; it follows after the summary]"


class MemoryConfig(BaseModel, frozen=True, extra="forbid"):
    """`[worlds.harness.tools.memory]`."""

    window: int = Field(ge=16, description="Size of a context window in tokens, at most the model's context length.")
    budget: float = Field(
        default=0.75,
        gt=0,
        lt=1,
        description="Share of the window that triggers a summary in rollouts that are not trained on.",
    )
    drawn: tuple[float, float] = Field(
        default=(0.4, 0.9),
        description="Range of the share of the window that triggers a summary in training. Each rollout draws its own share: with a fixed "
        "one the model would learn to expect the summary there.",
    )
    request: str = Field(
        default="Summarise what you need to go on; the conversation before this will be gone.",
        min_length=1,
        description="Message that asks the model for a summary.",
    )
    think_tokens: int = Field(
        default=512, ge=0, description="Tokens of reasoning before a summary. The reasoning is not kept."
    )
    summary_tokens: int | None = Field(
        default=None, ge=1, description="Most tokens of a summary. None: a sixteenth of the window."
    )
    tells: tuple[Told, ...] = Field(
        default=("files", "summaries", "calls", "tokens", "seconds"),
        description="Facts that the harness adds to a summary: files changed, summaries so far, calls, tokens and seconds left.",
    )
    keep_last: bool = Field(
        default=True, description="Repeat the newest message after the summary if it fits into an eighth of the window."
    )
    tries: int = Field(
        default=3,
        ge=1,
        description="Attempts at a summary. A summary is refused if it is empty, cut off or too long, makes a tool call, or contains "
        "template markup. After the last attempt, the newest half of the window is kept unchanged instead.",
    )
    summaries: int = Field(
        default=32, ge=1, description="Most summaries in one rollout. A rollout that needs another one ends."
    )

    @property
    def most_tokens(self) -> int:
        """The token limit of a summary."""
        return self.summary_tokens or max(1, self.window // 16)

    @model_validator(mode="after")
    def _ordered(self) -> MemoryConfig:
        least, greatest = self.drawn
        if not 0 < least <= greatest < 1:
            raise ValueError(f"drawn: two shares between 0 and 1, the lesser first, not {least:g} and {greatest:g}")
        return self

    def room(self, answer_tokens: int, result_chars: int) -> int:
        """Return the most tokens that a window may hold when its summary begins, so that one more answer, a tool result and the summary
        still fit.

        Raises BadConfig, with the numbers, if that is less than the smallest budget.
        """
        result, request = -(-result_chars // _BYTES_PER_TOKEN), -(-_bytes_of(self.request) // _BYTES_PER_TOKEN)
        left = self.window - answer_tokens - result - request - self.think_tokens - self.most_tokens
        least = math.ceil(min(self.budget, self.drawn[0]) * self.window)
        if left < least:
            raise BadConfig(
                f"memory.window of {self.window} tokens leaves {left} for work, and the least budget is {least}: an answer takes up to "
                f"{answer_tokens}, a tool's result about {result}, the request for a summary {request}, memory.think_tokens "
                f"{self.think_tokens} and the summary {self.most_tokens} (memory.summary_tokens); raise the window, or lower one of these"
            )
        return left


class Memory:
    """The context windows of one rollout. `messages` is the current window, changed in place; `transcript` has every message once.

    Args:
        config, task, model: those of the rollout.
        messages: the opening, which begins every window.
        turns: the list to which turns are appended, in order.
        effort: the counter of `tokens`, `summaries`, `summary_tokens` and `refused`.
        room: the most tokens that a window may hold when its summary begins, from `MemoryConfig.room`.
        tools: those of the conversation. They stay in the prompt when a summary is requested.
        sandbox: the sandbox whose changed files are reported; None: none are.
    """

    def __init__(
        self,
        config: MemoryConfig,
        task: Task,
        model: Model,
        messages: list[Message],
        turns: list[str],
        effort: Counter[str],
        *,
        room: int,
        tools: Sequence[Tool] = (),
        sandbox: Sandbox | None = None,
    ) -> None:
        self._config, self._task, self._model, self._sandbox = config, task, model, sandbox
        self._messages, self._turns, self.effort, self._tools = messages, turns, effort, tools
        least, greatest = config.drawn
        share = config.budget if model.draw is None else least + model.draw * (greatest - least)
        self._budget = min(share * config.window, room)
        self._least = min(config.budget, least) * config.window
        self._opening = len(messages)
        self._tools_bytes = sum(_bytes_of(f"{tool.name}{tool.description}{tool.parameters}") for tool in tools)
        self._past, self._tries = list[Message](), list[Message]()
        self._repeated = 0  # messages of this window, after its opening, that are in the transcript already
        self._summary = ""
        self._counted_tokens, self._counted = 0, 0  # tokens of the first `_counted` messages, by the gateway's count
        self._tokens_per_byte = 1 / _BYTES_PER_TOKEN
        self.fresh, self.fell_back = True, False
        effort.update(summaries=0, summary_tokens=0, refused=0)

    @property
    def transcript(self) -> list[Message]:
        """All messages of all windows in order, including requests for summaries and their answers."""
        opening, newer = self._messages[: self._opening], self._messages[self._opening + self._repeated :]
        return [*opening, *self._past, *newer, *self._tries]

    @property
    def size(self) -> float:
        """Tokens in the window: the gateway's count, plus an estimate from bytes for messages that the gateway has not seen yet."""
        return self._counted_tokens + self._tokens_per_byte * self._bytes(
            self._messages[self._counted :], tools=not self._counted
        )

    @property
    def full(self) -> bool:
        """True if the window must be summarised before the next answer."""
        return self.size >= self._budget and len(self._messages) > self._opening + self._repeated

    def count(self, answered: ModelAnswer) -> None:
        """Record the gateway's token counts for the newest message, an answer. Raises RolloutOver if the opening alone fills a window."""
        before = self._messages[:-1]
        self._tokens_per_byte = answered.prompt_tokens / self._bytes(before, tools=True)
        self._counted_tokens, self._counted = answered.prompt_tokens + answered.tokens, len(self._messages)
        if not self._past and self.fresh and answered.prompt_tokens + self._config.most_tokens >= self._least:
            raise RolloutOver(
                Ended.FAILED,
                f"the task's own messages and tools take {answered.prompt_tokens} tokens, so that with a summary of "
                f"{self._config.most_tokens} every window of {self._config.window} would be summarised at once, at {self._least:g}; raise "
                "memory.window",
            )
        self.fresh = False

    async def summarise(self, left: Left) -> None:
        """Summarise the window and begin a new one. `messages` changes only once the attempts are over, and not if an error is raised.

        `left` returns the "seconds" left now, and the "calls" and "tokens" left if they are bounded. "tokens" bounds the summary too.

        Raises RolloutOver if the limit `summaries` is reached or the time is over, BadRequest if the request exceeds the context, and
        Unavailable.
        """
        newest = self._messages[-1]
        last = newest.text if self._config.keep_last and newest.role is not Role.ASSISTANT else ""
        fits = self._tokens_per_byte * _bytes_of(last) <= self._config.window / _LAST_MESSAGE_DIVISOR
        await self._renew(left, self._messages, last if fits else "")

    async def shrink(self, left: Left) -> bool:
        """Summarise a window that exceeds the model's context. The messages since the last answer are left out of the request, and the
        newest of them is repeated after the summary with its middle cut.

        Returns False if there are no such messages. Raises as `summarise`.
        """
        since = len(self._messages)
        while since > self._opening + self._repeated and self._messages[since - 1].role is not Role.ASSISTANT:
            since -= 1
        newest = self._messages[since:]
        if not newest:
            return False
        short = [replace(each, text=_LEFT_OUT) for each in newest]
        most = self._config.window // _LAST_MESSAGE_DIVISOR  # in characters: each of them may be a token
        await self._renew(left, [*self._messages[:since], *short], cut_middle(newest[-1].text, most), whole=False)
        return True

    async def _renew(self, left: Left, window: Sequence[Message], last: str, *, whole: bool = True) -> None:
        """Have `window` summarised, and begin the next one. `whole`: if no summary succeeds, the newest half of the window may be kept."""
        if self.effort["summaries"] >= self._config.summaries:
            raise RolloutOver(Ended.LENGTH, f"it has written {self._config.summaries} summaries (memory.summaries)")
        summary = await self._request_summary(window, left)
        facts = await self._facts(left())
        self.effort["summaries"] += 1
        self.fell_back = self.fell_back or not summary
        kept = [] if summary or not whole else self._newest_half()
        self._past += [*self._messages[self._opening + self._repeated :], *self._tries]
        self._summary, self._tries = summary or self._summary, []
        sections = [("summary", self._summary), ("facts", facts), ("last message", "" if kept else last)]
        memory = "\n".join(_framed(name, text) for name, text in sections if text) or "(nothing was kept)"
        self._messages[self._opening :] = [Message(role=Role.USER, text=memory), *kept]
        self._past.append(self._messages[self._opening])
        self._repeated, self._counted_tokens, self._counted, self.fresh = 1 + len(kept), 0, 0, True

    async def _request_summary(self, window: Sequence[Message], left: Left) -> str:
        """Ask the model to summarise a window. Returns "" if every attempt was refused or no tokens are left."""
        config, asked = self._config, [*window, Message(role=Role.USER, text=self._config.request)]
        for number in range(config.tries):
            now = left()
            most = min(config.think_tokens + config.most_tokens, now.get("tokens", math.inf))
            if most < 1:
                break
            answered = await self._model.ask(
                asked, self._tools, max_tokens=int(most), left_s=now["seconds"], purpose=Purpose.COMPACTION
            )
            self._turns.append(answered.turn)
            self._tries += [asked[-1], answered.message]
            self._tokens_per_byte = answered.prompt_tokens / self._bytes(asked, tools=True)
            self.effort.update(tokens=answered.tokens, summary_tokens=answered.tokens)
            if self._counted_tokens and not number:  # since the last answer, the window grew by tool output
                grown = answered.prompt_tokens - self._counted_tokens - self._tokens_per_byte * self._bytes(asked[-1:])
                self.effort["output_tokens"] += max(0, round(grown))
            if answered.finish == OVERRAN:
                raise RolloutOver(Ended.TIMEOUT, timed_out(self._task))
            if self._is_summary(answered):
                return answered.message.text.strip()
            self.effort["refused"] += 1
        return ""

    def _is_summary(self, answered: ModelAnswer) -> bool:
        """Return False for an answer that is no valid summary: empty, cut off, too long, with a tool call, or with template markup."""
        message = answered.message
        text_tokens = len(message.text) / max(1, len(message.text) + len(message.reasoning)) * answered.tokens
        whole = answered.finish != "length" and text_tokens <= self._config.most_tokens
        return whole and bool(message.text.strip()) and not message.calls and _MARKUP.search(message.text) is None

    async def _facts(self, left: Mapping[str, float]) -> str:
        """Return the harness's own facts for the next window, as lines. Raises Unavailable, and its subclass SandboxBroken."""
        tells = self._config.tells
        counted = [name for name in ("calls", "tokens", "seconds") if name in tells and name in left]
        lines = [f"{name} left: {max(0, int(left[name]))}" for name in counted]
        if "summaries" in tells:
            done = self.effort["summaries"] + 1
            lines.insert(0, f"summaries so far: {done} of {self._config.summaries}")
        if "files" not in tells or self._sandbox is None:
            return "\n".join(lines)
        changes = await self._sandbox.diff()
        lines.append("files changed:" if changes else "files changed: none")
        lines += map(_file_line, changes[:_MOST_FILES])
        return "\n".join(lines if len(changes) <= _MOST_FILES else [*lines, f"and {len(changes) - _MOST_FILES} more"])

    def _newest_half(self) -> list[Message]:
        """Return the newest messages that take at most half of the budget. They begin with an answer, so no result lacks its call."""
        own = self._messages[self._opening :]
        begins = len(own)
        for place in range(len(own) - 1, 0, -1):
            if self._tokens_per_byte * self._bytes(own[place:]) > self._budget / 2:
                break
            if own[place].role is Role.ASSISTANT:
                begins = place
        return own[begins:]

    def _bytes(self, messages: Sequence[Message], *, tools: bool = False) -> int:
        size = sum(
            _bytes_of(each.text) + sum(_bytes_of(call.name) + _bytes_of(call.arguments) for call in each.calls)
            for each in messages
        )
        return size + self._tools_bytes * tools or 1


def _bytes_of(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _file_line(change: Change) -> str:
    count = change.data.count(b"\n") + (not change.data.endswith(b"\n") and bool(change.data))
    return f"{change.path[:_MOST_PATH]!a}: {'deleted' if change.kind is ChangeKind.DELETED else f'{count} lines'}"


def _framed(name: str, text: str) -> str:
    """Put a text between two delimiter lines, which the text itself cannot contain."""
    return f"=== memory: {name} ===\n{_FRAME.sub('==', text)}\n=== end of {name} ==="
