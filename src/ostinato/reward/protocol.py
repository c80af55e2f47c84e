"""Protocol between the reward desk and a reward function: requests, answers, failures, their JSON lines, and loading the function."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, Protocol, cast, get_args

from pydantic import ConfigDict, TypeAdapter, ValidationError

from ostinato.core.errors import BadConfig, OstinatoError
from ostinato.core.line_survival import MOST_LINES
from ostinato.core.named_function import did_you_mean, find_function
from ostinato.core.records import LineValues, NoReward, Pending, Reward, RewardReach, Signal, Turn
from ostinato.core.seams import RewardFn

LONGEST_NAME = 256  # characters of a function's name and version
LONGEST_REASON = 64
LONGEST_DETAIL = 200
LONGEST_RUNS = 16_384  # most runs of lines in a reward


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRequest:
    """A request for one turn's reward, given these signals, at `now` (Unix seconds).

    Example: ``RewardRequest(turn=turn, signals=(accepted,), now=41.0)``
    """

    turn: Turn
    signals: tuple[Signal, ...]
    now: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A reward function that gave no usable answer about a turn. `reason` is the reason of the turn's quarantine.

    Example: ``Failure(reason="reward_failed: ZeroDivisionError: division by zero")``
    """

    reason: str


Answer = Reward | Pending | NoReward | Failure


class Unloadable(OstinatoError):
    """The reward function was loaded before but cannot be loaded any more. No turn is to blame, so all turns wait."""

    code = "unloadable"


class Asker(Protocol):
    """Asks the reward function about many turns. A failure of the function affects only the answer about that turn."""

    async def open(self) -> None:
        """Load the function now, so that a missing function is reported early. Raises as `ask`."""
        ...

    async def ask(self, questions: Sequence[RewardRequest]) -> list[Answer | None]:
        """Return an answer to each question, in order; None for a question that was not asked and must be asked again.

        Raises:
            BadConfig: there is no such function, or its options do not suit it.
            Unloadable: the function could be loaded before, but no longer.
        """
        ...

    async def close(self) -> None:
        """Release what runs the function. Idempotent; `ask` may be called again afterwards."""
        ...


def answered(fn: RewardFn, question: RewardRequest, max_abs: float) -> Answer:
    """Call the function and return its answer, or its failure. The caller must make sure that the function terminates."""
    try:
        return checked(fn(question.turn, question.signals, question.now), question, max_abs)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the function may raise anything
        return failed(error)


def failed(error: BaseException | str) -> Failure:
    """Return the failure of a function that raised this exception or ended its process for this reason."""
    if isinstance(error, BaseException):
        try:
            error = f"{type(error).__name__}: {error}"
        except Exception:  # noqa: BLE001 - the function's own exception, which may not even convert to a string
            error = type(error).__name__
    return Failure(reason=f"reward_failed: {_short(error)}")


def checked(answer: object, question: RewardRequest, max_abs: float) -> Answer:
    """Return the answer if it is valid, otherwise a Failure that says what is wrong with it.

    A reward must be about this turn and be a number of magnitude at most `max_abs`, and it may only be based on signals in the question.
    The values of its lines, if any, have the same bound, and no line may occur twice. `Pending` must name a later time. `NoReward` must
    give a short reason.
    """
    match answer:
        case Reward():
            problem = _problem(answer, question, max_abs)
            if problem is None:
                return Reward(
                    turn=answer.turn,
                    value=float(answer.value),
                    function=answer.function,
                    signals=tuple(answer.signals),
                    at=float(answer.at),
                    lines=tuple(answer.lines),
                    reach=RewardReach(answer.reach),
                )
        case Pending():
            if _number(answer.until) and answer.until > question.now:
                return Pending(until=float(answer.until))
            problem = f"Pending until {_short(answer.until)}, which is not after {question.now:g}"
        case NoReward():
            reason: Any = answer.reason
            if isinstance(reason, str) and 0 < len(reason) <= LONGEST_REASON and reason.isprintable():
                return answer
            problem = f"NoReward with a reason that is not one of 1 to {LONGEST_REASON} printable characters"
        case Failure():
            return Failure(reason=_short(answer.reason))
        case _:
            problem = f"a {type(answer).__name__} is no Reward, Pending or NoReward"
    return Failure(reason=f"reward_nonsense: {problem}")


def _problem(answer: Reward, question: RewardRequest, max_abs: float) -> str | None:
    value: Any = answer.value
    name: Any = answer.function
    signals: Any = answer.signals
    if answer.turn != question.turn.id:
        return f"a reward for turn {_short(answer.turn)}"
    if not _number(value) or not abs(value) <= max_abs:
        return f"the value {_short(value)}; it must be a number from {-max_abs:g} to {max_abs:g} (reward.max_abs)"
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
        return f"a function's name that is not 1 to {LONGEST_NAME} printable characters"
    if not isinstance(signals, tuple | list) or not set(cast("list[Any]", signals)) <= {s.id for s in question.signals}:
        return "signals that it was not asked about"
    if not _number(answer.at):
        return f"the time {_short(answer.at)}"
    if answer.reach not in tuple(RewardReach):
        return f"the reach {_short(answer.reach)}; it must be one of {', '.join(RewardReach)}"
    return _line_problem(answer.lines, max_abs)


