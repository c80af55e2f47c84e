"""Which earlier turn of its segment a new turn leans on, so that only the ids which that one does not hold are written."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from ostinato.core.seams import Cursor
from ostinato.record.codec.tokens import shared_ids
from ostinato.record.codec.turns import Held

DEEPEST = 32
"""Bases stand at most so many one on another: whoever wants one turn reads so many."""

_LEAST = 8  # shared ids below which leaning is not worth the bytes that say so
_OPENINGS = (1024, 256, 64, 16)  # ids by whose equality two prompts are thought to begin alike
_BUDGET = 32 << 20  # bytes of ids in memory


@dataclass(frozen=True, slots=True)
class Lean:
    """A turn to lean on: its place, what it holds, and how many ids it shares."""

    seq: Cursor
    held: Held
    shared: int


class Bases:
    """The turns of the open segment that were written last. A turn leans only on one whose ids lie under the same key.

    A turn is looked for by its name, and by hashes of its prompt and of how that begins: what it shares is then compared.
    """

    def __init__(self) -> None:
        self._turns: OrderedDict[str, tuple[Cursor, Held, list[int]]] = OrderedDict()
        self._prompts: dict[int, str] = {}
        self._weight = 0

    def __contains__(self, turn: str) -> bool:
        return turn in self._turns

    def add(self, seq: Cursor, turn: str, held: Held, hashes: Sequence[int] = ()) -> None:
        """Remember a turn that was written, to be found by these hashes of its prompt."""
        own = [each for each in hashes if self._prompts.setdefault(each, turn) is turn]
        self._turns[turn] = (seq, held, own)
        self._weight += len(held.ids)
        while self._weight > _BUDGET and len(self._turns) > 1:
            _, (_, dropped, theirs) = self._turns.popitem(last=False)
            self._weight -= len(dropped.ids)
            for each in theirs:
                self._prompts.pop(each, None)

    def best(self, prompt: bytes, secret: int | None, parent: str | None, hashes: Sequence[int]) -> Lean | None:
        """The turn that shares most with a prompt; of two that share as much, the one with fewer below it."""
        names = {parent, *(self._prompts.get(each) for each in hashes[:1])}
        names.add(next((self._prompts[each] for each in hashes[1:] if each in self._prompts), None))
        found: Lean | None = None
        for name in names:
            if name is None or name not in self._turns:
                continue
            seq, held, _ = self._turns[name]
            if held.secret == secret and held.depth < DEEPEST:
                lean = Lean(seq, held, shared_ids(prompt, held.ids))
                if lean.shared >= _LEAST and (found is None or _rank(lean) > _rank(found)):
                    found = lean
        return found


def hashes_of(prompt: bytes, secret: int | None) -> list[int]:
    """Of the whole prompt, and of how it begins, the longest such beginning first. They mean nothing to another process."""
    beginnings = [prompt[: 4 * count] for count in _OPENINGS if len(prompt) >= 4 * count]
    return [hash((secret, part)) for part in (prompt, *beginnings)]


def _rank(lean: Lean) -> tuple[int, int, Cursor]:
    return lean.shared, -lean.held.depth, lean.seq
