"""Credit by line: which tokens of a turn wrote which line, and the credit that each line gives them. Pure.

A single reward for an answer of m lines gives each line's tokens the sum of m lines' fates, m - 1 of which they did not decide. If
lines survive independently, the gradient's signal-to-noise ratio (squared) is then 1 / m of that with each line's own fate: the same
precision takes m times as many answers.

In principle, a token gets credit for all that it can still change: its own line and the later ones (reward-to-go; the lines before
were decided without it). With all later lines at full weight the noise is back; with none of them, a bad name in the first line
that spoils the next ones would go unpunished. So a line's tokens get the mean of its own value and those of the later lines of the same
text, the k-th of which weighs LINE_DISCOUNT^k, as in generalised advantage estimation (arXiv:1506.02438). For independent lines this
keeps 1 - LINE_DISCOUNT^2 of the squared ratio, 15/16, and a line's own fate decides the sign. A token's effect on lines further on is
discounted, a bias that whole-answer credit does not have. It is a mean, not a sum: where all lines fare alike, each token gets the same
credit as without line numbers.

All tokens outside of lines, such as a call's name and path, get the mean of the turn's lines, as without line numbers.
"""

from __future__ import annotations

import codecs
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ostinato.core.errors import BadRequest
from ostinato.core.line_survival import line_spans
from ostinato.core.records import LineValues, Reward, Turn

LINE_DISCOUNT = 0.25
TokenBytes = Callable[[int], bytes]
"""The bytes of a token's text (`Renderer.token_bytes`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLines:
    """The values of a turn's lines: their `mean`, the number of `lines`, and for each token of a line its credit, as (token, value).

    `known` is empty if it is not known which tokens wrote them.

    Example: ``TurnLines(mean=0.0, lines=2, known=((4, 0.5), (5, 0.5), (6, -0.5)))``
    """

    mean: float = 0.0
    lines: int = 0
    known: tuple[tuple[int, float], ...] = ()

    @property
    def differ(self) -> bool:
        """True if its tokens get different credit."""
        return any(not math.isclose(value, self.mean, abs_tol=1e-9) for _, value in self.known)

    def deviations(self, tokens: int, part: float, unit: float) -> NDArray[np.float64]:
        """Return each token's credit beyond `part`, the turn's part from lines, as [`tokens`]; both divided by `unit`."""
        found_T = np.zeros(tokens)
        for token, value in self.known:
            found_T[token] = value / unit - part
        return found_T


NO_LINES = TurnLines()


def turn_lines(turn: Turn, reward: Reward, token_bytes: TokenBytes | None) -> TurnLines:
    """Return the values of a turn's lines by token; no token is known without `token_bytes`, or if lines and tokens do not match."""
    mean, lines = reward.line_mean
    starts = None if token_bytes is None else token_starts(turn, token_bytes)
    if starts is None:
        return TurnLines(mean=mean, lines=lines)
    known: dict[int, float] = {}
    for text in reward.lines:
        try:
            spans = line_spans(turn, text.call, text.argument, text.lines)
        except BadRequest:  # the signal describes lines of an answer that was not in the log at that time
            continue
        edges = [start for start, _ in spans]
        worth = discounted(text)
        for token in range(len(starts)):
            line = bisect_right(edges, starts[token])
            if line in worth and starts[token] < spans[line - 1][1]:
                known[token] = worth[line]
    return TurnLines(mean=mean, lines=lines, known=tuple(sorted(known.items())))


def discounted(text: LineValues) -> dict[int, float]:
    """Return for each line the mean of its own value and those of the later lines of the text; the k-th next weighs LINE_DISCOUNT^k.

    Example: the values 1 and 0 give ``{1: 0.8, 2: 0.0}``
    """
    found: dict[int, float] = {}
    total = weight = 0.0
    for first, last, value in reversed(text.runs):
        for line in range(last, first - 1, -1):
            total, weight = value + LINE_DISCOUNT * total, 1.0 + LINE_DISCOUNT * weight
            found[line] = total / weight
    return found


def token_starts(turn: Turn, token_bytes: TokenBytes) -> Sequence[int] | None:
    """Return the character of `turn.text` at which each sampled token begins; None if the tokens do not spell the text.

    A token that begins within a character begins with it. A tokenizer may write a space before the first word that the text lacks.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    starts: list[int] = []
    spelled: list[str] = []
    at = 0
    for token in turn.sampled_ids:
        starts.append(at)
        spelled.append(decoder.decode(token_bytes(token)))
        at += len(spelled[-1])
    text = "".join(spelled) + decoder.decode(b"", final=True)
    if text.startswith(turn.text):
        return starts
    return [max(0, start - 1) for start in starts] if text.startswith(" " + turn.text) else None