def _line_problem(lines: Any, max_abs: float) -> str | None:
    """Return what is wrong with the values of lines; None if nothing is."""
    texts: Any = lines
    if not isinstance(lines, tuple | list) or not all(isinstance(each, LineValues) for each in texts):
        return "lines that are no LineValues"
    if len({(each.call, each.argument) for each in texts}) < len(texts):
        return "values of one text's lines twice"
    if (runs := sum(len(each.runs) for each in texts)) > LONGEST_RUNS:
        return f"{runs} runs of lines; at most {LONGEST_RUNS} are allowed"
    for text in texts:
        before = 0
        for first, last, value in text.runs:
            if not before < first <= last <= text.lines <= MOST_LINES:
                return f"lines {_short(first)} to {_short(last)}; they must ascend, up to {text.lines}"
            if not _number(value) or not abs(value) <= max_abs:
                return f"the value {_short(value)} of a line; it must be a number from {-max_abs:g} to {max_abs:g} (reward.max_abs)"
            before = last
    return None


def _number(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def _short(value: object) -> str:
    # a lone surrogate is replaced, since the log cannot store it
    text = " ".join(str(value).encode(errors="replace").decode().split())
    return text if len(text) <= LONGEST_DETAIL else f"{text[:LONGEST_DETAIL]}..."


# ---------------------------------------------------------------- JSON lines


READY = b'["Ready"]\n'

_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64", ser_json_inf_nan="constants")
_question = TypeAdapter(tuple[RewardRequest], config=_config)
_answers: dict[str, TypeAdapter[Any]] = {
    "Reward": TypeAdapter(tuple[Reward], config=_config),
    "Pending": TypeAdapter(tuple[Pending], config=_config),
    "NoReward": TypeAdapter(tuple[NoReward], config=_config),
    "Failure": TypeAdapter(tuple[Failure], config=_config),
}


def question_line(question: RewardRequest) -> bytes:
    """Encode a question as a line of JSON."""
    return _question.dump_json((question,)) + b"\n"


def read_question(line: bytes) -> RewardRequest:
    """Decode a line from `question_line`."""
    return _question.validate_json(line)[0]


def answer_line(answer: Answer) -> bytes:
    """Encode an answer as a line of JSON, preceded by its kind."""
    kind = type(answer).__name__
    return b'["%s",%s]\n' % (kind.encode(), _answers[kind].dump_json((answer,)))


def read_answer(line: bytes) -> Answer:
    """Decode a line from `answer_line`. Raises ValueError for anything else."""
    try:
        kind, body = json.loads(line)
        return _answers[kind].validate_json(json.dumps(body))[0]
    except (ValueError, KeyError, TypeError, ValidationError) as error:
        raise ValueError(f"not an answer: {line[:200]!r}") from error


# ---------------------------------------------------------------- loading


def load(name: str, options: Mapping[str, Any] | None = None, setting: str = "reward") -> RewardFn:
    """Import "module:function" and bind `options` to its keyword-only parameters, checked against their annotations.

    `setting` is the config section that names them, for error messages.

    Importing runs the module's code, so the name must come from the operator's config, never from a request.

    Raises:
        BadConfig: the name is malformed or names nothing callable, or an option is unknown, missing or of the wrong type.

    Example: ``load("ostinato.reward.functions:copilot", {"t": 0.25, "window": 30.0})``
    """
    function = find_function(f"{setting}.function", name)
    declared = {
        key: parameter
        for key, parameter in inspect.signature(function, eval_str=True).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    given = dict(options or {})
    for key in given:
        if key not in declared:
            raise BadConfig(f"{setting}.options.{key}: {name} has no such option; {did_you_mean(key, list(declared))}")
    for key, parameter in declared.items():
        if key in given:
            given[key] = _checked(name, f"{setting}.options.{key}", given[key], parameter.annotation)
        elif parameter.default is inspect.Parameter.empty:
            raise BadConfig(f"{setting}.options.{key} is missing: {name} needs it")
    return partial(function, **given)


def _checked(name: str, setting: str, value: Any, annotation: Any) -> Any:
    if annotation is inspect.Parameter.empty:
        return value
    if value == "null" and type(None) in get_args(annotation):  # TOML has no null
        return None
    try:
        return TypeAdapter(annotation).validate_python(value)
    except ValidationError as error:
        why = error.errors()[0]["msg"]
        raise BadConfig(f"{setting} = {value!r} does not suit {name}: {why}") from error
