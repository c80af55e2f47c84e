"""Tokens as text on the page: parts of characters, control tokens, and five shades of log-probability. Pure."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ostinato.status.run_facts import TurnDetail

WINDOW = 2_000
"""Tokens per page."""
LONGEST_PROMPT = 20_000
SHADES = (-0.1, -0.7, -2.3, -4.6)
"""Log-probabilities at which the shade changes: 90%, 50%, 10%, 1%."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One sampled token. `shade` 0 is the surest, `place` is its version's index in the turn (at most 3), `text` its part of the answer."""

    at: int
    id: int
    text: str
    logprob: float
    shade: int
    version: int
    place: int


def cells(found: TurnDetail, start: int) -> list[Cell]:
    """The tokens from `start` on, `WINDOW` of them at most."""
    turn = found.line.turn
    by_token = turn.versions_T()
    places = {policy: number for number, policy in enumerate(turn.versions)}
    texts = list(spelt(found.sampled, turn.sampled_ids))
    return [
        Cell(
            at=at,
            id=turn.sampled_ids[at],
            text=texts[at],
            logprob=turn.logprobs[at],
            shade=shade(turn.logprobs[at]),
            version=by_token[at].number,
            place=min(places[by_token[at]], 3),
        )
        for at in range(start, min(start + WINDOW, len(turn.sampled_ids)))
    ]


def shade(logprob: float) -> int:
    """0 for a token that was nearly certain, 4 for one that came once in a hundred times or less."""
    return sum(logprob < bound for bound in SHADES)


def spelt(pieces: Iterable[bytes], ids: Sequence[int]) -> Iterable[str]:
    """The text that each token adds: a character of several tokens comes with its last one, a control token as its id."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for piece, token in zip(pieces, ids, strict=True):
        yield decoder.decode(piece) if piece else f"⟨{token}⟩"


def prompt_text(pieces: Sequence[bytes]) -> str:
    """A prompt's text; each control token is a mark. Cut in the middle if it is long."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return shortened("".join(decoder.decode(piece) if piece else "⟨·⟩" for piece in pieces), LONGEST_PROMPT)


def shortened(text: str, most: int) -> str:
    """The text without its middle if it has more than `most` characters."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n… {len(text) - 2 * half:,} characters are not shown …\n{text[-half:]}"
