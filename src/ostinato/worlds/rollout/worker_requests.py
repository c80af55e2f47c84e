"""What a worker on another machine may send, how it is rewritten for the gateway, and which turns in the log are its own.

Such a worker is another party's program. It may report rewards only for its own rollouts, and each once. All names that it sends are
prefixed with its own name, so that they cannot be another worker's. The door does the I/O.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ostinato.core.errors import BadRequest, Unauthorized
from ostinato.core.records import Arm, Batch, Holdback, Purpose, Turn
from ostinato.core.seams import Cursor, Log
from ostinato.core.verdicts import CLOSED, FAILED, GRADED, MEASURED, TORN
from ostinato.worlds.harness.gateway import LEFT, PURPOSE
from ostinato.worlds.harness.relay import Dialect, passed_headers, ruled_request

# ---------------------------------------------------------------- requests


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
    """The headers of a call to the gateway: the slot for worlds, and names prefixed with the worker's. Raises BadRequest."""
    found = {**passed_headers(headers), "X-Ostinato-Slot": Arm.WORLD.value}
    for name in (*_NAMED, "X-Ostinato-Harness", LEFT):
        value = headers.get(name)
        if value is None:
            continue
        if not (value.isascii() and value.isprintable() and 0 < len(value) <= _NAME_CHARS):
            raise BadRequest(f"{name} must hold 1 to {_NAME_CHARS} printable ASCII characters", field=name)
        found[name] = f"{worker}/{value}" if name in _NAMED else value
    if headers.get(PURPOSE) == Purpose.COMPACTION:  # no other purpose: what is held back, this side decides
        found[PURPOSE] = Purpose.COMPACTION.value
    if "X-Ostinato-Episode" not in found:
        raise BadRequest(
            "X-Ostinato-Episode is missing: a rollout's calls name their episode", field="X-Ostinato-Episode"
        )
    return found


def call_body(worker: str, path: str, body: Any, *, model: str, temperature: float) -> dict[str, Any]:
    """The body of a call to the gateway: one answer of the run's model, with this side's sampling settings. Raises BadRequest."""
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
    """The turns that events are about. Raises BadRequest if the body is not a list of events."""
    if not isinstance(body, list) or not 0 < len(body) <= MOST_EVENTS:
        raise BadRequest(f"send a list of 1 to {MOST_EVENTS} events")
    found = [event.get("target") if isinstance(event, dict) else None for event in body]
    if not all(isinstance(turn, str) and 0 < len(turn) <= 256 for turn in found):
        raise BadRequest("each event names a turn as its target", field="target")
    return [str(turn) for turn in found]


def own_verdicts(
    body: list[dict[str, Any]], groups: Mapping[str, str | None], episode_of: Callable[[str], str | None]
) -> list[dict[str, Any]]:
    """The events for the gateway, each with an id derived from its name and subject, so that no worker can take another's id. The id of a
    non-zero grade is derived from its rollout: the log keeps each id once, so it holds at most one such grade of all the rollout's
    turns, even after the door was restarted.

    Args:
        body: events that `targets` accepted.
        groups: the worker's own turns among their targets, each with its group.
        episode_of: returns the episode of one of those turns.

    Raises:
        Unauthorized: a turn is not the worker's, or an event is not a verdict.
        BadRequest: a value outside the verdict's range, or a turn without a group to close.
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


# ---------------------------------------------------------------- whose turns


_KEPT = 200_000
_PAGE = 500


class OwnTurns:
    """Reads a worker's own turns and their outcomes from the run's log.

    Example: ``await OwnTurns(log).groups("acme", ["chatcmpl-3f:0"])  # {"chatcmpl-3f:0": "acme/w3f.0"}``
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._known: OrderedDict[str, tuple[Arm, str, str | None]] = OrderedDict()

    async def groups(self, worker: str, turns: Iterable[str]) -> dict[str, str | None]:
        """The worker's own turns among `turns`, each with its group's name in the log. Raises Unavailable."""
        asked = list(dict.fromkeys(turns))
        unknown = [turn for turn in asked if turn not in self._known]
        for turn in await self._log.find(Turn, [(turn,) for turn in unknown]) if unknown else ():
            self._known[turn.id] = (turn.arm, turn.episode, turn.group)
        found = {
            turn: known[2]
            for turn in asked
            if (known := self._known.get(turn)) is not None and belongs(worker, known[0], known[1])
        }
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)
        return found

    def episode(self, turn: str) -> str | None:
        """The episode of a turn that `groups` looked up recently, or None."""
        known = self._known.get(turn)
        return None if known is None else known[1]

    async def end(self) -> Cursor:
        """Where the log ends now. Raises Unavailable."""
        return await self._log.append()

    async def outcomes(self, worker: str, after: Cursor) -> dict[str, Any]:
        """Outcomes of the worker's turns in the next rows of the log: `taken` by the trainer, or `held` back with the reason. `cursor` is
        where to continue, `step` the highest step in these rows. Raises Unavailable.
        """
        cursor, step, seen = after, 0, 0
        taken, held = list[str](), list[tuple[str, str]]()
        async for place, row in self._log.read(after, {Batch, Holdback}):
            cursor, seen = place, seen + 1
            if isinstance(row, Batch):
                step = max(step, row.step)
                taken += row.turns
            elif isinstance(row, Holdback):
                held.append((row.turn, row.reason))
            if seen >= _PAGE:
                break
        own = await self.groups(worker, [*taken, *(turn for turn, _ in held)])
        return {
            "cursor": cursor,
            "step": step,
            "taken": [turn for turn in taken if turn in own],
            "held": [[turn, reason] for turn, reason in held if turn in own],
        }
