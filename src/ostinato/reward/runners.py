"""Runs a reward function in a subprocess, which is killed when an answer is late and restarted when one is needed."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ostinato.core.child_process import ChildProcess
from ostinato.core.errors import BadConfig
from ostinato.core.seams import RewardFn
from ostinato.reward import protocol
from ostinato.reward.config import RewardConfig

MAX_LOSSES = 2  # most processes lost per round: a function that always hangs must not block the desk for hours
LONGEST_LINE = 1 << 20  # most bytes of an answer
GRACE_S = 0.2  # one more read before the function counts as late, in case the desk itself was delayed


LOSS_REASONS = (
    "reward_hung:",
    *(f"reward_failed: {why}" for why in ("its process ended", "its answer is longer", "not an answer")),
)
"""Prefixes of the reasons of failures that cost a process."""


class _Lost(Exception):
    """The process is lost; `failure` is the answer about the turn that it was processing."""

    def __init__(self, failure: protocol.Failure) -> None:
        self.failure = failure


class Isolated:
    """Implements `Asker`. The function's module is never imported here, and its process shares no memory with this one.

    A function that hangs, exits or floods its output loses its process, and only the turn that it was asked about
    gets a `Failure`. After two losses in one call the remaining questions stay unasked.

    Args:
        name: "module:function".
        options: its keyword options.
        answer_s: seconds for one answer.
        load_s: seconds for starting a process and importing the module.
        max_abs: the largest absolute reward that is accepted.
        memory_bytes: private memory of the process; beyond it the function gets a MemoryError.
        setting: the config section that names the function, for error messages.

    Example: ``await Isolated("yours:kept", {}, answer_s=5.0, load_s=60.0, max_abs=100.0, memory_bytes=1 << 30).ask([question])``
    """

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any],
        *,
        answer_s: float,
        load_s: float,
        max_abs: float,
        memory_bytes: int,
        setting: str = "reward",
    ) -> None:
        self._hello = {
            "function": name,
            "options": dict(options),
            "setting": setting,
            "max_abs": max_abs,
            "memory_bytes": memory_bytes,
            "path": sys.path,
        }
        self._answer_s = answer_s
        self._load_s = load_s
        self._max_abs = max_abs
        self._process: ChildProcess | None = None
        self._loaded = False

    async def open(self) -> None:
        """Start the process, unless it is running. Raises BadConfig, Unloadable."""
        await self._running()

    async def ask(self, questions: Sequence[protocol.RewardRequest]) -> list[protocol.Answer | None]:
        """Return an answer to each question, None for those that were not asked. Raises BadConfig, Unloadable."""
        answers: list[protocol.Answer | None] = []
        losses = 0
        try:
            while len(answers) < len(questions) and losses < MAX_LOSSES:
                process = await self._running()
                try:
                    await self._converse(process, questions, answers)
                except _Lost as lost:
                    await self.close()
                    answers.append(lost.failure)
                    losses += 1
        except asyncio.CancelledError:
            await self.close()  # otherwise a pending answer would be taken for the next question's
            raise
        return answers + [None] * (len(questions) - len(answers))

    async def close(self) -> None:
        """Kill the process, if there is one, and all its children."""
        process, self._process = self._process, None
        if process is not None:
            await process.kill()

    async def _running(self) -> ChildProcess:
        """Return the process, restarted if it exited while idle, for which no turn is to blame."""
        if self._process is not None and self._process.process.returncode is not None:
            await self.close()
        return self._process or await self._start()

    async def _start(self) -> ChildProcess:
        """Start a process and load the function in it."""
        self._process = process = await ChildProcess.start("ostinato.reward.child", longest_line=LONGEST_LINE)
        try:
            await process.send([json.dumps(self._hello).encode() + b"\n"])
            line = await _line(process, self._load_s)
        except _Lost as lost:
            await self.close()
            raise self._unloadable(f"it could not be loaded: {lost.failure.reason}") from None
        if line != protocol.READY:
            await self.close()
            raise self._unloadable(str(json.loads(line)[1]))
        self._loaded = True
        return process

    def _unloadable(self, why: str) -> BadConfig | protocol.Unloadable:
        text = why if "reward." in why else f"{self._hello['setting']}.function {self._hello['function']!r}: {why}"
        return protocol.Unloadable(text) if self._loaded else BadConfig(text)

    async def _converse(
        self, process: ChildProcess, questions: Sequence[protocol.RewardRequest], answers: list[protocol.Answer | None]
    ) -> None:
        """Ask the remaining questions, and append each answer as it arrives. Raises _Lost."""
        rest = questions[len(answers) :]
        sending = asyncio.ensure_future(process.send([protocol.question_line(question) for question in rest]))
        try:
            for question in rest:
                line = await _line(process, self._answer_s)
                try:
                    answers.append(protocol.checked(protocol.read_answer(line), question, self._max_abs))
                except ValueError as error:
                    raise _Lost(protocol.failed(str(error))) from error
            await sending
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)


async def _line(process: ChildProcess, seconds: float) -> bytes:
    """Read the next line. Raises _Lost if it is late or too long, or if the process has ended."""
    for patience in (seconds, GRACE_S):
        try:
            async with asyncio.timeout(patience):
                line = await process.answers.readline()
        except TimeoutError:
            continue
        except ValueError:
            raise _Lost(protocol.failed(f"its answer is longer than {LONGEST_LINE} bytes")) from None
        if line.endswith(b"\n"):
            return line
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                await process.process.wait()
        raise _Lost(protocol.failed(f"its process ended ({process.process.returncode})"))
    raise _Lost(protocol.Failure(reason=f"reward_hung: no answer in {seconds:g} s"))


# ---------------------------------------------------------------- in the same process


class Inline:
    """Implements `Asker`. An exception affects only its turn's answer; a function that never returns would stop the desk.

    The functions in `ostinato.reward.functions` may be called like this: each loops only over a turn's signals, of which there are
    at most `reward.max_signals`.

    Example: ``await Inline(copilot, max_abs=100.0).ask([question])``
    """

    def __init__(self, fn: RewardFn, *, max_abs: float) -> None:
        self._fn = fn
        self._max_abs = max_abs

    async def open(self) -> None:
        """Do nothing: there is nothing to start."""

    async def ask(self, questions: Sequence[protocol.RewardRequest]) -> list[protocol.Answer | None]:
        """Return an answer to each question."""
        return [protocol.answered(self._fn, question, self._max_abs) for question in questions]

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""


# ---------------------------------------------------------------- choosing a runner


BUILT_IN = "ostinato.reward.functions:"


def asker_of(config: RewardConfig, setting: str = "reward") -> protocol.Asker:
    """Return a runner: in this process for a built-in function, else in a subprocess. Raises BadConfig for a bad option of a built-in one.

    `setting`: the config section that names the function.
    """
    if config.function.startswith(BUILT_IN):
        given = {"outcomes": config.outcomes, **config.options}
        return Inline(protocol.load(config.function, given, setting), max_abs=config.max_abs)
    return Isolated(
        config.function,
        config.options,
        setting=setting,
        answer_s=config.answer_s,
        load_s=config.load_s,
        max_abs=config.max_abs,
        memory_bytes=config.memory_bytes,
    )


def late_asker_of(config: RewardConfig) -> protocol.Asker | None:
    """Return a runner for late rewards (`reward.surrogate`); None if there are none. Raises BadConfig as `asker_of`, and if the function's
    own window is not shorter.
    """
    late = config.surrogate
    if not late.truth_after_s:
        return None
    function, options = late.function or config.function, dict(late.options)
    if not late.function:
        options = {**config.options, "window": late.truth_after_s}
        if config.function.startswith(BUILT_IN):
            window = inspect.signature(protocol.load(config.function, config.options)).parameters["window"].default
            if window >= late.truth_after_s:
                why = f"within the window of {config.function}, {window:g} s; set a shorter reward.options.window"
                raise BadConfig(f"reward.surrogate.truth_after_s = {late.truth_after_s:g} is {why}")
    return asker_of(config.model_copy(update={"function": function, "options": options}), "reward.surrogate")
