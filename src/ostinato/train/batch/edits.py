"""Replay of the sampler's edits of logits: a grammar's masks, biases and penalties, reconstructed from a turn's own ids."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from ostinato.core.errors import BadRequest
from ostinato.core.records import Turn
from ostinato.model.grammars.compiling import Grammars
from ostinato.model.logit_edits import Edit, LogitEditor

_LOG = logging.getLogger(__name__)


class AnswerEdits:
    """Reconstructs the edits of turns.

    Args:
        load: the grammars of the model's tokenizer; called once, when the first turn needs them.

    Example::

        edits = AnswerEdits(lambda: HFRenderer(path).grammars)
        usable = [turn for turn in turns if edits.admits(turn)]
        edits.replay(usable, 0, 512)  # {3: Edit(...), ...}: by sampled token, turn after turn
    """

    def __init__(self, load: Callable[[], Grammars]) -> None:
        self._load = load
        self._grammars: Grammars | None = None

    def admits(self, turn: Turn) -> bool:
        """True if the turn's tokens were drawn from the model's own logits, or from edited ones that can be reconstructed."""
        try:
            editor = self._editor(turn)
        except BadRequest as error:
            _LOG.warning("turn %s is left out: %s", turn.id, error)
            return False
        if editor is None:
            return True
        for token in turn.sampled_ids:
            edit = editor.edit()
            if edit.allowed is not None and not edit.allowed[token >> 3] >> (token & 7) & 1:
                _LOG.warning("turn %s is left out: its grammar, as read here, does not allow token %d", turn.id, token)
                return False
            editor.take(token)
        return True

    def replay(self, turns: Sequence[Turn], start: int, stop: int) -> Mapping[int, Edit]:
        """The edits of the sampled tokens [start, stop), counted through all turns; tokens without an edit are left out.

        They are made for one part at a time: for long answers, all at once would take more memory than everything else.
        """
        made: dict[int, Edit] = {}
        first = 0
        for turn in turns:
            end = first + len(turn.sampled_ids)
            editor = self._editor(turn) if first < stop and end > start else None
            if editor is not None:
                for place, token in enumerate(turn.sampled_ids[: stop - first], first):
                    if place >= start:
                        made[place] = editor.edit()
                    editor.take(token)
            first = end
        return made

    def _editor(self, turn: Turn) -> LogitEditor | None:
        """The turn's editor, None if its logits were not edited. Raises BadRequest."""
        if turn.sampling.grammar and self._grammars is None:
            self._grammars = self._load()
        return LogitEditor.of(turn.sampling, self._grammars)
