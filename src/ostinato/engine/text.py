"""The visible text of a sampled token, and whether the token ends its answer: the same for every engine."""

from __future__ import annotations

from collections.abc import Set

from ostinato.core.records import Finish
from ostinato.model.stream import TextStream


def shown(stream: TextStream, token: int, stop_ids: Set[int], *, last: bool) -> tuple[str, Finish | None]:
    """Feed a token to its answer's text. Returns the text that may be shown now, and the finish if the answer ends.

    `last`: the token uses up `max_tokens`. A stop token ends the answer without being fed; no part of a stop string is shown.
    """
    if token in stop_ids:
        return stream.flush(), Finish.STOP
    text = stream.feed((token,))
    finish: Finish | None = None
    if last and not stream.stopped:
        text, finish = text + stream.flush(), Finish.LENGTH
    return text, Finish.STOP if stream.stopped else finish
