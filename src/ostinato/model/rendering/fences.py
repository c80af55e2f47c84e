"""Fences: control tokens in text from outside are put between two noncharacters before a chat template sees the text.

Text inside a fence in the template's output is encoded by a tokenizer that knows no control tokens.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator

from ostinato.core.errors import BadRequest

# Unicode noncharacters: never part of interchanged text, so nothing is lost when they are dropped from a message.
_OPEN, _CLOSE, HOLE, _EDGE = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3"
_FENCED = re.compile(f"{_OPEN}([^{_OPEN}{_CLOSE}]*){_CLOSE}")
_FENCE = re.compile(f"[{_OPEN}{_CLOSE}]")
_DROPPED = str.maketrans("", "", _OPEN + _CLOSE + HOLE + _EDGE)


class Fences:
    """Puts fences around the control tokens of one tokenizer, and finds them again.

    Example: ``Fences(["<|im_end|>"]).written(fences.around("a<|im_end|>") + "<|im_end|>") == ["<|im_end|>"]``
    """

    def __init__(self, tokens: Collection[str]) -> None:
        longest_first = sorted(tokens, key=len, reverse=True)
        # without tokens: a pattern that matches nothing
        any_token = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._token = re.compile(any_token)
        self._escaped = re.compile(rf"\\[uU]0*{ord(_OPEN):x}(?:{any_token})", re.IGNORECASE)

    def around(self, text: str, *, edges: bool = False) -> str:
        """The text with its control tokens fenced; with `edges` no neighbouring text can complete a control token."""
        bare = text if text.isascii() else text.translate(_DROPPED)
        fenced = self._token.sub(f"{_OPEN}\\g<0>{_CLOSE}", bare)
        return f"{_EDGE}{fenced}{_EDGE}" if edges else fenced

    def written(self, text: str) -> list[str]:
        """The control tokens outside fences, in order: those that the template wrote."""
        return [token for piece, fenced in self.pieces(text) if not fenced for token in self._token.findall(piece)]

    def pieces(self, text: str) -> Iterator[tuple[str, bool]]:
        """The text in order, cut at the fences, which are left out; each piece comes with whether it was fenced."""
        for i, piece in enumerate(_FENCED.split(text)):
            if i % 2:
                yield piece, True
            else:  # a fence that the template cut in two still separates
                yield from ((part, False) for part in _FENCE.split(piece))

    def first(self, text: str) -> str | None:
        """The control token that the text begins with, after white space; None if it begins with anything else."""
        match = self._token.match(text.lstrip())
        return None if match is None else match[0]

    def last(self, text: str, tokens: Collection[str]) -> re.Match[str] | None:
        """The last of these tokens outside a fence; None if there is none."""
        fenced = {match.start(1) for match in _FENCED.finditer(text)}
        found = [match for match in self._token.finditer(text) if match[0] in tokens and match.start() not in fenced]
        return found[-1] if found else None

    def check_intact(self, text: str) -> None:
        """Raise BadRequest if the template wrote a fence as an escape, which leaves the control token in it bare."""
        if self._escaped.search(text):
            raise BadRequest(
                "the model's chat template escapes the characters that keep this text from becoming a control token; "
                "leave the control token out",
                field="messages",
            )

    @staticmethod
    def loose(texts: Iterable[str], tokens: Collection[str]) -> frozenset[str]:
        """The texts that could form one of these tokens together with what a template writes beside them."""
        heads = tuple({token[:n] for token in tokens for n in range(1, len(token))})
        tails = tuple({token[n:] for token in tokens for n in range(1, len(token))})

        def fits(text: str) -> bool:
            bare = text.strip()  # as many templates do
            return bool(bare) and (
                text.endswith(heads)
                or text.startswith(tails)
                or bare.endswith(heads)
                or bare.startswith(tails)
                or any(bare in token for token in tokens)
            )

        return frozenset(filter(fits, texts))


def encodable(text: str, field: str) -> str:
    """The text itself. Raises BadRequest for a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(f"{field} holds half of a surrogate pair, which is not text", field=field) from error
    return text
