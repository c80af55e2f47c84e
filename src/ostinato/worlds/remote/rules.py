"""What a worker on another machine may say, and what becomes of it. Pure: the door asks, and does the rest.

Such a worker is somebody else's program. Its rewards are its own to tell, about its own rollouts, each once; all its names get its own
name in front, so that they are nobody else's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

from ostinato.core.errors import BadRequest, Unauthorized
from ostinato.core.records import Arm
from ostinato.core.verdicts import CLOSED, FAILED, GRADED, MEASURED, TORN
from ostinato.worlds.harness.agents.config import Dialect
from ostinato.worlds.harness.agents.rewriting import passed_headers, ruled_request
from ostinato.worlds.harness.gateway import LEFT

DIALECTS: Mapping[str, Dialect] = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "messages",
    "/v1/responses": "responses",
}
MOST_EVENTS = 1000
_MOST_TOKENS = 10_000_000  # of an answer: the gateway's own bound
_NAMED = ("X-Ostinato-Episode", "X-Ostinato-Group", "Idempotency-Key")
_NAME_CHARS = 300


def belongs(worker: str, arm: Arm, episode: str) -> bool:
    """True if a turn of this arm and episode is this worker's."""
    return arm is Arm.WORLD and episode.startswith(f"{worker}/")


def call_headers(worker: str, headers: Mapping[str, str]) -> dict[str, str]:
    """The headers of a call for the gateway: in the slot for worlds, and under names of the worker's own. Raises BadRequest."""
    found = {**passed_headers(headers), "X-Ostinato-Slot": Arm.WORLD.value}
    for name in (*_NAMED, "X-Ostinato-Harness", LEFT):
        value = headers.get(name)
        if value is None:
            continue
        if not (value.isascii() and value.isprintable() and 0 < len(value) <= _NAME_CHARS):
            raise BadRequest(f"{name} must hold 1 to {_NAME_CHARS} printable ASCII characters", field=name)
        found[name] = f"{worker}/{value}" if name in _NAMED else value
    if "X-Ostinato-Episode" not in found:
        raise BadRequest(
            "X-Ostinato-Episode is missing: a rollout's calls name their episode", field="X-Ostinato-Episode"
        )
    return found


def call_body(worker: str, path: str, body: Any, *, model: str, temperature: float) -> dict[str, Any]:
    """A call's body for the gateway: one answer of the one model, sampled as this side says. Raises BadRequest."""
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    if body.get("previous_response_id") is not None:
        raise BadRequest(
            "previous_response_id is not taken from afar; send the whole input", field="previous_response_id"
        )
    if path not in DIALECTS:
        return {**body, "model": model}
    return ruled_request(
        DIALECTS[path], body, model=model, temperature=temperature, tokens=_MOST_TOKENS, user=f"world/{worker}"
    )


def targets(body: Any) -> list[str]:
    """The turns that events are about. Raises BadRequest for what is no list of events."""
    if not isinstance(body, list) or not 0 < len(body) <= MOST_EVENTS:
        raise BadRequest(f"send a list of 1 to {MOST_EVENTS} events")
    found = [event.get("target") if isinstance(event, dict) else None for event in body]
    if not all(isinstance(turn, str) and 0 < len(turn) <= 256 for turn in found):
        raise BadRequest("each event names a turn as its target", field="target")
    return [str(turn) for turn in found]


def own_verdicts(
    body: list[dict[str, Any]], groups: Mapping[str, str | None], episode_of: Callable[[str], str | None]
) -> list[dict[str, Any]]:
    """The events for the gateway, each with the one id that it can have: nobody can take an id that is another's. A grade other than 0 has
    its rollout's, so that the log, which keeps each id once, holds no second one for any of its turns, even after the door was restarted.

    Args:
        body: events whose `targets` were read.
        groups: the worker's own turns among them, each with its group.
        episode_of: the episode of one of those turns.

    Raises:
        Unauthorized: a turn is not the worker's, or an event is no verdict.
        BadRequest: a value that no verdict has.
    """
    found: list[dict[str, Any]] = []
    for event in body:
        name, turn = event.get("name"), event["target"]
        if not isinstance(name, str) or name not in _VALUES:
            raise Unauthorized(
                f"{str(name)[:80]!r} is no verdict; from afar only {', '.join(sorted(_VALUES))} are taken"
            )
        if turn not in groups:
            raise Unauthorized(f"turn {turn!r} is none of this worker's")
        value, (least, most) = event.get("value"), _VALUES[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise BadRequest(f"the value of {name} lies between {least:g} and {most:g}", field="value")
        about = turn if name != CLOSED else groups[turn]
        if about is None:
            raise BadRequest(f"turn {turn!r} is of no group that could be closed", field="target")
        if name == GRADED and value:
            about = hashlib.sha256((episode_of(turn) or turn).encode()).hexdigest()[:40]
        found.append({"id": f"{name}:{about}", "target": turn, "name": name, "value": float(value), "source": "code"})
    return found


_VALUES = {GRADED: (0.0, 1.0), FAILED: (1.0, 1.0), TORN: (1.0, 1.0), MEASURED: (1.0, 1.0), CLOSED: (0.0, 128.0)}
