"""Whether the texts that a chat template was given are in what it wrote."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import NamedTuple

_CHECKED = (".content", ".function.name", ".function.arguments")
MOST = 64
# names that no message holds and that are unlike anything a template looks for
_MARK = "qzv{number}vzq"


class Given(NamedTuple):
    """A text from outside as a template was given it: the text, the same with fences, and the request's field."""

    text: str
    fenced: str
    field: str


def absent(given: Iterable[Given], written: str) -> list[Given]:
    """The texts, of messages and of calls, that are not in what was written, as they are or as JSON; outer white space does not count.

    At most `MOST` of them, and texts are looked for only until the search has gone over all that was written `MOST` times: in a prompt
    that holds the texts in their order it goes over it once. Reasoning is left out: templates drop that of earlier answers on
    purpose.
    """
    missing: list[Given] = []
    place, searched = 0, 0
    for item in given:
        if searched > MOST * len(written):
            return missing
        text = item.fenced.strip()
        if not text or not item.field.endswith(_CHECKED):
            continue
        before = place
        end = _end(text, written, place) or _end(json.dumps(text, ensure_ascii=False)[1:-1], written, place)
        searched += end - before if end is not None and end > before else 2 * len(written)
        if end is None:
            missing.append(item)
            if len(missing) == MOST:
                return missing
        else:
            place = max(place, end)
    return missing


def dropped(missing: list[Given], write: Callable[[dict[tuple[str, str], str]], str]) -> list[Given]:
    """Those of the missing texts in whose places other texts do not arrive, either: the others were rewritten on purpose.

    `write`: writes the same conversation with other texts, given by text and field.
    """
    marks = {(item.text, item.field): _MARK.format(number=i) for i, item in enumerate(missing)}
    marked = write(marks)
    return [item for item in missing if marks[item.text, item.field] not in marked]


def _end(text: str, written: str, place: int) -> int | None:
    """Where the text ends, after `place` if it is there; None if it is nowhere."""
    at = written.find(text, place)
    at = written.find(text) if at < 0 else at
    return None if at < 0 else at + len(text)
