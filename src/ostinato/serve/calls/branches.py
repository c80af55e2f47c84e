"""Why a turn does not simply go on from the newest turn of its conversation."""

from __future__ import annotations

from collections import OrderedDict

from ostinato.core.records import Branch

_MOST = 16_384


class Questions:
    """The last questions that were asked."""

    def __init__(self) -> None:
        self._asked: OrderedDict[tuple[bytes, str], None] = OrderedDict()

    def again(self, question: bytes, episode: str) -> bool:
        """Remember a question; True if it was asked before in its episode."""
        place = (question, episode)
        asked = place in self._asked
        self._asked[place] = None
        self._asked.move_to_end(place)
        if len(self._asked) > _MOST:
            self._asked.popitem(last=False)
        return asked


def branch_of(*, again: bool, begun: bool, answers: int, unknown: int, follows: bool, alone: bool) -> Branch:
    """The branch that a turn begins.

    Args:
        again: the same question was asked before.
        begun: its episode has turns.
        answers: how many answers its conversation holds.
        unknown: how many of them, the last ones, are of no turn that was found.
        follows: its prompt is the found turn's tokens and what is new.
        alone: no other turn follows the found one.
    """
    if again:
        return Branch.AGAIN
    if unknown == answers:  # no turn was found
        return Branch.NONE if not begun else Branch.EDITED if answers else Branch.FRESH
    if unknown:
        return Branch.EDITED
    if not follows:
        return Branch.UNSEEN
    return Branch.NONE if alone else Branch.PARALLEL
