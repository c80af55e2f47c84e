"""Questions and answers as lines of JSON, between the desk and the process that runs a reward function."""

from __future__ import annotations

import json
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from ostinato.core.records import NoReward, Pending, Reward
from ostinato.reward.asking.question import Answer, Failure, Question

READY = b'["Ready"]\n'

_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64", ser_json_inf_nan="constants")
_question = TypeAdapter(tuple[Question], config=_config)
_answers: dict[str, TypeAdapter[Any]] = {
    "Reward": TypeAdapter(tuple[Reward], config=_config),
    "Pending": TypeAdapter(tuple[Pending], config=_config),
    "NoReward": TypeAdapter(tuple[NoReward], config=_config),
    "Failure": TypeAdapter(tuple[Failure], config=_config),
}


def question_line(question: Question) -> bytes:
    """One question as a line of JSON."""
    return _question.dump_json((question,)) + b"\n"


def read_question(line: bytes) -> Question:
    """The inverse of `question_line`."""
    return _question.validate_json(line)[0]


def answer_line(answer: Answer) -> bytes:
    """One answer as a line of JSON, preceded by its kind."""
    kind = type(answer).__name__
    return b'["%s",%s]\n' % (kind.encode(), _answers[kind].dump_json((answer,)))


def read_answer(line: bytes) -> Answer:
    """The inverse of `answer_line`. Raises ValueError for anything else."""
    try:
        kind, body = json.loads(line)
        return _answers[kind].validate_json(json.dumps(body))[0]
    except (ValueError, KeyError, TypeError, ValidationError) as error:
        raise ValueError(f"not an answer: {line[:200]!r}") from error
