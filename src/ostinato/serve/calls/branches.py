"""Why a turn does not simply continue the newest turn of its conversation."""

from __future__ import annotations

from collections import OrderedDict

from ostinato.core.records import Branch

_MOST = 16_384


class Questions:
    """The most recent questions, to recognise repeated ones."""

    def __init__(self) -> None:
        self._asked: OrderedDict[tuple[bytes, str], None] = OrderedDict()

    def again(self, question: bytes, episode: str) -> bool:
        """Remember a question; returns True if it was asked before in its episode."""
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
        answers: the number of answers in its conversation.
        unknown: how many of these answers, counted from the last, belong to no turn that was found.
        follows: its prompt is the found turn's tokens plus the new messages.
        alone: no other turn continues the found turn.
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
