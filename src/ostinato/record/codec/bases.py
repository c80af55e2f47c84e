"""Chooses the base of a new turn: an earlier turn of its segment whose ids need not be written again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from ostinato.core.seams import Cursor
from ostinato.record.codec.tokens import shared_ids
from ostinato.record.codec.turns import Held

DEEPEST = 32
"""The longest chain of bases: reading one turn may mean reading this many."""

_LEAST = 8  # with fewer shared ids a base is not worth the bytes to name it
_OPENINGS = (1024, 256, 64, 16)  # prefix lengths in ids whose hashes are compared to find prompts that begin alike
_BUDGET = 32 << 20  # bytes of ids in memory


@dataclass(frozen=True, slots=True)
class Lean:
    """A candidate base: its place, its ids, and how many ids it shares."""

    seq: Cursor
    held: Held
    shared: int


class Bases:
    """The most recently written turns of the open segment. A base must be encrypted under the same key as the turn.

    Candidates are found by turn id, and by hashes of the prompt and of its prefixes; then the ids they share are counted.
    """

    def __init__(self) -> None:
        self._turns: OrderedDict[str, tuple[Cursor, Held, list[int]]] = OrderedDict()
        self._prompts: dict[int, str] = {}
        self._weight = 0

    def __contains__(self, turn: str) -> bool:
        return turn in self._turns

    def add(self, seq: Cursor, turn: str, held: Held, hashes: Sequence[int] = ()) -> None:
        """Remember a written turn, to be found by these hashes of its prompt."""
        own = [each for each in hashes if self._prompts.setdefault(each, turn) is turn]
        self._turns[turn] = (seq, held, own)
        self._weight += len(held.ids)
        while self._weight > _BUDGET and len(self._turns) > 1:
            _, (_, dropped, theirs) = self._turns.popitem(last=False)
            self._weight -= len(dropped.ids)
            for each in theirs:
                self._prompts.pop(each, None)

    def best(self, prompt: bytes, secret: int | None, parent: str | None, hashes: Sequence[int]) -> Lean | None:
        """The turn that shares the most ids with a prompt; ties prefer the turn with the shorter chain of bases."""
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
    """Hashes of the whole prompt and of its prefixes, longest first. They are only valid within this process."""
    beginnings = [prompt[: 4 * count] for count in _OPENINGS if len(prompt) >= 4 * count]
    return [hash((secret, part)) for part in (prompt, *beginnings)]


def _rank(lean: Lean) -> tuple[int, int, Cursor]:
    return lean.shared, -lean.held.depth, lean.seq
