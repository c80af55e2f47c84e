"""Token-in, token-out: a follow-up call reuses the ids that were sampled instead of tokenising their text again.

A conversation that a client sends back is recognised by a hash chain over its messages. After a restart, when only the log's turns
are known (they hold ids, not messages), it is recognised once by rendering it and comparing ids.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from ostinato.core.records import Turn
from ostinato.core.seams import Renderer

_OVERHEAD = 32  # what an entry costs besides its ids, in ids

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Conversations are never shared across these.

    Example: ``Scope(tenant="default", user="u42", arm="live")``
    """

    tenant: str
    user: str
    arm: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The ids to send to the engine and the turn they continue.

    Example: ``Prompt(ids=(1, 2, 7, 9, 4), parent="chatcmpl-3f:0", episode="e1")``; `parent` and `episode` are None when new.
    """

    ids: tuple[int, ...]
    parent: str | None = None
    episode: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    turn: str
    episode: str
    ids: array[int]
    ended: bool  # the last id is the assistant's end token


class Sessions:
    """Finds the stored turn that a conversation continues. Bounded: the least recently used turns are forgotten.

    Not thread-safe: all calls from one thread.

    Args:
        renderer: messages <-> ids.
        budget: most token ids held.
    """

    def __init__(self, renderer: Renderer, *, budget: int) -> None:
        self._renderer = renderer
        self._budget = budget
        self._held = 0
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._cold: set[bytes] = set()  # keys of `restore`: found by ids, not by messages
        self._stop_ids = renderer.stop_ids()

    def prompt(self, scope: Scope, messages: Sequence[dict[str, Any]], *, continue_final: bool = False) -> Prompt:
        """Ids for these messages, reusing a stored turn's ids where the messages begin with its conversation."""
        if continue_final:
            return self._continued(scope, messages)
        known, entry = self._find(scope, messages)
        if entry is not None:
            ids = self._follow(entry, messages, known)
            if ids is not None:
                return Prompt(ids=tuple(ids), parent=entry.turn, episode=entry.episode)
        episode = entry.episode if entry is not None else None
        return Prompt(ids=tuple(self._renderer.chat(messages)), episode=episode)

    def remember(self, scope: Scope, messages: Messages, turn: Turn) -> None:
        """Index a turn that answered these messages (an assistant's message at their end was continued by it)."""
        if not turn.finish.trainable:
            return
        text, before = turn.text, messages
        if messages[-1]["role"] == "assistant":
            text, before = messages[-1]["content"] + text, messages[:-1]
        chain = _chain(scope, [*before, {"role": "assistant", "content": text}])
        self._put(chain[-1], self._entry(turn))

    def restore(self, turn: Turn) -> None:
        """Index a turn that was read from the log."""
        if turn.finish.trainable:
            scope = Scope(tenant=turn.tenant, user=turn.user, arm=turn.arm)
            key = _ids_key(scope, turn.prompt_ids, turn.text)
            self._put(key, self._entry(turn))
            self._cold.add(key)

    def __len__(self) -> int:
        return len(self._entries)

    def _find(self, scope: Scope, messages: Sequence[dict[str, Any]]) -> tuple[int, _Entry | None]:
        """How many messages the longest known conversation has, and its last turn."""
        spoken = [i for i, message in enumerate(messages[:-1]) if message["role"] == "assistant"]
        if not spoken or not self._entries:
            return 0, None
        chain = _chain(scope, messages)
        for i in reversed(spoken):
            entry = self._entries.get(chain[i])
            if entry is not None:
                self._entries.move_to_end(chain[i])
                return i + 1, entry
        return self._find_cold(scope, messages, spoken, chain) if self._cold else (0, None)

    def _find_cold(
        self, scope: Scope, messages: Sequence[dict[str, Any]], spoken: list[int], chain: list[bytes]
    ) -> tuple[int, _Entry | None]:
        found: tuple[int, _Entry | None] = (0, None)
        ids: list[int] | None = self._renderer.chat(messages[: spoken[0]]) if spoken[0] else None
        for position, i in enumerate(spoken):
            if ids is None:
                break
            entry = self._entries.get(_ids_key(scope, ids, messages[i]["content"]))
            if entry is None:
                break
            self._put(chain[i], entry)
            found = (i + 1, entry)
            if position + 1 < len(spoken):
                ids = self._follow(entry, messages[: spoken[position + 1]], i + 1)
        return found

    def _follow(self, entry: _Entry, messages: Sequence[dict[str, Any]], known: int) -> list[int] | None:
        """The turn's ids and what follows; None if the turn was cut and the template's end token cannot be told."""
        if known >= len(messages):
            return None
        rest = self._renderer.follow_up(messages, known)
        if entry.ended:
            return [*entry.ids, *rest]
        closing = self._closing(messages, known, rest)
        return None if closing is None else [*entry.ids, *closing, *rest]

    def _closing(self, messages: Sequence[dict[str, Any]], known: int, rest: list[int]) -> list[int] | None:
        """What the template puts between an assistant's text and what `follow_up` starts with."""
        opened = self._renderer.chat(messages[:known], continue_final=True)
        whole = self._renderer.chat(messages)
        closing = whole[len(opened) : len(whole) - len(rest)]
        fits = whole[: len(opened)] == opened and whole[len(whole) - len(rest) :] == rest
        return closing if fits and len(closing) == 1 and closing[0] in self._stop_ids else None

    def _continued(self, scope: Scope, messages: Sequence[dict[str, Any]]) -> Prompt:
        ids = tuple(self._renderer.chat(messages, continue_final=True))
        _, entry = self._find(scope, messages)
        if entry is None:
            return Prompt(ids=ids)
        is_prefix = tuple(entry.ids) == ids[: len(entry.ids)]
        return Prompt(ids=ids, parent=entry.turn if is_prefix else None, episode=entry.episode)

    def _entry(self, turn: Turn) -> _Entry:
        ids = array("i", turn.prompt_ids + turn.sampled_ids)
        ended = bool(turn.sampled_ids) and turn.sampled_ids[-1] in self._stop_ids
        return _Entry(turn=turn.id, episode=turn.episode, ids=ids, ended=ended)

    def _put(self, key: bytes, entry: _Entry) -> None:
        self._drop(key)
        self._entries[key] = entry
        self._held += len(entry.ids) + _OVERHEAD
        while self._held > self._budget and self._entries:
            self._drop(next(iter(self._entries)))

    def _drop(self, key: bytes) -> None:
        entry = self._entries.pop(key, None)
        self._cold.discard(key)
        if entry is not None:
            self._held -= len(entry.ids) + _OVERHEAD


def _chain(scope: Scope, messages: Messages) -> list[bytes]:
    """One hash per message, each covering the scope and all messages up to it."""
    hashes: list[bytes] = []
    last = _hash(b"", scope.tenant, scope.user, scope.arm)
    for message in messages:
        last = _hash(last, message["role"], message["content"])
        hashes.append(last)
    return hashes


def _ids_key(scope: Scope, ids: Sequence[int], text: str) -> bytes:
    return _hash(array("i", ids).tobytes(), scope.tenant, scope.user, scope.arm, text)


def _hash(seed: bytes, *parts: str) -> bytes:
    state = blake2b(len(seed).to_bytes(8, "big") + seed, digest_size=16)
    for part in parts:
        data = part.encode()
        state.update(len(data).to_bytes(8, "big"))  # lengths, so that no two lists of parts run together
        state.update(data)
    return state.digest()
